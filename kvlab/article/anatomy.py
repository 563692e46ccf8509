"""The article's explaining room: ceilings, predictions, one token taken apart, and the tiers of machines."""

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from kvlab.analyse import breakdown
from kvlab.analyse.calibrate import Calibration
from kvlab.analyse.predict import Prediction
from kvlab.analyse.predictions import FIGURES
from kvlab.analyse.summary import interval
from kvlab.article import drawing, prose
from kvlab.article.drawing import chart, label, read_by

COLOUR = {
    "weights": "#0072B2", "kv_reads": "#56B4E9", "cache_copies": "#E69F00", "launch": "#D55E00",
    "sampling": "#CC79A7", "serving": "#009E73", "unexplained": "#B0B0B0",
}  # fmt: skip
PREDICTED, MEASURED = "#6A6A6A", "#0072B2"


def waterfall_numbers(parts):
    """Of the first stack: TPOT over its floor, and its largest part that no engine has to pay."""
    rows = parts[parts["stack"] == parts["stack"].iloc[0]]
    avoidable = rows[~rows["part"].isin(["weights", "kv_reads"])]
    largest = avoidable.loc[avoidable["seconds"].idxmax()]
    stack, tpot_s, floor_s = rows.iloc[0][["stack", "tpot_s", "floor_s"]]
    numbers = {"stack": stack_name(stack), "tpot": tpot_s, "floor": floor_s, "over": tpot_s / floor_s}
    return numbers | {"largest": prose.both(f"label.part_{largest['part']}"), "largest_s": largest["seconds"]}


@read_by(waterfall_numbers)
@chart
def waterfall(parts, language):
    """Where one token's time goes: a panel per stack, each in multiples of its own floor."""
    threads = parts.groupby("stack", sort=False)["threads"].first()
    titles = [prose.plain(f"label.stack_{stack}", language, threads=n) for stack, n in threads.items()] or [""]
    figure, axes = drawing.panels(language, "waterfall", titles, rows=len(titles), height=2.3, sharey=False)
    for ax, stack in zip(axes, threads.index):
        _steps(ax, parts[parts["stack"] == stack], language)
    if threads.empty:
        drawing.nothing(axes[0], language)
    axes[-1].set_xlabel(label("times_floor", language))
    return figure


def _steps(ax, rows, language):
    """One bar per part, each starting where the one before ended, then the whole token."""
    for height, row in enumerate(rows.to_dict("records")):
        pale = drawing.tint(COLOUR[row["part"]], 0 if row["basis"] == "measured" else 0.35)
        hatch = {"computed": "///", "remainder": ""}.get(row["basis"])
        ax.barh(height, row["length"], left=row["start"], color=pale, edgecolor=COLOUR[row["part"]], hatch=hatch)
        end = max(row["start"], row["start"] + row["length"])
        ax.text(end, height, f"  {prose.friendly(row['seconds'], 's', language)}", va="center", fontsize=8.5)
    whole = rows["tpot_s"].iloc[0] / rows["floor_s"].iloc[0]
    ax.barh(len(rows), whole, color="#444444")
    text = f"  {prose.friendly(rows['tpot_s'].iloc[0], 's', language)}"
    ax.text(whole, len(rows), text, va="center", fontsize=8.5)
    words = [[label(f"{kind}_{name}", language) for name in rows[kind]] for kind in ("part", "basis")]
    names = [prose.plain("label.part", language, part=part, basis=basis) for part, basis in zip(*words)]
    ax.set_yticks(range(len(rows) + 1), [*names, label("measured_tpot", language)])
    ax.set(xlim=(0, max(whole, (rows["start"] + rows["length"]).max()) * 1.18), ylim=(len(rows) + 0.6, -0.6))
    ax.axvline(1, color=drawing.COLOUR["reference"], linewidth=1, linestyle=":", zorder=0)
    ax.grid(False)


def stack_name(stack):
    return prose.both(f"label.stack_name_{stack}")


def slice_numbers(frame, layers):
    fit = breakdown.extrapolated(frame, "tpot_s", layers)
    if fit.empty:
        raise IndexError("no line through fewer than two slices")
    numbers = {"layers": layers, "deepest": frame["layers"].max(), "rest": fit["rest_s"].median()}
    return numbers | {name: interval(fit[f"{name}_s"]) for name in ("per_layer", "whole")}


@read_by(slice_numbers)
@chart
def slice_by_layers(frame, layers, language):
    """TPOT and TTFT of the first layers of a large model, and the straight line to all of its layers."""
    names = ("tpot_s", "ttft_s")
    titles = [label(name.removesuffix("_s"), language) for name in names]
    figure, axes = drawing.panels(language, "slice_by_layers", titles, height=3.3, sharey=False)
    for ax, value in zip(axes, names):
        drawing.dots(ax, frame, "layers", value, "cache")
        fit = breakdown.extrapolated(frame, value, layers)
        if len(fit):
            grey, (rest_s, slope) = drawing.COLOUR["reference"], fit[["rest_s", "per_layer_s"]].median()
            ax.plot([0, layers], [rest_s, rest_s + slope * layers], color=grey, linestyle="--", linewidth=1.4)
            ax.text(0.05, 0.93, label("extrapolated", language), transform=ax.transAxes, va="top", color=grey)
        drawing.line(ax, frame, "layers", value, "cache")
        ax.set_xlabel(label("layers", language))
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        drawing.friendly_y([ax], "s", language, "", from_zero=True)
    return figure


def residual_numbers(residuals):
    fair = residuals[residuals["attention"] == sorted(residuals["attention"].unique())[-1]]
    middle = fair.groupby("figure")["ratio"].median()
    return {name.removesuffix("_s"): middle[name] for name in FIGURES} | {"points": residuals["point"].nunique()}


@read_by(residual_numbers)
@chart
def prediction_residuals(residuals, language):
    """Measured over predicted, by context length: 1 is a prediction that came true."""
    titles = [label(f"figure_{name}", language) for name in FIGURES]
    figure, axes = drawing.panels(language, "prediction_residuals", titles, height=3.3)
    for ax, name in zip(axes, FIGURES):
        rows, ends = residuals[residuals["figure"] == name], []
        for kernel, group in rows.groupby("attention"):
            drawing.dots(ax, group, "context_length", "ratio", kernel)
            height = drawing.line(ax, group, "context_length", "ratio", kernel)
            ends.append((height, drawing.kernel_label(kernel, language), drawing.colour_of(kernel)))
        ax.axhline(1, color=drawing.COLOUR["reference"], linewidth=1, linestyle="--")
        drawing.octaves(ax, rows["context_length"], language, "context_length")
    drawing.friendly_y(axes, "x", language, label("measured_over_predicted", language))
    drawing.end_labels(axes[-1], ends)
    return figure


def tier_numbers(gaps):
    by_phase = gaps.set_index("phase")
    names = [(phase, value) for phase in ("ttft", "tpot") for value in ("gap", "ceiling")]
    return {f"{phase}_{value}": by_phase.loc[phase, value] for phase, value in names}


@read_by(tier_numbers)
@chart
def tier_gaps(gaps, language):
    """How many times faster the other machine is, phase by phase, beside the ratio of the ceiling that rules it."""
    figure, (ax,) = drawing.panels(language, "tier_gaps", [""], height=3.0)
    for height, row in enumerate(gaps.to_dict("records")):
        for value, colour, marker in (("gap", MEASURED, "o"), ("ceiling", PREDICTED, "D")):
            ax.scatter(row[value], height, color=colour, marker=marker, s=60, zorder=3)
            name = label(f"tier_{row['phase']}_{value}", language)
            text, place = f"{name} {prose.friendly(row[value], 'x', language)}", (0, 11 if value == "gap" else -19)
            style = {"ha": "center", "textcoords": "offset points", "fontsize": 9}
            ax.annotate(text, (row[value], height), place, color=colour, **style)
        ax.plot([row["gap_low"], row["gap_high"]], [height, height], color=MEASURED, linestyle="--", linewidth=2)
    ax.set_xscale("log")
    ax.set(ylim=(-0.7, max(len(gaps), 1) - 0.3))
    if len(gaps):
        values = gaps[["gap", "ceiling", "gap_low", "gap_high"]].to_numpy().ravel()
        decades = (digit * 10**power for power in range(5) for digit in (1, 2, 5))
        ticks = [tick for tick in decades if values.min() / 3 < tick < values.max() * 3]
        ax.set_xlim(values.min() / 2.5, values.max() * 2.5)
        drawing.fixed_ticks(ax.xaxis, ticks, lambda value: prose.plain("unit.ratio", language, number=f"{value:g}"))
    else:
        drawing.nothing(ax, language)
    ax.set_yticks(range(len(gaps)), [label(phase, language) for phase in gaps["phase"]])
    ax.set_xlabel(label("times_faster", language))
    return figure


# --- tables and sentences


def unmeasured_slices(records: list[dict], language: str) -> None:
    """Why there is no slice of the large model, where it was asked for and did not run."""
    failed = [r for r in records if r["status"] != "ok"]
    if failed and len(failed) == len(records):
        prose.say("status.missing_section", language, reason=failed[-1]["reason"] or failed[-1]["status"])


def ceilings(frame: pd.DataFrame, language: str, source: str) -> None:
    """Every ceiling of this machine with its interval, in units for people."""
    rows = []
    for (quantity, threads, shape), group in frame.groupby(["quantity", "threads", "shape"], sort=False):
        divisor, unit = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e9, "GFLOP/s"), "s": (1e-6, "µs")}[group["unit"].iloc[0]]
        what = prose.both(f"ceiling.{quantity}", shape=shape.strip("[]").replace(", ", " x "))
        rows.append({"what": what, "threads": threads, "value": interval(group["value"] / divisor), "unit": unit})
    headings = {name: f"ceiling.{name}" for name in ("what", "threads", "value", "unit")}
    headings["threads"] += ":count"
    prose.table(rows, headings, language, source=source)


def predicted(rows: list[dict], language: str, source: str) -> None:
    """What was written down for every point, before or after its measurement."""
    words = {"attention": "label", "when": "prediction"}
    table = [row | {name: prose.both(f"{key}.{row[name]}") for name, key in words.items()} for row in rows]
    headings = {"attention": "sections.kernel", "context_length": "label.context_length:count"}
    headings |= {name: f"label.figure_{name}:s" for name in FIGURES}
    headings |= {"kv_cache_bytes": "label.kv_bytes:B", "weights_and_cache_bytes": "prediction.weights_and_cache:B"}
    headings |= {"when": "prediction.when"}
    prose.table(table, headings, language, source=source)
    count = {when: sum(row["when"] == when for row in rows) for when in ("before", "after", "unmeasured")}
    prose.say("prediction.honesty", language, source=source, **count)


def calibrated(fitted: Calibration | None, language: str, source: str) -> None:
    """How far the calibrated predictor lies from lengths that it was not fitted to."""
    if fitted is None:
        prose.say("status.no_data", language)
        return
    lengths = sorted({point.case.context for point in fitted.held_out})
    listed = ", ".join(f"{length:,}" for length in lengths)
    misses = np.abs(fitted.residuals)
    numbers = {"points": len(misses), "middle": float(np.median(misses)), "largest": float(misses.max())}
    prose.say("prediction.calibrated", language, source=source, lengths=listed, **numbers)


def compiled(found: list[breakdown.Token], apart: pd.DataFrame, language: str, source: str) -> None:
    """What compiling changes for one request, stack by stack, how long it took, and why a stack has no panel.

    `apart` are the generations of the anatomy, of which a failed or refused one says why.
    """
    tokens, asked = {token.stack: token for token in found}, apart[apart["compiled"].astype(bool)]
    for eager, stack in (("static", "static_compiled"), ("vllm_eager", "vllm_compiled")):
        if eager in tokens and stack in tokens:
            times = {"eager": interval(tokens[eager].tpot_s), "compiled": interval(tokens[stack].tpot_s)}
            prose.say("anatomy.compiled", language, source=source, stack=stack_name(stack), **times)
    if "static_compiled" in tokens:
        prose.say("anatomy.compiling", language, source=source, seconds=asked["warmup_s"].max())
    known, failed = {None: "anatomy.not_asked", "tokens_differ": "refusal.tokens_differ"}, asked["reason"].dropna()
    for stack in [each for each in breakdown.STACKS if each not in tokens]:
        reason = failed.iloc[-1] if stack == "static_compiled" and len(failed) else None
        reason = prose.both(known[reason]) if reason in known else reason
        prose.say("anatomy.absent", language, stack=stack_name(stack), reason=reason)


def engine(found: list[breakdown.Token], large, language: str, source: str) -> None:
    """What an infinitely good engine could still remove of one token, stack by stack, and of the large model's."""
    for token in found:
        prose.say("anatomy.removable", language, source=source, stack=stack_name(token.stack), share=token.removable)
    if large.n:
        prose.say("anatomy.removable_large", language, source=source, share=large)


def side_by_side(rows: list[dict], language: str, source: str) -> None:
    """Every run at hand and the predicted card, one row each, labelled."""
    table = [row | {"kind": prose.both(f"kind.{row['kind']}")} | ranges(row) for row in rows]
    headings = {"profile": "tiers.profile", "machine": "answer.machine"}
    headings |= {"model": "machine.model", "dtype": "machine.dtype"}
    headings |= {"context_length": "label.context_length:count", "ttft": "label.ttft:s", "tpot": "label.tpot:s"}
    price = {"cost": "tiers.cost"} if any(row["price"] for row in rows) else {}
    headings |= {"throughput": "tiers.throughput:rate"} | price | {"kind": "tiers.kind"}
    prose.table(table, headings, language, source=source)


def ranges(row: dict) -> dict:
    """A predicted row's times as text with their range: a prediction has no n."""
    predictions = {name: row[name] for name in ("ttft", "tpot") if isinstance(row[name], Prediction)}
    return {name: prose.both("tiers.range", **vars(each)) for name, each in predictions.items()}
