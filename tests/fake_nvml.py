"""A stand-in for the `pynvml` module with two cards; any reading can be changed, made to fail or follow a clock."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


ERRORS = {
    f"NVMLError_{name}": type(f"NVMLError_{name}", (NVMLError,), {})
    for name in ("NotSupported", "FunctionNotFound", "NoPermission", "NotFound", "InvalidArgument", "GpuIsLost")
}
NOT_SUPPORTED, DENIED, LOST = (ERRORS[f"NVMLError_{name}"]() for name in ("NotSupported", "NoPermission", "GpuIsLost"))
MIB = 2**20
CARDS = ("GPU-0aaaaaaa-0000", "GPU-1bbbbbbb-1111")


def process(pid, mebibytes):
    return SimpleNamespace(pid=pid, usedGpuMemory=None if mebibytes is None else mebibytes * MIB)


def memory(used_mebibytes, total_mebibytes=24 * 1024):
    free = (total_mebibytes - used_mebibytes) * MIB
    return SimpleNamespace(total=total_mebibytes * MIB, used=used_mebibytes * MIB, free=free)


DEFAULTS = {
    "nvmlDeviceGetName": "NVIDIA A10",
    "nvmlSystemGetDriverVersion": "550.163.01",
    "nvmlDeviceGetEnforcedPowerLimit": 150_000,
    "nvmlDeviceGetMemoryInfo": memory(3000),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=80, memory=40),
    "nvmlDeviceGetPowerUsage": 120_000,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    "nvmlDeviceGetClockInfo": 1695,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksEventReasons": 0,
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetCount": len(CARDS),
}


def make(**readings):
    """The module; a reading may be a value, an exception to raise, or a function that is called for the value."""

    def answer(value):
        if isinstance(value, Exception):
            raise value
        return value() if callable(value) else value

    def by_uuid(uuid):
        if uuid in readings.get("mig", ()):
            return uuid
        raise ERRORS["NVMLError_NotFound"]

    calls = {name: lambda *_, value=value, **__: answer(value) for name, value in (DEFAULTS | readings).items()}
    own = {
        "nvmlInit": lambda: answer(readings.get("init")),
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda device: CARDS[device] if isinstance(device, int) else device,
    }
    return SimpleNamespace(**calls | own | ERRORS)
