"""What a model will take on a machine, from a few ceilings of it: TTFT, TPOT, speed-ups, with what binds each.

A forward pass is a sum of parts: weights read, products computed, the scores that eager attention writes out, the cache
read and copied, elementwise passes, and the time to launch it all, which on a CPU adds to the work and on a GPU hides
behind it. Reading and multiplying are added although they overlap: it is the smooth form of "whichever is longer", and
the fewer tokens a product has, the further it is from its FLOP/s. Nothing here is measured; `kvlab.analyse.calibrate`
fits a machine's efficiencies to points that were.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from kvlab.analyse import cost
from kvlab.analyse.architecture import Architecture

SCORE_PASSES = {2: 12, 4: 8}  # reads and writes of eager attention's scores, in numbers, by bytes per number
ATTENTION_KERNELS = {"eager": 7, "sdpa": 2, "flash_attention_2": 3}  # launched per layer
IN_CACHE = 0.25  # of a pass through memory
CPU_CACHE_BYTES = 2**25  # a usual last-level cache, and the largest block that glibc keeps instead of giving it back
PAGE_BYTES = 4096
PARTS = {
    "compute-bound": ("products", "attention"),
    "bandwidth-bound": ("weights", "scores", "elementwise", "cache_read", "cache_copy"),
    "launch-bound": ("launch", "kernels", "step"),
}


@dataclass(frozen=True)
class Machine:
    """Ceilings of one machine; rates in bytes/s and FLOP/s, times in seconds.

    `kind` is "measured", "data sheet" or "calibrated". The fields after it are zero until calibrated or measured.
    """

    name: str
    read_bandwidth_bytes_per_s: float
    copy_bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]  # dense, by dtype
    launch_s_per_layer: float
    launch_overlaps: bool
    kind: str
    source: str = ""
    memory_bytes: float | None = None
    power_w: float | None = None
    launch_s_per_operation: float = 0.0  # of a kernel, beyond its layer's share
    kernel_s: float = 0.0  # what even the smallest kernel occupies the device for
    cache_bytes: float | None = None  # what fits is not read from memory again; None: CPU_CACHE_BYTES, on a GPU 0
    page_s: float = 0.0  # for the system to give a page of memory anew; a GPU's allocator keeps what it has


@dataclass(frozen=True)
class Stack:
    """How software runs a model: eager Transformers, or an engine with graphs and fused kernels."""

    graphs: bool = False  # launched as a whole: no launch time
    fused_kernels: int | None = None  # per layer, where there are fewer than the model's own operations
    step_s: float = 0.0  # the engine's own work around a step


STACKS = {"transformers": Stack(), "vllm": Stack(graphs=True, fused_kernels=10)}


@dataclass(frozen=True)
class Case:
    """What is asked: a model, and prompts of `context` tokens of which `batch` generate `output_tokens` each."""

    model: Architecture
    context: int
    output_tokens: int = 64
    batch: int = 1
    dtype: str = "bfloat16"
    attention: str = "sdpa"
    cache: str = "dynamic"
    stack: str = "transformers"
    kv_dtype: str | None = None  # of the cache, where it is narrower than the weights
    all_logits: bool = False  # a prefill that computes the logits of every position


@dataclass(frozen=True)
class Prediction:
    """A predicted value, what binds it, and the interval where residuals are known."""

    value: float
    regime: str  # "launch-bound", "bandwidth-bound" or "compute-bound"
    low: float | None = None
    high: float | None = None
    phase: str | None = None  # of a whole generation, "prefill" or "decode": the longer one, whose regime it is


class Work(NamedTuple):
    """What one forward pass has to do, whatever the machine; bytes are of memory traffic if no cache held any."""

    layers: int
    rows: int  # tokens of all sequences
    product_flops: int
    attention_flops: float
    weight_bytes: int
    score_bytes: int
    score_tensor_bytes: int  # of one layer, as the other tensor sizes
    elementwise_bytes: float
    elementwise_tensor_bytes: int
    cache_bytes: int
    copied_bytes: int
    launches: int
    small_kernels: int


@lru_cache(maxsize=4096)
def work(c: Case, tokens: int, cached: int) -> Work:
    """Count a forward pass over `tokens` new tokens per sequence, with `cached` in the cache before them."""
    a, size, rows = c.model, cost.BYTES_PER_VALUE[c.dtype], tokens * c.batch
    engine, fused = c.stack != "transformers", STACKS[c.stack].fused_kernels
    flops = cost.decode_step_flops(a, cached, c.batch) if cached else cost.prefill_flops(a, tokens, c.batch)
    flops += 2 * (rows - c.batch) * a.vocab * a.head_input * c.all_logits
    keys = sum(cost.attended(b, cached) if cached else tokens for b in a.blocks)
    attention = 2 * rows * a.heads * (a.key_dim + a.value_dim) * keys
    skipped = 0.5 if tokens > 1 and c.attention != "eager" else 1.0  # a causal kernel leaves out what it masks
    score_numbers = rows * a.heads * (tokens + cached) if c.attention == "eager" else 0
    operations = sum(b.operations + ATTENTION_KERNELS[c.attention] for b in a.blocks)
    launches, linears = a.layers * fused if fused else operations, sum(len(b.linears) for b in a.blocks)
    passes = sum(b.elementwise for b in a.blocks) * launches / operations
    held = c.kv_dtype or c.dtype
    copied = 0 if engine else cost.cache_copy_bytes(a, cached, held, c.attention, c.cache, c.batch)
    return Work(
        layers=a.layers, rows=rows, product_flops=flops - attention, attention_flops=skipped * attention,
        weight_bytes=cost.step_weight_bytes(a, c.dtype, rows),
        score_bytes=SCORE_PASSES[size] * a.layers * score_numbers * size, score_tensor_bytes=score_numbers * size,
        elementwise_bytes=passes * rows * size,
        elementwise_tensor_bytes=rows * size * a.blocks[0].linears[-1][0],
        cache_bytes=cost.kv_cache_bytes(a, cached, held, c.batch, "engine" if engine else "transformers"),
        copied_bytes=copied, launches=launches, small_kernels=launches - min(linears, launches // 2),
    )  # fmt: skip


def parts_s(m: Machine, c: Case, tokens: int, cached: int = 0) -> dict[str, float]:
    """Seconds of each part of one forward pass; what hides behind another part is 0."""
    w = work(c, tokens, cached)
    rate, read = flops_per_s(m, c.dtype), m.read_bandwidth_bytes_per_s
    elementwise = _passes_s(m, w.elementwise_bytes, w.elementwise_tensor_bytes)
    kernels, stack = w.small_kernels * m.kernel_s, STACKS[c.stack]
    launch = w.layers * m.launch_s_per_layer + w.launches * m.launch_s_per_operation
    return {
        "products": w.product_flops / rate,
        "weights": w.weight_bytes / read,
        "attention": w.attention_flops / rate,
        "scores": _passes_s(m, w.score_bytes, w.score_tensor_bytes),
        "elementwise": elementwise * (elementwise > kernels),  # no kernel is shorter than the shortest
        "kernels": kernels * (elementwise <= kernels),
        "cache_read": w.cache_bytes / read,
        "cache_copy": _passes_s(m, w.copied_bytes, w.cache_bytes / w.layers),
        "launch": 0.0 if stack.graphs else launch,
        "step": stack.step_s,
    }


def flops_per_s(m: Machine, dtype: str) -> float:
    """The machine's rate for a dtype; raises ValueError for one that it states no rate for."""
    if dtype not in m.flops_per_s:
        raise ValueError(f"no FLOP/s known of {m.name} for {dtype}; known: {', '.join(m.flops_per_s)}")
    return m.flops_per_s[dtype]


def _passes_s(m: Machine, moved_bytes: float, tensor_bytes: float) -> float:
    """Seconds to read and write tensors of this size; what is written of large ones lies in pages given anew."""
    cache = m.cache_bytes if m.cache_bytes is not None else 0 if m.launch_overlaps else CPU_CACHE_BYTES
    if tensor_bytes <= cache:
        return moved_bytes * IN_CACHE / m.copy_bandwidth_bytes_per_s
    return moved_bytes / m.copy_bandwidth_bytes_per_s + moved_bytes / 2 / PAGE_BYTES * m.page_s


def forward(m: Machine, c: Case, tokens: int, cached: int = 0) -> Prediction:
    """Seconds of one forward pass."""
    parts = parts_s(m, c, tokens, cached)
    launch, total = parts["launch"], sum(parts.values())
    if m.launch_overlaps and launch >= total - launch:
        return Prediction(launch, "launch-bound")
    if m.launch_overlaps:
        parts["launch"], total = 0.0, total - launch
    shares = {regime: sum(parts[name] for name in names) for regime, names in PARTS.items()}
    return Prediction(total, max(shares, key=shares.get))


def ttft_s(m: Machine, c: Case) -> Prediction:
    """Time to the first token of one prompt (of the whole batch in Transformers), in seconds."""
    return forward(m, c if c.stack == "transformers" else replace(c, batch=1), c.context)


def step_s(m: Machine, c: Case, position: int, use_cache: bool = True) -> Prediction:
    """One decode step that follows `position` tokens, in seconds."""
    return forward(m, c, 1, position) if use_cache else forward(m, c, position + 1)


def tpot_s(m: Machine, c: Case, use_cache: bool = True) -> Prediction:
    """Time per output token after the first, in seconds: the mean of the steps.

    In an engine's closed loop each of the other requests starts anew once in that time: its prefill holds all up.
    """
    last = c.context + max(c.output_tokens - 2, 0)
    ends = [step_s(m, c, position, use_cache) for position in (c.context, (c.context + last) // 2, last)]
    held_up = (c.batch - 1) * ttft_s(m, c).value / c.output_tokens if c.stack != "transformers" else 0.0
    mean = (ends[0].value + 4 * ends[1].value + ends[2].value) / 6  # Simpson's rule: steps are smooth in their position
    return Prediction(mean + held_up, ends[1].regime)


def total_s(m: Machine, c: Case, use_cache: bool = True) -> Prediction:
    """Prefill and every decode step, in seconds."""
    prefill, tpot = ttft_s(m, c), tpot_s(m, c, use_cache)
    decode_s = (c.output_tokens - 1) * tpot.value
    longer = ("prefill", prefill) if prefill.value > decode_s else ("decode", tpot)
    return Prediction(prefill.value + decode_s, longer[1].regime, phase=longer[0])


def e2e_per_token_s(m: Machine, c: Case) -> Prediction:
    """Total time over output tokens, the time to the first included."""
    total = total_s(m, c)
    return replace(total, value=total.value / c.output_tokens)


def tpot_speedup(m: Machine, c: Case) -> Prediction:
    """TPOT without cache over TPOT with it; the regime is that of the cached arm."""
    return _ratio(tpot_s, m, c)


def total_speedup(m: Machine, c: Case) -> Prediction:
    """Total time without cache over total time with it."""
    return _ratio(total_s, m, c)


def _ratio(quantity: Callable, m: Machine, c: Case) -> Prediction:
    cached = quantity(m, c)
    return replace(cached, value=quantity(m, c, use_cache=False).value / cached.value)


def throughput_tokens_per_s(m: Machine, c: Case) -> Prediction:
    """Output tokens per second of all `batch` requests together, prefills included."""
    total = total_s(m, c)
    return replace(total, value=c.batch * c.output_tokens / total.value)


QUANTITIES: dict[str, Callable] = {
    "ttft_s": ttft_s, "tpot_s": tpot_s, "total_s": total_s, "tpot_speedup": tpot_speedup,
    "total_speedup": total_speedup, "throughput_tokens_per_s": throughput_tokens_per_s,
    "e2e_per_token_s": e2e_per_token_s,
    "tpot_no_cache_s": lambda m, c: tpot_s(m, c, use_cache=False),
    "total_no_cache_s": lambda m, c: total_s(m, c, use_cache=False),
}  # fmt: skip
