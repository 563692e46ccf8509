"""The serving client: while streams run it only takes time stamps; answers are read when the point is over.

`run_point` is the way in. Two loops: closed (N requests in flight) and open (Poisson arrivals). Nothing is
retried; a request that fails is a record with its reason.
"""

import asyncio
import gc
import json
import os
import random
import ssl
import threading
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from statistics import median
from urllib.parse import urlsplit

import psutil

from kvlab.measure import metrics, sampling, stream

try:
    from uvloop import new_event_loop  # less CPU time per read
except ImportError:  # not built for every system
    from asyncio import new_event_loop

LAG_INTERVAL_S = 0.02
METRICS_INTERVAL_S = 0.5
now_s = time.perf_counter


@dataclass(frozen=True)
class Target:
    """Where requests go: a base URL with or without /v1, and the environment variable with its token."""

    base_url: str
    token_variable: str | None = None

    def head(self, method, path, body_length=0):
        """Request line and headers as bytes; the token is read here and kept nowhere."""
        url = urlsplit(self.base_url)
        root = url.path.rstrip("/").removesuffix("/v1")
        lines = [f"{method} {root}{path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}"]
        lines += ["Connection: close", "Accept: */*", "Accept-Encoding: identity"]
        if self.token_variable:
            if not (token := os.environ.get(self.token_variable)):
                raise ValueError(f"{self.token_variable}, which should hold the server's token, is not set")
            lines.append(f"Authorization: Bearer {token}")
        if body_length:
            lines += ["Content-Type: application/json", f"Content-Length: {body_length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def request(self, body):
        """The whole POST of one completion as bytes, made before any clock runs."""
        payload = json.dumps(body).encode()
        return self.head("POST", "/v1/completions", len(payload)) + payload

    async def connect(self):
        url = urlsplit(self.base_url)
        secure = url.scheme == "https"
        context = ssl.create_default_context() if secure else None
        port = url.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        _, reader = await loop.create_connection(Reader, url.hostname, port, ssl=context)
        return reader


class Reader(asyncio.Protocol):
    """One connection for one request: each read with its time, and a future set when the stream ends."""

    def connection_made(self, transport):
        self.transport, self.reads, self.failure = transport, [], None
        self.end = stream.End()
        self.ended = asyncio.get_running_loop().create_future()

    def send(self, data):
        """Hand the bytes to the socket now: uvloop's transport would keep them until its round is over."""
        with suppress(BlockingIOError):
            if not self.transport.get_extra_info("sslcontext"):
                data = data[os.write(self.transport.get_extra_info("socket").fileno(), data) :]
        if data:
            self.transport.write(data)

    def data_received(self, data):
        self.reads.append((now_s(), data))  # every arrival time of the report is taken here
        if self.end.came(data):
            self._end(None)
            self.transport.close()

    def connection_lost(self, exc):
        self._end(exc)

    def _end(self, failure):
        if not self.ended.done():
            self.failure = failure
            self.ended.set_result(None)


@dataclass
class Sent:
    """One request on its way: what was asked, when, and the raw reads that came back; times on `now_s`."""

    index: int
    stream: int
    phase: str
    prompt_tokens: int
    output_tokens: int
    payload: bytes
    scheduled_s: float | None = None
    sent_s: float | None = None
    ended_s: float | None = None
    reads: list = field(default_factory=list)
    trouble: str | None = None  # "connection" or "timeout"
    detail: str | None = None


async def _exchange(target, sent, timeout_s, not_before_s=None):
    """Connect, hand the bytes to the socket, wait for the end; what happens goes into `sent`."""
    reader = None
    try:
        async with asyncio.timeout(timeout_s) as limit:
            reader = await target.connect()
            if not_before_s is not None:
                await _sleep_until(not_before_s)
            limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
            sent.sent_s = now_s()
            reader.send(sent.payload)
            await reader.ended
        if reader.failure is not None:
            sent.trouble, sent.detail = "connection", _without_address(reader.failure)
    except TimeoutError:
        sent.trouble, sent.detail = "timeout", f"no end within {timeout_s:g} s"
    except asyncio.CancelledError:
        sent.trouble = "interrupted"
        raise
    except OSError as error:
        sent.trouble, sent.detail = "connection", _without_address(error)
    finally:
        sent.ended_s = now_s()
        if reader is not None:
            sent.reads = reader.reads
            reader.transport.abort()


async def _sleep_until(due_s):
    """Never wake early, though uvloop counts in whole milliseconds."""
    while (left_s := due_s - now_s()) > 0:
        await asyncio.sleep(max(left_s, 0.001))


def _without_address(error):
    """An error's words; the event loop's own name the address, which is nobody's business."""
    return os.strerror(error.errno) if getattr(error, "errno", None) else type(error).__name__


# ---- loops


async def _closed_loop(target, requests, concurrency, stagger_s, timeout_s):
    """N streams, each with one request in flight; stream k starts k/N of `stagger_s` after the first."""
    start_s = now_s()

    async def run(number):
        due_s = start_s + stagger_s * number / concurrency
        await _sleep_until(due_s)
        for sent in requests[number::concurrency]:
            sent.scheduled_s = due_s
            await _exchange(target, sent, timeout_s)
            due_s = sent.ended_s

    await asyncio.gather(*(run(number) for number in range(concurrency)))


async def _open_loop(target, requests, rate_per_s, seed, timeout_s, connect_ahead_s=0.2):
    """Poisson arrivals at `rate_per_s` by seed; a connection is opened shortly before its arrival is due."""
    gaps, due_s = random.Random(seed), now_s() + connect_ahead_s

    async def run(sent):
        await _sleep_until(sent.scheduled_s - connect_ahead_s)
        await _exchange(target, sent, timeout_s, not_before_s=sent.scheduled_s)

    for sent in requests:
        sent.scheduled_s = due_s
        due_s += gaps.expovariate(rate_per_s)
    await asyncio.gather(*(run(sent) for sent in requests))


# ---- what runs beside them


async def _fetch_metrics(target, timeout_s=5.0):
    """(seconds, bytes of the answer) of one GET /metrics, unparsed; no bytes where there was no answer."""
    sent = Sent(0, 0, "", 0, 0, target.head("GET", "/metrics"))
    await _exchange(target, sent, timeout_s)
    return sent.sent_s or now_s(), sent.reads


async def _sample_metrics(target, samples):
    while True:
        samples.append(await _fetch_metrics(target))
        await asyncio.sleep(METRICS_INTERVAL_S)


async def _watch_lag(lags):
    while True:
        due_s = now_s() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(max(0.0, now_s() - due_s))


def _metrics_text(reads):
    status, body = stream.body(reads)
    return body.decode("utf-8", "replace") if status == 200 else None


def _cpu_time_s(pid):
    """CPU seconds, user and system, of a process and all below it; None where there is no such process."""
    try:
        process = psutil.Process(pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    except (psutil.Error, TypeError):
        return None
    return sum(each.user + each.system for each in times)


# ---- one point


@dataclass
class Run:
    """One point on its way: how it is measured, and what it has gathered so far, all of it raw."""

    target: Target
    point: dict
    seed: int
    warmup: int
    width: int  # requests in flight; 1 for the warm-up of an open loop
    timeout_s: float
    stagger_s: float | None
    server_pid: int | None
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    start_s: float = field(default_factory=now_s)
    requests: list = field(default_factory=list)
    samples: list = field(default_factory=list)
    lags_s: list = field(default_factory=list)
    counters: list = field(default_factory=list)  # /metrics before and after the measured requests
    cpu_times_s: list = field(default_factory=list)
    measured_from_s: float | None = None
    ended_s: float | None = None
    telemetry: sampling.Telemetry | None = None  # of a server of our own; another's machine is unknown


def run_point(
    base_url, model, point, prompts, seed, *, warmup=0, timeout_s=600.0, token_variable=None, server_pid=None,
    stagger_s=None, on_record=None,
):  # fmt: skip
    """Measure one serving point; return its "request" records and, last, its "point" record.

    `point` names loop ("closed", "open"), concurrency or request_rate_per_s, output_tokens and output_jitter
    (0.1 draws lengths from 90 % to 110 % by `seed`). `prompts` are lists of token ids, used once each: the
    first `warmup` (never fewer than the concurrency) warm up, the rest are measured. Measured streams start
    spread over `stagger_s`, by default the warm-up's median duration. `on_record` gets each record when the
    point is over; when it is interrupted, those of the requests that had ended. Raises ValueError for a
    point that cannot be, nothing for what a server does.
    """
    width = 1 if point["loop"] == "open" else point["concurrency"]
    run = Run(Target(base_url, token_variable), point, seed, max(width, warmup), width,
              timeout_s, stagger_s, server_pid)  # fmt: skip
    if len(prompts) <= run.warmup:
        raise ValueError(f"{len(prompts)} prompts leave none to measure after a warm-up of {run.warmup}")
    run.requests = _prepare(run, model, prompts)
    records = []

    def hand_over(record):
        records.append(record)
        if on_record is not None:
            on_record(record)

    try:
        _run_in_thread(_measure(run))
    finally:  # also when interrupted: what is complete is handed over
        for sent in run.requests:
            if sent.ended_s is not None and sent.trouble != "interrupted":
                hand_over(_request_record(run, sent))
    hand_over(_point_record(run, records))
    return records


def _prepare(run, model, prompts):
    """Every request of the point as bytes, before any clock runs."""
    lengths, jitter = random.Random(run.seed), run.point.get("output_jitter") or 0.0
    requests = []
    for index, prompt in enumerate(prompts):
        factor = 1 + jitter * (2 * lengths.random() - 1)
        output_tokens = max(1, round(run.point["output_tokens"] * factor))
        body = {
            "model": model, "prompt": list(prompt), "max_tokens": output_tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        phase, number = ("warmup", index) if index < run.warmup else ("measured", index - run.warmup)
        stream_number = number if run.point["loop"] == "open" else number % run.width
        payload = run.target.request(body)
        requests.append(Sent(index, stream_number, phase, len(prompt), output_tokens, payload))
    return requests


async def _measure(run):
    """Warm up, then measure with the samplers beside it; a server without one answer in its time is not measured."""
    warm, measured = run.requests[: run.warmup], run.requests[run.warmup :]
    await _closed_loop(run.target, warm, run.width, 0.0, run.timeout_s)
    run.counters.append(await _fetch_metrics(run.target))
    if all(sent.trouble == "timeout" and stream.parse(sent.reads).error for sent in warm):
        return
    run.telemetry = sampling.Telemetry(run.server_pid) if run.server_pid else None
    run.cpu_times_s.append(_cpu_time_s(run.server_pid))
    beside = [
        asyncio.create_task(_watch_lag(run.lags_s)),
        asyncio.create_task(_sample_metrics(run.target, run.samples)),
    ]
    try:
        with run.telemetry or nullcontext():
            run.measured_from_s = now_s()
            await _send(run, warm, measured)
            run.ended_s = now_s()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    run.cpu_times_s.append(_cpu_time_s(run.server_pid))
    run.counters.append(await _fetch_metrics(run.target))


async def _send(run, warm, measured):
    """The measured requests, in the loop that the point asks for."""
    if run.point["loop"] == "open":
        rate_per_s = run.point["request_rate_per_s"]
        await _open_loop(run.target, measured, rate_per_s, run.seed, run.timeout_s)
    else:
        stagger_s = run.stagger_s
        if stagger_s is None:
            stagger_s = median(sent.ended_s - sent.scheduled_s for sent in warm)
        await _closed_loop(run.target, measured, run.width, stagger_s, run.timeout_s)


def _run_in_thread(measuring):
    """Run a coroutine on an event loop of its own (a notebook's thread has one already), collector off."""
    loop = new_event_loop()
    task = loop.create_task(measuring)
    ended = threading.Event()  # a join that Ctrl-C interrupts takes the thread for ended

    def work():
        try:
            loop.run_until_complete(asyncio.wait([task]))
            loop.close()
        finally:
            ended.set()

    collecting = gc.isenabled()
    gc.disable()
    try:
        threading.Thread(target=work, name="kvlab-client").start()
        ended.wait()
    except BaseException:  # Ctrl-C lands here: end the streams, then let it go on
        loop.call_soon_threadsafe(task.cancel)
        ended.wait()
        raise
    finally:
        if collecting:
            gc.enable()
    task.result()


# ---- records


def _request_record(run, sent):
    answer = stream.parse(sent.reads)
    origin_s = sent.sent_s if sent.sent_s is not None else sent.scheduled_s
    status, reason, detail = _verdict(sent, answer)
    return {
        "experiment": "s1", "kind": "request", "point": run.point, "attempt": run.attempt,
        "status": status, "reason": reason, "detail": detail,
        "request": sent.index, "stream": sent.stream, "phase": sent.phase,
        "scheduled_s": _since(sent.scheduled_s, run.start_s), "sent_s": _since(sent.sent_s, run.start_s),
        "client_wait_s": _since(sent.sent_s, sent.scheduled_s),
        "arrival_times_s": [_since(at_s, origin_s) for at_s in answer.arrival_times_s],
        "chunk_tokens": answer.chunk_tokens, "token_count_source": answer.token_count_source,
        "finished_s": _since(answer.finished_s, origin_s),
        "prompt_tokens": answer.prompt_tokens, "requested_prompt_tokens": sent.prompt_tokens,
        "output_tokens": answer.output_tokens, "requested_output_tokens": sent.output_tokens,
        "finish_reason": answer.finish_reason, "http_status": answer.http_status,
    }  # fmt: skip


def _verdict(sent, answer):
    """(status, reason, detail): an answer that finished is a success, whatever the connection did then."""
    if answer.error is None:
        return "ok", None, None
    if sent.trouble and answer.error in ("truncated", "connection"):
        return ("timeout" if sent.trouble == "timeout" else "failed"), sent.trouble, sent.detail
    return "failed", answer.error, answer.detail


def _since(at_s, origin_s):
    return None if at_s is None or origin_s is None else at_s - origin_s


def _lost_server(run, measured):
    """Why the point is void though some requests were answered: its server had gone or failed by the end."""
    if run.counters[0][1] and not run.counters[1][1]:
        return "server_gone"
    last = {record["stream"]: record["reason"] or "" for record in measured}
    lost = ("connection", "timeout", "truncated", "server_error", "http_5")
    return "server_failing" if all(reason.startswith(lost) for reason in last.values()) else None


def _point_record(run, records):
    shared = {"experiment": "s1", "kind": "point", "point": run.point, "attempt": run.attempt}
    if run.ended_s is None:  # it ended with its warm-up
        reason = "timeout" if run.counters[0][1] else "server_gone"
        return shared | {"status": "failed", "reason": reason, "requests": 0, "failed_requests": 0}
    measured = [record for record in records if record["phase"] == "measured"]
    before, after = (metrics.parse(_metrics_text(reads)) for _, reads in run.counters)
    failures = [record["reason"] for record in measured if record["status"] != "ok"]
    reason = failures[0] if len(failures) == len(measured) else _lost_server(run, measured)
    cpu_before_s, cpu_after_s = run.cpu_times_s
    return shared | {
        "status": "failed" if reason else "ok", "reason": reason,
        "requests": len(measured), "failed_requests": len(failures),
        "measured_from_s": run.measured_from_s - run.start_s, "duration_s": run.ended_s - run.measured_from_s,
        "server_samples": [
            metrics.sample(at_s - run.start_s, _metrics_text(reads)) for at_s, reads in run.samples if reads
        ],
        "server_deltas": metrics.deltas(before, after),
        "event_loop_lag_s": [median(run.lags_s), max(run.lags_s)] if run.lags_s else None,
        "server_cpu_time_s": _since(cpu_after_s, cpu_before_s),
        "telemetry": run.telemetry and run.telemetry.record(),
    }  # fmt: skip
