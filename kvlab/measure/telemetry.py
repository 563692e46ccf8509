"""The one module that touches NVML: which card this process sees, and what it says of itself."""

import os
from contextlib import contextmanager


@contextmanager
def nvml():
    """The initialised `pynvml` module (of the distribution nvidia-ml-py), or None where there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library, the driver or the permission is missing: there is no card to ask
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read(pynvml, name: str, *arguments):
    """One NVML reading, or None where the card does not support it."""
    try:
        return getattr(pynvml, name)(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, UnicodeDecodeError):
        return None


def handle(pynvml):
    """NVML handle of the first card that CUDA_VISIBLE_DEVICES shows (index or UUID); None where it shows none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first == "" or first == "-1" or not pynvml.nvmlDeviceGetCount():
        return None
    if first.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(first))
    return pynvml.nvmlDeviceGetHandleByUUID(first)


def card() -> dict | None:
    """Model, UUID, driver, power limit (W) and memory (bytes) of the visible card; None without one."""
    with nvml() as pynvml:
        device = handle(pynvml) if pynvml else None
        if device is None:
            return None
        power_limit_mw = read(pynvml, "nvmlDeviceGetEnforcedPowerLimit", device)
        memory = read(pynvml, "nvmlDeviceGetMemoryInfo", device)
        return {
            "model": as_text(read(pynvml, "nvmlDeviceGetName", device)) or "unknown",
            "uuid": as_text(read(pynvml, "nvmlDeviceGetUUID", device)),
            "driver": as_text(read(pynvml, "nvmlSystemGetDriverVersion")),
            "power_limit_w": None if power_limit_mw is None else power_limit_mw / 1000,
            "memory_bytes": memory.total if memory else None,
        }


def as_text(value: str | bytes | None) -> str | None:
    """A name as text; some bindings hand out bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
