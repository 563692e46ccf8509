"""Where one token's time goes, and what of it an infinitely good engine could still remove."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd

from kvlab.analyse import cost
from kvlab.analyse import definitions as d
from kvlab.analyse.summary import Estimate, interval, measured

PARTS = ("weights", "kv_reads", "cache_copies", "launch", "sampling", "serving")
STACKS = ("dynamic", "static", "static_compiled", "vllm_eager", "vllm_compiled")
COMPUTED = ("weights", "kv_reads", "cache_copies")  # bytes by the configuration over a measured bandwidth


@dataclass(frozen=True)
class Token:
    """One stack's time per token in seconds at one context length, and the parts that are known of it."""

    stack: str  # of STACKS
    tpot_s: pd.Series  # one value per repetition
    parts: dict[str, float]  # name of PARTS -> seconds; "serving" is what remains
    threads: int

    @property
    def floor_s(self) -> float:
        """Bytes that any engine has to read for the token, over the measured bandwidth: weights and KV cache."""
        return self.parts["weights"] + self.parts["kv_reads"]

    @property
    def removable(self) -> Estimate:
        """Share of TPOT above the floor."""
        return interval(1 - self.floor_s / self.tpot_s)


def ceiling(ceilings: pd.DataFrame, quantity: str, threads: int | None = None) -> Estimate:
    """The machine's ceiling of a quantity, over repetitions; of several shapes the one that runs fastest."""
    rows = ceilings[ceilings["quantity"] == quantity]
    rows = rows if threads is None else rows[rows["threads"] == threads]
    by_shape = [interval(group["value"]) for _, group in rows.groupby("shape")]
    return max(by_shape, key=lambda estimate: estimate.median, default=interval([]))


def cached(generations: pd.DataFrame, attention: str, context_length: int) -> pd.DataFrame:
    rows = measured(generations)
    at = (rows["attention"] == attention) & (rows["context_length"] == context_length)
    return rows[rows["use_cache"].astype(bool) & at]


def floor_parts(a: cost.Architecture, dtype: str, tokens: int, bytes_per_s: float, batch: int = 1) -> dict[str, float]:
    """Seconds to read the weights and the cache of `tokens` tokens of each sequence once."""
    read = {"weights": cost.step_weight_bytes(a, dtype), "kv_reads": cost.kv_cache_bytes(a, tokens, dtype, batch)}
    return {name: count / bytes_per_s for name, count in read.items()}


def transformers_token(
    p: SimpleNamespace, a: cost.Architecture, stack: str, rows: pd.DataFrame, thin: pd.DataFrame, ceilings: pd.DataFrame
) -> Token:
    """A token of Transformers; `rows` are its generations.

    `thin` are generations of the same layers with matrices of next to nothing: what is left there is launches and
    Python. On a card they run while it works, so only what exceeds the work counts. Without them (compiled execution,
    whose fused operations nothing splits) launches stay in the remainder. `ceilings` hold "sampling" too.
    """
    first = rows.iloc[0]
    tokens, batch = int(first["context_length"] + first["output_tokens"] // 2), int(first["batch_size"])
    parts = floor_parts(a, p.dtype, tokens, ceiling(ceilings, "read", p.threads).median, batch)
    copied = cost.cache_copy_bytes(a, tokens, p.dtype, first["attention"], first["cache"], batch)
    parts["cache_copies"] = copied / ceiling(ceilings, "copy", p.threads).median
    hidden_s = sum(parts.values()) if p.device == "cuda" else 0.0
    if len(thin):
        parts["launch"] = max(float(thin["tpot_s"].median()) - hidden_s, 0.0)
    parts["sampling"] = ceiling(ceilings, "sampling").median
    return Token(stack, rows["tpot_s"], parts, p.threads)


def vllm_token(
    p: SimpleNamespace, a: cost.Architecture, stack: str, rows: pd.DataFrame, ceilings: pd.DataFrame
) -> Token | None:
    """A token of vLLM with one request in flight; all beyond its floor is one part, since nothing splits it."""
    threads, first = p.server_threads if p.device == "cpu" else p.threads, rows.iloc[0]
    tokens, read = int(first["context_length"] + first["output_tokens"] // 2), ceiling(ceilings, "read", threads)
    parts = floor_parts(a, p.dtype, tokens, read.median)
    parts["serving"] = float(rows["tpot_s"].median()) - sum(parts.values())
    return Token(stack, rows["tpot_s"], parts, threads) if read.n else None


def tokens(
    p: SimpleNamespace, a: cost.Architecture, generations: pd.DataFrame, apart: pd.DataFrame, requests: pd.DataFrame,
    ceilings: pd.DataFrame,
) -> list[Token]:  # fmt: skip
    """The token of every stack at the length of `apart`, the generations of anatomy.jsonl.

    A server at `base_url` is left out: the machine it runs on has not been measured.
    """
    at, found = (p.attention_kernels[-1], apart["context_length"].max()), []
    for stack, frame in zip(STACKS[:3], (generations, apart, apart)):
        cache, compiled = stack.removesuffix("_compiled"), stack.endswith("_compiled")
        rows, thin = (
            cached(each[(each["cache"] == cache) & (each["compiled"] == compiled) & (each["model"] == model)], *at)
            for each, model in ((frame, p.model), (apart, f"thin:{p.model}"))
        )
        if len(rows) and (compiled or len(thin)) and ceiling(ceilings, "read", p.threads).n:
            found.append(transformers_token(p, a, stack, rows, thin, ceilings))
    alone = measured(requests)
    alone = alone[(alone["concurrency"] == 1) & (alone["context_length"] == at[1])]
    values = ["tpot_s", "context_length", "output_tokens"]
    for stack, eager in zip(STACKS[3:], (True, False)):
        rows = alone[alone["enforce_eager"] == eager].groupby("repetition")[values].median()  # requests do not repeat
        found.append(vllm_token(p, a, stack, rows, ceilings) if len(rows) and not p.base_url else None)
    return [token for token in found if token]


def waterfall(found: list[Token]) -> pd.DataFrame:
    """One row per stack and part: seconds, where the part starts, both over the stack's own floor, and its basis."""
    rows = []
    for token in found:
        start_s, tpot_s = 0.0, float(token.tpot_s.median())
        left = {} if "serving" in token.parts else {"unexplained": tpot_s - sum(token.parts.values())}
        for part, seconds in (token.parts | left).items():
            basis = "computed" if part in COMPUTED else "measured" if part in ("launch", "sampling") else "remainder"
            place = (start_s / token.floor_s, seconds / token.floor_s)
            rows.append((token.stack, part, basis, token.threads, seconds, *place, tpot_s, token.floor_s))
            start_s += seconds
    names = ["stack", "part", "basis", "threads", "seconds", "start", "length", "tpot_s", "floor_s"]
    return pd.DataFrame(rows, columns=names)


SLICE = ["layers", "repetition", "process", "context_length", "output_tokens", "ttft_s", "tpot_s"]


def slices(records: list[dict]) -> pd.DataFrame:
    """One row per generation of a layer slice."""
    found = [r for r in records if r["kind"] == "generation" and r["point"].get("layers") and r["status"] == d.OK]
    rows = [r | r["point"] | {"ttft_s": d.ttft_s(r), "tpot_s": d.tpot_s(r)} for r in found]
    return pd.DataFrame(rows, columns=SLICE).astype({"ttft_s": float, "tpot_s": float})


def extrapolated(frame: pd.DataFrame, value: str, layers: int) -> pd.DataFrame:
    """Per repetition a straight line over the slices: seconds per layer, of the rest (head), and of all `layers`."""
    rows = []
    for repetition, group in frame.groupby("repetition"):
        if group["layers"].nunique() > 1:
            slope, rest_s = np.polyfit(group["layers"], group[value], 1)
            rows.append((repetition, slope, rest_s, rest_s + slope * layers))
    return pd.DataFrame(rows, columns=["repetition", "per_layer_s", "rest_s", "whole_s"])


def slice_removable(frame: pd.DataFrame, a: cost.Architecture, dtype: str, bytes_per_s: float) -> Estimate:
    """Share above the floor of one token of the whole architecture, extrapolated from its slices."""
    whole = extrapolated(frame, "tpot_s", a.layers)["whole_s"]
    if whole.empty:
        return interval([])
    read = floor_parts(a, dtype, int(frame["context_length"].iloc[0]), bytes_per_s)
    return interval(1 - sum(read.values()) / whole)
