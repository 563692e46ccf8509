"""A child process that holds the model: its memory and threads are its own, and it dies with its parent."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
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
        self, model_source: ModelSource | None, dtype: str, device: str, threads: int, seed: int = 0,
        for_memory: bool = False,
    ) -> None:  # fmt: skip
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
        self, point: dict, repetition: int, control: bool = False, negative_control: bool = False,
        ask: str = "measure_pair",
    ) -> list[dict]:  # fmt: skip
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
        return [record | {"repetition": repetition} for record in answer.get("records") or [lost]]

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
            [sys.executable, "-m", "kvlab.measure.child", json.dumps(self._setup)],
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
