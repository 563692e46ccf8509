"""What each number means: every latency is computed here, from raw arrival times, and nowhere else.

A record is a plain dict of the raw measurement (see `kvlab.records`). Functions return None where a
quantity is not defined for that record; they never return 0, NaN or infinity in its place.
"""

OK = "ok"


def output_tokens(record: dict) -> int | None:
    """Output tokens of one generation: the server's or the loop's own count, never the number asked for."""
    counts = record.get("chunk_tokens") or []
    if record.get("output_tokens") is not None:
        return record["output_tokens"]
    return sum(counts) if counts and None not in counts else None


def ttft_s(record: dict) -> float | None:
    """Time to first token in seconds: from the send (S1) or launch (S1b) to the first arrival that holds a token."""
    times = record.get("arrival_times_s") or []
    return times[0] if record["status"] == OK and times else None


def e2e_s(record: dict) -> float | None:
    """End-to-end latency in seconds: last token minus send. A trailing usage event or [DONE] moves nothing.

    A last token without text comes with its finish reason.
    """
    times = record.get("arrival_times_s") or []
    last_token_s = times[-1] if times else record.get("finished_s")
    return last_token_s if record["status"] == OK else None


def tpot_s(record: dict) -> float | None:
    """Time per output token in seconds: (last token - first token) / (output tokens - 1); None for one token."""
    tokens, first, last = output_tokens(record), ttft_s(record), e2e_s(record)
    if first is None or last is None or not tokens or tokens < 2:
        return None
    return (last - first) / (tokens - 1)


def tpot_after_first_chunk_s(record: dict) -> float | None:
    """TPOT variant that leaves out all tokens of the first chunk; None unless every chunk's count is known."""
    counts, first, last = record.get("chunk_tokens") or [], ttft_s(record), e2e_s(record)
    if first is None or last is None or len(counts) < 2 or None in counts or sum(counts[1:]) == 0:
        return None
    return (last - first) / sum(counts[1:])


def step_times_s(record: dict) -> list[float]:
    """Seconds of each decode step (the prefill, whose end is the TTFT, is not among them)."""
    times = record.get("arrival_times_s") or []
    return [later - earlier for earlier, later in zip(times, times[1:])]


def between_chunks_s(record: dict) -> tuple[list[float], str]:
    """Gaps between arrivals in seconds and what they lie between: "tokens" (ITL) or "chunks"."""
    counts = record.get("chunk_tokens") or []
    exact = set(counts) == {1} and record.get("token_count_source") != "estimated"
    return step_times_s(record), "tokens" if exact else "chunks"


def paired_ratio(without_cache: float | None, with_cache: float | None) -> float | None:
    """Ratio of one pair, time without cache over time with cache; None where either is missing."""
    return without_cache / with_cache if without_cache is not None and with_cache else None


def steady_window_s(requests: list[dict], concurrency: int) -> tuple[float, float] | None:
    """Start and end of the steady window, in seconds from the point's start.

    It opens when every stream has its first token and closes at the last moment with `concurrency` requests
    in flight. None with fewer than 3 x `concurrency` completions, or when the two moments never come in that order.
    """
    ok = [r for r in requests if r["status"] == OK and r.get("arrival_times_s")]
    if len(ok) < 3 * concurrency:
        return None
    first_tokens: dict[int, float] = {}
    for r in sorted(ok, key=lambda r: r["sent_s"]):
        first_tokens.setdefault(r["stream"], r["sent_s"] + ttft_s(r))
    ends: dict[int, float] = {}
    for r in ok:
        ends[r["stream"]] = max(ends.get(r["stream"], 0.0), r["sent_s"] + e2e_s(r))
    if len(first_tokens) < concurrency:
        return None
    start, end = max(first_tokens.values()), min(ends.values())
    return (start, end) if end > start else None


def throughput_tokens_per_s(requests: list[dict], concurrency: int) -> float | None:
    """Output tokens that arrive inside the steady window over its length, in tokens/s; None without a window."""
    window = steady_window_s(requests, concurrency)
    if window is None:
        return None
    start, end = window
    arrivals = [
        (r["sent_s"] + time, tokens)
        for r in requests
        for time, tokens in zip(r.get("arrival_times_s") or [], _tokens_of_chunks(r))
    ]
    return sum(tokens for time, tokens in arrivals if start < time <= end) / (end - start)


def _tokens_of_chunks(record: dict) -> list[float]:
    """Output tokens of each chunk; where a chunk's count is not told, all share the answer's total alike."""
    counts = record.get("chunk_tokens") or []
    if None not in counts:
        return counts
    return [(output_tokens(record) or len(counts)) / len(counts)] * len(counts)
