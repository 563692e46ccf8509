"""What memory a point of S1b will need: weights, KV cache and the activations of its longest forward pass."""

from dataclasses import dataclass

from kvlab.analyse import cost

ROOM = 0.9  # share of the memory there that a point may be predicted to take


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of points on one machine."""

    architecture: cost.Architecture
    available_bytes: int

    def peak_bytes(self, point: dict) -> int:
        """Bytes that the point's hungrier arm needs at its largest; the KV cache is counted in full beside it."""
        tokens, batch = point["context_length"] + point["output_tokens"], point.get("batch_size", 1)
        weights = cost.weight_bytes(self.architecture, point["dtype"])
        cache = cost.kv_cache_bytes(self.architecture, tokens, point["dtype"], batch)
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
