"""Charts, tables and sentences of S1b's law, of its steps and of its speed-ups over the output length."""

import math

import pandas as pd

from kvlab.analyse import findings, law, summary
from kvlab.article import drawing, prose, readings
from kvlab.article.charts import ARMS, kernel_panels
from kvlab.article.drawing import COLOUR, chart, label, read_by


def what_ran(records, dtype, language, source):
    """In which form the weights ran; expanded ones are called dequantised. Nothing where the records do not tell."""
    told = [r for r in records if r.get("file_type") and r.get("parameter_bytes")]
    if told:
        key = "law.dequantised" if told[-1]["dequantised"] else "law.as_stored"
        facts = {"file_type": told[-1]["file_type"], "size": told[-1]["parameter_bytes"], "dtype": dtype}
        prose.say(key, language, source=source, **facts)


# --- the law


def law_reading(residuals):
    rows = summary.headline(residuals)
    tested = rows[rows["left_out"].astype(bool)]
    errors = tested["residual"].abs().groupby(tested["use_cache"].astype(bool)).median()
    return {
        "kernel": readings.kernel(residuals),
        "fitted": len(rows) // 2 - tested["context_length"].nunique(),
        "tested": tested["context_length"].nunique(),
        "cache": errors[True],
        "no_cache": errors[False],
    }


@read_by(law_reading)
@chart
def law_by_context(residuals, language):
    """The law of every second length over the measured steps, and below it how far it misses each length."""
    figure, axes, kernels = kernel_panels(residuals, "law_by_context", language, rows=2, height=2.5)
    upper, lower = axes[: len(kernels)], axes[len(kernels) :]
    for kernel, above, below in zip(kernels, upper, lower, strict=True):
        ends = []
        for condition, arm in ARMS:
            rows = residuals[(residuals["attention"] == kernel) & (residuals["use_cache"] == arm)]
            above.plot(rows["tokens"], rows["fitted_s"], color=COLOUR[condition], linestyle="--", linewidth=1.4)
            _fitted_and_left_out(above, rows, "step_s", condition)
            _fitted_and_left_out(below, rows, "residual", condition)
            ends.append((rows["step_s"].max() if len(rows) else None, label(condition, language), COLOUR[condition]))
        below.axhline(0, color=COLOUR["reference"], linewidth=1)
        for ax in (above, below):
            drawing.octaves(ax, residuals["context_length"], language, "context_length")
        above.set_xlabel("")
    drawing.friendly_y(upper, "s", language, label("step_time", language))
    drawing.end_labels(upper[-1], ends)
    _percent_axis(lower, residuals["residual"].abs().max(), label("residual", language))
    return figure


def _fitted_and_left_out(ax, rows, value, condition):
    """Filled marks for the lengths of the fit, hollow ones for those that only test it."""
    for hollow, part in rows.groupby(rows["left_out"].astype(bool)):
        style = {"facecolor": "white"} if hollow else {"color": COLOUR[condition]}
        ax.scatter(part["tokens"], part[value], edgecolor=COLOUR[condition], s=30, linewidth=1.4, zorder=3, **style)


def _percent_axis(axes, largest, name):
    reach = 1.25 * (largest if largest and math.isfinite(largest) else 0.1)
    for ax in axes:
        ax.set_ylim(-reach, reach)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    axes[0].set_ylabel(name)


def terms(times, architecture, dtype, language, source):
    """What each term of the law costs at the longest length, beside the shares that arithmetic gives it."""
    rows = [
        {
            **name,
            "lengths": count,
            "constant": found.constant_s,
            "linear": found.linear_s,
            "quadratic": found.quadratic_s,
            "measured": shares_text(shares(found, times)),
            "arithmetic": shares_text(arithmetic_of(architecture, name, dtype, times)),
        }
        for name, found, count in law.laws(times)
    ]
    prose.table(rows, "law_terms", language, source=source)


def shares(found, times):
    """Shares of the three terms at the longest length measured."""
    parts = found.parts_s(times["tokens"].max())
    return parts / parts.sum()


def arithmetic_of(architecture, name, dtype, times):
    if architecture is None:
        return None
    return law.arithmetic(architecture, name["use_cache"], dtype, name["attention"], int(times["tokens"].max()))


def shares_text(parts):
    return "" if parts is None else " + ".join(prose.friendly(float(part), "%") for part in parts)


def law_in_words(times, language, source):
    """Which terms carry a step's time at the longest length, in both arms, for the fair kernel."""
    kernel = summary.fair_kernel(times)
    found = {name["use_cache"]: shares(a, times) for name, a, _ in law.laws(times) if name["attention"] == kernel}
    if set(found) != {True, False}:
        prose.say("status.no_data", language)
        return
    numbers = {f"{term}_{arm}": found[cached][i] for arm, cached in ARMS for i, term in enumerate(law.TERMS)}
    longest = times["context_length"].max()
    prose.say("law.in_words", language, source=source, kernel=readings.kernel(times), longest=longest, **numbers)


def residuals(found, slopes, language, source):
    """How far the law misses each length, and the local exponent from there to the next length, both arms."""
    exponents = {(s["attention"], s["use_cache"], s["shorter"]): s["slope"] for s in slopes.to_dict("records")}
    rows = []
    for (attention, length), pair in found.groupby(["attention", "context_length"]):
        role = "tested" if pair["left_out"].iloc[0] else "fitted"
        row = {"attention": attention, "length": length, "role": role}
        for condition, arm in ARMS:
            errors = pair.loc[pair["use_cache"] == arm, "residual"]
            row |= {condition: errors.iloc[0] if len(errors) else None}
            row[f"slope_{condition}"] = exponents.get((attention, arm, length))
        rows.append(row)
    prose.table(rows, "law_residuals", language, source=source)


# --- steps, with the prefill beside them


def steps_reading(steps):
    ratios = law.recomputed(steps)
    rows = summary.headline(ratios)
    by_length = {n: summary.interval(group["step_over_prefill"]) for n, group in rows.groupby("context_length")}
    longest = max(by_length) if by_length else ratios["context_length"].iloc[0]
    medians = [estimate.median for estimate in by_length.values()]
    return {
        "kernel": readings.kernel(ratios),
        "lowest": min(medians),
        "highest": max(medians),
        "longest": longest,
        "ratio": by_length[longest],
    }


@read_by(steps_reading)
@chart
def steps_over_lengths(steps, language):
    """Every decode step against its position with the prefill beside it; below, a step without cache over a prefill."""
    figure, axes, kernels = kernel_panels(steps, "steps_over_lengths", language, rows=2, height=2.6)
    upper, lower, ratios = axes[: len(kernels)], axes[len(kernels) :], law.recomputed(steps)
    for kernel, above, below in zip(kernels, upper, lower, strict=True):
        ends = _steps_and_prefills(above, steps[steps["attention"] == kernel], language)
        of_kernel = ratios[ratios["attention"] == kernel]
        drawing.series(below, of_kernel, "context_length", "step_over_prefill", "no_cache", "")
        below.axhline(1, color=COLOUR["reference"], linewidth=1)
        for ax in (above, below):
            drawing.octaves(ax, steps["context_length"], language, "context_length")
        above.set_xlabel(label("position", language))
    drawing.friendly_y(upper, "s", language, label("step_time", language))
    drawing.friendly_y(lower, "x", language, label("step_over_prefill", language))
    drawing.end_labels(upper[-1], ends)
    return figure


def _steps_and_prefills(ax, rows, language):
    """Medians over the repetitions; a short line for each generation, a diamond for the prefill of its prompt."""
    ends = []
    for condition, arm in ARMS:
        of_arm = rows[rows["use_cache"] == arm]
        middle = of_arm.groupby(["context_length", "position"])["step_s"].median().reset_index()
        for _, generation in middle.groupby("context_length"):
            ax.plot(generation["position"], generation["step_s"], color=COLOUR[condition], marker=".", markersize=4)
        ends.append((middle["step_s"].iloc[-1] if len(middle) else None, label(condition, language), COLOUR[condition]))
    prefill = summary.arm(rows, False).groupby("context_length")["ttft_s"].median()
    ax.scatter(prefill.index, prefill, marker="D", s=34, facecolor="none", edgecolor="#222222", linewidth=1.1, zorder=4)
    if len(prefill):
        place = (prefill.index[0], prefill.iloc[0])
        ax.annotate(label("prefill", language), place, (2, 12), textcoords="offset points", color="#222222")
    return ends


# --- speed-ups over the output length


def outputs_reading(pairs):
    rows = readings.measured(pairs).dropna(subset=["tpot_speedup", "total_speedup"])
    by_output = rows.groupby("output_tokens")
    fewest, most = min(by_output.groups), max(by_output.groups)
    ends = {"fewest": fewest, "most": most} if fewest < most else {}
    values = {
        f"{name}_{end}": summary.interval(by_output.get_group(tokens)[f"{name}_speedup"])
        for end, tokens in ends.items()
        for name in ("tpot", "total")
    }
    return {**ends, **values, "context": rows["context_length"].iloc[0]} if ends else None


@read_by(lambda pairs: outputs_reading(pairs) if len(pairs) else None)
@chart
def speedups_by_output(pairs, language):
    """Both paired speed-ups over the number of output tokens, under the ceiling that the total cannot pass."""
    figure, (ax,) = drawing.panels(language, "speedups_by_output", [""], height=3.3)
    rows, ends = readings.measured(pairs), []
    for name in ("tpot_speedup", "total_speedup"):
        ends.append(drawing.series(ax, rows, "output_tokens", name, name, label(name, language)))
    tokens = sorted(rows["output_tokens"].unique())
    if tokens:
        ax.plot(tokens, tokens, color=COLOUR["reference"], linestyle=":", linewidth=1.6)
        ends.append((tokens[-1], label("ceiling", language), COLOUR["reference"]))
        ax.axhline(1, color=COLOUR["reference"], linewidth=1)
    drawing.octaves(ax, tokens, language, "output_tokens")
    drawing.friendly_y([ax], "x", language, label("speedup_axis", language))
    drawing.end_labels(ax, ends)
    return figure


def agreement(pairs, language, source):
    """Where the arms' tokens first differ, and by how much the choice there led: rounding is named, not hidden."""
    rows = readings.measured(pairs)
    different = rows[rows["first_difference"].notna()]
    same = int((rows["first_difference"].isna() & rows["refusal"].isna()).sum())
    prose.say("law.same_tokens", language, source=source, same=same, pairs=len(rows))
    for row in different.sort_values("margin").to_dict("records")[:3]:
        names = ("context_length", "first_difference", "margin")
        prose.say("law.first_difference", language, source=source, **{name: row[name] for name in names})


def sureness(pairs, within, language, source):
    """The speed-up that is least sure, and whether points were measured again until they were surer."""
    rows = findings.proven(pairs)
    by = ["attention", "context_length"]
    speedups = [summary.intervals(rows, by, name) for name in ("tpot_speedup", "total_speedup")]
    found = pd.concat(speedups, ignore_index=True)
    found = found.assign(reach=findings.reach(found)).dropna()
    if len(found):
        widest = found.loc[found["reach"].idxmax(), [*by, "n", "reach"]].to_dict()
        widest["kernel"] = readings.kernel_name(widest.pop("attention"))
        prose.say("law.least_sure", language, source=source, **widest)
    if within:
        prose.say("law.measured_again", language, source=source, share=within)


def cache_kinds(generations, language, source):
    """TPOT with each kind of cache at each length; nothing where one kind was measured."""
    rows = readings.measured(summary.arm(generations, True))
    kinds = sorted(rows["cache"].dropna().unique())
    if len(kinds) < 2:
        return
    cells = rows.groupby(["context_length", "cache"])["tpot_s"].apply(summary.interval).unstack()
    table = [{"length": length, **cells.loc[length].to_dict()} for length in cells.index]
    headings = {"length": "label.context_length:count"} | {kind: f"law.cache_{kind}:s" for kind in kinds}
    prose.table(table, headings, language, source=source)
