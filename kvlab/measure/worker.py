"""A child process that holds the model: its memory and threads are its own, and it dies with its parent."""

import gc
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
import zlib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import kvlab
from kvlab import models
from kvlab.measure.provenance import read_text
from kvlab.models import ModelSource

STOP_WAIT_S = 5.0
GIVES_MEMORY_BACK = {  # environment of a process whose allocator returns freed memory to the system at once
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0",
    "OMP_WAIT_POLICY": "PASSIVE",  # its times count for nothing, so others may have the cores
}  # fmt: skip


class Worker:
    """Measure pairs in a child process, started at the first call and again after it died.

    Use it as a context manager; leaving it, Ctrl-C included, ends the child. A point that kills the child is
    a record with its reason, and so is one whose model cannot be loaded.
    """

    def __init__(
        self,
        model_source: ModelSource | None,
        dtype: str,
        device: str,
        threads: int,
        seed: int = 0,
        for_memory: bool = False,
    ) -> None:
        threads = 1 if for_memory else threads  # a point's own process starts its threads itself
        source = model_source and asdict(model_source)
        self._setup = {"source": source, "dtype": dtype, "device": device, "threads": threads}
        self._seed, self._for_memory = seed, for_memory
        self._child: subprocess.Popen | None = None
        self._arms_run = 0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is no child."""
        return self._child.pid if self._child and self._child.poll() is None else None

    def measure_pair(
        self,
        point: dict,
        repetition: int,
        control: bool = False,
        negative_control: bool = False,
        ask: str = "measure_pair",
    ) -> list[dict]:
        """Return both arms' raw records; prompt and order follow from seed, point and repetition."""
        entropy = self._entropy(point, repetition)
        ask = "measure_negative_control" if negative_control else ask
        answer = self._ask({"ask": ask, "point": point, "entropy": entropy})
        records = answer.get("records") or _failed_pair(point, answer, negative_control)
        for record in records:
            record |= {"repetition": repetition, "control": control, "order": self._arms_run}
            self._arms_run += 1
        return records

    def measure_generation(self, point: dict, repetition: int) -> list[dict]:
        """Return the record of one generation with cache; a point's `layers` asks for the first layers only."""
        request = {"ask": "measure_generation", "point": point, "entropy": self._entropy(point, repetition)}
        return self._single(request, repetition)

    def measure_ceiling(self, point: dict, repetition: int) -> list[dict]:
        """Return the record of one ceiling of the machine (see `measure.machine`); it needs no model."""
        return self._single({"ask": "measure_ceiling", "point": point}, repetition)

    def _entropy(self, point: dict, repetition: int) -> list[int]:
        return [self._seed, zlib.crc32(json.dumps(point, sort_keys=True).encode()), repetition]

    def _single(self, request: dict, repetition: int) -> list[dict]:
        answer = self._ask(request)
        kind = request["ask"].removeprefix("measure_")
        lost = {"kind": kind, "point": request["point"], "status": answer.get("status"), "reason": answer.get("error")}
        return [(answer.get("record") or lost) | {"repetition": repetition}]

    def measure_memory(self, point: dict, repetition: int) -> list[dict]:
        """Return both arms' records of kind "memory"; on a CPU from a process of the point's own (`for_memory`)."""
        records = self.measure_pair(point, repetition, ask="measure_memory")
        return [record | {"kind": "memory"} for record in records]

    def stop(self) -> None:
        """End the child if there is one."""
        if self._child is None:
            return
        child, self._child = self._child, None
        child.stdin.close()  # the child takes this as the end, in the middle of work too
        try:
            child.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        self._errors.close()

    def _ask(self, request: dict) -> dict:
        if self.pid is None:
            self.stop()
            self._start()
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C above all: the child must not work on for nobody
            self._child.kill()
            self.stop()
            raise
        if not line.endswith("\n"):
            return self._how_it_ended()
        return json.loads(line)

    def _start(self) -> None:
        path = os.pathsep.join([str(Path(kvlab.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        threads = str(self._setup["threads"])
        environment = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": threads}
        environment |= GIVES_MEMORY_BACK if self._for_memory else {}
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA counts cards as NVML does
        self._errors = tempfile.TemporaryFile()
        self._killed_before = _out_of_memory_kills()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvlab.measure.worker", json.dumps(self._setup)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment, start_new_session=True)  # fmt: skip  # Ctrl-C reaches the parent alone

    def _how_it_ended(self) -> dict:
        code = self._child.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        self.stop()
        if code == -signal.SIGKILL and _out_of_memory_kills() > self._killed_before:
            return {"status": "out_of_memory", "error": "the system ran out of memory and killed the worker"}
        if code < 0:
            return {"status": "failed", "error": f"worker killed by signal {-code} ({signal.Signals(-code).name})"}
        last = said[-1] if said else "it said nothing"
        return {"status": "failed", "error": f"worker ended with exit code {code}: {last}"}


def _out_of_memory_kills() -> int:
    """How many processes this system has killed for want of memory since it booted; 0 where it does not tell."""
    counted = re.search(r"^oom_kill (\d+)$", read_text("/proc/vmstat"), re.M)
    return int(counted[1]) if counted else 0


def open_worker(p: SimpleNamespace, model: str | None) -> Worker:
    """Return a worker with the run's precision, device and threads for this model, or for none."""
    source = models.resolve(model, p.model_revision) if model else None
    return Worker(source, p.dtype, p.device, p.threads, p.seed)


def _failed_pair(point: dict, answer: dict, negative_control: bool) -> list[dict]:
    shared = {"kind": "generation", "point": point, "pair": uuid.uuid4().hex,
              "negative_control": negative_control, "status": answer["status"],
              "reason": answer["error"]}  # fmt: skip
    return [{**shared, "use_cache": use_cache} for use_cache in (True, False)]


class _ChildSession:
    """The child's side: one model at a time, its attention kernel changed in place where that works."""

    def __init__(self, source: dict | None, dtype: str, device: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._source, self._dtype, self._device = source and ModelSource(**source), dtype, device
        self._model, self._attention = None, None
        self._process = uuid.uuid4().hex  # tells a record's process apart from others

    def answer(self, request: dict) -> dict:
        """Answer one request; whatever goes wrong here is this request's failure and no other's."""
        from kvlab.measure.decoding import is_out_of_memory

        try:
            return getattr(self, f"_{request.pop('ask')}")(**request)
        except Exception as error:  # the process's border: the parent makes a record of it
            refused = "refused" if isinstance(error, ValueError) else "failed"
            status = "out_of_memory" if is_out_of_memory(error) else refused
            return {"error": f"{type(error).__name__}: {error}", "status": status}

    def _measure_pair(self, point: dict, entropy: list[int]) -> dict:
        return self._measured("measure_pair", point, entropy)

    def _measure_negative_control(self, point: dict, entropy: list[int]) -> dict:
        return self._measured("measure_negative_control", point, entropy)

    def _measure_memory(self, point: dict, entropy: list[int]) -> dict:
        from kvlab.measure import memory

        self._loaded(point["attention"])
        here = {"ask": "measure_memory_here", "point": point, "entropy": entropy}
        if self._device != "cpu" or sys.platform != "linux":
            return self.answer(here)
        return memory.in_a_fork(lambda: self.answer(here))

    def _measure_memory_here(self, point: dict, entropy: list[int]) -> dict:
        import torch

        torch.set_num_threads(point["threads"])
        return self._measured("measure_memory", point, entropy)

    def _measured(self, primitive: str, point: dict, entropy: list[int]) -> dict:
        import numpy

        from kvlab import weights
        from kvlab.measure import decoding

        model = self._loaded(point["attention"])
        records = getattr(decoding, primitive)(model, point, numpy.random.default_rng(entropy))
        known = {"process": self._process, "model_files": weights.short_hashes(self._source)} | self._stored
        return {"records": [record | known for record in records]}

    def _measure_generation(self, point: dict, entropy: list[int]) -> dict:
        import numpy

        from kvlab import weights
        from kvlab.measure import decoding

        with weights.first_layers(self._loaded(point["attention"]), point.get("layers")) as model:
            record = decoding.measure_generation(model, point, numpy.random.default_rng(entropy))
        return {"record": record | {"process": self._process}}

    def _measure_ceiling(self, point: dict) -> dict:
        from kvlab.measure import machine

        vocabulary = models.outline(self._source).vocab_size if self._source else None
        return {"record": machine.measure(point, vocabulary) | {"process": self._process}}

    def _loaded(self, attention: str) -> object:
        from kvlab import weights

        if self._model is None or (attention != self._attention and not self._switched(attention)):
            self._model = None  # two copies of the weights may not fit
            self._model = weights.load(self._source, self._dtype, self._device, attention)
            self._stored = weights.stored(self._source)
            gc.freeze()  # what is there now stays: collecting garbage in the middle of a step stays cheap
        self._attention = attention
        return self._model

    def _switched(self, attention: str) -> bool:
        from kvlab import weights

        return weights.switch_attention(self._model, attention)


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    requests: queue.Queue = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    session = _ChildSession(**json.loads(sys.argv[1]))
    while True:
        answers.write(json.dumps(session.answer(requests.get())) + "\n")
        answers.flush()


def _read_requests(requests: queue.Queue) -> None:
    """Pass requests on; when the pipe closes, the parent is gone, however it died, and so are we."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    _main()
