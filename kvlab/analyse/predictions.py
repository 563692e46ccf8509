"""Predictions written down before anything is measured, and what became of them."""

from dataclasses import asdict
from types import SimpleNamespace

import pandas as pd

from kvlab.analyse import breakdown, calibrate, cost, predict
from kvlab.analyse import definitions as d
from kvlab.analyse.calibrate import Calibration
from kvlab.analyse.predict import Case, Machine
from kvlab.records import key

FIGURES = ("ttft_s", "tpot_cache_s", "tpot_no_cache_s")


def records(m: Machine | None, a: cost.Architecture, points: list[dict], known: list[dict]) -> list[dict]:
    """A prediction for every point that `known` holds none of; none at all on a machine without ceilings."""
    written = {key(r) for r in known}
    fresh = [x for x in points if m and key({"point": x, "repetition": 0}) not in written]
    shared = {"experiment": "predictions", "kind": "prediction", "repetition": 0, "status": "ok", "reason": None}
    return [shared | {"point": x, "machine": asdict(m), "predicted": figures(m, a, x)} for x in fresh]


def machine(ceilings: pd.DataFrame, p: SimpleNamespace, name: str) -> Machine | None:
    """The measured ceilings as a machine that nothing is fitted to; None where one is missing."""
    read, copy, gemm, layer = (breakdown.ceiling(ceilings, q, p.threads) for q in ("read", "copy", "gemm", "layer"))
    if not all(each.n for each in (read, copy, gemm, layer)):
        return None
    return Machine(name, read.median, copy.median, {p.dtype: gemm.median}, layer.median, p.device == "cuda", "measured")


def figures(m: Machine, a: cost.Architecture, point: dict) -> dict[str, float]:
    """Seconds and bytes of one S1b point."""
    size = {"context": point["context_length"], "output_tokens": point["output_tokens"], "batch": point["batch_size"]}
    case = Case(a, **size, **{name: point[name] for name in ("dtype", "attention", "cache")})
    tokens = case.context + case.output_tokens - 1
    held = cost.kv_cache_bytes(a, tokens, case.dtype, case.batch)
    return {
        "ttft_s": predict.ttft_s(m, case).value,
        "tpot_cache_s": predict.tpot_s(m, case).value,
        "tpot_no_cache_s": predict.tpot_s(m, case, use_cache=False).value,
        "kv_cache_bytes": held,
        "weights_and_cache_bytes": cost.weight_bytes(a, case.dtype) + held,
    }


def rows(predicted: list[dict], measured: list[dict]) -> list[dict]:
    """One row per prediction, with `when`: "before" or "after" the point's first measurement, or "unmeasured"."""
    first: dict[str, str] = {}
    for r in sorted(measured, key=lambda r: r["recorded_at"]):
        first.setdefault(key({"point": r["point"], "repetition": 0}), r["recorded_at"])
    found = []
    for r in predicted:
        at = first.get(key(r))
        when = "unmeasured" if at is None else "before" if r["recorded_at"] <= at else "after"
        found.append({**r["point"], **r["predicted"], "when": when})
    return found


def residuals(predicted: list[dict], measured: list[dict]) -> pd.DataFrame:
    """One row per measured figure of a predicted point: measured over predicted."""
    by_point = {key(r): r["predicted"] for r in predicted}
    found = []
    for r in measured:
        point = key({"point": r["point"], "repetition": 0})
        if r["kind"] != "generation" or r.get("control") or r.get("negative_control") or point not in by_point:
            continue
        tpot = "tpot_cache_s" if r["use_cache"] else "tpot_no_cache_s"
        values = {tpot: d.tpot_s(r)} | ({"ttft_s": d.ttft_s(r)} if r["use_cache"] else {})
        found += [
            {"figure": figure, "point": point, "repetition": r["repetition"], "ratio": value / by_point[point][figure]}
            | {name: r["point"][name] for name in ("attention", "context_length")}
            for figure, value in values.items()
            if value is not None
        ]
    return pd.DataFrame(found, columns=["figure", "point", "repetition", "ratio", "attention", "context_length"])


def calibrated(
    m: Machine | None, a: cost.Architecture, dtype: str, generations: pd.DataFrame, pairs: pd.DataFrame
) -> Calibration | None:
    """The machine fitted on every second length and tested on the lengths between; None without lengths to test on."""
    points = calibrate.measured_points(a, dtype, generations, pairs)
    enough = m is not None and len({point.case.context for point in points}) > 1
    return calibrate.on_lengths(m, points) if enough else None
