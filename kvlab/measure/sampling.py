"""What the machine did while something was measured: raw samples of CPU and card, taken beside the window."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from kvlab.measure.telemetry import CardSensor

INTERVAL_S = 0.1
MOST_SAMPLES = 256  # of a window; beyond, every second one is dropped and the interval doubles
PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class ProcessorSensor:
    """CPU time and resident memory of some processes, busy and stolen time of the CPUs they may use.

    Reads a handful of files of /proc that stay open: tens of microseconds. Elsewhere than on Linux all is None.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.cpus = len(self._cpus) or os.cpu_count()
        self._whole_machine = self.cpus == os.cpu_count()
        self._machine = _open(PROC / "stat")
        self._processes = {pid: [_open(PROC / str(pid) / name) for name in ("stat", "statm")] for pid in pids}

    def close(self) -> None:
        for file in [self._machine, *sum(self._processes.values(), [])]:
            if file is not None:
                os.close(file)
        self._machine, self._processes = None, {}

    def read(self) -> dict:
        """Seconds of CPU time since boot or start (counters) and bytes in RAM, of this moment."""
        busy_s, steal_s = self._machine_times_s()
        own = [self._process(pid, *files) for pid, files in self._processes.items()]
        alive = [each for each in own if each]
        return {
            "own_cpu_s": sum(cpu_s for cpu_s, _ in alive) if alive else None,
            "resident_set_bytes": sum(size for _, size in alive) if alive else None,
            "busy_cpu_s": busy_s,
            "steal_cpu_s": steal_s,
        }

    def _machine_times_s(self) -> tuple[float | None, float | None]:
        lines = _read(self._machine).splitlines()
        names = {"cpu"} if self._whole_machine else {f"cpu{number}" for number in self._cpus}
        rows = [line.split()[1:] for line in lines if line.split(" ", 1)[0] in names]
        if not rows:
            return None, None
        user, nice, system, _, _, irq, soft, steal = (sum(map(int, column)) for column in list(zip(*rows))[:8])
        return (user + nice + system + irq + soft) * TICK_S, steal * TICK_S

    def _process(self, pid: int, stat: int | None, statm: int | None) -> tuple[float, int] | None:
        times, sizes = _read(stat).rpartition(")")[2].split(), _read(statm).split()
        if not times or not sizes:
            return None
        cpu_s = time.process_time() if pid == os.getpid() else (int(times[11]) + int(times[12])) * TICK_S
        return cpu_s, int(sizes[1]) * PAGE_BYTES


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(file: int | None) -> str:
    try:
        return "" if file is None else os.pread(file, 65536, 0).decode()
    except OSError:  # the process has ended
        return ""


def frequency_hz() -> float | None:
    """Mean clock of the CPUs now; None where the system does not tell. Slow on large machines: not within a window."""
    try:
        found = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        return None
    return found.current * 1e6 if found and found.current else None


def family(pid: int) -> list[int]:
    """The process and all below it, [] where it is gone."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


class Telemetry:
    """Samples the machine through its `with` block, which is the measured window; `record` is what came of it.

    Making one is the slow part (NVML starts, processes are listed) and belongs before the window. `pid`: the
    measured process where it is another than this one, which counts as ours as well. `card_uuid`: the card that
    the work runs on. What goes wrong while sampling ends the sampling, is told in the record and stops nothing.
    """

    def __init__(
        self, pid: int | None = None, card_uuid: str | None = None, interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        pids = sorted({os.getpid(), *(family(pid) if pid else ())})
        self._interval_s, self._clock, self._pids = interval_s, clock, pids
        self._rows: list[tuple[float, dict]] = []
        self._trouble: str | None = None
        self._over = threading.Event()
        self._processor, self._card = ProcessorSensor(pids), None
        try:
            self._card = CardSensor(pids, card_uuid)
        except Exception as error:  # NVML has errors of its own; none of them may end a measurement
            self._trouble = f"{type(error).__name__}: {error}"
        self._frequencies_hz = [frequency_hz()]
        self._thread = threading.Thread(target=self._run, name="kvlab-telemetry", daemon=True)

    def __enter__(self) -> "Telemetry":
        self.sample()
        self._start_s = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._window_s = self._clock() - self._start_s
        self._over.set()
        self._thread.join()
        self.sample()
        self._frequencies_hz.append(frequency_hz())
        self._processor.close()
        if self._card:
            self._card.close()

    def sample(self) -> None:
        """Take one sample now; after a failure no more are taken."""
        if self._trouble:
            return
        at_s = self._clock()
        try:
            self._rows.append((at_s, self._processor.read() | (self._card.read() if self._card else {})))
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
        if len(self._rows) > MOST_SAMPLES:
            self._rows, self._interval_s = self._rows[::2], 2 * self._interval_s

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self.sample()

    def record(self) -> dict:
        """The window's raw samples as columns and rows; times in seconds from the window's start."""
        columns = list(self._rows[-1][1]) if self._rows else []
        rows = [[round(at_s - self._start_s, 4), *map(_short, values.values())] for at_s, values in self._rows]
        return {
            "window_s": self._window_s, "interval_s": self._interval_s, "processes": len(self._pids),
            "cpus": self._processor.cpus, "cpu_frequencies_hz": self._frequencies_hz,
            "card_uuid": self._card and self._card.uuid, "no_card": self._card and self._card.absence,
            "unreadable": self._card.unreadable if self._card else {}, "trouble": self._trouble,
            "columns": ["t_s", *columns], "samples": rows,
        }  # fmt: skip


def _short(value: float | None) -> float | None:
    """Without the digits that no counter has: ten microseconds, ten milliwatts."""
    return round(value, 5) if isinstance(value, float) else value
