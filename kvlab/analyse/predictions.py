"""Predictions written down before anything is measured, and what became of them."""

import pandas as pd

from kvlab.analyse import breakdown, cost
from kvlab.analyse import definitions as d
from kvlab.records import key

FIGURES = ("ttft_s", "tpot_cache_s", "tpot_no_cache_s")


def records(p, a: cost.Architecture, ceilings: pd.DataFrame, points: list[dict], known: list[dict]) -> list[dict]:
    """A prediction for every point that `known` holds none of, from ceilings that nothing was fitted to."""
    written = {key(r) for r in known}
    fresh = [x for x in points if key({"point": x, "repetition": 0}) not in written]
    rates = uncalibrated(ceilings, p.threads)
    if any(rate is None for rate in rates.values()):
        return []
    shared = {"experiment": "predictions", "kind": "prediction", "repetition": 0, "status": "ok", "reason": None}
    return [shared | {"point": x, "rates": rates, "predicted": figures(rates, a, x)} for x in fresh]


def uncalibrated(ceilings: pd.DataFrame, threads: int) -> dict[str, float | None]:
    """Medians of the ceilings in SI units, as they were measured; None where one is missing."""
    names = {"read": "read_bandwidth_bytes_per_s", "copy": "copy_bandwidth_bytes_per_s", "gemm": "flops_per_s"}
    names["layer"] = "launch_s_per_layer"
    found = {name: breakdown.ceiling(ceilings, quantity, threads) for quantity, name in names.items()}
    return {name: estimate.median if estimate.n else None for name, estimate in found.items()}


def figures(rates: dict[str, float], a: cost.Architecture, point: dict) -> dict[str, float]:
    """Seconds and bytes of one S1b point: launches add to the work (a CPU does one thing at a time)."""
    n, batch, dtype = point["context_length"], point["batch_size"], point["dtype"]
    halfway, launch_s = n + point["output_tokens"] // 2, rates["launch_s_per_layer"] * a.layers
    read = cost.step_weight_bytes(a, dtype) + cost.kv_cache_bytes(a, halfway, dtype, batch)
    copied = cost.cache_copy_bytes(a, halfway, dtype, point["attention"], point["cache"], batch)
    held = cost.kv_cache_bytes(a, n + point["output_tokens"] - 1, dtype, batch)
    return {
        "ttft_s": cost.prefill_flops(a, n, batch) / rates["flops_per_s"] + launch_s,
        "tpot_cache_s": read / rates["read_bandwidth_bytes_per_s"]
        + copied / rates["copy_bandwidth_bytes_per_s"] + launch_s,
        "tpot_no_cache_s": cost.prefill_flops(a, halfway, batch) / rates["flops_per_s"] + launch_s,
        "kv_cache_bytes": held,
        "weights_and_cache_bytes": cost.weight_bytes(a, dtype) + held,
    }  # fmt: skip


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
