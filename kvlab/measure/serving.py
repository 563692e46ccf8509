"""S1's primitive: one serving point from its parameters, on a server of ours or on one that is already there."""

import json
import zlib
from contextlib import nullcontext
from types import SimpleNamespace

from kvlab import models, paths, prompts
from kvlab.measure.client import run_point
from kvlab.measure.server import ServerError, VllmServer


def open_server(p: SimpleNamespace, max_model_len: int, report=None, *, small_cache=False, kv_bytes_per_token=None):
    """A context manager for the server that parameters `p` ask for: vLLM started here, or the one at `base_url`.

    With `small_cache` it is the one for `sweep.cache_points`: a cache of `full_cache_space_gib`, prefixes kept.
    """
    if p.base_url:
        return nullcontext(SimpleNamespace(base_url=p.base_url, model=p.model, pid=None, facts=dict,
                                           token_variable=p.token_variable or None,
                                           is_gone=lambda: False))  # fmt: skip
    space_gib = p.full_cache_space_gib if small_cache else p.kv_cache_space_gib
    return VllmServer(
        served_folder(p), p.model, max_model_len, p.dtype, p.enforce_eager,
        kv_cache_space_bytes=int(space_gib * 2**30) if p.device == "cpu" or small_cache else None,
        kv_bytes_per_token=kv_bytes_per_token, threads=p.server_threads, prefix_caching=small_cache,
        chunked_prefill=p.chunked_prefill, seed=p.seed, extra_args=p.server_arguments.split(),
        log_path=paths.results(p.profile) / "executed" / "vllm-server.log",
        startup_timeout_s=p.startup_timeout_s, report=report,
    )  # fmt: skip


def served_folder(p: SimpleNamespace):
    from kvlab import weights  # torch and Transformers: only for a server that has to be started

    return weights.served_folder(models.resolve(p.model, p.model_revision), p.dtype)


def measure_point(p: SimpleNamespace, server, point: dict, repetition: int, keep) -> None:
    """Run one point and hand each record to `keep`; raises ServerError when the server died under it."""
    warmup, measured = request_counts(p, point)
    asked = point_prompts(p, point, repetition, warmup + measured)
    records = run_point(
        server.base_url, server.model, point, asked, p.seed + repetition, warmup=warmup,
        timeout_s=p.request_timeout_s, token_variable=server.token_variable, server_pid=server.pid,
        on_record=lambda record: keep(record | {"repetition": repetition} | about_server(p, record, server)),
    )  # fmt: skip
    last = records[-1]  # where every request failed, the first one's reason stands there
    if last["reason"] == "server_gone" or last["status"] != "ok" and server.is_gone():
        raise ServerError("server_gone", "the server died or hung while it was measured; its log says why")


def request_counts(p: SimpleNamespace, point: dict) -> tuple[int, int]:
    """Requests that warm a point up, and those that are measured: fewer on the small cache, where many wait long."""
    if point["loop"] == "open":
        return 1, point["requests"]
    fewest, per_stream = p.serving_min_requests, p.serving_requests_per_stream
    if point["prefix_caching"]:
        fewest, per_stream = fewest // 2 + 1, max(1, per_stream // 2)
    return point["concurrency"], max(fewest, per_stream * point["concurrency"])


def about_server(p: SimpleNamespace, record: dict, server) -> dict:
    """What the server was started with and on which files, kept once a point; of another's server nothing is known."""
    if record["kind"] != "point":
        return {}
    if p.base_url:
        return {"server": server.facts()}
    from kvlab import weights

    files = weights.file_hashes(models.resolve(p.model, p.model_revision))
    return {"server": server.facts(), "model_files": files}


def point_prompts(p: SimpleNamespace, point: dict, repetition: int, count: int) -> list[list[int]]:
    """`count` prompts of exactly the point's length that share no block with those of any other point.

    Nor with one another, but for the first `shared_prefix_tokens` of a point that has them.
    """
    model = models.outline(models.resolve(p.model, p.model_revision))
    name = json.dumps([p.seed, point, repetition], sort_keys=True)
    seed = zlib.crc32(name.encode())
    length, special = point["context_length"], model.special_token_ids
    prefix = prompts.token_ids(length, seed, count, model.vocab_size, special)[: point.get("shared_prefix_tokens", 0)]
    rest = length - len(prefix)
    return [prefix + prompts.token_ids(rest, seed, i, model.vocab_size, special) for i in range(count)]
