"""Machines side by side: what was measured on each, and how far apart two of them are, phase by phase."""

from types import SimpleNamespace

import pandas as pd

from kvlab.analyse import breakdown, cost
from kvlab.analyse.calibrate import Calibration
from kvlab.analyse.findings import headline
from kvlab.analyse.predict import Case, Machine, Prediction
from kvlab.analyse.summary import interval

HOUR_S, MILLION = 3600, 1_000_000
GAP = ("gap", "gap_low", "gap_high", "ceiling", "reached", "reached_here")
CONTEXT = 1024  # tokens at which two machines are compared: long enough for a card's prefill to be bound by FLOP/s


def measured(machine: str | dict, p: SimpleNamespace, generations: pd.DataFrame, points: pd.DataFrame) -> dict:
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


def predicted(m: Calibration, a: cost.Architecture, name: str, dtype: str) -> dict:
    """The row of a card that nobody ran: each time with the range that its residuals on unseen figures allow."""
    case = Case(a, CONTEXT, dtype=dtype)
    times = {figure: m.predict(case, f"{figure}_s") for figure in ("ttft", "tpot")}
    return {
        "profile": None, "machine": m.machine.name, "model": name, "dtype": dtype, "context_length": CONTEXT,
        "throughput": None, "price": 0.0, "cost": None, "kind": "predicted", **times,
    }  # fmt: skip


def gaps(slices: pd.DataFrame, a: cost.Architecture, here: Machine | None, sheet: Machine, there: dict) -> pd.DataFrame:
    """How many times faster a predicted card is for one architecture, beside the ratio of the ceiling behind it.

    `here` holds this machine's measured ceilings; its times are extrapolated from slices in layers, TTFT also in
    length, by FLOPs. `sheet` is the card's data sheet, `there` its row of `predicted`. Bandwidths are compared in
    weights per second: half the bytes are twice the weights. `reached` and `reached_here` are the shares of its
    ceiling that each machine reaches: their ratio is how far the gap lies off the ceilings' ratio.
    """
    rows, phases = [], {"ttft": "flops", "tpot": "weights"}
    for phase in phases if here and len(slices) else ():
        longer = cost.prefill_flops(a, CONTEXT) / cost.prefill_flops(a, int(slices["context_length"].iloc[0]))
        whole_s = breakdown.extrapolated(slices, f"{phase}_s", a.layers)["whole_s"]
        whole = interval(whole_s * (longer if phase == "ttft" else 1))
        time: Prediction = there[phase]
        gap = (whole.median / time.value, whole.low / time.high, whole.high / time.low)
        ceiling = ceiling_ratio(phases[phase], here, sheet, there["dtype"])
        reached = reached_share(phase, a, sheet, there)
        rows.append((phase, *gap, ceiling, reached, reached * ceiling / gap[0], whole))
    return pd.DataFrame(rows, columns=["phase", *GAP, "here"])


def reached_share(phase: str, a: cost.Architecture, sheet: Machine, there: dict) -> float:
    """The time that a phase would take at the card's ceiling, over the time predicted for it."""
    if phase == "ttft":
        return cost.prefill_flops(a, CONTEXT) / sheet.flops_per_s[there["dtype"]] / there["ttft"].value
    return cost.step_weight_bytes(a, there["dtype"]) / sheet.read_bandwidth_bytes_per_s / there["tpot"].value


def ceiling_ratio(what: str, here: Machine, there: Machine, dtype: str) -> float:
    """FLOP/s, or weights read per second, of a machine at `dtype` over those of the one here at its own."""
    ((own, flops_per_s),) = here.flops_per_s.items()
    if what == "flops":
        return there.flops_per_s[dtype] / flops_per_s
    per_weight = cost.BYTES_PER_VALUE[own] / cost.BYTES_PER_VALUE[dtype]
    return there.read_bandwidth_bytes_per_s / here.read_bandwidth_bytes_per_s * per_weight
