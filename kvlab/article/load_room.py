"""What the machine did while it measured: a table per experiment, and a word about windows that were disturbed."""

from collections import Counter

import pandas as pd

from kvlab.analyse import definitions as d
from kvlab.analyse import load
from kvlab.article import prose

CPU, CARD, MEMORY = (prose.TABLES[f"telemetry_{name}"] for name in ("cpu", "card", "memory"))
GROUPS = {"generation": ["use_cache", "context_length"], "point": ["concurrency", "context_length"]}


def machine_load(records: list[dict], language: str, source: str) -> None:
    """Medians per condition: CPU shares, clock and memory; the same of the card, or that there is none to ask.

    It also says of how many measured windows there are samples.
    """
    windows = load.windows(records)
    if windows.empty:
        prose.say("telemetry.nothing", language)
        return
    by = GROUPS[windows["kind"].iloc[0]]
    rows = condition_rows(windows, by)
    show(rows, by, CPU, language, source)
    if windows["card_memory_bytes"].notna().any():
        show(rows, by, CARD, language, source)
        show(rows, by, MEMORY, language, source)
    else:
        prose.say("telemetry.no_card", language)
    numbers = {"samples": windows["samples"].median(), "interval": windows["interval_s"].median()}
    numbers |= {"windows": len(windows), "measured": sum(r["kind"] in GROUPS and r["status"] == d.OK for r in records)}
    prose.say("telemetry.sampling", language, source=source, **numbers)
    if numbers["windows"] < numbers["measured"]:
        prose.say("telemetry.unsampled", language, count=numbers["measured"] - numbers["windows"])
    disturbed(windows, language, source)


def condition_rows(windows: pd.DataFrame, by: list[str]) -> list[dict]:
    """The median of every reading for each condition; None where no window of it has a value."""
    friendly = windows.assign(cpu_ghz=windows["cpu_frequency_hz"], sm_clock_ghz=windows["sm_clock_hz"])
    friendly[["cpu_ghz", "sm_clock_ghz"]] = friendly[["cpu_ghz", "sm_clock_ghz"]].astype(float) / 1e9
    rows = []
    for values, group in friendly.groupby(by, sort=True):
        known = {name: group[name].dropna().astype(float) for name in [*CPU, *CARD, *MEMORY]}
        medians = {name: series.median() if len(series) else None for name, series in known.items()}
        rows.append(dict(zip(by, values)) | {"windows": len(group)} | medians)
    return rows


def show(rows: list[dict], by: list[str], columns: dict[str, str], language: str, source: str) -> None:
    cells = [
        row | {name: prose.both("telemetry.not_measurable") for name in columns if pd.isna(row[name])} for row in rows
    ]
    headings = {name: "telemetry.arm:@arm" if name == "use_cache" else f"label.{name}:count" for name in by}
    prose.table(cells, headings | {"windows": "telemetry.windows:count"} | columns, language, source=source)


def disturbed(windows: pd.DataFrame, language: str, source: str) -> None:
    """How many windows were slowed or shared with others, by reason, and how many could not be sampled to the end."""
    counts = Counter(mark for marks in windows["marks"] for mark in marks)
    if not counts:
        prose.say("telemetry.undisturbed", language, source=source, windows=len(windows))
    for mark, count in counts.most_common():
        why = prose.both(f"telemetry.mark.{mark}")
        prose.say("telemetry.disturbed", language, source=source, count=count, windows=len(windows), why=why)
    broken = windows["trouble"].dropna()
    if len(broken):
        prose.say("telemetry.broken", language, source=source, count=len(broken), reason=broken.iloc[-1])
