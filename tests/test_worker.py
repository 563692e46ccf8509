"""The child process: it answers, it dies with its parent, and its own death is one failed point."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

import kvlab
from kvlab import models
from kvlab.measure.child import Session
from kvlab.measure.worker import Worker

ROOT = str(Path(kvlab.__file__).parents[1])
SLOW = {"context_length": 1500, "output_tokens": 500}  # minutes without cache


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Name a random llama that is heavy at long contexts: a folder with nothing but a configuration."""
    folder = tmp_path_factory.mktemp("wide")
    settings = {**models.TINY, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8,
                "max_position_embeddings": 8192}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return f"random:{folder}"


@pytest.fixture(scope="module")
def measuring(wide):
    """One worker for all tests: they also show that none leaves it unfit for the next."""
    with Worker(models.resolve(wide), "float32", "cpu", threads=1) as worker:
        yield worker
        pid = worker.pid
    wait_until_gone(pid)


def point(**changes):
    return {"dtype": "float32", "attention": "eager", "cache": "dynamic", "context_length": 24,
            "output_tokens": 8, "batch_size": 1, **changes}  # fmt: skip


def statuses(records):
    return [record["status"] for record in records]


def wait_until_gone(pid, within_s=5.0):
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_pairs_come_back_with_what_only_the_worker_knows(measuring):
    pairs = [measuring.measure_pair(point(), 0, control=True),
             measuring.measure_pair(point(attention="sdpa"), 0),
             measuring.measure_pair(point(), 0, negative_control=True)]  # fmt: skip
    records = [record for pair in pairs for record in pair]
    assert {(record["file_type"], record["dequantised"]) for record in records} == {("random weights", False)}
    assert statuses(records) == ["ok"] * 6
    assert [record["order"] for record in records] == list(range(6))
    assert [record["control"] for record in records] == [True] * 2 + [False] * 4
    assert [record["negative_control"] for record in records] == [False] * 4 + [True] * 2
    assert len({record["process"] for record in records}) == 1
    assert len({record["pair"] for record in records}) == 3
    json.dumps(records)


def test_a_request_that_cannot_be_answered_does_not_end_the_worker(measuring):
    pid = measuring.pid
    broken = measuring.measure_pair({"attention": "eager"}, 0)
    assert statuses(broken) == ["failed"] * 2 and "KeyError" in broken[0]["reason"]
    assert statuses(measuring.measure_pair(point(), 0)) == ["ok"] * 2 and measuring.pid == pid


@pytest.fixture(scope="module")
def weighing(wide):
    """One worker that measures memory: each point in a process of its own."""
    with Worker(models.resolve(wide), "float32", "cpu", threads=1, for_memory=True) as worker:
        yield worker


def weighed(worker, length):
    return worker.measure_memory(point(context_length=length, output_tokens=1, threads=1), 0)


def test_br34_the_peak_of_a_point_is_the_same_whatever_was_measured_before(weighing):
    def peaks(order):
        return {(length, r["use_cache"]): r["peak_memory_bytes"] for length in order for r in weighed(weighing, length)}

    upwards, downwards = peaks([256, 1024, 2048]), peaks([2048, 1024, 256])
    if None in upwards.values():
        pytest.skip("this system does not let a process restart its peak")
    for name, peak in upwards.items():
        assert downwards[name] == pytest.approx(peak, rel=0.01), name
    scores_bytes = 8 * 2048**2 * 4  # heads, tokens squared, float32: one layer's, all freed again
    assert downwards[2048, True] - downwards[256, True] > scores_bytes, "a later small point may need less"


def test_memory_is_weighed_in_a_process_of_the_points_own_and_says_what_it_consists_of(weighing):
    cached, uncached = sorted(weighed(weighing, 300), key=lambda record: not record["use_cache"])
    assert cached["kind"] == uncached["kind"] == "memory" and statuses([cached, uncached]) == ["ok"] * 2
    assert cached["kv_cache_bytes"] == 2 * 2 * 300 * 64 * 4 and uncached["kv_cache_bytes"] is None
    assert cached["reserved_memory_bytes"] is None, "no allocator on a CPU keeps a reserve that it tells"
    assert cached["parameter_bytes"] > 0 and cached["cpu_time_s"] > 0 and cached["resident_set_bytes"] > 0


def test_memory_that_runs_out_is_recorded_given_back_and_the_next_point_runs(measuring):
    pid, in_use = measuring.pid, psutil.Process(measuring.pid).memory_info().vms
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (in_use + 2**28, before[1]))
    too_long = measuring.measure_pair(point(context_length=6000, output_tokens=2), 0)
    after = measuring.measure_pair(point(context_length=100), 0)
    resource.prlimit(pid, resource.RLIMIT_AS, before)
    assert statuses(too_long) == ["out_of_memory"] * 2 and "memory" in too_long[0]["reason"]
    assert statuses(after) == ["ok"] * 2 and measuring.pid == pid, "the same process goes on"


def test_memory_that_runs_out_where_it_is_weighed_is_recorded_and_the_next_point_runs(weighing):
    weighed(weighing, 16)  # the model is loaded
    before = resource.prlimit(weighing.pid, resource.RLIMIT_AS)
    limit = psutil.Process(weighing.pid).memory_info().vms + 2**28
    resource.prlimit(weighing.pid, resource.RLIMIT_AS, (limit, before[1]))
    too_long, after = weighed(weighing, 6000), weighed(weighing, 100)
    resource.prlimit(weighing.pid, resource.RLIMIT_AS, before)
    assert statuses(too_long) == ["out_of_memory"] * 2 and statuses(after) == ["ok"] * 2
    assert {record["kind"] for record in too_long} == {"memory"}


def test_a_worker_that_the_system_killed_for_want_of_memory_ran_out_of_memory(measuring):
    measuring.measure_pair(point(), 0)
    measuring._killed_before = -1  # as if the system's count of such kills had risen since the start
    threading.Timer(1.0, os.kill, (measuring.pid, signal.SIGKILL)).start()
    killed = measuring.measure_pair(point(**SLOW), 0)
    assert statuses(killed) == ["out_of_memory"] * 2 and "the system ran out of memory" in killed[0]["reason"]


def test_a_killed_worker_is_a_failed_pair_and_the_next_process_draws_the_same_prompts(measuring):
    before = [measuring.measure_pair(point(), repetition)[0] for repetition in (0, 1)]
    threading.Timer(1.0, os.kill, (measuring.pid, signal.SIGKILL)).start()
    killed = measuring.measure_pair(point(**SLOW), 0)
    after = [measuring.measure_pair(point(), repetition)[0] for repetition in (0, 1)]
    assert statuses(killed) == ["failed", "failed"] and statuses(after) == ["ok", "ok"]
    assert killed[0]["reason"] == "worker killed by signal 9 (SIGKILL)"
    assert {record["use_cache"] for record in killed} == {True, False}
    assert before[0]["process"] != after[0]["process"]
    tokens = [record["token_ids"] for record in before + after]
    assert tokens[:2] == tokens[2:] and tokens[0] != tokens[1]


def test_a_model_that_cannot_be_measured_is_refused_in_words():
    session = Session(asdict(models.resolve("random:mamba")), "float32", "cpu", threads=1)
    answer = session.answer({"ask": "measure_pair", "point": point(), "entropy": [0]})
    assert answer["status"] == "refused" and "mamba has no KV cache" in answer["error"]


SCRIPT = """
import sys, time
from kvlab import models
from kvlab.measure.worker import Worker
point = {"dtype": "float32", "attention": "eager", "cache": "dynamic", "batch_size": 1, **eval(sys.argv[2])}
with Worker(models.resolve(sys.argv[1]), "float32", "cpu", 1) as worker:
    worker.measure_pair(point | {"context_length": 16, "output_tokens": 2}, 0)  # the model is loaded
    print(worker.pid, flush=True)
    worker.measure_pair(point, 0)
"""


def parent(tmp_path, model, **changes):
    """Start a plain script, without a guard around its main part, that measures one pair."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), model, repr(changes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ROOT}, **pipes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_worker_dies_with_its_parent_in_the_middle_of_work(tmp_path, wide, how):
    running = parent(tmp_path, wide, **SLOW)
    pid = int(running.stdout.readline())
    time.sleep(1.0)
    assert psutil.pid_exists(pid)
    running.send_signal(how)
    running.communicate(timeout=10)
    wait_until_gone(pid)
    assert running.returncode != 0
