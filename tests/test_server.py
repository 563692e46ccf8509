"""A server left behind holds the card, a wrong one falsifies every number: both are tried with a fake."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvlab.measure import metrics, server, serving
from kvlab.measure.server import ServerError, VllmServer

HERE = Path(__file__).parent
FAKE = (sys.executable, str(HERE / "fake_vllm.py"))


@pytest.fixture
def folder(tmp_path):
    """A folder that looks like a model."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path / "model"


def fake(folder, mode="ok", **options):
    options = {"enforce_eager": True, "kv_cache_space_bytes": 2**28, "startup_timeout_s": 20} | options
    log_path = folder.parent / "server.log"
    extra_args = ("--fake", mode)
    return VllmServer(folder, "m", 512, "float32", launcher=FAKE, version="0.32.0", log_path=log_path,
                      extra_args=extra_args, **options)  # fmt: skip


def family(pid):
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def gone(processes, timeout_s=8.0):
    """True once none of the processes runs any more."""
    ends_at_s = time.monotonic() + timeout_s
    while any(alive(process) for process in processes):
        if time.monotonic() >= ends_at_s:
            return False
        time.sleep(0.05)
    return True


def test_br39_a_server_killed_before_a_point_answered_anything_ends_the_others(folder, monkeypatch):
    failed = {"kind": "point", "status": "failed", "reason": "connection"}
    monkeypatch.setattr(serving, "run_point", lambda *_, **__: [failed])
    monkeypatch.setattr(serving, "request_counts", lambda *_: (1, 1))
    monkeypatch.setattr(serving, "point_prompts", lambda *_: [])
    p = SimpleNamespace(seed=0, request_timeout_s=1.0)
    with fake(folder) as served:
        serving.measure_point(p, served, {}, 1, None)  # a point may fail while its server lives: the next one is tried
        processes = family(served.pid)
        os.kill(served._guard.pid, signal.SIGKILL)
        assert gone(processes[:1])
        with pytest.raises(ServerError, match="died or hung while it was measured"):
            serving.measure_point(p, served, {}, 1, None)
    assert gone(processes)



def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def port_is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_serves_and_leaves_nothing_behind(folder):
    lines = []
    with fake(folder, report=lines.append) as running:
        processes = family(running.pid)
        assert len(processes) == 2 and all(alive(process) for process in processes)
        facts = running.facts()
    assert (facts["engine_version"], facts["max_model_len"]) == ("0.32.0", 512)
    assert facts["kv_cache_tokens"] == 11648
    assert facts["thread_cpus"] == server.thread_cpus() and facts["startup_s"] > 0
    assert gone(processes, 0) and port_is_free(running.port)
    log = running.log_path.read_text()
    assert f"OMP threads on CPUs {','.join(map(str, server.thread_cpus()))}" in log and "offline 1 1" in log
    assert "completion of 1" in log and "first token" in lines[-1]


@pytest.mark.parametrize("mode", ["ok", "stubborn"])
def test_an_exception_ends_it_within_seconds(folder, mode):
    with pytest.raises(ZeroDivisionError), fake(folder, mode) as running:
        processes, started_s = family(running.pid), time.monotonic()
        raise ZeroDivisionError
    assert time.monotonic() - started_s < 6 and gone(processes, 0) and port_is_free(running.port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("mode", ["ok", "never"])
def test_whatever_ends_the_notebook_ends_the_server(folder, number, mode):
    program = (
        "import sys, time; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1]); import test_server as t\n"
        "s = t.fake(Path(sys.argv[2]), sys.argv[3], startup_timeout_s=60)\n"
        "print(s.port, flush=True)\n"
        "with s: time.sleep(60)"
    )
    command = [sys.executable, "-c", program, HERE, folder, mode]
    notebook = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    port = int(notebook.stdout.readline())
    while port_is_free(port):
        time.sleep(0.05)
    time.sleep(0.3)
    processes = family(notebook.pid)[1:]
    assert len(processes) == 3  # the guard, the server and its child
    notebook.send_signal(number)
    assert notebook.wait(10) != 0
    notebook.stdout.close()
    assert gone(processes) and port_is_free(port)


@pytest.mark.parametrize("mode", ["ok", "deaf"])
def test_a_killed_guard_takes_the_server_along(folder, mode):
    """At once, also one that waits for a stream to end: the notebook would wait for that stream as well."""
    with fake(folder, mode) as running:
        processes = family(running.pid)
        psutil.Process(running.pid).parent().kill()
        assert gone(processes, 2)


EXITS = {
    "kv": ("kv_cache_too_small", "2912"),
    "kv-old": ("kv_cache_too_small", "19232"),
    "kv-none": ("kv_cache_too_small", "kv_cache_space_gib"),
    "context": ("context_too_long", "8192"),
    "memory": ("out_of_memory", "free"),
    "arguments": ("arguments", "--no-such-thing"),
    "library": ("library_missing", "libnuma1"),
}


@pytest.mark.parametrize("mode", EXITS)
def test_br37_an_early_exit_fails_at_once_with_a_way_out(folder, mode):
    kind, advice = EXITS[mode]
    started_s = time.monotonic()
    with pytest.raises(ServerError) as caught, fake(folder, mode):
        pass
    assert time.monotonic() - started_s < 5
    assert (caught.value.kind, advice in caught.value.sentence) == (kind, True)
    assert "line 49" in str(caught.value) and "line 20" not in str(caught.value)


def test_br36_memory_that_comes_free_late_is_waited_for():
    gib, states = 2**30, [18, 18, 23]
    server.wait_for_gpu_memory(lambda: (states.pop(0) * gib, 24 * gib), 21 / 24, 5, interval_s=0.01)
    assert states == []
    server.wait_for_gpu_memory(lambda: None, 0.9, 5)
    with pytest.raises(ServerError, match=r"18.0 GiB .* 21.0 GiB .*--gpu-memory-utilization"):
        server.wait_for_gpu_memory(lambda: (18 * gib, 24 * gib), 21 / 24, 0.1, interval_s=0.01)


def test_br37_the_length_is_passed_explicitly(folder):
    command = fake(folder).command
    assert command[command.index("--max-model-len") + 1] == "512"


def test_br39_ready_means_a_token_not_a_health_check(folder):
    with fake(folder, "slow") as running:
        assert running.startup_s >= 2


def test_a_server_that_makes_no_token_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(server, "TOKEN_TIMEOUT_S", 0.3)
    running = fake(folder, "never", startup_timeout_s=1)
    with pytest.raises(ServerError, match="no token in 1 s") as caught, running:
        pass
    assert caught.value.kind == "timeout"


def test_br41_the_cache_is_sized_in_bytes_and_no_gpu_option_is_passed(folder, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    command = fake(folder, kv_cache_space_bytes=100 * 2**20).command
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(100 * 2**20)
    assert not any("gpu" in argument for argument in command[2:])
    assert "VLLM_CPU_KVCACHE_SPACE" not in server.environment(folder, [0])


class Stranger(BaseHTTPRequestHandler):
    """Somebody else's server, which answers everything gladly."""

    asked = 0

    def do_GET(self):
        content = json.dumps({"data": [{"id": "another-model"}], "choices": [{"text": "a"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        Stranger.asked += 1
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("kind", ["dumb", "glad"])
def test_br42_a_taken_port_is_never_measured(folder, monkeypatch, kind):
    Stranger.asked = 0
    stranger = HTTPServer(("127.0.0.1", 0), Stranger)
    if kind == "glad":
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
    monkeypatch.setattr(server, "free_port", lambda: stranger.server_address[1])
    started_s = time.monotonic()
    with pytest.raises(ServerError) as caught, fake(folder):
        pass
    if kind == "glad":
        stranger.shutdown()
    stranger.server_close()
    assert (caught.value.kind, Stranger.asked) == ("port_taken", 0)
    assert time.monotonic() - started_s < 8


def test_a_free_port_is_found():
    assert port_is_free(server.free_port())


def test_missing_weights_are_said_before_anything_starts(tmp_path):
    with pytest.raises(ServerError, match="is no model folder") as caught, fake(tmp_path / "nothing"):
        pass
    assert caught.value.kind == "weights_missing"


def test_a_missing_vllm_is_said(folder, monkeypatch):
    def absent(name):
        raise server.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(server.importlib.metadata, "version", absent)
    with pytest.raises(ServerError, match="not installed") as caught:
        VllmServer(folder, "m", 512, "float32", True)
    assert caught.value.kind == "vllm_missing"


SETTINGS = {"max_model_len": 2048, "dtype": "bfloat16", "seed": 1, "enforce_eager": False,
            "prefix_caching": False, "chunked_prefill": False, "kv_cache_space_bytes": None}  # fmt: skip


def test_the_command_line_of_each_version():
    old = server.arguments("0.7.3", "folder", ("m",), 1, SETTINGS)
    new = server.arguments("0.32.0", "folder", ("m",), 1, SETTINGS)
    assert {"--disable-log-requests", "--enable-chunked-prefill=False"} < set(old)
    assert "--no-enable-prefix-caching" in old
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} < set(new)
    assert "--disable-log-requests" not in new and "--enforce-eager" not in new + old
    sized = {**SETTINGS, "kv_cache_space_bytes": 2**30}
    with pytest.raises(ServerError, match="gpu-memory-utilization"):
        server.arguments("0.7.3", "folder", ("m",), 1, sized)
    old = server.arguments("0.7.3", "folder", ("m",), 1, sized | {"kv_bytes_per_token": 57344})
    assert old[old.index("--num-gpu-blocks-override") + 1] == "1170"  # 2**30 // (16 * 57344)


def test_threads_leave_a_cpu_to_the_client():
    allowed = sorted(os.sched_getaffinity(0))
    assert server.thread_cpus() == (allowed[1:] if len(allowed) > 1 else allowed)
    assert server.thread_cpus(1) == allowed[-1:] and server.thread_cpus(99) == allowed


OLD = """# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:prompt_tokens_total{model_name="m"} 1.2e+03
vllm:prompt_tokens_created{model_name="m"} 1.7e+09
vllm:generation_tokens_total{model_name="m"} 77.0
vllm:num_preemptions_total{model_name="m"} 2.0
"""
NEW = """vllm:kv_cache_usage_perc{engine="0",model_name="a } b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a } b"} 0.5
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 2.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_total{engine="1"} 20.0
vllm:prompt_tokens_by_source_total{engine="1"} 20.0
vllm:prefix_cache_queries_total{engine="0"} 64.0
vllm:prefix_cache_hits_total{engine="0"} 16.0
vllm:external_prefix_cache_hits_total{engine="0"} 5.0
"""


def test_br40_old_and_new_names_and_what_is_absent():
    old, new, none = metrics.parse(OLD), metrics.parse(NEW), metrics.parse(None)
    assert (old["kv_cache_usage"], old["running"], old["waiting"]) == (0.25, 3, 0)
    assert (old["prompt_tokens"], old["preemptions"]) == (1200, 2)
    assert (old["prefix_hits"], old["prefix_queries"]) == (None, None)
    assert (new["kv_cache_usage"], new["running"], new["waiting"], new["prompt_tokens"]) == (0.5, 3, 0, 120)
    assert (new["prefix_hits"], new["prefix_queries"], new["preemptions"]) == (16, 64, None)
    assert set(none.values()) == {None} == set(metrics.parse("<html>no metrics</html>").values())
    rises = metrics.deltas(old, {**old, "generation_tokens": 80.0})
    assert (rises["generation_tokens"], rises["preemptions"], rises["prefix_hits"]) == (3, 0, None)
    gauges = {"kv_cache_usage": 0.25, "running": 3, "waiting": 0}
    assert metrics.sample(1.5, OLD) == {"t_s": 1.5, **gauges, "preemptions": 2}


def test_the_cache_is_read_in_blocks_or_not_at_all():
    told = 'vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="12",num_gpu_blocks_override="None"} 1.0'
    assert metrics.cache_blocks("x 1\n" + told) == (12, 128)
    assert metrics.cache_blocks(NEW) == metrics.cache_blocks(None) == (None, None)
    assert metrics.cache_blocks(told.replace('"12"', '"None"')) == (None, 128)
