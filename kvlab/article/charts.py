"""The article's charts: one function per chart, tidy frames and a language in, a matplotlib figure out."""

import functools
import importlib.util
import io
import math
import os
import tempfile
from pathlib import Path

import matplotlib.style
import numpy as np
import seaborn as sns
from matplotlib import font_manager
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from kvlab.analyse import summary
from kvlab.article import prose, readings

STYLE = Path(__file__).parent / "article.mplstyle"
FONT_FILE = "NotoSansCJKsc-Regular.otf"
COLOUR = {"cache": "#0072B2", "no_cache": "#D55E00", "vllm": "#009E73", "s1b": "#0072B2",
          "eager": "#4D4D4D", "sdpa": "#CC79A7", "reference": "#8A8A8A"}  # after Okabe and Ito, safe for colour-blind eyes
MARKER = {"cache": "o", "no_cache": "s", "eager": "s", "sdpa": "o", "vllm": "D", "s1b": "o"}
ARMS = (("no_cache", False), ("cache", True))
LABEL_GAP_POINTS = 14


@functools.cache
def font_path():
    """The Chinese font inside the installed package mplfonts, registered with matplotlib."""
    package = importlib.util.find_spec("mplfonts")
    if package is None:
        raise ModuleNotFoundError("the charts need the font in the package mplfonts; install it with: pip install mplfonts")
    path = Path(package.submodule_search_locations[0]) / "fonts" / FONT_FILE
    font_manager.fontManager.addfont(str(path))
    return path


def chart(draw):
    """Draws inside the article's style, which is read only then and leaves matplotlib's settings as they were."""
    @functools.wraps(draw)
    def styled(*frames_and_language, **named):
        font_path()
        with matplotlib.style.context(STYLE):
            return draw(*frames_and_language, **named)
    return styled


# --- saving and showing


def show(name, draw, *frames, language="both", figures_dir, source="", reading=True):
    """Draws the chart in each language, keeps it as <figures_dir>/<name>.<language>.svg and .png, and displays it.

    `source` says where the numbers came from; with `reading` the chart's computed sentence follows it.
    """
    key, numbers = f"charts.{draw.__name__}", readings.of(draw.__name__, *frames)
    for each in prose.languages(language):
        images = _images(draw(*frames, each))
        for extension, data in images.items():
            write_atomically(Path(figures_dir) / f"{name}.{each}.{extension}", data)
        title = prose.plain(f"{key}.title", each)
        alt = prose.plain(f"{key}.alt", each, **numbers) if numbers else f"{title}: {prose.plain('status.no_data', each)}"
        prose.emit({"image/svg+xml": images["svg"].decode(), "image/png": images["png"], "text/plain": alt}, each,
                   figure=name, alt=alt, source=source, title=title, caption=prose.plain(f"{key}.caption", each))
        if reading:
            read(draw, *frames, language=each, source=source)


def read(draw, *frames, language="both", source=""):
    """Displays the chart's computed sentence, or says that there is nothing to read yet."""
    numbers = readings.of(draw.__name__, *frames)
    key = f"charts.{draw.__name__}.reading" if numbers else "status.no_data"
    prose.say(key, language, source=source, **(numbers or {}))


def _images(figure):
    """The figure as bytes that depend on nothing but the figure: no date, no version, no random ids."""
    images = {}
    with matplotlib.style.context(STYLE):
        for extension, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=extension, metadata=metadata)
            images[extension] = buffer.getvalue()
    return images


def write_atomically(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


# --- parts that charts share


def _panels(language, name, titles, *, width=7.4, height=3.7, rows=1, sharey="row", sharex=False):
    """A figure with the chart's title and one pair of axes per panel title."""
    figure = Figure(figsize=(width, height * rows))
    columns = math.ceil(len(titles) / rows)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=sharey, sharex=sharex).flat)
    for ax, title in zip(axes, titles):
        ax.set_title(title)
    figure.suptitle(prose.plain(f"charts.{name}.title", language), x=0.012, ha="left")
    return figure, axes


def _label(key, language):
    return prose.plain(f"label.{key}", language)


def _kernel_label(attention, language):
    return prose.table_of(language).get(f"label.{attention}", attention)


def _tint(colour, share=0.6):
    return tuple(1 - (1 - part) * (1 - share) for part in to_rgb(colour))


def _line(ax, frame, x, value, condition, scale_by=1.0, dots=True):
    """Median line with its 95 % band and faint raw points; returns the label's height (last median) or None."""
    frame = frame.dropna(subset=[value])
    if frame.empty:
        return None
    frame = frame.assign(**{value: frame[value] / scale_by})
    middle = summary.intervals(frame, [x], value)
    colour, limits = COLOUR.get(condition, "#4D4D4D"), ax.get_ylim() if ax.has_data() else None
    if dots:
        sns.scatterplot(frame, x=x, y=value, ax=ax, color=colour, alpha=0.3, s=14, linewidth=0, legend=False)
    ax.plot(middle[x], middle["median"], color=colour, marker=MARKER.get(condition, "o"), markeredgecolor="white")
    _cover(ax, [*middle["median"], *(frame[value] if dots else [])], limits)
    ax.fill_between(middle[x], middle["low"], middle["high"], color=colour, alpha=0.16, linewidth=0)
    return middle["median"].iloc[-1]


def _cover(ax, values, limits):
    """Fits the y limits to points and medians: a wide interval may leave the picture but must not flatten it."""
    ax.y_data = [*getattr(ax, "y_data", []), *values]
    ax.set_ylim(min(ax.y_data), max(ax.y_data))


def _crosses(ax, xs, condition, level=0):
    """Failures: crosses along the top edge, one row per condition."""
    ax.scatter(xs, [0.97 - 0.07 * level] * len(xs), marker="x", s=36, linewidth=1.6, color=COLOUR.get(condition, "#4D4D4D"),
               transform=ax.get_xaxis_transform(), clip_on=False, zorder=5)


def _end_labels(ax, labels):
    """Names the lines at the right edge instead of in a legend: (height in data, text, colour), moved apart."""
    labels = sorted((label for label in labels if label[0] is not None), key=lambda label: label[0])
    if not labels:
        return
    low, high = ax.transScale.transform([(1, limit) for limit in ax.get_ylim()])[:, 1]
    heights = [(ax.transScale.transform((1, label[0]))[1] - low) / (high - low) for label in labels]
    gap = LABEL_GAP_POINTS / (ax.figure.get_figheight() * 72 * ax.get_position().height)
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + gap)
    overflow = max(0.0, heights[-1] - 1)
    for height, (_, text, colour) in zip(heights, labels):
        ax.text(1.03, height - overflow, text, transform=ax.transAxes, color=colour, va="center")


def _octaves(ax, values, language, label):
    """A log2 x axis whose ticks are the measured values, thinned where their labels would touch."""
    values = sorted({int(value) for value in values})
    ax.set_xlabel(_label(label, language))
    if not values:
        return
    ax.set_xscale("log", base=2)
    span = math.log2(values[-1] / values[0]) or 1.0
    ax.set_xlim(values[0] * 2 ** (-0.06 * span), values[-1] * 2 ** (0.06 * span))
    room = 0.5 / (ax.figure.get_figwidth() * 0.8 * ax.get_position().width)
    kept = values[-1:]
    for value in reversed(values[:-1]):
        if math.log2(kept[-1] / value) / span >= room:
            kept.append(value)
    ax.xaxis.set_major_locator(FixedLocator(kept))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _friendly_y(ax, unit, language, *, from_zero=False):
    """A y axis with ticks such as "33 ms"; logarithmic where the values span more than a factor of 6."""
    values = [value for value in getattr(ax, "y_data", []) if np.isfinite(value)]
    if not values:
        return
    low, high = min(values), max(values)
    if low > 0 and high / low > 6 and not from_zero:
        _log_y(ax, low, high, unit, language)
        return
    ax.set_ylim(0, high * 1.12 or 1)
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, high, unit, language)))


def _log_y(ax, low, high, unit, language):
    ax.set_yscale("log")
    ax.set_ylim(low / 1.25, high * 1.4)
    if unit in ("x", "B"):
        ticks = 2.0 ** np.arange(math.floor(math.log2(low)), math.log2(high) + 1)
    else:
        ticks = np.outer(10.0 ** np.arange(math.floor(math.log10(low)), math.log10(high) + 1), [1, 2, 5]).ravel()
    ticks = [tick for tick in ticks if low / 1.25 <= tick <= high * 1.4]
    ax.yaxis.set_major_locator(FixedLocator(ticks[::math.ceil(len(ticks) / 8)]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, value, unit, language)))


def _tick(value, largest, unit, language):
    """A tick in the unit that suits `largest`: "33 ms", "4x"; a rate is bare, its unit stands in the title."""
    if unit == "x":
        return prose.plain("unit.ratio", language, number=f"{value:g}")
    divisor, symbol = prose.scale(largest, unit)
    return f"{value / divisor:g} {symbol}".rstrip() if value else "0"


def _nothing(ax, language):
    ax.text(0.5, 0.5, _label("no_data", language), transform=ax.transAxes, ha="center", color="#777777")
    ax.set(xticks=[], yticks=[])
    ax.grid(False)


# --- S1b: with and without the cache


@chart
def mechanism(language):
    """The drawn explanation: what prefill and each decode step compute, and what they read from the cache."""
    figure, axes = _panels(language, "mechanism", [_label("cache", language), _label("no_cache", language)], height=2.5)
    for ax, condition in zip(axes, ("cache", "no_cache")):
        for step in range(readings.DECODE_STEPS + 1):
            _forward_pass(ax, step, condition, language)
        ax.set(xlim=(-0.2, readings.PROMPT_TOKENS + readings.DECODE_STEPS + 3.6), ylim=(readings.DECODE_STEPS + 1.75, -0.1),
               xticks=[], aspect="equal")
        ax.set_yticks([step + 0.5 for step in range(readings.DECODE_STEPS + 1)], [_label("prefill", language)] + [
            prose.plain("label.decode_step", language, step=step) for step in range(1, readings.DECODE_STEPS + 1)])
        ax.grid(False)
        ax.spines[:].set_visible(False)
    _legend_squares(axes[0], [("read_cache", _tint(COLOUR["cache"], 0.78)), ("computed_now", COLOUR["cache"])], language)
    _legend_squares(axes[1], [("computed_now", COLOUR["no_cache"])], language)
    return figure


def _forward_pass(ax, step, condition, language):
    length = readings.PROMPT_TOKENS + step
    first_computed = length - 1 if condition == "cache" and step else 0
    for position in range(length):
        fill = COLOUR[condition] if position >= first_computed else _tint(COLOUR[condition], 0.78)
        ax.add_patch(Rectangle((position + 0.06, step + 0.06), 0.88, 0.88, facecolor=fill, linewidth=0))
    ax.text(length + 0.2, step + 0.5, prose.plain("label.computed_count", language, count=length - first_computed),
            va="center", color=COLOUR[condition], fontsize=9)


def _legend_squares(ax, entries, language):
    x, y = 0.06, readings.DECODE_STEPS + 1.3
    for key, colour in entries:
        ax.add_patch(Rectangle((x, y), 0.4, 0.4, facecolor=colour, linewidth=0))
        ax.text(x + 0.6, y + 0.22, _label(key, language), va="center", color="#444444", fontsize=9.5)
        x += 6.9


def _arms_by_context(generations, name, value, language):
    kernels = readings.kernels(generations) or [""]
    figure, axes = _panels(language, name, [_kernel_label(kernel, language) for kernel in kernels])
    rows, labels = readings.measured(generations), []
    for ax, kernel in zip(axes, kernels):
        of_kernel, labels = rows[rows["attention"] == kernel], []
        for level, (condition, arm) in enumerate(ARMS):
            height = _line(ax, of_kernel[of_kernel["use_cache"] == arm], "context_length", value, condition)
            labels.append((height, _label(condition, language), COLOUR[condition]))
            failed = generations[(generations["status"] != "ok") & (generations["attention"] == kernel)
                                 & (generations["use_cache"] == arm)]
            _crosses(ax, sorted(set(failed["context_length"])), condition, level)
        _octaves(ax, generations["context_length"], language, "context_length")
    _share_y(axes, value.removesuffix("_s"), "s", language)
    _end_labels(axes[-1], labels)
    return figure


def _share_y(axes, label, unit, language):
    """One y axis for panels side by side, or the note that there is nothing to show."""
    data = [value for ax in axes for value in getattr(ax, "y_data", [])]
    for ax in axes:
        if not data:
            _nothing(ax, language)
        ax.y_data = data
        _friendly_y(ax, unit, language)
    axes[0].set_ylabel(_label(label, language))
    for ax in axes[1:]:
        ax.set_ylabel("")


@chart
def tpot_by_context(generations, language):
    """TPOT of both arms over context length, one panel per attention kernel."""
    return _arms_by_context(generations, "tpot_by_context", "tpot_s", language)


@chart
def ttft_by_context(generations, language):
    """TTFT of both arms over context length: the control."""
    return _arms_by_context(generations, "ttft_by_context", "ttft_s", language)


@chart
def speedups_by_context(pairs, language):
    """Both paired speed-ups over context length, with the line of no gain and the total's ceiling."""
    names = ("tpot_speedup", "total_speedup")
    figure, axes = _panels(language, "speedups_by_context", [_label(name, language) for name in names], sharey=False)
    rows = pairs[~pairs["control"].astype(bool)]
    for ax, value in zip(axes, names):
        labels = []
        for level, kernel in enumerate(readings.kernels(rows)):
            of_kernel = rows[rows["attention"] == kernel]
            height = _line(ax, of_kernel, "context_length", value, kernel)
            labels.append((height, _kernel_label(kernel, language), COLOUR.get(kernel, "#4D4D4D")))
            _crosses(ax, sorted(set(of_kernel[of_kernel[value].isna()]["context_length"])), kernel, level)
        _speedup_axes(ax, rows, value, labels, language)
    axes[0].set_ylabel(_label("speedup_axis", language))
    axes[1].set_ylabel("")
    return figure


def _speedup_axes(ax, rows, value, labels, language):
    if not hasattr(ax, "y_data"):
        _nothing(ax, language)
        return
    ax.y_data.append(1.0)
    ceiling = rows.groupby("context_length")["output_tokens"].max()
    if value == "total_speedup":
        ax.y_data += list(ceiling)
        ax.plot(ceiling.index, ceiling, color=COLOUR["reference"], linestyle=":", drawstyle="steps-mid", linewidth=1.6)
        labels = [*labels, (ceiling.iloc[-1], _label("ceiling", language), "#6A6A6A")]
    ax.axhline(1, color=COLOUR["reference"], linewidth=1)
    _octaves(ax, rows["context_length"], language, "context_length")
    _friendly_y(ax, "x", language)
    _end_labels(ax, [*labels, (1.0, _label("no_gain", language), "#6A6A6A")])


@chart
def step_curve(steps, language):
    """Time of every decode step of one long generation, both arms, one panel per attention kernel."""
    kernels = readings.kernels(steps) or [""]
    figure, axes = _panels(language, "step_curve", [_kernel_label(kernel, language) for kernel in kernels])
    labels = []
    for ax, kernel in zip(axes, kernels):
        labels = []
        for condition, arm in ARMS:
            rows = steps[(steps["attention"] == kernel) & (steps["use_cache"] == arm)]
            labels.append((_curve(ax, rows, condition), _label(condition, language), COLOUR[condition]))
        ax.set_xlabel(_label("position", language))
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _share_y(axes, "step_time", "s", language)
    _end_labels(axes[-1], labels)
    return figure


def _curve(ax, rows, condition):
    if rows.empty:
        return None
    for _, run in rows.groupby(["repetition", "pair"]):
        ax.plot(run["position"], run["step_s"], color=COLOUR[condition], alpha=0.25, linewidth=0.7)
    middle = rows.groupby("position")["step_s"].median()
    ax.plot(middle.index, middle, color=COLOUR[condition])
    _cover(ax, rows["step_s"], None)
    return middle.iloc[-10:].median()


@chart
def phase_share(generations, language):
    """Share of the total time in prefill and in decode, by arm, length and attention kernel."""
    rows = readings.measured(generations).dropna(subset=["ttft_s", "e2e_s"])
    kernels = readings.kernels(rows) or [""]
    titles = [f"{_label(arm, language)} · {_kernel_label(kernel, language)}" for kernel in kernels for arm in ("cache", "no_cache")]
    lengths = max(1, rows["context_length"].nunique())
    figure, axes = _panels(language, "phase_share", titles, rows=len(kernels), height=0.8 + 0.32 * lengths, sharex=True)
    for ax, (kernel, arm) in zip(axes, [(kernel, arm) for kernel in kernels for arm in ("cache", "no_cache")]):
        _stacked(ax, rows[(rows["attention"] == kernel) & (rows["use_cache"] == (arm == "cache"))], arm, language)
    for ax in axes[-2:]:
        ax.set_xlabel(_label("share", language))
    for ax in axes[::2]:
        ax.set_ylabel(_label("context_and_output", language))
    return figure


def _stacked(ax, rows, condition, language):
    if rows.empty:
        _nothing(ax, language)
        return
    share = readings.shares(rows)
    heights = range(len(share))
    ax.barh(heights, share, color=_tint(COLOUR[condition], 0.65), height=0.72)
    ax.barh(heights, 1 - share, left=share, color=COLOUR[condition], height=0.72)
    for height, part in zip(heights, share):
        inside = part > 0.16
        ax.text(part + (-0.015 if inside else 0.015), height, prose.friendly(part, "%", language), va="center", fontsize=8.5,
                ha="right" if inside else "left", color="#222222" if inside else "white")
    ax.text(0.0, 1.0, _label("prefill", language), transform=ax.transAxes, fontsize=9, color="#555555", va="bottom")
    ax.text(1.0, 1.0, _label("decode", language), transform=ax.transAxes, fontsize=9, color=COLOUR[condition], va="bottom", ha="right")
    ax.set_title(ax.get_title(loc="left"), pad=19)
    ax.set_yticks(heights, [f"{context:,} + {output:,}" for _, context, output in share.index])
    ax.set(xlim=(0, 1), ylim=(len(share) - 0.5, -0.5))
    ax.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f} %"))
    ax.grid(False)


# --- S1: serving


@chart
def serving_by_concurrency(requests, points, language):
    """TTFT, TPOT and throughput over the number of requests in flight."""
    names = ("ttft", "tpot", "throughput")
    figure, axes = _panels(language, "serving_by_concurrency", [_label(name, language) for name in names],
                           width=8.6, height=3.3, sharey=False)
    sent, runs = readings.swept(readings.measured(requests)), readings.swept(points)
    for ax, value in zip(axes, ("ttft_s", "tpot_s")):
        _served(ax, sent, value, "s", language)
    rate = "throughput_tokens_per_s"
    _served(axes[2], readings.measured(runs), rate, "rate", language)
    _crosses(axes[2], sorted(set(runs[runs[rate].isna() | runs["void"].notna()]["concurrency"].dropna())), "vllm")
    return figure


def _served(ax, rows, value, unit, language):
    """Raw points are requests; the line and its interval stand on one median per run, the unit that repeats."""
    rows = rows.dropna(subset=[value, "concurrency"])
    if rows.empty:
        _nothing(ax, language)
        return
    sns.scatterplot(rows, x="concurrency", y=value, ax=ax, color=COLOUR["vllm"], alpha=0.25, s=14, linewidth=0, legend=False)
    _cover(ax, rows[value], None)
    runs = rows.groupby(["concurrency", "repetition"], as_index=False)[value].median()
    _line(ax, runs, "concurrency", value, "vllm", dots=False)
    _octaves(ax, rows["concurrency"], language, "concurrency")
    _friendly_y(ax, unit, language, from_zero=True)
    ax.set_ylabel("")


@chart
def kv_usage_by_concurrency(points, language):
    """Peak KV cache usage that the server reported, over the number of requests in flight."""
    figure, (ax,) = _panels(language, "kv_usage_by_concurrency", [""], width=5.6, height=3.3)
    _served(ax, readings.swept(readings.measured(points)), "kv_cache_usage_max", "%", language)
    ax.set_ylabel(_label("kv_usage", language))
    return figure


@chart
def growth_side_by_side(generations, requests, language):
    """Growth of TTFT and TPOT over context length, each stack relative to its own shortest length; ratios only."""
    figure, axes = _panels(language, "growth_side_by_side", [_label("ttft", language), _label("tpot", language)], sharey=False)
    stacks = readings.stacks(generations, requests) if len(readings.measured(generations)) else ()
    shared = set.intersection(*(set(rows["context_length"]) for _, rows in stacks)) if stacks else set()
    for ax, value in zip(axes, ("ttft_s", "tpot_s")):
        labels = []
        for name, rows in stacks if shared else ():
            rows = rows[rows["context_length"].isin(shared)]
            base = readings.medians(rows, "context_length", value).iloc[0]
            labels.append((_line(ax, rows, "context_length", value, name, scale_by=base),
                           _label(name, language).replace("，", "\n").replace(", ", "\n"), COLOUR[name]))
        if not shared:
            _nothing(ax, language)
        _octaves(ax, shared, language, "context_length")
        _friendly_y(ax, "x", language)
        if ax is axes[1]:
            _end_labels(ax, labels)
        ax.set_ylabel("")
    axes[0].set_ylabel(_label("growth", language))
    return figure


@chart
def kv_bytes_by_context(generations, kv_bytes_per_token, language):
    """Bytes of the actual cache tensors as points on the formula's line."""
    figure, (ax,) = _panels(language, "kv_bytes_by_context", [""], width=5.8, height=3.5)
    rows = readings.cache_sizes(generations)
    if rows.empty:
        _nothing(ax, language)
        return figure
    tokens = np.array(sorted(set(rows["tokens"])))
    ax.plot(tokens, tokens * kv_bytes_per_token, color=COLOUR["reference"], linestyle="--", linewidth=1.4)
    sns.scatterplot(rows, x="tokens", y="kv_cache_bytes", ax=ax, color=COLOUR["cache"], s=42, linewidth=0, legend=False)
    ax.y_data = [*rows["kv_cache_bytes"], *(tokens * kv_bytes_per_token)]
    _octaves(ax, tokens, language, "tokens_in_cache")
    _friendly_y(ax, "B", language)
    top = rows.loc[rows["tokens"].idxmax()]
    ax.annotate(_label("measured_points", language), (top["tokens"], top["kv_cache_bytes"]), (-8, 4), color=COLOUR["cache"],
                textcoords="offset points", ha="right")
    middle = tokens[len(tokens) // 2]
    ax.annotate(_label("formula", language), (middle, middle * kv_bytes_per_token), (8, -14), color="#6A6A6A",
                textcoords="offset points")
    ax.set_ylabel(_label("kv_bytes", language))
    return figure
