"""A machine's ceilings: the fastest it reads, copies, multiplies and launches; raw times, one record per repetition."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch.nn import functional

from kvlab.measure import memory, timing

COLUMNS = 4096  # of the matrix that is read
CALLS = {"read": 5, "copy": 5, "gemm": 3, "launch": 5, "layer": 5, "sampling": 20}  # timed calls of each repetition
LAUNCHES = {"launch": 500, "layer": 20}  # operations, or layers of them, in one timed call
WIDTH = 32  # numbers in the operands of operations whose work is next to nothing


def measure(point: dict, vocabulary: int | None = None) -> dict:
    """Time one quantity: `samples_s` holds the seconds of each call, beside the bytes, FLOPs or launches of a call.

    Quantities: "read" (matrix-vector product over `size_bytes`, what decoding does), "copy" (`size_bytes` read and as
    many written), "gemm" (`shape`: rows, depth, columns), "launch" (one small operation), "layer" (the operations of
    one decoder layer on operands of next to no size), "sampling" (the largest of `vocabulary` logits, to the host).
    A call that nobody timed comes first.
    """
    torch.set_num_threads(point["threads"])
    make = {"read": _read, "copy": _copy, "gemm": _gemm, "launch": _launch, "layer": _layer}
    make["sampling"] = partial(_sampling, vocabulary=vocabulary)
    call, work = make[point["quantity"]](point)
    device = torch.device(point["device"])
    watch = timing.Stopwatch(timing.synchronizer(device), device_events=device.type == "cuda")
    with torch.inference_mode():
        call()
        watch.start()
        for _ in range(CALLS[point["quantity"]]):
            call()
            watch.stamp()  # the device is idle again: the time since the last stamp is this call's
    del call
    memory.give_back()
    starts_s = [0.0, *watch.times_s]
    samples_s = [end - start for start, end in zip(starts_s, watch.times_s)]
    return {"kind": "ceiling", "point": point, "status": "ok", "reason": None, "samples_s": samples_s,
            "device_times_s": watch.device_times_s(), **work}  # fmt: skip


def _filled(point: dict, *shape: int) -> torch.Tensor:
    """A tensor whose memory is really there: pages that nobody wrote cost no reading."""
    return torch.full(shape, 0.01, dtype=getattr(torch, point["dtype"]), device=point["device"])


@lru_cache(maxsize=1)
def _buffer(dtype: str, device: str, size_bytes: int) -> torch.Tensor:
    """The memory that is read and copied, written once for all repetitions: to fill it takes longer than to measure."""
    count = size_bytes // getattr(torch, dtype).itemsize // COLUMNS * COLUMNS
    return _filled({"dtype": dtype, "device": device}, count)


def _read(point: dict) -> tuple[Callable, dict]:
    matrix = _buffer(point["dtype"], point["device"], point["size_bytes"]).view(-1, COLUMNS)
    return partial(functional.linear, _filled(point, 1, COLUMNS), matrix), {"bytes": matrix.nbytes}


def _copy(point: dict) -> tuple[Callable, dict]:
    source, target = _buffer(point["dtype"], point["device"], 2 * point["size_bytes"]).chunk(2)
    return partial(target.copy_, source), {"bytes": 2 * source.nbytes}


def _gemm(point: dict) -> tuple[Callable, dict]:
    rows, depth, columns = point["shape"]
    operands = _filled(point, rows, depth), _filled(point, columns, depth)
    return partial(functional.linear, *operands), {"flops": 2 * rows * depth * columns}


def _launch(point: dict) -> tuple[Callable, dict]:
    small = _filled(point, WIDTH)
    return partial(_repeat, LAUNCHES["launch"], partial(torch.add, small, small)), {"launches": LAUNCHES["launch"]}


def _layer(point: dict) -> tuple[Callable, dict]:
    """The operations of a decoder layer as a Transformers model runs them on one token, less its Python."""
    hidden, square, one = _filled(point, 1, 1, WIDTH), _filled(point, WIDTH, WIDTH), _filled(point, WIDTH)
    past = _filled(point, 1, 1, WIDTH, WIDTH)
    step = partial(_small_layer, hidden, square, one, past)
    return partial(_repeat, LAUNCHES["layer"], step), {"launches": LAUNCHES["layer"]}


def _sampling(point: dict, vocabulary: int) -> tuple[Callable, dict]:
    logits = _filled(point, 1, vocabulary)
    return lambda: logits.max(dim=-1)[1].tolist(), {"launches": 1, "vocabulary": vocabulary}


def _repeat(times: int, operation: Callable) -> None:
    for _ in range(times):
        operation()


def _small_layer(hidden: torch.Tensor, square: torch.Tensor, one: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    normed = _normed(hidden, one)
    query, key, value = (functional.linear(normed, square, one)[:, None] for _ in range(3))
    query, key = _rotated(query, one), _rotated(key, one)
    keys, values = torch.cat([past, key], dim=-2), torch.cat([past, value], dim=-2)  # a dynamic cache's growth
    attended = functional.scaled_dot_product_attention(query, keys, values)
    hidden = hidden + functional.linear(attended[:, 0], square)
    normed = _normed(hidden, one)
    gated = functional.silu(functional.linear(normed, square)) * functional.linear(normed, square)
    return hidden + functional.linear(gated, square)


def _normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (states * scale).to(states.dtype)


def _rotated(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    left, right = states.chunk(2, dim=-1)
    return states * angles + torch.cat([-right, left], dim=-1) * angles
