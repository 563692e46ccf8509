"""The one module that touches NVML: which card this process sees, what it says of itself, and under load."""

import os
from collections.abc import Iterable
from contextlib import contextmanager

MILLI = 1e-3
UNSUPPORTED = ("NotSupported", "FunctionNotFound")
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
# reading of a window -> (functions that give it, newest name first; attribute or arguments; factor to SI units)
READINGS = {
    "utilisation": (("nvmlDeviceGetUtilizationRates",), "gpu", 0.01),
    "power_w": (("nvmlDeviceGetPowerUsage",), (), MILLI),
    "energy_j": (("nvmlDeviceGetTotalEnergyConsumption",), (), MILLI),  # a counter since the driver was loaded
    "sm_clock_hz": (("nvmlDeviceGetClockInfo",), (1,), 1e6),  # 1: NVML_CLOCK_SM
    "memory_clock_hz": (("nvmlDeviceGetClockInfo",), (2,), 1e6),  # 2: NVML_CLOCK_MEM
    "temperature_c": (("nvmlDeviceGetTemperature",), (0,), 1),  # 0: NVML_TEMPERATURE_GPU
    "throttle_reasons": (REASONS, (), 1),
}
PROCESS_READINGS = ("card_memory_bytes", "own_memory_bytes", "other_memory_bytes", "other_processes")


def open_nvml():
    """(initialised `pynvml`, of the distribution nvidia-ml-py, or None; why there is none)."""
    try:
        import pynvml
    except Exception as error:  # missing, or another distribution under its name
        return None, f"the library nvidia-ml-py cannot be imported ({type(error).__name__})"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # the driver or the permission is missing: there is no card to ask
        return None, f"NVML does not start ({error})"
    return pynvml, None


@contextmanager
def nvml():
    """The initialised `pynvml` module, or None where there is no NVML."""
    pynvml, _ = open_nvml()
    try:
        yield pynvml
    finally:
        if pynvml:
            pynvml.nvmlShutdown()


def error_of(pynvml, error: Exception) -> str | None:
    """What kind of refusal an NVML error is: "not supported", "denied", or None for a real failure."""
    if isinstance(error, UnicodeDecodeError) or _is(pynvml, error, *UNSUPPORTED):
        return "not supported"
    return "denied" if _is(pynvml, error, "NoPermission") else None


def _is(pynvml, error: Exception, *names: str) -> bool:
    return any(isinstance(error, getattr(pynvml, f"NVMLError_{name}", ())) for name in names)


def read(pynvml, name: str, *arguments, absent: tuple = (), **keywords):
    """One NVML reading (some bindings hand out a name as bytes), or None where it is not supported or not allowed.

    `absent` names further errors that mean no more than that: there is no such thing.
    """
    try:
        value = getattr(pynvml, name)(*arguments, **keywords)
        return value.decode(errors="replace") if isinstance(value, bytes) else value
    except Exception as error:  # pynvml's error classes exist only when it is there
        if error_of(pynvml, error) is None and not _is(pynvml, error, *absent):
            raise
        return None


def handle(pynvml, uuid: str | None = None):
    """NVML handle of the card with this UUID, else of the first that CUDA_VISIBLE_DEVICES shows; None without one.

    An index is NVML's own, in the order of the PCI bus, as kvlab asks CUDA to count too.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if uuid and not first.startswith("MIG-"):  # CUDA gives the UUID of a MIG instance without this beginning
        first = uuid
    count = pynvml.nvmlDeviceGetCount()
    if first.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(first)) if int(first) < count else None
    if first.startswith("MIG-"):
        return read(pynvml, "nvmlDeviceGetHandleByUUID", first, absent=("NotFound", "InvalidArgument"))
    devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)] if first.startswith("GPU-") else []
    named = [(device, read(pynvml, "nvmlDeviceGetUUID", device) or "") for device in devices]
    return next((device for device, found in named if found.startswith(first)), None)  # CUDA takes the beginning too


def memory_info(pynvml, device):
    """(total, used, free) bytes; used without what the driver keeps for itself, where this NVML tells them apart."""
    if hasattr(pynvml, "nvmlMemory_v2"):
        found = read(pynvml, "nvmlDeviceGetMemoryInfo", device, version=pynvml.nvmlMemory_v2)
        if found is not None:
            return found
    return read(pynvml, "nvmlDeviceGetMemoryInfo", device)


def card() -> dict | None:
    """Model, UUID, driver, power limit (W) and memory (bytes) of the visible card; None without one."""
    with nvml() as pynvml:
        device = handle(pynvml) if pynvml else None
        if device is None:
            return None
        power_limit_mw = read(pynvml, "nvmlDeviceGetEnforcedPowerLimit", device)
        memory = memory_info(pynvml, device)
        return {
            "model": read(pynvml, "nvmlDeviceGetName", device) or "unknown",
            "uuid": read(pynvml, "nvmlDeviceGetUUID", device),
            "driver": read(pynvml, "nvmlSystemGetDriverVersion"),
            "power_limit_w": None if power_limit_mw is None else power_limit_mw * MILLI,
            "memory_bytes": memory.total if memory else None,
        }


class CardSensor:
    """Readings of one card under load; those it does not have are None, and `unreadable` says why."""

    def __init__(self, pids: Iterable[int], uuid: str | None = None) -> None:
        self.unreadable: dict[str, str] = {}
        self._pids = set(pids)
        self._nvml, self.absence = open_nvml()
        self._device = handle(self._nvml, uuid) if self._nvml else None
        if self._nvml and self._device is None:
            self.absence = "no card is visible (CUDA_VISIBLE_DEVICES)"
        there = self._device is not None
        self.uuid = read(self._nvml, "nvmlDeviceGetUUID", self._device) if there else None

    def close(self) -> None:
        if self._nvml:
            self._nvml.nvmlShutdown()
            self._nvml = self._device = None

    def read(self) -> dict:
        """All readings of this moment; {} without a card. Raises what NVML raises, a missing support aside."""
        if self._device is None:
            return {}
        values = {name: self._read(name, *how) for name, how in READINGS.items()}
        return values | self._memory()

    def _read(self, name: str, functions: tuple, selection: str | tuple, factor: float):
        arguments = () if isinstance(selection, str) else selection
        value = self._ask(name, functions, *arguments)
        value = getattr(value, selection) if value is not None and isinstance(selection, str) else value
        return None if value is None else value * factor

    def _ask(self, name: str, functions: Iterable[str], *arguments):
        if name in self.unreadable:  # asked once: the answer does not change, and asking costs time
            return None
        function = next((f for f in functions if hasattr(self._nvml, f)), None)
        try:
            return getattr(self._nvml, function)(self._device, *arguments) if function else None
        except Exception as error:
            why = error_of(self._nvml, error)
            if why is None:
                raise
            self.unreadable[name] = why
            return None

    def _memory(self) -> dict:
        """Memory in use on the card and by whom; by whom is None where process ids are hidden (containers, WSL)."""
        found = dict.fromkeys(PROCESS_READINGS)
        memory = memory_info(self._nvml, self._device)
        found["card_memory_bytes"] = memory.used if memory else None
        processes = self._ask("own_memory_bytes", ["nvmlDeviceGetComputeRunningProcesses"])
        own = [each for each in processes or () if each.pid in self._pids]
        if not own:  # we may be on the card under a number of another name space: then nobody can be told apart
            return found
        others = [each for each in processes if each.pid not in self._pids]
        sizes = {"own_memory_bytes": own, "other_memory_bytes": others}
        return found | {name: _total(group) for name, group in sizes.items()} | {"other_processes": len(others)}


def _total(processes: list) -> int | None:
    sizes = [each.usedGpuMemory for each in processes]
    return None if None in sizes else sum(sizes)
