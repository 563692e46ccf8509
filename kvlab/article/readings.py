"""Numbers that a chart's alternative text and computed sentence quote, from the chart's own frames."""

from kvlab.analyse import summary
from kvlab.analyse.summary import arm, fair_kernel, headline, measured, swept

PROMPT_TOKENS, DECODE_STEPS = 6, 4  # of the drawn explanation


def of(chart, *frames):
    """{placeholder: number} for a chart's sentences; None where the frames hold no usable row.

    `chart` is its name, or the chart, which may carry a `reading` of its own, or such a reading itself.
    """
    reading = getattr(chart, "reading", None) or globals().get(getattr(chart, "__name__", chart)) or chart
    try:
        return reading(*frames)
    except (IndexError, KeyError):  # a group that the sentence needs was not measured
        return None


def kernels(frame):
    return sorted(frame["attention"].dropna().unique())


def kernel(frame):
    """The name of the fair attention kernel for a sentence."""
    return kernel_name(fair_kernel(frame))


def kernel_name(attention):
    return "SDPA" if attention == "sdpa" else attention


def medians(frame, by, value):
    return frame.dropna(subset=[value]).groupby(by)[value].median()


def spans(names, **series):
    """First and last key of the first series, by these two names; <series>_low, _high and _growth between them.

    IndexError below two keys.
    """
    first, last, _ = ends(next(iter(series.values())))
    found = dict(zip(names, (first, last)))
    for name, values in series.items():
        found |= {f"{name}_low": values[first], f"{name}_high": values[last]}
        found[f"{name}_growth"] = values[last] / values[first]
    return found


def ends(series):
    """(first key, last key, last value over first value); IndexError below two keys."""
    if len(series) < 2:
        raise IndexError("growth needs two values")
    return series.index[0], series.index[-1], series.iloc[-1] / series.iloc[0]


def mechanism():
    lengths = [PROMPT_TOKENS + step for step in range(1, DECODE_STEPS + 1)]
    return {
        "prompt": PROMPT_TOKENS,
        "steps": DECODE_STEPS,
        "last": lengths[-1],
        "with_cache": DECODE_STEPS,
        "without_cache": sum(lengths),
    }


def by_arm(generations, value):
    rows = headline(measured(generations))
    cache, no_cache = (medians(arm(rows, use_cache), "context_length", value) for use_cache in (True, False))
    shared = cache.index.intersection(no_cache.index)
    return kernel(rows), cache[shared], no_cache[shared]


def tpot_by_context(generations):
    kernel, cache, no_cache = by_arm(generations, "tpot_s")
    return {"kernel": kernel} | spans(("shortest", "longest"), cache=cache, no_cache=no_cache)


def ttft_by_context(generations):
    """Lowest and highest of the medians of paired ratios, which the control's table has length by length."""
    kernel, cache, _ = by_arm(generations, "ttft_s")
    by = ["context_length", "output_tokens", "pair"]
    paired = headline(measured(generations)).pivot_table(index=by, columns="use_cache", values="ttft_s")
    ratio = (paired[False] / paired[True]).groupby(level=by[:2]).median()
    longest = cache.index[-1]
    return {
        "kernel": kernel,
        "longest": longest,
        "cache": cache[longest],
        "lowest": ratio.min(),
        "highest": ratio.max(),
    }


def speedups_by_context(pairs):
    kept = measured(pairs)
    rows = headline(measured(pairs)).dropna(subset=["tpot_speedup", "total_speedup"])
    longest = rows["context_length"].sort_values().iloc[-1]
    at_longest = rows[rows["context_length"] == longest]
    return {
        "kernel": kernel(kept),
        "longest": longest,
        "refused": int(kept["refusal"].notna().sum()),
        "output_tokens": at_longest["output_tokens"].iloc[0],
        **{name: summary.interval(at_longest[name]) for name in ("tpot_speedup", "total_speedup")},
    }


def step_curve(steps):
    cache, no_cache = (medians(arm(headline(steps), cached), "position", "step_s") for cached in (True, False))
    return {
        "kernel": kernel(steps),
        "first": cache.index[0],
        "last": cache.index[-1],
        "growth_cache": late_over_early(cache),
        "growth_no_cache": late_over_early(no_cache),
    }


def late_over_early(series):
    """Median of the last quarter over the median of the first: one slow step decides nothing."""
    quarter = max(1, len(series) // 4)
    return series.iloc[-quarter:].median() / series.iloc[:quarter].median()


def shares(rows):
    """Median share of the total time that prefill takes, by arm and length."""
    share = rows.assign(share=rows["ttft_s"] / rows["e2e_s"])
    return medians(share, ["use_cache", "context_length", "output_tokens"], "share")


def phase_share(generations):
    rows = headline(measured(generations))
    cache, no_cache = shares(rows)[True], shares(rows)[False]
    longest, output_tokens = cache.index.intersection(no_cache.index)[-1]
    return {
        "kernel": kernel(rows),
        "longest": longest,
        "output_tokens": output_tokens,
        "cache": cache.iloc[-1],
        "no_cache": no_cache[(longest, output_tokens)],
    }


def serving_by_concurrency(requests, points):
    sent, runs = swept(measured(requests)), swept(measured(points))
    throughput = medians(runs, "concurrency", "throughput_tokens_per_s")
    ttft, tpot = (medians(sent, "concurrency", name) for name in ("ttft_s", "tpot_s"))
    return spans(("fewest", "most"), throughput=throughput, ttft=ttft, tpot=tpot)


def kv_usage_by_concurrency(points):
    usage = medians(swept(measured(points)), "concurrency", "kv_cache_usage_max")
    return spans(("fewest", "most"), usage=usage)


def stacks(generations, requests):
    """(name, rows) of S1b's cached arm and of S1 with a single request in flight."""
    cached, served = headline(measured(arm(generations, True))), measured(requests)
    return ("s1b", cached), ("vllm", served[served["concurrency"] == 1])


def shared_lengths(generations, requests):
    (_, cached), (_, served) = stacks(generations, requests)
    return sorted(set(cached["context_length"]) & set(served["context_length"]))


def growth(rows, value):
    """The rows with `value` relative to its median at the shortest length."""
    middle = medians(rows, "context_length", value)
    return rows.assign(**{value: rows[value] / middle.iloc[0]}) if len(middle) else rows


def growth_side_by_side(generations, requests):
    lengths = shared_lengths(generations, requests)
    middle = {
        f"{value}_{name}": medians(rows[rows["context_length"].isin(lengths)], "context_length", f"{value}_s")
        for name, rows in stacks(generations, requests)
        for value in ("ttft", "tpot")
    }
    return spans(("shortest", "longest"), **middle)


def cache_sizes(generations, formula):
    """Measured bytes and the formula's by tokens in the cache: the last output token is never fed back."""
    rows = measured(arm(generations, True)).dropna(subset=["kv_cache_bytes"])
    tokens = rows["context_length"] + rows["output_tokens"] - 1
    batches = rows["batch_size"].fillna(1).astype(int) if "batch_size" in rows else tokens * 0 + 1
    computed = [formula(length, batch=batch) for length, batch in zip(tokens, batches)]
    return rows.assign(tokens=tokens * batches, formula=computed, per_token=[formula(1)] * len(rows))


def kv_bytes_by_context(generations, formula):
    last = cache_sizes(generations, formula).sort_values("tokens").iloc[-1]
    shown = {"tokens": "tokens", "measured": "kv_cache_bytes", "formula": "formula", "per_token": "per_token"}
    return {name: last[column] for name, column in shown.items()}
