"""The article's charts: one function per chart, tidy frames and a language in, a matplotlib figure out."""

from pathlib import Path

from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from kvlab import paths
from kvlab.article import drawing, prose, readings
from kvlab.article.drawing import COLOUR, chart, kernel_label, label, tint

ARMS = (("no_cache", False), ("cache", True))
PALE = 0.78  # share of white in what is only read back


def show(name, draw, *frames, language="both", figures_dir, source=""):
    """Draws the chart in each language, saves <figures_dir>/<name>.<language>.svg and .png, displays it.

    `source` says where the numbers came from. The chart's computed sentence follows it.
    """
    key, numbers = f"charts.{draw.__name__}", readings.of(draw, *frames)
    for each in prose.languages(language):
        images = drawing.images(draw(*frames, each))
        for extension, data in images.items():
            paths.replace(Path(figures_dir) / f"{name}.{each}.{extension}", data)
        alt = prose.plain(f"{key}.alt" if numbers else "status.no_data", each, **(numbers or {}))
        data = {"image/svg+xml": images["svg"].decode(), "image/png": images["png"], "text/plain": alt}
        prose.emit(data, each, figure=name, alt=alt, source=source, caption=prose.plain(f"{key}.caption", each))
        read(draw, *frames, language=each, source=source)


def read(draw, *frames, language="both", source=""):
    """Displays the chart's computed sentence, or says that there is nothing to read yet."""
    numbers = readings.of(draw, *frames)
    key = f"charts.{draw.__name__}.reading" if numbers else "status.no_data"
    prose.say(key, language, source=source, **(numbers or {}))


# --- S1b: with and without the cache


@chart
def mechanism(language):
    """The drawn explanation: what prefill and each decode step compute, and what they read from the cache."""
    arms = ("cache", "no_cache")
    figure, axes = drawing.panels(language, "mechanism", [label(arm, language) for arm in arms], height=2.5)
    rows = range(readings.DECODE_STEPS + 1)
    names = [label("prefill", language)]
    names += [prose.plain("label.decode_step", language, step=step) for step in rows[1:]]
    for ax, arm in zip(axes, arms, strict=True):
        for step in rows:
            _forward_pass(ax, step, arm, language)
        ax.set(xlim=(-0.2, readings.PROMPT_TOKENS + rows[-1] + 3.6), ylim=(rows[-1] + 1.75, -0.1))
        ax.set(xticks=[], aspect="equal")
        ax.set_yticks([step + 0.5 for step in rows], names)
        ax.grid(False)
        ax.spines[:].set_visible(False)
    read_back, computed = ("read_cache", tint(COLOUR["cache"], PALE)), ("computed_now", COLOUR["cache"])
    _legend_squares(axes[0], [read_back, computed], language)
    _legend_squares(axes[1], [("computed_now", COLOUR["no_cache"])], language)
    return figure


def _forward_pass(ax, step, arm, language):
    """One row of squares: the positions of one forward pass, computed or read back."""
    length = readings.PROMPT_TOKENS + step
    first_computed = length - 1 if arm == "cache" and step else 0
    for position in range(length):
        fill = COLOUR[arm] if position >= first_computed else tint(COLOUR[arm], PALE)
        ax.add_patch(Rectangle((position + 0.06, step + 0.06), 0.88, 0.88, facecolor=fill, linewidth=0))
    text = prose.plain("label.computed_count", language, count=length - first_computed)
    ax.text(length + 0.2, step + 0.5, text, va="center", color=COLOUR[arm], fontsize=9)


def _legend_squares(ax, entries, language):
    x, y = 0.06, readings.DECODE_STEPS + 1.3
    for key, colour in entries:
        ax.add_patch(Rectangle((x, y), 0.4, 0.4, facecolor=colour, linewidth=0))
        ax.text(x + 0.6, y + 0.22, label(key, language), va="center", color="#444444", fontsize=9.5)
        x += 6.9


def kernel_panels(frame, chart_name, language, **shape):
    """A column per attention kernel, named above its first panel; `shape` is that of `drawing.panels`."""
    kernels = readings.kernels(frame) or [""]
    titles = [kernel_label(kernel, language) for kernel in kernels]
    titles += [""] * len(kernels) * (shape.get("rows", 1) - 1)
    figure, axes = drawing.panels(language, chart_name, titles, **shape)
    return figure, axes, kernels


def arm_panels(frame, chart_name, language, **shape):
    """A row per attention kernel, a column per arm; returns the figure and (axes, kernel, condition, arm) of each."""
    cells = [(kernel, *arm) for kernel in readings.kernels(frame) or [""] for arm in ARMS[::-1]]
    titles = [f"{label(condition, language)} · {kernel_label(kernel, language)}" for kernel, condition, _ in cells]
    figure, axes = drawing.panels(language, chart_name, titles, rows=len(cells) // len(ARMS), **shape)
    return figure, [(ax, *cell) for ax, cell in zip(axes, cells, strict=True)]


def _arms_by_context(generations, chart_name, value, language):
    figure, axes, kernels = kernel_panels(generations, chart_name, language)
    x = "context_length"
    for ax, kernel in zip(axes, kernels, strict=True):
        ends = []
        for level, (condition, arm) in enumerate(ARMS):
            rows = generations[(generations["attention"] == kernel) & (generations["use_cache"] == arm)]
            good = readings.measured(rows)
            ends.append(drawing.series(ax, good, x, value, condition, label(condition, language)))
            drawing.crosses(ax, rows[rows["status"] != "ok"][x], condition, level)
        drawing.octaves(ax, generations[x], language, x)
    drawing.friendly_y(axes, "s", language, label(value.removesuffix("_s"), language))
    drawing.end_labels(axes[-1], ends)
    return figure


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
    titles = [label(name, language) for name in names]
    figure, axes = drawing.panels(language, "speedups_by_context", titles, sharey=False)
    rows = readings.measured(pairs)
    for ax, value in zip(axes, names, strict=True):
        ends = []
        for level, kernel in enumerate(readings.kernels(rows)):
            of_kernel = rows[rows["attention"] == kernel]
            named = kernel_label(kernel, language)
            ends.append(drawing.series(ax, of_kernel, "context_length", value, kernel, named))
            drawing.crosses(ax, of_kernel[of_kernel[value].isna()]["context_length"], kernel, level)
        if len(rows):
            ends += _references(ax, rows, value, language)
        drawing.octaves(ax, rows["context_length"], language, "context_length")
        drawing.friendly_y([ax], "x", language, label("speedup_axis", language) if ax is axes[0] else "")
        drawing.end_labels(ax, ends)
    return figure


def _references(ax, rows, value, language):
    """The line of no gain, and for the total speed-up its ceiling; returns their end labels."""
    grey = COLOUR["reference"]
    ax.axhline(1, color=grey, linewidth=1)
    ends = [(1.0, label("no_gain", language), grey)]
    if value == "total_speedup":
        ceiling = rows.groupby("context_length")["output_tokens"].max()
        ax.plot(ceiling.index, ceiling, color=grey, linestyle=":", drawstyle="steps-mid", linewidth=1.6)
        ends.append((ceiling.iloc[-1], label("ceiling", language), grey))
    return ends


@chart
def step_curve(steps, language):
    """Time of every decode step of one long generation, both arms, one panel per attention kernel."""
    figure, axes, kernels = kernel_panels(steps, "step_curve", language)
    for ax, kernel in zip(axes, kernels, strict=True):
        ends = []
        for condition, arm in ARMS:
            rows = steps[(steps["attention"] == kernel) & (steps["use_cache"] == arm)]
            height = _curve(ax, rows, condition)
            ends.append((height, label(condition, language), COLOUR[condition]))
        ax.set_xlabel(label("position", language))
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    drawing.friendly_y(axes, "s", language, label("step_time", language))
    drawing.end_labels(axes[-1], ends)
    return figure


def _curve(ax, rows, condition):
    """Thin lines for single runs, a bold one for their median; returns the height of its right end."""
    if rows.empty:
        return None
    for _, run in rows.groupby(["repetition", "pair"]):
        ax.plot(run["position"], run["step_s"], color=COLOUR[condition], alpha=0.25, linewidth=0.7)
    middle = rows.groupby("position")["step_s"].median()
    ax.plot(middle.index, middle, color=COLOUR[condition])
    return middle.iloc[-10:].median()


@chart
def phase_share(generations, language):
    """Share of the total time in prefill and in decode, by arm, length and attention kernel."""
    rows = readings.measured(generations).dropna(subset=["ttft_s", "e2e_s"])
    height = 0.8 + 0.32 * max(3, rows["context_length"].nunique())
    figure, cells = arm_panels(rows, "phase_share", language, height=height, sharex=True)
    for ax, kernel, condition, arm in cells:
        of_cell = rows[(rows["attention"] == kernel) & (rows["use_cache"] == arm)]
        _stacked(ax, of_cell, condition, language)
    for ax in figure.axes[-2:]:
        ax.set_xlabel(label("share", language))
    for ax in figure.axes[::2]:
        ax.set_ylabel(label("context_and_output", language))
    return figure


def _stacked(ax, rows, arm, language):
    """One bar per length, prefill pale and decode in full colour."""
    if rows.empty:
        drawing.nothing(ax, language)
        return
    share = readings.shares(rows)
    heights = range(len(share))
    ax.barh(heights, share, color=tint(COLOUR[arm], 0.65), height=0.72)
    ax.barh(heights, 1 - share, left=share, color=COLOUR[arm], height=0.72)
    for height, part in zip(heights, share, strict=True):
        text = prose.friendly(part, "%", language)
        if part > 0.16:
            ax.text(part - 0.015, height, text, va="center", ha="right", fontsize=8.5, color="#222222")
        else:
            ax.text(part + 0.015, height, text, va="center", fontsize=8.5, color="white")
    ax.set_title(ax.get_title(loc="left"), pad=20)  # room for the names of the phases
    named = {"transform": ax.transAxes, "fontsize": 9, "va": "bottom"}
    ax.text(0, 1.01, label("prefill", language), color="#555555", **named)
    ax.text(1, 1.01, label("decode", language), color=COLOUR[arm], ha="right", **named)
    ax.set(xlim=(0, 1), ylim=(len(share) - 0.5, -0.5))
    ax.set_yticks(heights, [f"{context:,} + {output:,}" for _, context, output in share.index])
    drawing.fixed_ticks(ax.xaxis, [0, 0.25, 0.5, 0.75, 1], lambda value: f"{value * 100:.0f} %")
    ax.grid(False)


@chart
def kv_bytes_by_context(generations, formula, language):
    """Bytes of the actual cache tensors as points on the line of `formula`, which maps (tokens, batch=) to bytes."""
    figure, (ax,) = drawing.panels(language, "kv_bytes_by_context", [""], height=3.1)
    rows = readings.cache_sizes(generations, formula).sort_values("tokens")
    tokens = list(dict.fromkeys(rows["tokens"]))
    if tokens:
        ax.plot(rows["tokens"], rows["formula"], color=COLOUR["reference"], linestyle="--", linewidth=1.4)
        ax.scatter(rows["tokens"], rows["kv_cache_bytes"], color=COLOUR["cache"], s=42, zorder=3)
        top, middle = rows.iloc[-1], rows[rows["tokens"] == tokens[len(tokens) // 2]].iloc[0]
        at_dot, on_line = (top["tokens"], top["kv_cache_bytes"]), (middle["tokens"], middle["formula"])
        for key, place, shift, align, colour in (
            ("measured_points", at_dot, (-9, 3), "right", COLOUR["cache"]),
            ("formula", on_line, (10, -14), "left", COLOUR["reference"]),
        ):
            text = label(key, language)
            ax.annotate(text, place, shift, color=colour, ha=align, textcoords="offset points")
    drawing.octaves(ax, tokens, language, "tokens_in_cache")
    drawing.friendly_y([ax], "B", language, label("kv_bytes", language))
    return figure


# --- S1: serving


@chart
def serving_by_concurrency(requests, points, language):
    """TTFT, TPOT and throughput over the number of requests in flight."""
    names = [label(name, language) for name in ("ttft", "tpot", "throughput")]
    figure, axes = drawing.panels(language, "serving_by_concurrency", names, height=3.1, sharey=False)
    sent, runs = readings.swept(readings.measured(requests)), readings.swept(points)
    _served(axes[0], sent, "ttft_s", "s", language)
    _served(axes[1], sent, "tpot_s", "s", language)
    _served(axes[2], readings.measured(runs), "throughput_tokens_per_s", "rate", language)
    invalid = runs[runs["throughput_tokens_per_s"].isna() | runs["void"].notna()]
    drawing.crosses(axes[2], invalid["concurrency"].dropna(), "vllm")
    return figure


def _served(ax, rows, value, unit, language, y_label=""):
    """Dots are rows; line and interval stand on one median per run of a point, the unit that repeats."""
    rows = rows.dropna(subset=[value, "concurrency"])
    drawing.dots(ax, rows, "concurrency", value, "vllm")
    runs = rows.groupby(["concurrency", "repetition"], as_index=False)[value].median()
    drawing.line(ax, runs, "concurrency", value, "vllm")
    drawing.octaves(ax, rows["concurrency"], language, "concurrency")
    drawing.friendly_y([ax], unit, language, y_label, from_zero=True)


@chart
def kv_usage_by_concurrency(points, language):
    """Peak KV cache usage that the server reported, over the number of requests in flight."""
    figure, (ax,) = drawing.panels(language, "kv_usage_by_concurrency", [""], height=3.1)
    rows = readings.swept(readings.measured(points))
    _served(ax, rows, "kv_cache_usage_max", "%", language, label("kv_usage", language))
    return figure


# --- both stacks, each against itself


@chart
def growth_side_by_side(generations, requests, language):
    """Growth of TTFT and TPOT over context length, each stack against its own shortest length."""
    titles = [label("ttft", language), label("tpot", language)]
    figure, axes = drawing.panels(language, "growth_side_by_side", titles, sharey=False)
    stacks, shared = readings.stacks(generations, requests), readings.shared_lengths(generations, requests)
    for ax, value in zip(axes, ("ttft_s", "tpot_s"), strict=True):
        ends = []
        for name, rows in stacks:
            relative = readings.growth(rows[rows["context_length"].isin(shared)], value)
            short = label(f"{name}_short", language)
            ends.append(drawing.series(ax, relative, "context_length", value, name, short))
        drawing.octaves(ax, shared, language, "context_length")
        drawing.friendly_y([ax], "x", language, label("growth", language) if ax is axes[0] else "")
    drawing.end_labels(axes[1], ends)
    return figure
