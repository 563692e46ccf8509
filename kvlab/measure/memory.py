"""Memory: bytes of the cache and the weights as they are, and the peak of one stretch of work."""

import ctypes
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

CLEAR_PEAK = "5"  # what Linux wants written to /proc/self/clear_refs to restart VmHWM
PR_SET_PDEATHSIG = 1


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all weights, tied ones counted once, in the dtype they run in."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def kv_cache_bytes(cache: object) -> int:
    """Return the bytes of the cache's tensors, whatever the release of Transformers that made it."""
    return sum(state.numel() * state.element_size() for layer in _layer_states(cache) for state in layer.values())


def cache_length(cache: object) -> int:
    """Return how many tokens the cache holds: its longest tensors, or a preallocated cache's own count."""
    if hasattr(cache, "key_cache") and hasattr(cache, "max_cache_len"):
        return int(cache.get_seq_length())
    lengths = [
        int(layer.get_seq_length()) if hasattr(layer, "max_cache_len") else layer.keys.shape[-2]
        for layer in getattr(cache, "layers", ())
        if isinstance(getattr(layer, "keys", None), torch.Tensor)
    ]
    if not hasattr(cache, "layers"):
        lengths = [layer["keys"].shape[-2] for layer in _layer_states(cache) if "keys" in layer]
    return max(lengths, default=0)


def _layer_states(cache: object) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a dict of tensors per layer, from layers (new), lists (older) or nested tuples (oldest)."""
    if hasattr(cache, "layers"):
        yield from (_tensors(vars(layer)) for layer in cache.layers)
    elif hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
        pairs = zip(cache.key_cache, cache.value_cache, strict=True)
        yield from (_tensors({"keys": keys, "values": values}) for keys, values in pairs)
    elif isinstance(cache, (tuple, list)):
        yield from (_tensors(dict(zip(("keys", "values"), layer, strict=False))) for layer in cache)
    else:
        raise TypeError(
            f"cannot read a KV cache of type {type(cache).__name__} (Transformers {transformers.__version__})"
        )


def _tensors(states: dict) -> dict[str, torch.Tensor]:
    """Keep the states that are tensors with content; counters (0 or 1 dimension) and empty slots are none."""
    flat = {}
    for name, state in states.items():
        if isinstance(state, (dict, list, tuple)):  # several states of one kind, as linear attention has
            parts = state.items() if isinstance(state, dict) else enumerate(state)
            flat.update({f"{name}.{key}": part for key, part in parts})
        else:
            flat[name] = state
    return {name: part for name, part in flat.items() if isinstance(part, torch.Tensor) and part.dim() > 1}


def give_back() -> None:
    """Return freed memory to the device and the system, so that no measurement weighs on the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # not glibc: freed memory stays with the process


def start_peak(device: torch.device) -> str:
    """Restart the peak counter and return where the peak will come from."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return "torch.cuda.max_memory_allocated"
    try:
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    except OSError:
        return "none: this system does not let a process restart its peak"
    return "VmHWM of the process, restarted for this arm"


def peak_bytes(device: torch.device, source: str) -> int | None:
    """Return the peak since `start_peak`, None where it could not be restarted."""
    if source.startswith("none"):
        return None
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")


def reserved_bytes(device: torch.device) -> int | None:
    """Return the peak that the allocator held of a card, used or not, since `start_peak`; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def in_a_fork(work: Callable[[], dict]) -> dict:
    """Return what `work` returns in a copy of this process: no earlier work weighs on its memory. Linux only.

    For a process in which torch has started no threads yet. Raises RuntimeError when the copy dies.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            with os.fdopen(writable, "w") as answer:
                json.dump(work(), answer)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        raise RuntimeError(f"the point's own process ended with status {os.waitstatus_to_exitcode(status)}")
    return json.loads(text)


def resident_set_bytes() -> int | None:
    """Return the memory of this process that is in RAM now, None where the system does not tell."""
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 if values else None  # the kernel writes kB and means KiB
