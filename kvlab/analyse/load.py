"""What the machine did while it was measured: arithmetic on the raw samples that stand in each record."""

import math

import pandas as pd

from kvlab.analyse import definitions as d

DRIVER_WINDOW_S = 1.0  # NVML's utilisation is a mean over up to the last second: shorter windows have none of their own
OTHERS_LIMIT = 0.10  # share of the CPUs used by others from which a window counts as disturbed
STEAL_LIMIT = 0.02  # share taken by the hypervisor
SLOWED = {"power_cap": 0x4, "hardware": 0x8, "thermal": 0x20 | 0x40, "power_brake": 0x80}  # bits of NVML's reasons


def windows(records: list[dict]) -> pd.DataFrame:
    """One row per measured window that was sampled; what could not be read is None or NaN."""
    rows = [
        {name: r["point"].get(name) for name in ("attention", "context_length", "concurrency")}
        | {"kind": r["kind"], "use_cache": r.get("use_cache")}
        | of_window(r)
        for r in records
        if r.get("telemetry") and r["status"] == d.OK
    ]
    return pd.DataFrame(rows)


def disturbed(record: dict) -> bool:
    """The record's window was sampled and carries a mark; of one that was not sampled nothing is known against it."""
    return bool(record.get("telemetry") and of_window(record)["marks"])


def of_window(record: dict) -> dict:
    """Shares of CPU, memory, and what the card did, of one record's window."""
    t = record["telemetry"]
    at_s, columns = _columns(t)
    cpu_s = (at_s[-1] - at_s[0]) * t["cpus"] if len(at_s) > 1 else None
    own, busy, steal = (_share(columns.get(f"{name}_cpu_s"), cpu_s) for name in ("own", "busy", "steal"))
    others = None if None in (own, busy) else max(0.0, busy - own)
    found = {
        "window_s": t["window_s"], "samples": len(at_s), "interval_s": t["interval_s"], "trouble": t["trouble"],
        "own_share": own, "others_share": others, "steal_share": steal,
        "cpu_frequency_hz": _mean(t["cpu_frequencies_hz"]),
        "resident_set_bytes": _highest(columns.get("resident_set_bytes")),
    }  # fmt: skip
    found |= _card(record, at_s, columns)
    return found | {"marks": marks(found, columns)}


def _columns(t: dict) -> tuple[list[float], dict[str, list]]:
    """Times, and the values of each column, in the order of the samples."""
    series = [list(column) for column in zip(*t["samples"])] or [[] for _ in t["columns"]]
    named = dict(zip(t["columns"], series))
    return named.pop("t_s", []), named


def _card(record: dict, at_s: list[float], columns: dict[str, list]) -> dict:
    """Means over the window; memory under five names that are never mixed (see the glossary of the table)."""
    used, energy = (_known(columns.get(name)) for name in ("card_memory_bytes", "energy_j"))
    energy_j = energy[-1] - energy[0] if len(energy) > 1 else None
    tokens = sum(record.get("chunk_tokens") or []) or (record.get("server_deltas") or {}).get("generation_tokens")
    long_enough = record["telemetry"]["window_s"] >= DRIVER_WINDOW_S
    means = {name: time_mean(at_s, columns.get(name)) for name in ("utilisation", "power_w", "sm_clock_hz")}
    return {
        **means,
        "utilisation": means["utilisation"] if long_enough else None,
        "energy_per_token_j": energy_j / tokens if tokens and energy_j is not None else None,
        "temperature_c": _highest(columns.get("temperature_c")),
        "card_memory_before_bytes": used[0] if used else None,
        "card_memory_bytes": _highest(used),
        "card_memory_rise_bytes": max(used) - used[0] if used else None,
        "own_memory_bytes": _highest(columns.get("own_memory_bytes")),
        "allocated_bytes": record.get("peak_memory_bytes") if record.get("reserved_memory_bytes") else None,
        "reserved_bytes": record.get("reserved_memory_bytes"),
    }


def marks(found: dict, columns: dict[str, list]) -> tuple[str, ...]:
    """Why a window is not that of a quiet machine at full speed: slowed card, load by others, stolen time."""
    reasons = [int(mask) for mask in _known(columns.get("throttle_reasons"))]
    slowed = [name for name, bits in SLOWED.items() if any(mask & bits for mask in reasons)]
    others = [] if (found["others_share"] or 0) <= OTHERS_LIMIT else ["others"]
    steal = [] if (found["steal_share"] or 0) <= STEAL_LIMIT else ["steal"]
    foreign = ["foreign"] if _highest(columns.get("other_processes")) else []
    return tuple(slowed + others + steal + foreign)


def time_mean(at_s: list[float], values: list | None) -> float | None:
    """Mean over time: a sample stands for the stretch since the one before it; None without a value."""
    pairs = [(at_s[i] - at_s[i - 1], values[i]) for i in range(1, len(values or [])) if values[i] is not None]
    weight = sum(length for length, _ in pairs)
    return sum(length * value for length, value in pairs) / weight if weight else None


def _known(values: list | None) -> list:
    return [value for value in values or [] if value is not None]


def _share(counter: list | None, of_s: float | None) -> float | None:
    """Rise of a counter of seconds, as a share of `of_s`."""
    if not of_s or not counter or None in (counter[0], counter[-1]):
        return None
    return (counter[-1] - counter[0]) / of_s


def _mean(values: list) -> float | None:
    known = _known(values)
    return math.fsum(known) / len(known) if known else None


def _highest(values: list | None) -> float | None:
    return max(_known(values), default=None)
