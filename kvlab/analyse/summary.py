"""Raw records to tidy frames and intervals: statistics are computed here on load and stored nowhere."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from kvlab.analyse import definitions as d
from kvlab.analyse import load

VERDICT_MIN_N = 6  # below this an interval is shown but nothing is concluded from it
UNSTABLE, STRONGLY_UNSTABLE = 0.10, 0.25  # IQR over median
PREFIX_HIT_LIMIT = 0.01  # share of prompt tokens found in the server's prefix cache that voids a point
CLIENT_LAG_LIMIT = 0.01  # of the median TTFT
LOGIT_DIFFERENCE_CAP = 1.0  # largest logit difference between arms that 16-bit rounding may explain
PERCENTILE_MIN_N = {99: 100, 95: 20}


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % interval, how many values it rests on and how steady they were."""

    n: int
    median: float
    low: float
    high: float
    stable: str

    @property
    def conclusive(self) -> bool:
        return self.n >= VERDICT_MIN_N


def interval(values) -> Estimate:
    """95 % interval of the median of positive values: order statistics from n = 6 on, a t interval on logs below.

    Missing values are left out. n = 1 has a median and no interval; n = 0 gives NaN throughout.
    """
    x = np.sort(np.asarray([v for v in values if v is not None and not math.isnan(v)], dtype=float))
    if len(x) == 0:
        return Estimate(0, math.nan, math.nan, math.nan, "ok")
    median = float(np.median(x))
    if len(x) >= VERDICT_MIN_N:
        low, high = order_statistics(x)
    elif len(x) > 1 and x[0] > 0:
        low, high = t_on_logs(x)
    else:
        low, high = math.nan, math.nan
    return Estimate(len(x), median, low, high, stability(x))


def order_statistics(x: np.ndarray) -> tuple[float, float]:
    """Narrowest symmetric pair of order statistics that covers the median with at least 95 %; `x` is sorted."""
    below = special.bdtr(np.arange(len(x)), len(x), 0.5)  # P(at most k of the values lie below the median)
    k = int(np.searchsorted(below, 0.025))  # P(fewer than k) < 2.5 %
    return float(x[k - 1]), float(x[-k])


def t_on_logs(x: np.ndarray) -> tuple[float, float]:
    logs = np.log(x)
    half = special.stdtrit(len(x) - 1, 0.975) * logs.std(ddof=1) / math.sqrt(len(x))
    return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def stability(x: np.ndarray) -> str:
    """ "ok", "unstable" (IQR over median above 10 %) or "strongly unstable" (above 25 %)."""
    spread = float(np.subtract(*np.percentile(x, [75, 25]))) / float(np.median(x)) if np.median(x) else 0.0
    return "ok" if spread <= UNSTABLE else "unstable" if spread <= STRONGLY_UNSTABLE else "strongly unstable"


def percentile(values, q: float) -> float | None:
    """Percentile by linear interpolation; None without values, or with too few for that q (p99 needs 100)."""
    x = [v for v in values if v is not None and not math.isnan(v)]
    return float(np.percentile(x, q)) if x and len(x) >= PERCENTILE_MIN_N.get(q, 1) else None


def intervals(frame: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """One row per group of `by`: n, median, low, high and stability of `value`; empty groups are left out."""
    rows = [
        {**dict(zip(by, keys)), **vars(estimate)}
        for keys, group in frame.groupby(by, sort=True)
        if (estimate := interval(group[value])).n
    ]
    return pd.DataFrame(rows, columns=[*by, "n", "median", "low", "high", "stable"])


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of any frame here that count: they succeeded, are no control or warm-up, and their point is not void."""
    keep = pd.Series(True, index=frame.index)
    if "status" in frame:
        keep &= frame["status"] == "ok"
    if "control" in frame:
        keep &= ~frame["control"].astype(bool)
    if "phase" in frame:
        keep &= frame["phase"] == "measured"
    if "void" in frame:
        keep &= frame["void"].isna()
    return frame[keep]


def arm(frame: pd.DataFrame, use_cache: bool) -> pd.DataFrame:
    """Rows of S1b's arm with the cache, or of the one without."""
    return frame[frame["use_cache"].astype(bool) == use_cache]


def fair_kernel(frame: pd.DataFrame) -> str | None:
    """SDPA where it was measured: eager attention flatters the cache at long contexts; None without rows."""
    return max(frame["attention"].dropna(), default=None)  # the last in the alphabet


def headline(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the fair attention kernel."""
    return frame[frame["attention"] == fair_kernel(frame)]


def swept(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows at the one context length that was run at the most concurrencies."""
    counts = frame.groupby("context_length")["concurrency"].nunique()
    return frame[frame["context_length"] == counts.idxmax()] if len(counts) else frame


TIMES = {"ttft_s": d.ttft_s, "tpot_s": d.tpot_s, "e2e_s": d.e2e_s}
POINT = ["attention", "cache", "context_length", "output_tokens", "batch_size"]
GENERATION = [
    "environment", "model", "dtype", *POINT, "use_cache", "compiled", "warmup_s", "repetition", "process",
    "pair", "control", "status", "reason", "ttft_s", "tpot_s", "e2e_s", "kv_cache_bytes", "parameter_bytes",
    "peak_memory_bytes", "cpu_time_s", "disturbed",
]  # fmt: skip


def generations(records: list[dict]) -> pd.DataFrame:
    """One row per arm of S1b."""
    rows = [
        {name: r.get(name) for name in GENERATION}
        | {name: r["point"].get(name) for name in ("model", "dtype", *POINT)}
        | {"control": bool(r.get("control")), "compiled": bool(r["point"].get("compiled"))}
        | {"disturbed": load.disturbed(r)}
        | times_s(r)
        | ({"status": "refused", "reason": "tokens_differ"} if r["status"] == d.OK and not as_eager(r) else {})
        for r in of_kind(records, "generation")
    ]
    return numeric(pd.DataFrame(rows, columns=GENERATION), *TIMES, "kv_cache_bytes", "peak_memory_bytes")


def times_s(record: dict) -> dict[str, float | None]:
    return {name: number(record) for name, number in TIMES.items()}


def of_kind(records: list[dict], kind: str) -> list[dict]:
    """Records of one kind, without the pairs that were spoilt on purpose (see `negative_controls`)."""
    return [r for r in records if r["kind"] == kind and not r.get("negative_control")]


def negative_controls(records: list[dict]) -> list[str | None]:
    """Why each pair that was spoilt on purpose was refused; None for one that slipped through."""
    spoilt = [r | {"negative_control": False} for r in records if r.get("negative_control")]
    return [refusal(*pair) for pair in arms(spoilt)]


def numeric(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The frame with these columns as floats, null as NaN."""
    return frame.astype({name: float for name in columns})


def arms(records: list[dict]) -> list[tuple[dict, dict]]:
    """(with cache, without cache) of every pair of which both arms were recorded."""
    found: dict[str, dict[bool, dict]] = {}
    for r in of_kind(records, "generation"):
        found.setdefault(r["pair"], {})[r["use_cache"]] = r
    return [(pair[True], pair[False]) for pair in found.values() if len(pair) == 2]


def refusal(cached: dict, uncached: dict) -> str | None:
    """Why a pair proves nothing, as the key of a sentence; None when the proof holds.

    The proof is read off the run: every forward of the cached arm after the prefill took one token and its cache
    grew, every forward of the other arm took the whole sequence, and both arms chose the same tokens.
    """
    if cached["status"] != d.OK or uncached["status"] != d.OK:
        return "arm_missing"
    if cached["boot"] != uncached["boot"]:
        return "two_boots"
    counts = {d.output_tokens(cached), d.output_tokens(uncached)}
    if counts != {cached["point"]["output_tokens"]}:
        return "output_counts_differ"
    n, steps = cached["point"]["context_length"], cached["point"]["output_tokens"]
    if cached["input_lengths"] != [n] + [1] * (steps - 1) or not cache_grew(cached["cache_lengths"], n):
        return "cache_not_used"
    if uncached["input_lengths"] != [n + i for i in range(steps)] or any(uncached.get("cache_lengths") or []):
        return "cache_not_off"
    return None if agree(cached, uncached) else "tokens_differ"


def cache_grew(lengths: list[int | None], context_length: int) -> bool:
    """The cache held the prompt and then grew by one a step, or stayed at its window once it had reached it."""
    if not lengths or lengths[0] is None or not 0 < lengths[0] <= context_length:
        return False
    growth = [b - a if a is not None and b is not None else None for a, b in zip(lengths, lengths[1:])]
    windowed = lengths[0] < context_length
    return all(step == 1 or (windowed and step == 0) for step in growth)


def agree(cached: dict, uncached: dict) -> bool:
    """Identical tokens; where both arms were fed one sequence, a disagreement must be a near tie within rounding."""
    if cached["token_ids"] == uncached["token_ids"]:
        return True
    if not (cached.get("fed_sequence") and uncached.get("fed_sequence")):
        return False
    differences = cached.get("logit_differences") or uncached.get("logit_differences")
    if not differences or max(differences) > LOGIT_DIFFERENCE_CAP:
        return False
    choices = zip(cached["token_ids"], uncached["token_ids"], cached["top2_margins"], differences)
    return all(a == b or margin < 2 * difference for a, b, margin, difference in choices)


def as_eager(record: dict) -> bool:
    """A compiled generation chose what its eager arm had chosen; any other has nothing to prove."""
    return "eager" not in record or agree(record, record["eager"])


def first_difference(cached: dict, uncached: dict) -> tuple[int | None, float | None]:
    """The first output token (from 1) on which the arms differ, and by how much its choice led the second best."""
    choices = zip(cached.get("token_ids") or [], uncached.get("token_ids") or [], cached.get("top2_margins") or [])
    different = ((i, margin) for i, (one, other, margin) in enumerate(choices, start=1) if one != other)
    return next(different, (None, None))


RATIOS = {"ttft_ratio": d.ttft_s, "tpot_speedup": d.tpot_s, "total_speedup": d.e2e_s}
PAIR = [*POINT, "repetition", "control", "pair", "refusal", "first_difference", "margin", *RATIOS]


def pairs(records: list[dict]) -> pd.DataFrame:
    """One row per pair of arms: paired ratios, time without cache over time with cache; NaN where refused."""
    rows = []
    for cached, uncached in arms(records):
        why = refusal(cached, uncached)
        row = {name: cached["point"].get(name) for name in POINT}
        row |= {"repetition": cached["repetition"], "control": bool(cached.get("control")), "pair": cached["pair"]}
        row |= {"refusal": why} | dict(zip(("first_difference", "margin"), first_difference(cached, uncached)))
        if not why:
            row |= {name: d.paired_ratio(number(uncached), number(cached)) for name, number in RATIOS.items()}
        rows.append(row)
    return numeric(pd.DataFrame(rows, columns=PAIR), *PAIR[PAIR.index("first_difference") :])


def steps(records: list[dict]) -> pd.DataFrame:
    """One row per decode step of S1b: its time and how many tokens the model had seen when it ended."""
    rows = [
        {name: r["point"].get(name) for name in POINT}
        | {"use_cache": r["use_cache"], "repetition": r["repetition"], "pair": r["pair"], "step": i}
        | {"position": r["point"]["context_length"] + i, "step_s": step_s, "ttft_s": d.ttft_s(r)}
        for r in of_kind(records, "generation")
        if r["status"] == d.OK and not r.get("control")
        for i, step_s in enumerate(d.step_times_s(r), start=1)
    ]
    return pd.DataFrame(rows, columns=[*POINT, *"use_cache repetition pair step position step_s ttft_s".split()])


SERVED = ["loop", "concurrency", "context_length", "output_tokens", "enforce_eager"]
SENT = ["repetition", "attempt", "phase", "status", "reason"]
REQUEST = [*SERVED, *SENT, *TIMES, "tokens", "void", "disturbed"]


def requests(records: list[dict]) -> pd.DataFrame:
    """One row per request of S1 that belongs to a finished point; `void` carries the point's failed hygiene check."""
    rows = []
    for point, sent in attempts(records):
        why, disturbed = void_reason(point), load.disturbed(point)
        rows += [
            {name: r["point"].get(name) for name in SERVED}
            | {name: r.get(name) for name in SENT}
            | times_s(r)
            | {"tokens": d.output_tokens(r), "void": why, "disturbed": disturbed}
            for r in sent
        ]
    return numeric(pd.DataFrame(rows, columns=REQUEST), *TIMES, "tokens")


def attempts(records: list[dict]) -> list[tuple[dict, list[dict]]]:
    """(point record, its request records) of every point that was finished."""
    sent: dict[str, list[dict]] = {}
    for r in of_kind(records, "request"):
        sent.setdefault(r["attempt"], []).append(r)
    return [(r, sent.get(r["attempt"], [])) for r in of_kind(records, "point") if r["status"] == d.OK]


def void_reason(point: dict) -> str | None:
    """Why a point's numbers do not count: its prompts were found in the server's prefix cache, and should not be."""
    share = None if point["point"].get("shared_prefix_tokens") else prefix_hit_share(point)
    return "prefix_hits" if share is not None and share > PREFIX_HIT_LIMIT else None


def prefix_hit_share(point: dict) -> float | None:
    """Prefix-cache hits over queries while the point ran; None where the server does not count them."""
    deltas = point.get("server_deltas") or {}
    hits, queries = deltas.get("prefix_hits"), deltas.get("prefix_queries")
    if hits is None or queries is None:
        return None
    return hits / queries if queries else None  # with the cache off it counts nothing


SERVING_POINT = [
    *SERVED, "repetition", "attempt", "throughput_tokens_per_s", "window_s", "completed", "failed",
    "kv_cache_usage_max", "waiting_max", "preemptions", "prefix_hit_share", "littles_law",
    "client_over_server_ttft",
    "tokens_conserved", "event_loop_lag_max_s", "client_saturated", "void",
]  # fmt: skip


def points(records: list[dict]) -> pd.DataFrame:
    """One row per finished point of S1: throughput in its steady window and the checks on it."""
    rows = [serving_point(point, sent) for point, sent in attempts(records)]
    exact = ("throughput_tokens_per_s", "window_s", "kv_cache_usage_max", "littles_law", "prefix_hit_share")
    return numeric(pd.DataFrame(rows, columns=SERVING_POINT), *exact, "client_over_server_ttft")


def serving_point(point: dict, sent: list[dict]) -> dict:
    measured = [r for r in sent if r["phase"] == "measured"]
    streams = point["point"].get("concurrency") or 1
    window, samples = d.steady_window_s(measured, streams), point.get("server_samples") or []
    lag = point.get("event_loop_lag_s") or [None, None]
    return {name: point["point"].get(name) for name in SERVED} | {
        "repetition": point["repetition"],
        "attempt": point["attempt"],
        "throughput_tokens_per_s": d.throughput_tokens_per_s(measured, streams),
        "window_s": window and window[1] - window[0],
        "completed": sum(r["status"] == d.OK for r in measured),
        "failed": sum(r["status"] != d.OK for r in measured),
        "kv_cache_usage_max": most(samples, "kv_cache_usage"),
        "waiting_max": most(samples, "waiting"),
        "preemptions": (point.get("server_deltas") or {}).get("preemptions"),
        "prefix_hit_share": prefix_hit_share(point),
        "littles_law": littles_law(measured, window),
        "client_over_server_ttft": client_over_server_ttft(point, measured),
        "tokens_conserved": tokens_conserved(point, measured),
        "event_loop_lag_max_s": lag[1],
        "client_saturated": client_saturated(point, measured),
        "void": void_reason(point),
    }


def most(samples: list[dict], name: str) -> float | None:
    values = [s[name] for s in samples if s.get(name) is not None]
    return max(values) if values else None


def client_saturated(point: dict, measured: list[dict]) -> bool:
    """The client's event loop was late by more than a hundredth of the median TTFT, half of the time."""
    lag_s = (point.get("event_loop_lag_s") or [None])[0]
    seen = [d.ttft_s(r) for r in measured if d.ttft_s(r) is not None]
    return bool(lag_s and seen) and lag_s > CLIENT_LAG_LIMIT * float(np.median(seen))


def littles_law(measured: list[dict], window: tuple[float, float] | None) -> float | None:
    """Completions per second x mean latency over mean requests in flight, all in the window; 1 in a steady state."""
    spans = [(r["sent_s"], r["sent_s"] + d.e2e_s(r)) for r in measured if d.e2e_s(r) is not None]
    if window is None or not spans:
        return None
    start, end = window
    ended = [b - a for a, b in spans if start < b <= end]
    in_flight = sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans) / (end - start)
    return sum(ended) / (end - start) / in_flight if in_flight else None


def client_over_server_ttft(point: dict, measured: list[dict]) -> float | None:
    """Mean TTFT by the client over that by the server's own histogram; None where it offers none or counts others."""
    deltas, seen = point.get("server_deltas") or {}, [d.ttft_s(r) for r in measured if d.ttft_s(r) is not None]
    total_s, count = deltas.get("ttft_sum_s"), deltas.get("ttft_count")
    return sum(seen) / total_s if seen and total_s and count == len(seen) else None


def tokens_conserved(point: dict, measured: list[dict]) -> bool | None:
    """The server counted as many generated tokens as the client; None where it offers no count or one is unknown."""
    counted = (point.get("server_deltas") or {}).get("generation_tokens")
    tokens = [d.output_tokens(r) for r in measured]
    return None if counted is None or None in tokens else counted == sum(tokens)


CEILING = ["quantity", "dtype", "threads", "shape", "repetition", "process", "value", "unit"]


def ceilings(records: list[dict]) -> pd.DataFrame:
    """One row per repetition of a ceiling: its best call, as bytes/s or FLOP/s, or as seconds per launch."""
    rows = []
    for r in [each for each in records if each["kind"] == "ceiling" and each["status"] == d.OK]:
        best_s, launches = min(r["samples_s"]), r.get("launches")
        work, unit = (r["bytes"], "B/s") if r.get("bytes") else (r.get("flops"), "FLOP/s")
        value, unit = (best_s / launches, "s") if launches else (work / best_s, unit)
        point = {name: r["point"].get(name) for name in CEILING[:4]} | {"shape": str(r["point"].get("shape") or "")}
        rows.append(point | {name: r.get(name) for name in ("repetition", "process")} | {"value": value, "unit": unit})
    return pd.DataFrame(rows, columns=CEILING)
