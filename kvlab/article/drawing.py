"""What the charts share: style and font, panels, lines with intervals, axes for people, stable files."""

import functools
import importlib.util
import io
import math
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib import font_manager
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from kvlab.analyse import summary
from kvlab.article import prose

STYLE = Path(__file__).parent / "article.mplstyle"
FONT_FILE = "NotoSansCJKsc-Regular.otf"
COLOUR = {  # after Okabe and Ito, safe for colour-blind eyes
    "cache": "#0072B2", "no_cache": "#D55E00", "vllm": "#009E73", "s1b": "#0072B2",
    "eager": "#4D4D4D", "sdpa": "#CC79A7", "reference": "#6A6A6A",
    "tpot_speedup": "#E69F00", "total_speedup": "#56B4E9",
}  # fmt: skip
MARKER = {"cache": "o", "no_cache": "s", "eager": "s", "sdpa": "o", "vllm": "D", "s1b": "o"}
LABEL_GAP_POINTS = 14


@functools.cache
def font_path():
    """The Chinese font inside the installed package mplfonts, registered in place of a system's own of that name."""
    package = importlib.util.find_spec("mplfonts")
    if package is None:
        raise ModuleNotFoundError("the charts take their font from mplfonts: pip install mplfonts")
    path = Path(package.submodule_search_locations[0]) / "fonts" / FONT_FILE
    known = font_manager.fontManager
    known.addfont(str(path))
    names = {entry.name for entry in known.ttflist if entry.fname == str(path)}
    known.ttflist = [entry for entry in known.ttflist if entry.name not in names or entry.fname == str(path)]
    return path


def chart(draw):
    """Draws in the article's style, which is read only then and leaves matplotlib's settings as they were."""

    @functools.wraps(draw)
    def styled(*frames_and_language, **named):
        font_path()
        with matplotlib.style.context(STYLE):
            figure = draw(*frames_and_language, **named)
            figure.draw_without_rendering()  # ticks are made here, with this font, wherever it is shown later
        figure.set_layout_engine(None)  # laid out once and for all; every file would do it twice more
        return figure

    return styled


def read_by(reading):
    """Gives a chart the function that reads its frames."""

    def give(draw):
        draw.reading = reading
        return draw

    return give


def images(figure):
    """{"svg": bytes, "png": bytes} that depend on nothing but the figure: no date, version or random id."""
    found = {}
    with matplotlib.style.context(STYLE):
        for extension, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=extension, metadata=metadata)
            found[extension] = buffer.getvalue()
    return found


def label(key, language):
    return prose.plain(f"label.{key}", language)


def kernel_label(attention, language):
    return prose.table_of(language).get(f"label.{attention}", attention)


def colour_of(condition):
    return COLOUR.get(condition, COLOUR["eager"])


def tint(colour, share):
    """The colour mixed with white."""
    return tuple(1 - (1 - part) * (1 - share) for part in to_rgb(colour))


def panels(language, chart_name, titles, *, height=3.7, rows=1, sharey="row", sharex=False, **numbers):
    """A figure with the chart's title, and its axes with a title each; `height` is a row's, in inches.

    `numbers` fill the chart's title.
    """
    figure = Figure(figsize=(7.4, height * rows))
    axes = list(figure.subplots(rows, len(titles) // rows, squeeze=False, sharey=sharey, sharex=sharex).flat)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    figure.suptitle(prose.plain(f"charts.{chart_name}.title", language, **numbers), x=0.012, ha="left")
    return figure, axes


def dots(ax, frame, x, y, condition):
    """Single values, faint; those measured on a slowed or shared machine carry an open square (see load_room)."""
    if "disturbed" in frame and frame["disturbed"].any():
        marked = frame[frame["disturbed"]]
        ax.scatter(marked[x], marked[y], s=36, marker="s", facecolors="none", edgecolors=colour_of(condition), lw=0.7)
    ax.scatter(frame[x], frame[y], color=colour_of(condition), alpha=0.3, s=14, linewidth=0)


def line(ax, frame, x, y, condition):
    """Median line with its 95 % band; returns the height of its right end, None where there is no line."""
    middle = summary.intervals(frame.dropna(subset=[y]), [x], y)
    if middle.empty:
        return None
    colour = colour_of(condition)
    ax.plot(middle[x], middle["median"], color=colour, marker=MARKER.get(condition, "o"), markeredgecolor="white")
    ax.fill_between(middle[x], middle["low"], middle["high"], color=colour, alpha=0.16, linewidth=0)
    return middle["median"].iloc[-1]


def series(ax, frame, x, y, condition, name):
    """Dots and the line of one condition; returns the label of its right end, for `end_labels`."""
    dots(ax, frame, x, y, condition)
    return line(ax, frame, x, y, condition), name, colour_of(condition)


def crosses(ax, xs, condition, level=0):
    """Failures: crosses along the top edge, one row per condition."""
    xs = sorted(set(xs))
    ax.scatter(
        xs, [0.97 - 0.07 * level] * len(xs), marker="x", s=36, linewidth=1.6, color=colour_of(condition),
        transform=ax.get_xaxis_transform(), clip_on=False, zorder=5,
    )  # fmt: skip


def end_labels(ax, labels):
    """Names lines at the right edge instead of in a legend: (height in data, text, colour), moved apart."""
    labels = sorted((each for each in labels if each[0] is not None), key=lambda each: each[0])
    if not labels:
        return
    (low, high), at = ax.get_ylim(), ax.transScale.transform
    bottom, top = at((1, low))[1], at((1, high))[1]
    gap = LABEL_GAP_POINTS / (ax.figure.get_figheight() * 72 * ax.get_position().height)
    places = [(at((1, each[0]))[1] - bottom) / (top - bottom) for each in labels]
    for index in range(1, len(places)):
        extra_lines = "".join(text for _, text, _ in labels[index - 1 : index + 1]).count("\n")
        places[index] = max(places[index], places[index - 1] + gap * (1 + extra_lines / 2))
    overflow = max(0.0, places[-1] - 1)
    for place, (_, text, colour) in zip(places, labels, strict=True):
        ax.text(1.03, place - overflow, text, transform=ax.transAxes, color=colour, va="center")


def octaves(ax, values, language, label_key):
    """A log2 x axis whose ticks are the measured values, thinned where their labels would touch."""
    values = sorted({int(value) for value in values})
    ax.set_xlabel(label(label_key, language))
    if not values:
        return
    span = math.log2(values[-1] / values[0]) or 1.0
    ax.set_xscale("log", base=2)
    ax.set_xlim(values[0] * 2 ** (-0.06 * span), values[-1] * 2 ** (0.06 * span))
    width_inches = ax.figure.get_figwidth() * 0.8 * ax.get_position().width
    room, kept = (0.12 + 0.063 * len(f"{values[-1]:,}")) / width_inches, values[-1:]
    for value in reversed(values[:-1]):
        if math.log2(kept[-1] / value) / span >= room:
            kept.append(value)
    fixed_ticks(ax.xaxis, kept, lambda value: f"{value:,.0f}")


def fixed_ticks(axis, ticks, form):
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def drawn_values(ax):
    """Heights of lines and points, not of bands: a wide interval may leave the picture, not flatten it."""
    dots = [each for each in ax.collections if each.get_offset_transform() == ax.transData]
    parts = [each.get_offsets()[:, 1] for each in dots] + [each.get_ydata() for each in ax.lines]
    return [value for part in parts for value in part]


def friendly_y(axes, unit, language, y_label="", *, from_zero=False):
    """One y scale for panels side by side, ticks such as "33 ms"; logarithmic beyond a factor of 6."""
    values = [float(value) for ax in axes for value in drawn_values(ax) if np.isfinite(value)]
    for ax in axes:
        ax.set_ylabel(y_label if ax is axes[0] else "")
        if not values:
            nothing(ax, language)
        elif min(values) > 0 and max(values) / min(values) > 6 and not from_zero:
            _log_y(ax, min(values), max(values), unit, language)
        else:
            ax.set_ylim(0, max(values) * 1.12 or 1)
            ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, max(values), unit, language)))


def _log_y(ax, low, high, unit, language):
    ax.set_yscale("log")
    ax.set_ylim(low / 1.25, high * 1.4)
    if unit in ("x", "B"):
        ticks = 2.0 ** np.arange(math.floor(math.log2(low)), math.log2(high) + 1)
    else:
        decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.log10(high) + 1)
        ticks = np.outer(decades, [1, 2, 5]).ravel()
    ticks = [tick for tick in ticks if low / 1.25 <= tick <= high * 1.4]
    fixed_ticks(ax.yaxis, ticks[:: math.ceil(len(ticks) / 8)], lambda v: _tick(v, v, unit, language))


def _tick(value, largest, unit, language):
    """A tick in the unit that suits `largest`: "33 ms", "4x"; a rate is bare, the title has its unit."""
    if unit == "x":
        return prose.plain("unit.ratio", language, number=f"{value:g}")
    divisor, symbol = prose.scale(largest, unit)
    return f"{float(f'{value / divisor:.3g}'):g} {symbol}".rstrip() if value else "0"


def nothing(ax, language):
    """The note that there is no measurement to draw."""
    ax.text(0.5, 0.5, label("no_data", language), transform=ax.transAxes, ha="center", color="#777777")
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
