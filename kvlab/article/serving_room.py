"""S1's room beyond the plain sweep: latency against throughput, a full KV cache, reused prefixes, definitions."""

import pandas as pd
from matplotlib.ticker import MaxNLocator

from kvlab.analyse import dialects
from kvlab.analyse import serving as s1
from kvlab.article import drawing, prose, readings
from kvlab.article.drawing import COLOUR, chart, label, read_by

WAITING = COLOUR["no_cache"]


# ---- latency against throughput


def latency_numbers(requests, points, ttft_limit_s, tpot_limit_s):
    rows = trade_off(requests, points)
    series = {"throughput": "throughput_tokens_per_s", "ttft": "ttft_s", "tpot": "tpot_s"}
    return readings.spans(("fewest", "most"), **{name: rows[column] for name, column in series.items()})


def trade_off(requests, points):
    """Medians by concurrency: throughput, TTFT and TPOT."""
    sent, runs = (readings.swept(readings.measured(frame)) for frame in (requests, points))
    columns = [readings.medians(runs, "concurrency", "throughput_tokens_per_s")]
    columns += [readings.medians(sent, "concurrency", value) for value in ("ttft_s", "tpot_s")]
    return pd.concat(columns, axis=1).dropna()


@read_by(latency_numbers)
@chart
def latency_by_throughput(requests, points, ttft_limit_s, tpot_limit_s, language):
    """What each further token/s costs in latency, one point per concurrency, with the limits of the goodput."""
    titles = [label(name, language) for name in ("ttft", "tpot")]
    figure, axes = drawing.panels(language, "latency_by_throughput", titles, height=3.1, sharey=False)
    rows, limits = trade_off(requests, points), {"ttft_s": ttft_limit_s, "tpot_s": tpot_limit_s}
    for ax, (value, limit_s) in zip(axes, limits.items(), strict=True):
        ax.set_xlabel(label("throughput", language))
        if len(rows):
            ax.plot(rows["throughput_tokens_per_s"], rows[value], color=COLOUR["vllm"], marker="D")
            ax.axhline(limit_s, color=COLOUR["reference"], linestyle=":", linewidth=1.4)
            at = {"xy": (0, limit_s), "xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
            ax.annotate(label("limit", language), xytext=(4, 3), color=COLOUR["reference"], fontsize=9, **at)
        for concurrency, row in rows.iterrows():
            place = (row["throughput_tokens_per_s"], row[value])
            ax.annotate(f"{concurrency:g}", place, (6, -11), textcoords="offset points", fontsize=9)
        ax.set_xlim(0, rows["throughput_tokens_per_s"].max() * 1.15 if len(rows) else 1)
        drawing.friendly_y([ax], "s", language, from_zero=True)
    return figure


def goodput(frame: pd.DataFrame, language: str, source: str, ttft_limit_s: float, tpot_limit_s: float) -> None:
    """Requests/s, the share of them within both limits, and goodput, one row per concurrency."""
    if len(frame):
        prose.say("serving.goodput_limits", language, ttft=ttft_limit_s, tpot=tpot_limit_s)
    frame = readings.swept(frame)
    rows = frame.groupby("concurrency", as_index=False)[["requests_per_s", "within", "goodput_per_s"]].median()
    prose.table(rows, "goodput", language, source=source)


def open_loop(frame: pd.DataFrame, language: str, source: str) -> None:
    """Latency from the send and from the scheduled arrival at each rate, and Little's law between client and server."""
    prose.table(frame.sort_values("request_rate_per_s"), "open_loop", language, source=source)


def compared(frame: pd.DataFrame, language: str, source: str) -> None:
    """TTFT and TPOT at concurrency 1, eager and compiled; nothing where only one mode was measured."""
    if len(frame):
        prose.table(frame, "compared", language, source=source)


# ---- the KV cache, full


def filling_numbers(samples, sends):
    full = samples.dropna(subset=["kv_cache_usage", "waiting"])
    sends = sends.dropna(subset=["ttft_s"])
    if full.empty or sends.empty:
        raise IndexError("a reading needs samples and requests")
    columns = ["t_s", "repetition", "waiting"]
    at_send = pd.merge_asof(sends.sort_values("t_s"), full[columns].sort_values("t_s"), on="t_s", by="repetition")
    ttft_s = at_send.groupby(at_send["waiting"] > 0)["ttft_s"].median()
    return {
        "usage": full["kv_cache_usage"].max(),
        "waiting_share": (full["waiting"] > 0).mean(),
        "waiting": full["waiting"].max(),
        "preemptions": full["preemptions"].max(),
        "ttft_free": ttft_s.get(False),
        "ttft_queue": ttft_s.get(True),
    }


@read_by(filling_numbers)
@chart
def cache_filling(samples, sends, language):
    """Usage of a small KV cache, running and waiting requests, preemptions, and TTFT by the time of the send."""
    titles = [label(name, language) for name in ("kv_usage_now", "requests_in_server", "ttft")]
    figure, axes = drawing.panels(
        language, "cache_filling", titles, height=1.9, rows=3, sharey=False, sharex=True
    )  # fmt: skip
    for _, run in samples.groupby("repetition"):
        axes[0].step(run["t_s"], run["kv_cache_usage"], color=COLOUR["vllm"], where="post")
        axes[1].step(run["t_s"], run["running"], color=COLOUR["vllm"], where="post")
        axes[1].step(run["t_s"], run["waiting"], color=WAITING, where="post")
        preempted = run[run["preemptions"].diff() > 0]
        axes[0].plot(preempted["t_s"], [1.0] * len(preempted), "v", color=WAITING, clip_on=False, zorder=5)
    axes[2].scatter(sends["t_s"], sends["ttft_s"], color=COLOUR["vllm"], s=16, linewidth=0)
    drawing.friendly_y(axes[:1], "%", language, from_zero=True)
    drawing.friendly_y(axes[1:2], "count", language, from_zero=True)
    drawing.friendly_y(axes[2:], "s", language, from_zero=True)
    if len(samples):
        axes[2].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        last = samples.iloc[-len(samples) // 2]  # where both lines still run
        ends = [("running", COLOUR["vllm"]), ("waiting", WAITING)]
        drawing.end_labels(axes[1], [(last[name], label(name, language), colour) for name, colour in ends])
        drawing.end_labels(axes[0], [(1.0, label("preempted", language), WAITING)])
    axes[2].set_xlabel(label("time", language))
    axes[2].set_ylabel("")
    return figure


def full_cache(numbers: dict | None, language: str, source: str) -> None:
    """What a full cache does to TTFT and TPOT, as a sentence."""
    if numbers is None:
        prose.say("status.no_data", language)
    else:
        prose.say("serving.full_cache", language, source=source, **numbers)


def capacity(rows: list[dict], wasted: dict | None, language: str, source: str) -> None:
    """Capacity predicted from the bytes beside what vLLM reports, and what pages waste against contiguous memory."""
    if rows:
        prose.table(rows, "capacity", language, source=source)
    if wasted:
        prose.say("serving.waste", language, source=source, **wasted)


# ---- prefixes that are reused


def reuse_numbers(frame):
    middle = readings.medians(frame, "shared", "ttft_s")
    none, most, ratio = readings.ends(middle)
    at_most = frame[frame["shared"] == most]
    return {
        "context_length": at_most["context_length"].iloc[0],
        "shared": most,
        "cold": middle[none],
        "warm": middle[most],
        "speedup": 1 / ratio,
        "reused": at_most["reused"].median(),
        "whole_blocks": at_most["whole_blocks"].median(),
    }


@read_by(reuse_numbers)
@chart
def ttft_by_shared_prefix(frame, language):
    """TTFT over the length of the prefix that is in the cache already; dashed, if it were proportional to the rest."""
    figure, (ax,) = drawing.panels(language, "ttft_by_shared_prefix", [""], height=3.1)
    ends = [drawing.series(ax, frame, "shared", "ttft_s", "vllm", label("measured_points", language))]
    cold = frame[frame["shared"] == 0]["ttft_s"].median()
    if cold == cold:  # measured at all
        rows = frame.drop_duplicates("shared").sort_values("shared")
        expected = cold * (1 - rows["whole_blocks"].fillna(rows["shared"] / rows["context_length"]))
        ax.plot(rows["shared"], expected, color=COLOUR["reference"], linestyle="--", linewidth=1.4)
        ends.append((expected.iloc[-1], label("proportional", language), COLOUR["reference"]))
        drawing.fixed_ticks(ax.xaxis, list(rows["shared"]), lambda value: f"{value:,.0f}")
    ax.set_xlabel(label("shared_prefix", language))
    drawing.friendly_y([ax], "s", language, label("ttft", language), from_zero=True)
    drawing.end_labels(ax, ends)
    return figure


# ---- definitions


def definitions_table(records: list[dict], language: str, source: str) -> None:
    """One run under every tool's definitions: the run with the most requests in flight."""
    found = [run for run in s1.runs(records) if run[0]["point"]["concurrency"]]
    if not found:
        prose.say("status.no_data", language)
        return
    point, sent = max(found, key=lambda run: run[0]["point"]["concurrency"])
    rows = dialects.table(sent, point["point"]["concurrency"])
    headings = {"tool": "serving.tool", "tpot_name": "serving.its_name", "tpot_s": "serving.time_per_token:s"}
    headings |= {"ttft_s": "label.ttft:s", "throughput_tokens_per_s": "label.throughput"}
    for each in prose.languages(language):
        words = prose.table_of(each)
        named = [row | {"tpot_name": words.get(f"serving.{row['tpot_name']}", row["tpot_name"])} for row in rows]
        prose.table(named, headings, each, source=source)
    spreads = {"per_token": "tpot_s", "throughput": "throughput_tokens_per_s"}
    numbers = {name: dialects.spread(rows, value) for name, value in spreads.items()}
    prose.say("serving.spread", language, source=source, concurrency=point["point"]["concurrency"], **numbers)
