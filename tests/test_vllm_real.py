"""The real vLLM with real weights, started once: what the fake cannot show."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import psutil
import pytest
from test_server import family, gone, port_is_free

from kvlab import models, prompts, weights
from kvlab.analyse import definitions
from kvlab.analyse import serving as s1
from kvlab.measure import client, server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]
NOTEBOOK = """
import json, os, sys
from kvlab.measure.server import VllmServer
folder, log_path = sys.argv[1:]
with VllmServer(folder, "smol", 640, "float32", True, 96 * 2**20, log_path=log_path) as server:
    said = {"base_url": server.base_url, "port": server.port, "pid": server.pid, **server.facts()}
    said["token"] = os.environ[server.token_variable]
    print(json.dumps(said), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder():
    return weights.served_folder(models.resolve("smollm2-135m-instruct"), "float32")


@pytest.fixture(scope="module")
def running(folder, tmp_path_factory):
    """A process that holds a server, as a notebook does, and what it says of it."""
    log_path = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [sys.executable, "-c", NOTEBOOK, folder, log_path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said = json.loads(process.stdout.readline() or "{}")
    assert said, log_path.read_text()[-2000:]
    yield process, said
    process.kill()
    process.wait()


def measure(said, concurrency, context_length, output_tokens, per_stream):
    point = {"loop": "closed", "concurrency": concurrency}
    point |= {"output_tokens": output_tokens, "output_jitter": 0.25}
    asked = [
        prompts.token_ids(context_length, concurrency, index, 49152)
        for index in range(concurrency * (1 + per_stream))
    ]
    os.environ[server.TOKEN_VARIABLE] = said["token"]
    records = client.run_point(said["base_url"], "smol", point, asked, 5, server_pid=said["pid"],
                               token_variable=server.TOKEN_VARIABLE)  # fmt: skip
    return [record for record in records if record.get("phase") == "measured"], records[-1]


def test_each_request_gets_its_tokens_and_the_counters_agree(running):
    records, point = measure(running[1], 3, 128, 8, 3)
    assert {record["status"] for record in records} == {"ok"} and point["status"] == "ok"
    for record in records:
        assert record["prompt_tokens"] == record["requested_prompt_tokens"] == 128
        assert record["output_tokens"] == record["requested_output_tokens"] == sum(record["chunk_tokens"])
        assert record["token_count_source"] == "usage" and record["finish_reason"] == "length"
        assert 0 < definitions.ttft_s(record) < definitions.e2e_s(record)
    deltas = point["server_deltas"]
    assert deltas["prompt_tokens"] == 128 * len(records)
    assert deltas["generation_tokens"] == sum(record["output_tokens"] for record in records)
    assert not deltas["prefix_hits"] and deltas["preemptions"] == 0
    assert max(sample["running"] for sample in point["server_samples"]) >= 1
    assert 0 < max(sample["kv_cache_usage"] for sample in point["server_samples"]) <= 1
    assert point["server_cpu_time_s"] > 0.1


def test_the_cache_holds_what_its_bytes_allow(running, folder):
    """Capacity predicted from the configuration: equal to the block, and to the token as vLLM counts them."""
    per_token = s1.kv_bytes_per_token(json.loads((folder / "config.json").read_text()), "float32")
    point = {"kind": "point", "attempt": "a", "status": "ok", "server": running[1]}
    (row,) = s1.capacity([point], per_token)
    assert row["space_bytes"] == 96 * 2**20 and row["block_tokens"]
    assert (row["blocks"], row["tokens"]) == (row["blocks_predicted"], row["tokens_predicted"])


def test_the_engine_is_bound_to_its_cpus(running):
    said = running[1]
    threads = [thread.id for process in family(said["pid"]) for thread in process.threads()]
    assert said["thread_cpus"] == server.thread_cpus()
    assert set(said["thread_cpus"]) in [os.sched_getaffinity(thread) for thread in threads]


def test_a_notebook_killed_with_its_guard_leaves_no_process_and_no_port(running):
    process, said = running
    everyone = family(process.pid)[1:]
    assert len(everyone) >= 3  # the guard, the server, its engine
    psutil.Process(said["pid"]).parent().kill()
    process.kill()
    process.wait()
    assert gone(everyone, 10) and port_is_free(said["port"])


def test_br37_a_context_beyond_the_cache_is_refused_with_the_length_that_fits(folder, tmp_path):
    with pytest.raises(server.ServerError) as caught:
        with server.VllmServer(folder, "smol", 4096, "float32", True, kv_cache_space_bytes=48 * 2**20,
                               log_path=tmp_path / "log"):  # fmt: skip
            pass
    assert caught.value.kind == "kv_cache_too_small"
    length = int(re.search(r"set max_model_len to (\d+)", caught.value.sentence)[1])
    assert 512 <= length <= 48 * 2**20 // 46080
