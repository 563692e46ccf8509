"""The same request records under the definitions of other serving benchmarks: a reader of theirs can compare.

Sources, all public: vLLM `vllm/benchmarks/serve.py` and SGLang `bench_serving.py` (one definition), GuideLLM
`schemas/request_stats.py` and its aggregation, AIPerf's "Metrics Reference" (GenAI-Perf before it), llmperf
`token_benchmark_ray.py` with its OpenAI client. Each tool's mean is given here, so that only definitions differ;
what a tool measures differently (its clock, a tokenizer of its own) is not imitated.
"""

from statistics import fmean

from kvlab.analyse import definitions as d


def table(requests: list[dict], concurrency: int) -> list[dict]:
    """One row per tool for the measured requests of one run; None where nothing can be computed.

    Seconds, and tokens/s. `tpot_name` is what the tool calls its time per output token: ITL only where each
    chunk is known to hold one token, else "between_chunks". Where chunks' counts are known, ours has two rows.
    """
    ok = [r for r in requests if d.ttft_s(r) is not None and d.tpot_s(r) is not None]
    ours = {"tool": "kvlab", "tpot_name": "TPOT", "tpot_s": mean(map(d.tpot_s, ok))}
    ours |= {"throughput_tokens_per_s": d.throughput_tokens_per_s(requests, concurrency)}
    left_out = [d.tpot_after_first_chunk_s(r) for r in ok]
    variant = [] if None in left_out else [ours | {"tpot_name": "after_first_chunk", "tpot_s": mean(left_out)}]
    itl = "between_chunks" if "chunks" in {d.between_chunks_s(r)[1] for r in ok} else "ITL"
    whole = whole_run_tokens_per_s(ok)
    others = [
        {"tool": "vLLM, SGLang", "tpot_name": "TPOT", "tpot_s": mean(map(d.tpot_s, ok))},
        {"tool": "vLLM, SGLang", "tpot_name": itl, "tpot_s": mean(gap for r in ok for gap in d.step_times_s(r))},
        {"tool": "GuideLLM", "tpot_name": "TPOT", "tpot_s": ratio(ok, d.e2e_s, d.output_tokens)},
        {"tool": "GuideLLM", "tpot_name": "ITL", "tpot_s": ratio(ok, decode_s, tokens_after_first)},
        {"tool": "AIPerf", "tpot_name": "ITL", "tpot_s": mean(decode_s(r) / tokens_after_first(r) for r in ok)},
        {"tool": "llmperf", "tpot_name": "inter-token latency",
         "tpot_s": mean(d.e2e_s(r) / d.output_tokens(r) for r in ok)},
    ]  # fmt: skip
    rows = [ours, *variant, *(row | {"throughput_tokens_per_s": whole} for row in others)]
    return [row | {"ttft_s": mean(map(d.ttft_s, ok))} for row in rows]


def spread(rows: list[dict], value: str) -> float | None:
    """Largest over smallest value of a column; None where there is none."""
    found = [row[value] for row in rows if row[value]]
    return max(found) / min(found) if found else None


def whole_run_tokens_per_s(ok: list[dict]) -> float | None:
    """Output tokens over the time from the first send to the last token, start-up wave and drain included."""
    if not ok:
        return None
    length_s = max(r["sent_s"] + d.e2e_s(r) for r in ok) - min(r["sent_s"] for r in ok)
    return sum(map(d.output_tokens, ok)) / length_s


def decode_s(record: dict) -> float:
    return d.e2e_s(record) - d.ttft_s(record)


def tokens_after_first(record: dict) -> int:
    return d.output_tokens(record) - 1


def mean(values) -> float | None:
    values = list(values)
    return fmean(values) if values else None


def ratio(requests: list[dict], time_s, count) -> float | None:
    """Sum of times over sum of counts: a mean in which each token, not each request, has the same weight."""
    return sum(map(time_s, requests)) / sum(map(count, requests)) if requests else None
