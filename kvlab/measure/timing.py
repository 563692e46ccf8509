"""Clocks: arrival times in seconds, the device idle on both sides of every reading."""

import time
from collections.abc import Callable
from functools import partial

import torch


def synchronizer(device: str | torch.device) -> Callable[[], None]:
    """Return what waits until the device has finished its work; on a CPU there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        return partial(torch.cuda.synchronize, torch.device(device))
    return lambda: None


class Stopwatch:
    """Monotonic times since `start`; on CUDA the device's own events stand beside them as a check."""

    def __init__(self, synchronize: Callable[[], None], device_events: bool = False) -> None:
        self.times_s: list[float] = []
        self._synchronize = synchronize
        self._events: list | None = [] if device_events else None

    def start(self) -> None:
        """Wait for the device, then start."""
        self._synchronize()
        self._mark_event()
        self._start_s = time.perf_counter()

    def stamp(self) -> None:
        """Wait for the device, then note the seconds since the start."""
        self._mark_event()
        self._synchronize()
        self.times_s.append(time.perf_counter() - self._start_s)

    def device_times_s(self) -> list[float] | None:
        """Return the same times as the device saw them, or None where there are no device events."""
        if self._events is None:
            return None
        return [self._events[0].elapsed_time(event) / 1000 for event in self._events[1:]]

    def _mark_event(self) -> None:
        if self._events is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
