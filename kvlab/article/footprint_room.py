"""The chart and the table of what S1b's memory consists of."""

import math

import numpy as np
from matplotlib.patches import Patch

from kvlab.analyse import footprint, summary
from kvlab.article import drawing, prose, readings
from kvlab.article.charts import arm_panels
from kvlab.article.drawing import COLOUR, chart, label, read_by, tint

PART_COLOUR = {
    "weights_bytes": "#B5B5B5", "kv_cache_bytes": COLOUR["cache"],
    "activation_bytes": tint(COLOUR["no_cache"], 0.35), "reserve_bytes": "#E6E6E6",
}  # fmt: skip


def memory_reading(parts):
    rows = readings.measured(summary.arm(parts, True))
    longest = rows["context_length"].sort_values().iloc[-1]
    at_longest = rows[rows["context_length"] == longest].set_index("attention")
    row = at_longest.loc[[summary.fair_kernel(rows)]].iloc[0]
    return {
        "kernel": readings.kernel(rows),
        "longest": longest,
        **{name.removesuffix("_bytes"): row[name] for name in footprint.PARTS[:3]},
        "most": at_longest["activation_bytes"].max(),
        "most_kernel": readings.kernel_name(at_longest["activation_bytes"].idxmax()),
    }


@read_by(memory_reading)
@chart
def memory_by_part(parts, language):
    """What the peak consists of, by length, arm and attention kernel; a dash marks what was predicted."""
    figure, cells = arm_panels(parts, "memory_by_part", language, height=2.7)
    lengths = sorted(parts["context_length"].unique())
    for ax, kernel, condition, arm in cells:
        rows = parts[(parts["attention"] == kernel) & (parts["use_cache"] == arm)]
        _stacked(ax, rows, lengths, condition)
        ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        ax.set_xlabel(label("context_length", language) if ax in figure.axes[-2:] else "")
    totals = parts[list(footprint.PARTS)].sum(axis=1).tolist() + parts["predicted_bytes"].dropna().tolist()
    _byte_axis(figure.axes, max(totals, default=0), language)
    _name_parts(figure, parts, language)
    return figure


def _stacked(ax, rows, lengths, condition):
    good = readings.measured(rows).groupby("context_length").median(numeric_only=True).reindex(lengths)
    floor = np.zeros(len(lengths))
    for name in footprint.PARTS:
        heights = good[name].fillna(0).to_numpy()
        ax.bar(range(len(lengths)), heights, bottom=floor, color=PART_COLOUR[name], width=0.66)
        floor = floor + heights
    style = {"color": "#222222", "linestyle": "none", "marker": "_", "markersize": 22, "markeredgewidth": 1.4}
    ax.plot(range(len(lengths)), good["predicted_bytes"], **style)
    lost = rows.loc[rows["status"] != "ok", "context_length"]
    drawing.crosses(ax, [lengths.index(length) for length in lost], condition)


def _byte_axis(axes, largest, language):
    step = 2.0 ** math.ceil(math.log2(max(largest, 5.0) / 5))
    for ax in axes:
        if not largest:
            drawing.nothing(ax, language)
            continue
        ax.set_ylim(0, largest * 1.1)
        ticks = np.arange(0, largest * 1.1, step)
        drawing.fixed_ticks(ax.yaxis, ticks, lambda value: prose.friendly(value, "B", language) if value else "0")


def _name_parts(figure, parts, language):
    shown = [name for name in footprint.PARTS if parts[name].notna().any() and parts[name].max() > 0]
    handles = [Patch(facecolor=PART_COLOUR[name], label=label(name, language)) for name in shown]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def memory_table(parts, language, source):
    """The parts in numbers for the fair kernel, with the resident set and the processor time of the forward pass."""
    rows = readings.measured(summary.headline(parts))
    middle = rows.groupby(["context_length", "use_cache"]).median(numeric_only=True)
    prose.table(middle.reset_index(), "memory", language, source=source)
