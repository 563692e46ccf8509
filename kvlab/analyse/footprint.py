"""What memory a point of S1b needs, predicted and measured: weights, KV cache, activations, allocator's reserve."""

from dataclasses import dataclass

import pandas as pd

from kvlab.analyse import cost, summary

ROOM = 0.9  # share of the memory there that a point may be predicted to take


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of points on one machine."""

    architecture: cost.Architecture
    available_bytes: int

    def peak_bytes(self, point: dict, use_cache: bool = True) -> int:
        """Bytes that one arm of the point needs at its largest; the one with cache needs more."""
        tokens, batch = point["context_length"] + point["output_tokens"], point.get("batch_size", 1)
        weights = cost.weight_bytes(self.architecture, point["dtype"])
        cache = cost.kv_cache_bytes(self.architecture, tokens, point["dtype"], batch) if use_cache else 0
        return weights + cache + activation_bytes(self.architecture, tokens, point["dtype"], point["attention"], batch)

    def fits(self, point: dict) -> bool:
        return self.peak_bytes(point) <= ROOM * self.available_bytes


def forecast(config: dict, environment: dict, device: str) -> Forecast | None:
    """The forecast for a model's configuration on a recorded environment; None for a model whose layers are unknown."""
    names = ("card_memory_bytes",) if device == "cuda" else ("memory_limit_bytes", "memory_bytes")
    there = [environment[name] for name in names if environment.get(name)]
    try:
        return Forecast(cost.architecture(config), min(there)) if there else None
    except ValueError:
        return None


def activation_bytes(a: cost.Architecture, tokens: int, dtype: str, attention: str, batch: int = 1) -> int:
    """Bytes of intermediate tensors that live at once in a forward pass over `tokens` tokens, one layer at a time.

    The wider of two moments: the feed-forward part (its three widest tensors and three of the hidden size), or with
    eager attention the scores of every head, before and after a softmax in float32, and the mask.
    """
    width, rows = cost.BYTES_PER_VALUE[dtype], batch * tokens
    widest = max(outputs for block in a.blocks for _, outputs in block.linears + block.expert)
    feed_forward = rows * (3 * widest + 3 * a.hidden) * width
    if attention != "eager":
        return feed_forward
    scores = rows * tokens * (a.heads * max(2 * width, 8) + width)
    return max(feed_forward, scores + rows * 5 * a.hidden * width)


RAW = ("use_cache", "repetition", "status", "reason", "peak_memory_bytes", "resident_set_bytes", "cpu_time_s")
PARTS = ("weights_bytes", "kv_cache_bytes", "activation_bytes", "reserve_bytes")
MEMORY = [*summary.POINT, *RAW, *PARTS, "predicted_bytes"]


def parts(records: list[dict], prediction: Forecast | None = None) -> pd.DataFrame:
    """One row per arm that was weighed: the parts of its peak in bytes, NaN where unknown, and what was predicted.

    Activations are what the peak holds beside weights and cache: on a CPU what the process grew by, on a card what its
    allocator gave out. The reserve is what that allocator held beyond its peak; on a CPU there is none.
    """
    rows = [part(r, prediction) for r in summary.of_kind(records, "memory")]
    quantities = [name for name in MEMORY if name.endswith(("_bytes", "_s"))]
    return summary.numeric(pd.DataFrame(rows, columns=MEMORY), *quantities)


def part(record: dict, prediction: Forecast | None) -> dict:
    row = {name: record["point"].get(name) for name in summary.POINT} | {name: record.get(name) for name in RAW}
    return row | {
        "weights_bytes": record.get("parameter_bytes"),
        "kv_cache_bytes": record.get("kv_cache_bytes") if record["use_cache"] else 0,
        "activation_bytes": measured_activation_bytes(record),
        "reserve_bytes": less(record, "reserved_memory_bytes", "peak_memory_bytes"),
        "predicted_bytes": prediction and prediction.peak_bytes(record["point"], record["use_cache"]),
    }


def measured_activation_bytes(record: dict) -> int | None:
    on_card = (record.get("memory_source") or "").startswith("torch.cuda")
    rise = less(record, "peak_memory_bytes", "parameter_bytes" if on_card else "resident_set_before_bytes")
    return None if rise is None else rise - (record.get("kv_cache_bytes") or 0)


def less(record: dict, one: str, other: str) -> int | None:
    """One raw value less another, None where either is missing."""
    both = record.get(one), record.get(other)
    return None if None in both else both[0] - both[1]
