"""S1 beyond the plain sweep: goodput, open-loop arrivals, a KV cache that is full, prefixes that are reused."""

import math

import pandas as pd

from kvlab.analyse import cost, summary
from kvlab.analyse import definitions as d

LOAD = ["loop", "concurrency", "request_rate_per_s", "context_length", "output_tokens"]


def runs(records: list[dict]) -> list[tuple[dict, list[dict]]]:
    """(point record, its measured requests) of every finished point whose prompts were as they should be."""
    return [
        (point, [r for r in sent if r["phase"] == "measured"])
        for point, sent in summary.attempts(records)
        if summary.void_reason(point) is None
    ]


def load_of(point: dict) -> dict:
    return {name: point["point"].get(name) for name in LOAD} | {"repetition": point["repetition"]}


# ---- goodput


def goodput(records: list[dict], ttft_limit_s: float, tpot_limit_s: float) -> pd.DataFrame:
    """One row per run: requests/s that completed, the share of them within both limits, and their product.

    Counted in the steady window of a closed loop; none, no row. A single token has no TPOT and breaks no limit.
    """
    rows = []
    for point, sent in runs(records):
        window = d.steady_window_s(sent, point["point"]["concurrency"]) if point["point"]["concurrency"] else None
        ended = [r for r in sent if window and d.e2e_s(r) and window[0] < r["sent_s"] + d.e2e_s(r) <= window[1]]
        if not ended:
            continue
        share = sum(within(r, ttft_limit_s, tpot_limit_s) for r in ended) / len(ended)
        rate = len(ended) / (window[1] - window[0])
        rows.append(load_of(point) | {"requests_per_s": rate, "within": share, "goodput_per_s": rate * share})
    return pd.DataFrame(rows, columns=[*LOAD, "repetition", "requests_per_s", "within", "goodput_per_s"])


def within(request: dict, ttft_limit_s: float, tpot_limit_s: float) -> bool:
    ttft_s = d.ttft_s(request)
    return ttft_s is not None and ttft_s <= ttft_limit_s and (d.tpot_s(request) or 0.0) <= tpot_limit_s


# ---- open loop


def open_loop(records: list[dict]) -> pd.DataFrame:
    """One row per run of Poisson arrivals: medians of latency from the send and from the scheduled arrival.

    `littles_law` covers the time from the first completion to the last send; it is 1 in a steady state, and away
    from it where requests pile up, or where few complete.
    """
    rows = []
    for point, sent in runs(records):
        ok = [r for r in sent if r["status"] == d.OK and d.e2e_s(r) is not None]
        if point["point"]["loop"] != "open" or not ok:
            continue
        window = min(r["sent_s"] + d.e2e_s(r) for r in ok), max(r["sent_s"] for r in ok)
        scheduled = pd.Series([r["client_wait_s"] for r in ok])
        ttft_s, e2e_s = pd.Series([d.ttft_s(r) for r in ok], dtype=float), pd.Series([d.e2e_s(r) for r in ok])
        rows.append(
            load_of(point)
            | {"completed": len(ok), "ttft_s": ttft_s.median(), "e2e_s": e2e_s.median()}
            | {"arrival_ttft_s": (ttft_s + scheduled).median(), "arrival_e2e_s": (e2e_s + scheduled).median()}
            | {"littles_law": summary.littles_law(ok, window if window[0] < window[1] else None)}
            | {"client_over_server_ttft": summary.client_over_server_ttft(point, sent)}
        )
    columns = ["completed", "ttft_s", "e2e_s", "arrival_ttft_s", "arrival_e2e_s"]
    return pd.DataFrame(rows, columns=[*LOAD, "repetition", *columns, "littles_law", "client_over_server_ttft"])


# ---- compiled or eager


def compared(records: list[dict]) -> pd.DataFrame:
    """Median TTFT and TPOT at concurrency 1 in both modes, one row per context length that was measured in both."""
    rows = summary.measured(summary.requests(records))
    rows = rows[rows["concurrency"] == 1]
    cells = rows.groupby(["context_length", "enforce_eager"])[["ttft_s", "tpot_s"]].median()
    table = cells.unstack("enforce_eager")
    names = {True: "eager", False: "compiled"}
    table.columns = [f"{value}_{names[eager]}" for value, eager in table.columns]
    if len(table.columns) < 4:
        return pd.DataFrame()
    ratios = {f"{value}_ratio": table[f"{value}_s_eager"] / table[f"{value}_s_compiled"] for value in ("ttft", "tpot")}
    return table.assign(**ratios).dropna().reset_index()


# ---- the KV cache under load


def is_full(record: dict) -> bool:
    """A run on the small cache whose prompts share nothing."""
    return bool(record["point"].get("prefix_caching")) and "shared_prefix_tokens" not in record["point"]


def filling(records: list[dict]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What the server said through the runs on the small cache, and each request's TTFT at the time of its send.

    Times in seconds from the first measured request; preemptions are counted from there.
    """
    samples, sends = [], []
    for point, sent in runs([r for r in records if is_full(r)]):
        start_s, at_start = point["measured_from_s"], None
        for sample in point.get("server_samples") or []:
            preempted = sample.get("preemptions")
            at_start = preempted if at_start is None else at_start
            since = None if preempted is None else preempted - at_start
            samples.append(
                sample | {"t_s": sample["t_s"] - start_s, "preemptions": since, "repetition": point["repetition"]}
            )
        sends += [{"t_s": r["sent_s"] - start_s, "ttft_s": d.ttft_s(r), "repetition": r["repetition"]} for r in sent]
    columns = ["t_s", "kv_cache_usage", "running", "waiting", "preemptions", "repetition"]
    frames = (pd.DataFrame(samples, columns=columns), pd.DataFrame(sends, columns=["t_s", "ttft_s", "repetition"]))
    return tuple(frame.astype(float) for frame in frames)


def full_and_roomy(small: list[dict], roomy: list[dict]) -> dict | None:
    """TTFT and TPOT (medians over requests) of the load that fills the small cache, and of the same on the large one.

    None where either was not measured.
    """
    full = runs([r for r in small if is_full(r)])
    twins = [run for run in runs(roomy) if full and load_key(run[0]) == load_key(full[0][0])]
    if not full or not twins:
        return None
    numbers = {"concurrency": full[0][0]["point"]["concurrency"]}
    for name, found in (("full", full), ("roomy", twins)):
        requests = [r for _, sent in found for r in sent]
        for value, of in (("ttft", d.ttft_s), ("tpot", d.tpot_s)):
            numbers[f"{value}_{name}"] = pd.Series([of(r) for r in requests], dtype=float).median()
    points = pd.DataFrame([summary.serving_point(point, sent) for point, sent in full])
    most = {name: points[name].max() for name in ("kv_cache_usage_max", "waiting_max", "preemptions")}
    ratios = {f"{value}_ratio": numbers[f"{value}_full"] / numbers[f"{value}_roomy"] for value in ("ttft", "tpot")}
    return numbers | most | ratios


def load_key(point: dict) -> tuple:
    return tuple(point["point"].get(name) for name in LOAD)


def kv_bytes_per_token(config: dict, dtype: str) -> int | None:
    """What the engine stores for a token; None for a model that the cost model does not know."""
    try:
        return cost.kv_cache_bytes_per_token(cost.architecture(config), dtype, layout="engine")
    except ValueError:
        return None


def capacity(records: list[dict], bytes_per_token: int | None) -> list[dict]:
    """For each cache size: blocks and tokens predicted from its bytes, and what vLLM said it has.

    vLLM counts tokens as the requests of maximum length that fit, times that length: less than blocks x block.
    """
    rows = {}
    for point, _ in summary.attempts(records):
        server = point.get("server") or {}
        space, block, length = (server.get(n) for n in ("kv_cache_space_bytes", "kv_block_tokens", "max_model_len"))
        if space and block and bytes_per_token:
            blocks = space // (block * bytes_per_token)
            rows[space] = {
                "space_bytes": space, "block_tokens": block,
                "blocks_predicted": blocks, "blocks": server["kv_blocks"],
                "tokens_predicted": blocks * length // math.ceil(length / block), "tokens": server["kv_cache_tokens"],
            }  # fmt: skip
    return list(rows.values())


def waste(records: list[dict]) -> dict | None:
    """Share of reserved KV memory that holds nothing when a request ends: in pages, and if each had the maximum.

    The last output token is never fed back, so it has no place in the cache. None without a block size.
    """
    held = paged = contiguous = count = 0
    for point, sent in summary.attempts(records):
        server = point.get("server") or {}
        block, length = server.get("kv_block_tokens"), server.get("max_model_len")
        for r in sent if block and length else []:
            if r["status"] == d.OK and r["phase"] == "measured" and d.output_tokens(r):
                tokens = r["prompt_tokens"] + d.output_tokens(r) - 1
                held, count = held + tokens, count + 1
                paged, contiguous = paged + math.ceil(tokens / block) * block, contiguous + length
                numbers = {"block_tokens": block, "max_model_len": length}
    if not count:
        return None
    return numbers | {"requests": count, "paged": 1 - held / paged, "contiguous": 1 - held / contiguous}


# ---- prefixes that are reused


def reuse(records: list[dict]) -> pd.DataFrame:
    """One row per request whose prompt shares its first tokens with all others of its point (0: with none).

    `reused` is the part of the prompt that the server found in its cache by its own counter; `whole_blocks` is the
    part that could be found, since only whole blocks are shared.
    """
    rows = []
    for point, sent in runs(records):
        shared, block = point["point"].get("shared_prefix_tokens"), (point.get("server") or {}).get("kv_block_tokens")
        if shared is None:
            continue
        length = point["point"]["context_length"]
        about = {"shared": shared, "context_length": length, "reused": summary.prefix_hit_share(point)}
        about |= {"whole_blocks": shared // block * block / length if block else None}
        rows += [about | {"repetition": r["repetition"], "ttft_s": d.ttft_s(r)} for r in sent if d.ttft_s(r)]
    columns = ["shared", "context_length", "reused", "whole_blocks", "repetition", "ttft_s"]
    return pd.DataFrame(rows, columns=columns).astype({name: float for name in ("reused", "whole_blocks", "ttft_s")})
