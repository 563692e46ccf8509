"""Answers to the questions why: what an engine can remove, what lies between machines, what the cache costs."""

import math

import pandas as pd

from kvlab.analyse import breakdown, cost
from kvlab.analyse.findings import Answer, verdict
from kvlab.analyse.summary import Estimate, interval, measured, swept
from kvlab.analyse.tiers import GAP

NOTHING = interval([])


def throughput_growth(points: pd.DataFrame) -> float | None:
    """S1's throughput at the most requests in flight over that of one, at the length swept; None without both."""
    rows = swept(measured(points).dropna(subset=["throughput_tokens_per_s"]))
    middle = rows.groupby("concurrency")["throughput_tokens_per_s"].median()
    return float(middle.iloc[-1] / middle.iloc[0]) if len(middle) > 1 and middle.index[0] == 1 else None


def engine(found: list[breakdown.Token], large: Estimate, growth: float | None) -> Answer:
    """Q3: the share of a token that a perfect engine could remove is larger for the small model than for the large one.

    `large` is that share for the architecture whose slices were measured, `growth` vLLM's throughput at its highest
    concurrency over that of one request.
    """
    shares = {token.stack: token.removable for token in found}
    small = shares.get("dynamic", NOTHING)
    numbers = {"small": small, "large": large, "growth": growth, "n": min(small.n, large.n)}
    holds, fails = small.low > large.high, small.high <= large.low
    return Answer("q3", verdict(holds, fails, small, large), small, numbers)


def tiers(gaps: pd.DataFrame) -> Answer:
    """Q4: how far apart the phases are on two machines; one of them predicted, so no verdict is passed."""
    by_phase = gaps.set_index("phase").to_dict("index")
    values = [(phase, value) for phase in ("ttft", "tpot") for value in GAP]
    numbers = {f"{phase}_{value}": by_phase.get(phase, {}).get(value) for phase, value in values}
    times = by_phase.get("ttft", {}).get("here", NOTHING)
    return Answer("q4", "predicted_only" if times.n else "no_verdict", times, numbers)


def memory(generations: pd.DataFrame, a: cost.Architecture, dtype: str) -> Answer:
    """Q5: the cache holds exactly the bytes that the formula gives, at every length that was measured."""
    rows = generations[(generations["status"] == "ok") & generations["use_cache"].astype(bool)]
    rows = rows.dropna(subset=["kv_cache_bytes"])
    held = zip(rows["context_length"] + rows["output_tokens"] - 1, rows["batch_size"])
    formula = [cost.kv_cache_bytes(a, int(tokens), dtype, int(batch)) for tokens, batch in held]
    by_repetition = (rows["kv_cache_bytes"] / formula).groupby(rows["repetition"])
    ratio = interval(by_repetition.max())  # processes are what repeats; lengths are not
    exact = bool(len(rows)) and bool((rows["kv_cache_bytes"] == formula).all())
    numbers = {
        "per_token": cost.kv_cache_bytes_per_token(a, dtype),
        "longest": rows["context_length"].max() if len(rows) else math.nan,
        "at_longest": rows["kv_cache_bytes"].max(),
        "n": ratio.n,
    }
    return Answer("q5", verdict(exact, not exact, ratio), ratio, numbers)
