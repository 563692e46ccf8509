"""What the client says a stream took is held against what the server wrote down while it sent it."""

import asyncio
import base64
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from sse_cases import CASES, DONE, Case, text, usage
from test_stream import chunked

from kvlab.analyse import definitions
from kvlab.measure import client

HERE = Path(__file__).parent
TOLERANCE_S = 0.002
TRIES = 30  # only what was off is tried again
QUICK = Case([(1, text("a", **usage(1))), (2, text("b", "length", **usage(2))), (2, DONE)], {})
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
POINT = {"loop": "closed", "concurrency": 1, "output_tokens": 16, "output_jitter": 0.0}


def script(case):
    writes = [(at_ms, base64.b64encode(content).decode()) for at_ms, content in case.writes]
    return {"status": case.http_status, "headers": case.headers, "writes": writes, "close": case.close}


class Replay:
    """A replay server for the tests: its address, its log, and one way to run a point against it."""

    def __init__(self, port, process=None):
        self.base_url, self.process = f"http://127.0.0.1:{port}", process

    def log(self):
        """The server's log of the requests that were measured (the warm-up asks for script 0)."""
        with urllib.request.urlopen(self.base_url + "/log") as answer:
            return [entry for entry in json.load(answer) if entry["script"]]

    def measure(self, *numbers, point=POINT, **options):
        """(measured request records, point record) of a run that asks for these scripts in turn."""
        prompts = [[0, 5]] * max(1, point.get("concurrency", 1)) + [[number, 5, 6, 7] for number in numbers]
        options = {"timeout_s": 5.0, "stagger_s": 0.0} | options
        records = client.run_point(self.base_url, "m", point, prompts, 3, **options)
        return [record for record in records if record.get("phase") == "measured"], records[-1]


@contextmanager
def replaying(tmp_path, *cases, warmup=QUICK):
    """A replay server whose script 0 is what warms it up, followed by `cases`."""
    path = tmp_path / "scripts.json"
    path.write_text(json.dumps([script(case) for case in (warmup, *cases)]))
    command = [sys.executable, HERE / "replay_server.py", path]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Replay(int(server.stdout.readline()), server)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def errors_s(case, record, entry):
    """How far the record's TTFT, TPOT and E2E lie from what the server's log says, in seconds."""
    expect, tokens = case.expect, case.expect["output_tokens"]

    def written_s(nominal_ms):
        at_ms = [at_ms for at_ms, _ in case.writes]
        index = max(i for i in range(len(at_ms)) if abs(at_ms[i] - nominal_ms) < 0.5)
        return entry["write_times_s"][index] - entry["received_s"]

    errors = []
    if expect.get("ttft"):
        errors.append(definitions.ttft_s(record) - written_s(expect["ttft"]))
    if expect.get("tpot"):
        last_ms = expect["ttft"] + expect["tpot"] * (tokens - 1)
        true_s = (written_s(last_ms) - written_s(expect["ttft"])) / (tokens - 1)
        errors.append(definitions.tpot_s(record) - true_s)
    if expect.get("e2e"):
        errors.append(definitions.e2e_s(record) - written_s(expect["e2e"]))
    return [abs(error) for error in errors]


def check_counts(name, record):
    expect = CASES[name].expect
    assert (record["status"], record["reason"]) == (expect.get("status", "ok"), expect.get("reason")), name
    assert (record["http_status"] or 0) == CASES[name].http_status, name
    if record["status"] == "ok":
        assert record["output_tokens"] == expect["output_tokens"], name
        for key, value in (("ttft", definitions.ttft_s(record)), ("tpot", definitions.tpot_s(record))):
            if key in expect:
                assert (value is None) == (expect[key] is None), (name, key)


def test_every_case_replayed_at_its_times(tmp_path):
    """Counts must be right each time; a busy machine may delay a reading, so timing has a few more tries."""
    names = waiting = [name for name in CASES if name != "hang"]
    with replaying(tmp_path, *(CASES[name] for name in names)) as server:
        for _ in range(TRIES):
            before = len(server.log())
            records, point = server.measure(*(names.index(name) + 1 for name in waiting))
            log = server.log()[before:]
            assert len(log) == len(waiting) == point["requests"]  # nothing was retried
            far = []
            for name, record, entry in zip(waiting, records, log, strict=True):
                check_counts(name, record)
                if record["status"] == "ok" and max(errors_s(CASES[name], record, entry)) > TOLERANCE_S:
                    far.append(name)
            waiting = far
            if not waiting:
                return
    raise AssertionError(f"off by more than {TOLERANCE_S} s in each of {TRIES} tries: {waiting}")


@pytest.fixture(params=["asyncio", "uvloop"])
def either_loop(request, monkeypatch):
    """What a record says must not depend on the event loop that the machine happens to have."""
    monkeypatch.setattr(client, "new_event_loop", pytest.importorskip(request.param).new_event_loop)


@pytest.mark.usefixtures("either_loop")
def test_br09_failures_are_records_and_the_run_goes_on(tmp_path):
    names = ["truncated_clean", "truncated_reset", "hang", "finish_without_done"]
    with replaying(tmp_path, *(CASES[name] for name in names)) as server:
        records, point = server.measure(1, 2, 3, 4, timeout_s=0.5)
    assert [record["reason"] for record in records] == ["truncated", "connection", "timeout", None]
    assert [len(record["arrival_times_s"]) for record in records] == [4, 4, 4, 2]
    assert (point["status"], point["requests"], point["failed_requests"]) == ("ok", 4, 3)


@pytest.mark.usefixtures("either_loop")
def test_br09_a_refused_connection_is_a_record():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        records, point = Replay(port).measure(1, 1)
    assert [record["reason"] for record in records] == ["connection"] * 2
    assert all(record["sent_s"] is None and record["arrival_times_s"] == [] for record in records)
    assert records[0]["detail"] == "Connection refused"  # whose, is nobody's business
    assert (point["status"], point["reason"]) == ("failed", "connection")
    assert set(point["server_deltas"].values()) == {None} and point["server_samples"] == []


def test_br10_no_retry_and_failures_by_status(tmp_path):
    with replaying(tmp_path, QUICK, CASES["http_429"], CASES["http_500"]) as server:
        records, point = server.measure(2, 1, 3, 1, 2, 1, 1, 3, 1, 2)
        assert len(server.log()) == 10
    reasons = [record["reason"] for record in records]
    assert (reasons.count("http_429"), reasons.count("http_500"), reasons.count(None)) == (3, 2, 5)
    assert point["failed_requests"] == 5


def test_br12_every_request_asks_for_usage(tmp_path):
    with replaying(tmp_path, QUICK) as server:
        server.measure(1, 1)
        bodies = [entry["body"] for entry in server.log()]
    for body in bodies:
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert (body["stream"], body["ignore_eos"]) == (True, True)
        assert (body["temperature"], body["max_tokens"]) == (0, 16)
        assert body["prompt"] == [1, 5, 6, 7]


def test_closed_loop_keeps_n_in_flight_from_staggered_starts(tmp_path):
    slow = Case([(100, text("a", **usage(1))), (200, text("b", "length", **usage(2))), (200, DONE)], {})
    point = {**POINT, "concurrency": 4, "output_jitter": 0.25}
    with replaying(tmp_path, slow) as server:
        records, summary = server.measure(*[1] * 16, point=point, stagger_s=2.0)
        log = server.log()
    firsts = {record["stream"]: record["sent_s"] for record in reversed(records)}
    gaps_s = [firsts[i + 1] - firsts[i] for i in range(3)]
    assert gaps_s == pytest.approx([0.5] * 3, abs=0.3)
    for stream in range(4):
        mine = [record for record in records if record["stream"] == stream]
        ends_s = [record["sent_s"] + definitions.e2e_s(record) for record in mine]
        waits_s = [record["sent_s"] - end_s for record, end_s in zip(mine[1:], ends_s, strict=False)]
        assert all(0 <= wait_s < 0.5 for wait_s in waits_s)
    asked = {record["requested_output_tokens"] for record in records}
    assert len(asked) > 3 and min(asked) >= 12 and max(asked) <= 20
    assert sorted(entry["body"]["max_tokens"] for entry in log) == sorted(
        record["requested_output_tokens"] for record in records
    )
    assert summary["event_loop_lag_s"][0] < 0.5
    assert summary["server_samples"][0]["kv_cache_usage"] == 0.25
    assert summary["server_deltas"]["generation_tokens"] == 16
    assert summary["server_deltas"]["prefix_hits"] is None


@pytest.mark.usefixtures("either_loop")
def test_open_loop_sends_on_schedule_whatever_the_server_does(tmp_path):
    slow = Case([(300, text("a", "length", **usage(1))), (300, DONE)], {})
    point = {"loop": "open", "request_rate_per_s": 40.0, "output_tokens": 1}
    with replaying(tmp_path, slow) as server:
        records, _ = server.measure(*[1] * 20, point=point)
        again, _ = server.measure(*[1] * 20, point=point)
    gaps_s = [b["scheduled_s"] - a["scheduled_s"] for a, b in zip(records, records[1:], strict=False)]
    assert 0.3 / 40 < sum(gaps_s) / len(gaps_s) < 2 / 40 and max(gaps_s) > 2 * min(gaps_s)
    assert gaps_s == pytest.approx(
        [b["scheduled_s"] - a["scheduled_s"] for a, b in zip(again, again[1:], strict=False)], abs=1e-6
    )
    for record in records:
        assert record["client_wait_s"] == pytest.approx(record["sent_s"] - record["scheduled_s"], abs=1e-9)
        assert 0 <= record["client_wait_s"] < 0.5


def test_a_token_goes_to_the_server_and_into_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_TEST_TOKEN", "s3cret-token")
    with replaying(tmp_path, QUICK) as server:
        server.base_url += "/api/predict/x/v1"
        records, point = server.measure(1, token_variable="KVLAB_TEST_TOKEN")
        server.base_url = server.base_url.removesuffix("/api/predict/x/v1")
        (entry,) = server.log()
    assert entry["headers"]["authorization"] == "Bearer s3cret-token"
    assert records[0]["status"] == "ok" and "s3cret" not in json.dumps([*records, point])


def test_an_interrupted_run_hands_over_what_had_ended(tmp_path):
    program = f"""
import sys; sys.path[:0] = [{str(HERE)!r}]
from kvlab.measure import client
kept = []
try:
    client.run_point(sys.argv[1], "m", {POINT!r}, [[0], [1], [1], [2]], 1, stagger_s=0, on_record=kept.append)
except KeyboardInterrupt:
    print([(r["kind"], r["phase"], r["status"]) for r in kept])
"""
    with replaying(tmp_path, QUICK, CASES["hang"]) as server:
        command = [sys.executable, "-c", program, server.base_url]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        wait_until(lambda: len(server.log()) == 3)
        run.send_signal(2)
        output, _ = run.communicate(timeout=10)
    assert output.strip() == str([("request", phase, "ok") for phase in ("warmup", "measured", "measured")])


def wait_until(condition, timeout_s=20.0):
    ends_at_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at_s, "it did not come to that"
        time.sleep(0.05)


def test_it_runs_inside_a_running_event_loop(tmp_path):
    async def cell():
        return server.measure(1)

    with replaying(tmp_path, QUICK) as server:
        (record,), _ = asyncio.run(cell())
    assert record["status"] == "ok"


OPEN = {
    None: OK + b"".join(chunked(x) for x in (text("a", **usage(1)), text("b", "length", **usage(2)), DONE))
    + b"0;last=1\r\nx-checksum: 7\r\n\r\n",
    "http_429": b"HTTP/1.1 429 X\r\ncontent-length: 2\r\n\r\n{}",
    "http_302": b"HTTP/1.1 302 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("reason", OPEN)
def test_a_server_that_keeps_its_connections_open_holds_up_nothing(reason):
    """Each answer ends where its own framing says so, cut into single bytes though it be."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for index in range(len(OPEN[reason])):
            writer.write(OPEN[reason][index : index + 1])
        await writer.drain()

    async def measure():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        return await asyncio.to_thread(Replay(port).measure, 1, timeout_s=20.0)

    started_s = time.monotonic()
    (record,), _ = asyncio.run(measure())
    assert record["reason"] == reason and time.monotonic() - started_s < 10


def test_too_few_prompts_are_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="none to measure after a warm-up of 4"):
        client.run_point("http://127.0.0.1:9", "m", {**POINT, "concurrency": 4}, [[1]] * 4, 1)


def test_br39_an_engine_that_dies_behind_its_server_makes_the_point_invalid(tmp_path):
    with replaying(tmp_path, QUICK, CASES["http_500"], CASES["hang"]) as server:
        runs = ((1, 1), (1, 2, 1), (1, 2, 3))
        fine, hiccup, failing = (server.measure(*numbers, timeout_s=0.3)[1] for numbers in runs)
    assert (fine["status"], hiccup["status"], hiccup["failed_requests"]) == ("ok", "ok", 1)
    assert (failing["status"], failing["reason"]) == ("failed", "server_failing")
    assert failing["failed_requests"] == 2


def test_a_token_that_is_not_set_is_named():
    with pytest.raises(ValueError, match="KVLAB_NO_TOKEN"):
        Replay(9).measure(1, token_variable="KVLAB_NO_TOKEN")


def test_br39_a_server_that_dies_in_mid_run_makes_the_point_invalid(tmp_path):
    long = Case([(50, text("a", **usage(1))), (2000, text("b", "length", **usage(2))), (2000, DONE)], {})
    with replaying(tmp_path, QUICK, long) as server:
        threading.Timer(0.6, server.process.kill).start()
        records, point = server.measure(1, 2, 1, 1)
    assert records[0]["status"] == "ok"
    assert [record["reason"] for record in records[1:]] == ["truncated", "connection", "connection"]
    assert (point["status"], point["reason"]) == ("failed", "server_gone")


@pytest.mark.parametrize("metrics_too", [True, False])
def test_br39_a_server_that_hangs_costs_one_timeout_a_point_and_not_one_a_request(tmp_path, metrics_too):
    """With ten minutes a request and seven requests a point, a hung server would take a rented hour for itself."""
    with replaying(tmp_path, warmup=CASES["hang"]) as hung, socket.create_server(("127.0.0.1", 0)) as silent:
        url = hung.base_url if metrics_too else f"http://127.0.0.1:{silent.getsockname()[1]}"
        records = client.run_point(url, "m", POINT, [[0, 5]] * 4, 3, timeout_s=0.7)
    assert [(r["kind"], r["status"], r["reason"]) for r in records] == [
        ("request", "timeout", "timeout"),
        ("point", "failed", "timeout" if metrics_too else "server_gone"),
    ]


@pytest.mark.parametrize("size", [10, 20_000_000])
def test_a_request_is_in_the_socket_when_its_clock_starts(size):
    """Whatever the event loop does next, and however little of a long prompt the socket takes at a time."""

    async def exchange(listener):
        reader = await client.Target(f"http://127.0.0.1:{listener.getsockname()[1]}").connect()
        connection, _ = listener.accept()
        connection.settimeout(5)
        reader.send(b"x" * size)
        at_once = connection.recv(10)  # this thread has given the loop no chance to do anything
        rest = await asyncio.to_thread(receive, connection, size - 10)
        reader.transport.abort()
        return at_once, rest

    def receive(connection, left):
        while left > 0:
            left -= len(connection.recv(1 << 20))
        return left

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert client.new_event_loop().run_until_complete(exchange(listener)) == (b"x" * 10, 0)
