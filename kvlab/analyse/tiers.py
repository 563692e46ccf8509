"""Machines side by side: what was measured on each, and how far apart two of them are, phase by phase."""

from types import SimpleNamespace

import pandas as pd

from kvlab.analyse import breakdown, cost
from kvlab.analyse.findings import headline
from kvlab.analyse.summary import interval

HOUR_S, MILLION = 3600, 1_000_000


def measured(machine: str, p: SimpleNamespace, generations: pd.DataFrame, points: pd.DataFrame) -> dict:
    """One run as a row: S1b with cache at its middle length, and the best throughput that S1 reached."""
    lengths = sorted(p.context_lengths)
    length = lengths[len(lengths) // 2]
    rows = headline(generations)
    rows = breakdown.cached(rows, rows["attention"].iloc[0], length) if len(rows) else rows
    throughput = points["throughput_tokens_per_s"].max()
    price = getattr(p, "price_per_hour", 0.0)  # a run that older parameters describe has none
    return {
        "profile": p.profile, "machine": machine, "model": p.model, "dtype": p.dtype, "context_length": length,
        "ttft": interval(rows["ttft_s"]), "tpot": interval(rows["tpot_s"]), "throughput": throughput,
        "price": price, "cost": cost_per_million(price, throughput), "kind": "measured",
    }  # fmt: skip


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Price of a million output tokens, in the currency of the price; None without a price or a throughput."""
    known = price_per_hour and tokens_per_s == tokens_per_s
    return price_per_hour / (tokens_per_s * HOUR_S) * MILLION if known else None


def gaps(slices: pd.DataFrame, a: cost.Architecture, here: dict, there: dict) -> pd.DataFrame:
    """How many times faster `there` is for one architecture, beside the ratio of the ceiling that rules the phase.

    `here`: rates of this machine (see `predictions.uncalibrated`) and `dtype`; its times are extrapolated from slices.
    `there`: the same rates, `dtype`, and `ttft_s`, `tpot_s` as predicted, each (value, low, high). Bandwidths are
    compared in weights per second: half as many bytes a weight is twice as many weights.
    """
    if slices.empty:
        return pd.DataFrame(columns=["phase", "gap", "gap_low", "gap_high", "ceiling"])
    per_weight = cost.BYTES_PER_VALUE[here["dtype"]] / cost.BYTES_PER_VALUE[there["dtype"]]
    ceilings = {
        "ttft": there["flops_per_s"] / here["flops_per_s"],
        "tpot": there["read_bandwidth_bytes_per_s"] / here["read_bandwidth_bytes_per_s"] * per_weight,
    }
    rows = []
    for phase, ceiling in ceilings.items():
        whole = interval(breakdown.extrapolated(slices, f"{phase}_s", a.layers)["whole_s"])
        value, low, high = there[f"{phase}_s"]
        rows.append(
            {"phase": phase, "gap": whole.median / value, "gap_low": whole.low / high, "gap_high": whole.high / low}
            | {"ceiling": ceiling, "here": whole}
        )
    return pd.DataFrame(rows)
