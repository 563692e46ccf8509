"""Answers to the report's questions, computed from intervals: a verdict is never typed."""

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from kvlab.analyse import summary
from kvlab.analyse.summary import Estimate, arm, headline, interval, measured

CONTROL_LOW, CONTROL_HIGH = 0.9, 1.1  # TTFT of both arms is the same forward pass: its paired ratio must lie inside


@dataclass(frozen=True)
class Answer:
    """A question's verdict (see `verdict`), its effect and the numbers of its sentence."""

    question: str
    verdict: str
    effect: Estimate
    numbers: dict = field(default_factory=dict)


def proven(pairs: pd.DataFrame) -> pd.DataFrame:
    """Pairs that count: not refused, and not the control that only watches for drift."""
    return measured(pairs[pairs["refusal"].isna()])


def too_wide(records: list[dict], share: float) -> bool:
    """Whether a speed-up of one point's pairs has an interval that reaches further than `share` of its median.

    False for a point without any proven pair: there is no interval to narrow.
    """
    rows = proven(summary.pairs(records))
    estimates = pd.DataFrame([vars(interval(rows[name])) for name in ("tpot_speedup", "total_speedup")])
    return not (reach(estimates[estimates["n"] > 0]) <= share).all()


def reach(estimates: pd.DataFrame) -> pd.Series:
    """How far each interval reaches from its median, as a share of it; NaN for a single value."""
    return np.maximum(estimates["high"] / estimates["median"] - 1, 1 - estimates["low"] / estimates["median"])


def per_repetition(pairs: pd.DataFrame, value: str) -> pd.Series:
    """Geometric mean over lengths within each repetition: repetitions are the independent processes."""
    return np.exp(np.log(pairs[value]).groupby(pairs["repetition"]).mean())


def at(pairs: pd.DataFrame, context_length: int, value: str) -> Estimate:
    return interval(pairs.loc[pairs["context_length"] == context_length, value])


def phase(pairs: pd.DataFrame) -> Answer:
    """Q1: decode is faster with the cache (TPOT at the longest length), prefill is not (TTFT over all lengths)."""
    rows = headline(proven(pairs))
    control = interval(per_repetition(rows, "ttft_ratio"))
    longest = rows["context_length"].max()
    speedup = at(rows, longest, "tpot_speedup")
    holds = CONTROL_LOW <= control.low and control.high <= CONTROL_HIGH and speedup.low > 1
    fails = control.high < CONTROL_LOW or control.low > CONTROL_HIGH or speedup.high <= 1
    numbers = {"context_length": longest, "tpot_speedup": speedup, "ttft_ratio": control, "n": speedup.n}
    return Answer("q1", verdict(holds, fails, control, speedup), speedup, numbers)


def growth(pairs: pd.DataFrame) -> Answer:
    """Q2: the speed-up of TPOT is larger at the longest length than at the shortest, repetition by repetition."""
    rows = headline(proven(pairs))
    shortest, longest = rows["context_length"].min(), rows["context_length"].max()
    table = rows.pivot_table(index="repetition", columns="context_length", values="tpot_speedup", aggfunc="median")
    gain = interval(table[longest] / table[shortest] if shortest < longest else [])
    numbers = {
        "shortest": shortest,
        "longest": longest,
        "speedup_shortest": at(rows, shortest, "tpot_speedup"),
        "speedup_longest": at(rows, longest, "tpot_speedup"),
        "n": gain.n,
    }
    return Answer("q2", verdict(gain.low > 1, gain.high <= 1, gain), gain, numbers)


def verdict(holds: bool, fails: bool, *evidence: Estimate) -> str:
    """ "supported" or "not_supported" where the whole intervals say so, "undecided" where they allow both.

    "no_verdict" where any estimate rests on fewer than six values.
    """
    if not all(estimate.conclusive for estimate in evidence):
        return "no_verdict"
    return "supported" if holds else "not_supported" if fails else "undecided"


def break_even(pairs: pd.DataFrame) -> tuple[int | None, bool]:
    """Smallest length whose whole interval of the total speed-up lies above 1; is it the shortest measured?"""
    rows = headline(proven(pairs))
    lengths = sorted(rows["context_length"].unique())
    paying = [n for n in lengths if at(rows, n, "total_speedup").low > 1]
    return (int(paying[0]), paying[0] == lengths[0]) if paying else (None, False)


def local_slopes(generations: pd.DataFrame) -> pd.DataFrame:
    """Exponent of TPOT over length between neighbouring lengths, per kernel and arm (0 flat, 1 linear)."""
    by = ["attention", "use_cache", "context_length"]
    table = measured(generations).groupby(by)["tpot_s"].median().reset_index(name="slope")
    table = table.rename(columns={"context_length": "shorter"})
    logs = np.log(table[["slope", "shorter"]].astype(float)).groupby([table[name] for name in by[:2]]).diff(-1)
    table["longer"] = table.groupby(by[:2])["shorter"].shift(-1)
    return table.assign(slope=logs["slope"] / logs["shorter"]).dropna(subset=["longer"])


def refusals(pairs: pd.DataFrame) -> list[tuple[str, int]]:
    """Why pairs were refused, and how many for each reason."""
    counts = pairs["refusal"].dropna().value_counts()
    return [(str(why), int(count)) for why, count in counts.items()]


def unstable(generations: pd.DataFrame) -> list[tuple[dict, Estimate]]:
    """Points whose TPOT spreads too far (IQR over median above 10 %), to be named in the article."""
    by = ["attention", "context_length", "use_cache"]
    found = [(dict(zip(by, keys)), interval(rows["tpot_s"])) for keys, rows in measured(generations).groupby(by)]
    return [(point, estimate) for point, estimate in found if estimate.stable != "ok"]


def drift(generations: pd.DataFrame) -> Estimate:
    """Last control over first, process by process (TPOT with cache): 1 when the machine held still."""
    rows = arm(generations, True)
    control = rows[rows["control"].astype(bool) & (rows["status"] == "ok")]
    ratios = [
        group["tpot_s"].iloc[-1] / group["tpot_s"].iloc[0]
        for _, group in control.groupby("process")
        if len(group) > 1 and not math.isnan(group["tpot_s"].iloc[0])
    ]
    return interval(ratios)
