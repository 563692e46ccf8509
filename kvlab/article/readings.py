"""Numbers that a chart's alternative text and computed sentence quote, from the chart's own frames."""

from kvlab.analyse import summary
from kvlab.analyse.summary import measured, swept

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


def fair_kernel(frame):
    """SDPA where it was measured: eager attention flatters the cache at long contexts; None without rows."""
    names = kernels(frame)
    return "sdpa" if "sdpa" in names else names[0] if names else None


def kernel_name(attention):
    return "SDPA" if attention == "sdpa" else attention


def of_kernel(frame):
    rows = measured(frame)
    return rows[rows["attention"] == fair_kernel(rows)]


def medians(frame, by, value):
    return frame.dropna(subset=[value]).groupby(by)[value].median()


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
    rows = of_kernel(generations)
    cache = medians(rows[rows["use_cache"] == True], "context_length", value)  # noqa: E712
    no_cache = medians(rows[rows["use_cache"] == False], "context_length", value)  # noqa: E712
    shared = cache.index.intersection(no_cache.index)
    return kernel_name(fair_kernel(rows)), cache[shared], no_cache[shared]


def tpot_by_context(generations):
    kernel, cache, no_cache = by_arm(generations, "tpot_s")
    shortest, longest, growth = ends(cache)
    return {
        "kernel": kernel,
        "shortest": shortest,
        "longest": longest,
        "growth_cache": growth,
        "growth_no_cache": ends(no_cache)[2],
        "cache": cache[longest],
        "no_cache": no_cache[longest],
    }


def ttft_by_context(generations):
    kernel, cache, no_cache = by_arm(generations, "ttft_s")
    ratio, longest = no_cache / cache, cache.index[-1]
    return {
        "kernel": kernel,
        "longest": longest,
        "cache": cache[longest],
        "lowest": ratio.min(),
        "highest": ratio.max(),
    }


def speedups_by_context(pairs):
    kept = measured(pairs)
    rows = of_kernel(pairs).dropna(subset=["tpot_speedup", "total_speedup"])
    longest = rows["context_length"].sort_values().iloc[-1]
    at_longest = rows[rows["context_length"] == longest]
    return {
        "kernel": kernel_name(fair_kernel(kept)),
        "longest": longest,
        "refused": int(kept["refusal"].notna().sum()),
        "output_tokens": at_longest["output_tokens"].iloc[0],
        **{name: summary.interval(at_longest[name]) for name in ("tpot_speedup", "total_speedup")},
    }


def step_curve(steps):
    rows = steps[steps["attention"] == fair_kernel(steps)]
    cache, no_cache = (medians(rows[rows["use_cache"] == arm], "position", "step_s") for arm in (True, False))
    return {
        "kernel": kernel_name(fair_kernel(steps)),
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
    rows = of_kernel(generations)
    cache, no_cache = shares(rows)[True], shares(rows)[False]
    longest, output_tokens = cache.index.intersection(no_cache.index)[-1]
    return {
        "kernel": kernel_name(fair_kernel(rows)),
        "longest": longest,
        "output_tokens": output_tokens,
        "cache": cache.iloc[-1],
        "no_cache": no_cache[(longest, output_tokens)],
    }


def serving_by_concurrency(requests, points):
    ttft, tpot = (medians(swept(measured(requests)), "concurrency", name) for name in ("ttft_s", "tpot_s"))
    throughput = medians(swept(measured(points)), "concurrency", "throughput_tokens_per_s")
    fewest, most, growth = ends(throughput)
    return {
        "fewest": fewest,
        "most": most,
        "throughput_growth": growth,
        "ttft_low": ttft[fewest],
        "ttft_high": ttft[most],
        "tpot_low": tpot[fewest],
        "tpot_high": tpot[most],
    }


def kv_usage_by_concurrency(points):
    usage = medians(swept(measured(points)), "concurrency", "kv_cache_usage_max")
    fewest, most, _ = ends(usage)
    return {"fewest": fewest, "most": most, "low": usage[fewest], "high": usage[most]}


def stacks(generations, requests):
    """(name, rows) of S1b's cached arm and of S1 with a single request in flight."""
    cached, served = of_kernel(generations[generations["use_cache"] == True]), measured(requests)  # noqa: E712
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
    if len(lengths) < 2:
        raise IndexError("growth needs two lengths")
    numbers = {"shortest": lengths[0], "longest": lengths[-1]}
    for name, rows in stacks(generations, requests):
        for value in ("ttft", "tpot"):
            series = medians(rows, "context_length", f"{value}_s")
            numbers[f"{value}_{name}"] = series[lengths[-1]] / series[lengths[0]]
    return numbers


def cache_sizes(generations, formula):
    """Measured bytes and the formula's by tokens in the cache: the last output token is never fed back."""
    rows = measured(generations[generations["use_cache"] == True]).dropna(subset=["kv_cache_bytes"])  # noqa: E712
    tokens = rows["context_length"] + rows["output_tokens"] - 1
    batches = rows["batch_size"].fillna(1).astype(int) if "batch_size" in rows else tokens * 0 + 1
    computed = [formula(length, batch=batch) for length, batch in zip(tokens, batches)]
    return rows.assign(tokens=tokens * batches, formula=computed, per_token=[formula(1)] * len(rows))


def kv_bytes_by_context(generations, formula):
    last = cache_sizes(generations, formula).sort_values("tokens").iloc[-1]
    shown = {"tokens": "tokens", "measured": "kv_cache_bytes", "formula": "formula", "per_token": "per_token"}
    return {name: last[column] for name, column in shown.items()}
