"""S1b's primitive: one greedy generation, every token timed, with the KV cache or without it."""

import inspect
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy
import torch
import transformers

from kvlab import prompts, weights
from kvlab.measure import compilation, memory, sampling, timing

CACHES = ("dynamic", "static")
WARM_UP_TOKENS = 512
_warm: WeakKeyDictionary = WeakKeyDictionary()  # model -> the shape families it has already run
_arms_run = itertools.count()


@dataclass(frozen=True)
class Generation:
    """What one generation showed, nothing derived; with a batch, `token_ids` holds a list per step."""

    arrival_times_s: list[float]
    device_times_s: list[float] | None
    input_lengths: list[int]
    cache_lengths: list[int | None]
    token_ids: list
    top2_margins: list[float]
    fed_sequence: bool
    kv_cache_bytes: int | None
    logits: list[torch.Tensor]  # per step (batch, vocabulary), kept only for a fed sequence


def generate(
    model: torch.nn.Module,
    prompt_ids: Sequence,
    output_tokens: int,
    use_cache: bool,
    synchronize: Callable[[], None],
    feed: Sequence | None = None,
    cache: object = "dynamic",
    compiled: bool = False,
) -> Generation:
    """Generate exactly `output_tokens` tokens greedily; no token ends it early.

    `prompt_ids` is one list of ids or one per sequence of a batch. With `feed` (same nesting, output_tokens
    long) these tokens go in instead of the model's own choices, which are recorded all the same. `cache` is a kind,
    or one to be used again. With `compiled`, steps of one token run compiled; what enters the model is not seen then.
    Raises ValueError when prompt and output exceed the model's positions.
    """
    device = next(model.parameters()).device
    ids = torch.tensor(prompt_ids, device=device)
    ids = ids.reshape(-1, ids.shape[-1])  # (batch, prompt_tokens)
    fed = None if feed is None else torch.tensor(feed, device=device).reshape(len(ids), -1)
    _check_positions(model, ids.shape[-1], output_tokens)
    last_logits = _last_logits_function(model, compiled)
    past = _empty_cache(model, cache, len(ids), ids.shape[-1] + output_tokens) if use_cache else None
    watch = timing.Stopwatch(synchronize, device_events=device.type == "cuda")
    notes = []
    with torch.inference_mode(), nullcontext([]) if compiled else _observed_inputs(model) as seen:
        step_ids = ids
        watch.start()  # the device is idle: the clock runs from the launch of the prefill forward
        for step in range(output_tokens):
            logits, past = last_logits(step_ids, past, use_cache)
            best, ids_of_best = logits.topk(2)  # (batch, 2): the first is the greedy choice
            choice = ids_of_best[:, 0]  # (batch,)
            tokens = choice.tolist()  # the host holds the token now
            watch.stamp()  # step 0: this interval is the TTFT; later ones: the time of one decode step
            # From here to the next launch notes are taken, to be read when the clock has stopped.
            length = None if past is None else memory.cache_length(past)
            kept = None if fed is None else logits.cpu()
            entered = max(seen, default=step_ids.shape[-1])
            notes.append((entered, length, tokens, best, kept))
            seen.clear()
            following = choice[:, None] if fed is None else fed[:, step : step + 1]  # (batch, 1)
            step_ids = following if use_cache else torch.cat([step_ids, following], dim=-1)
    return _generation(watch, notes, past)


def _generation(watch: timing.Stopwatch, notes: list[tuple], past: object) -> Generation:
    entered, lengths, tokens, best, logits = map(list, zip(*notes))
    return Generation(
        arrival_times_s=watch.times_s,
        device_times_s=watch.device_times_s(),
        input_lengths=entered,
        cache_lengths=lengths,
        token_ids=tokens if len(tokens[0]) > 1 else [step[0] for step in tokens],
        top2_margins=[float((step[:, 0] - step[:, 1]).min()) for step in best],
        fed_sequence=logits[0] is not None,
        kv_cache_bytes=None if past is None else memory.kv_cache_bytes(past),
        logits=[step for step in logits if step is not None],
    )


def _check_positions(model: torch.nn.Module, prompt_tokens: int, output_tokens: int) -> None:
    limit = weights.max_positions(model.config)
    if output_tokens < 1 or prompt_tokens + output_tokens > limit:
        raise ValueError(
            f"{prompt_tokens} prompt tokens and {output_tokens} output tokens"
            f" do not fit the model's {limit} positions"
        )


def _last_logits_function(model: torch.nn.Module, compiled: bool = False) -> Callable:
    """Return a forward pass that computes the last position's logits only, as the class offers it."""
    parameters = inspect.signature(model.forward).parameters
    limit = next((name for name in ("logits_to_keep", "num_logits_to_keep") if name in parameters), None)
    whole = model if limit else model.base_model
    step = _compiled(whole) if compiled else whole

    def last_logits(ids: torch.Tensor, past: object, use_cache: bool) -> tuple:
        more = {limit: 1} if limit else {}
        if compiled and "cache_position" in parameters:  # 4.49 would look it up in the cache's numbers
            more["cache_position"] = memory.cache_length(past) + torch.arange(ids.shape[-1], device=ids.device)
        call = step if ids.shape[-1] == 1 else whole
        answer = call(input_ids=ids, past_key_values=past, use_cache=use_cache, **more)
        if limit:
            return answer.logits[:, -1], answer.past_key_values
        return model.get_output_embeddings()(answer.last_hidden_state[:, -1]), answer.past_key_values

    return last_logits


def _compiled(model: torch.nn.Module) -> Callable:
    """The model as Transformers' own `generate` compiles it, once; on a card into CUDA graphs."""
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))):
        raise RuntimeError("torch.compile needs a C++ compiler, and there is none: install g++")
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    return model.get_compiled_call(transformers.CompileConfig(fullgraph=True, dynamic=False, mode=mode))


def _empty_cache(model: torch.nn.Module, kind: object, batch_size: int, length: int) -> object | None:
    """Return an empty cache of the model's own layout, or this one emptied; a static one has room for just `length`."""
    if hasattr(kind, "reset"):
        with torch.inference_mode():  # which made its tensors
            kind.reset()
        return kind
    if kind not in CACHES:
        raise ValueError(f"unknown cache {kind!r}; choose one of {', '.join(CACHES)}")
    if getattr(model, "_supports_cache_class", True) is False:  # older ones make nested tuples
        if kind != "dynamic":
            raise ValueError(f"{type(model).__name__} takes no {kind} cache in this release of Transformers")
        return None
    if kind == "dynamic":
        knows_layers = "config" in inspect.signature(transformers.DynamicCache).parameters
        return transformers.DynamicCache(**({"config": model.config} if knows_layers else {}))
    older = {"max_batch_size": batch_size, "device": model.device, "dtype": model.dtype}
    takes = inspect.signature(transformers.StaticCache).parameters
    known = {name: value for name, value in older.items() if name in takes}
    return transformers.StaticCache(config=model.config, max_cache_len=length, **known)


@contextmanager
def _observed_inputs(model: torch.nn.Module) -> Iterator[list[int]]:
    """Collect how many tokens per sequence really enter the model's embedding, whatever was asked for."""
    seen: list[int] = []
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model

    def note(_: torch.nn.Module, inputs: tuple) -> None:
        if inputs:
            seen.append(inputs[0].shape[-1])

    hook = embedding.register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def measure_pair(model: torch.nn.Module, point: dict, rng: numpy.random.Generator) -> list[dict]:
    """Run the point with and without cache, in random order, and return one raw record per arm.

    Memory that runs out, a refused point and a failing model become records with status and reason.
    """
    return _measure_arms(model, point, rng, really_cached={True: True, False: False})


def measure_negative_control(model: torch.nn.Module, point: dict, rng: numpy.random.Generator) -> list[dict]:
    """Run a pair that must be refused: labelled like any other, but the cache is off in both arms."""
    records = _measure_arms(model, point, rng, really_cached={True: False, False: False})
    return [{**record, "negative_control": True} for record in records]


def measure_generation(model: torch.nn.Module, point: dict, rng: numpy.random.Generator) -> dict:
    """Run the point with the cache alone and return its raw record: a time, not half of a pair."""
    inputs = _inputs(model, point, rng)
    warmup_forwards = _warm_up(model, point, inputs)
    raw, logits = _measure_arm(model, point, True, inputs)
    if point.get("compiled") and raw["status"] == "ok":
        raw = _measure_compiled(model, point, inputs, raw, logits)
    return {"kind": "generation", "point": point, "use_cache": True, "warmup_forwards": warmup_forwards, **raw}


def _measure_compiled(model: torch.nn.Module, point: dict, inputs: dict, eager: dict, eager_logits: list) -> dict:
    """Run the point compiled: once to compile (`warmup_s`, no token of it is timed), then again on the same cache.

    The raw record holds what the eager arm chose: without the same tokens the times prove nothing.
    """
    room = (point.get("batch_size", 1), point["context_length"] + point["output_tokens"])
    cache = _empty_cache(model, point["cache"], *room)  # graphs are bound to its address
    kept = compilation.begin(f"torch-{torch.__version__}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept)
    inputs, start_s = inputs | {"cache": cache, "compiled": True}, time.perf_counter()
    raw, logits = _measure_arm(model, point, True, inputs)
    warmup_s = time.perf_counter() - start_s
    if raw["status"] == "ok":
        compilation.end(kept)
        raw, logits = _measure_arm(model, point, True, inputs)
    chosen = {name: eager[name] for name in ("token_ids", "top2_margins", "fed_sequence")}
    differences = _logit_differences(logits, eager_logits)
    return raw | {"warmup_s": warmup_s, "eager": chosen, "logit_differences": differences}


def _measure_arms(
    model: torch.nn.Module, point: dict, rng: numpy.random.Generator, really_cached: dict[bool, bool]
) -> list[dict]:
    inputs = _inputs(model, point, rng)
    warmup_forwards = _warm_up(model, point, inputs)
    pair, records, logits = uuid.uuid4().hex, [], []
    for label in rng.permutation([True, False]).tolist():
        raw, kept = _measure_arm(model, point, really_cached[label], inputs)
        shared = {"kind": "generation", "point": point, "use_cache": label, "pair": pair,
                  "order": next(_arms_run), "warmup_forwards": warmup_forwards}  # fmt: skip
        records.append({**shared, "negative_control": False, **raw})
        logits.append(kept)
    differences = _logit_differences(*logits)
    return [{**record, "logit_differences": differences} for record in records]


def _inputs(model: torch.nn.Module, point: dict, rng: numpy.random.Generator) -> dict:
    """Draw the prompts and, where rounding may part the arms (16-bit dtypes), the tokens fed to both."""
    seed, rows = int(rng.integers(2**31)), range(point.get("batch_size", 1))
    special = [getattr(model.config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    forbidden = [int(number) for number in numpy.hstack(special) if number is not None]
    vocab_size = model.config.get_text_config().vocab_size

    def draw(length: int, first: int) -> list[list[int]]:
        return [prompts.token_ids(length, seed, first + row, vocab_size, forbidden) for row in rows]

    feed = None if point["dtype"] == "float32" else draw(point["output_tokens"], len(rows))
    return {"prompt_ids": draw(point["context_length"], 0), "feed": feed}


def _warm_up(model: torch.nn.Module, point: dict, inputs: dict) -> int:
    """Run each shape family once per process, untimed: a prefill and one step of one token.

    A step without cache has the shape of a prefill, so two forwards cover both arms. Lengths beyond WARM_UP_TOKENS
    are one family: they run the same kernels for longer, at seconds a forward on a CPU. Returns the forwards' number.
    """
    length = min(point["context_length"], WARM_UP_TOKENS)
    family = (length, *(point.get(name) for name in ("attention", "cache", "batch_size", "layers")))
    if family not in _warm.setdefault(model, set()):
        _warm[model].add(family)
        prompt_ids = [row[:length] for row in inputs["prompt_ids"]]
        _measure_arm(model, {**point, "output_tokens": 2}, True, {"prompt_ids": prompt_ids, "feed": None})
    return 2


def _measure_arm(model: torch.nn.Module, point: dict, use_cache: bool, inputs: dict) -> tuple[dict, list]:
    """Run one generation; return its raw record and, for a fed sequence, the logits of each step."""
    device = next(model.parameters()).device
    memory.give_back()  # what an arm before this one has left, a failed one above all
    baseline_bytes, memory_source = memory.resident_set_bytes(), memory.start_peak(device)
    sampled = sampling.Telemetry(card_uuid=_card_uuid(device))
    cpu_time_s = time.process_time()  # all threads of this process
    asked = {"output_tokens": point["output_tokens"], "cache": point.get("cache", "dynamic"), **inputs}
    synchronize = timing.synchronizer(device)
    with sampled:
        generation, status, reason = _attempt(
            lambda: generate(model, use_cache=use_cache, synchronize=synchronize, **asked)
        )
    cpu_time_s = time.process_time() - cpu_time_s
    peak_bytes, resident_bytes = memory.peak_bytes(device, memory_source), memory.resident_set_bytes()
    shown = vars(generation) if generation else dict.fromkeys(Generation.__dataclass_fields__)
    raw = {name: value for name, value in shown.items() if name != "logits"} | {
        "status": status, "reason": reason, "chunk_tokens": generation and [1] * len(generation.token_ids),
        "token_count_source": "exact", "parameter_bytes": memory.parameter_bytes(model),
        "peak_memory_bytes": peak_bytes, "memory_source": memory_source, "cpu_time_s": cpu_time_s,
        "resident_set_bytes": resident_bytes, "resident_set_before_bytes": baseline_bytes,
        "reserved_memory_bytes": memory.reserved_bytes(device), "telemetry": sampled.record(),
    }  # fmt: skip
    return raw, generation.logits if generation else []


def _card_uuid(device: torch.device) -> str | None:
    """The card's UUID as CUDA knows it, which no order of cards can confuse; None where it does not tell."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return uuid and f"GPU-{uuid}"


def _attempt(run: Callable[[], Generation]) -> tuple[Generation | None, str, str | None]:
    """Return the result with its status and reason; the failed run's tensors are free when this returns."""
    try:
        return run(), "ok", None
    except (ValueError, RuntimeError, MemoryError, TypeError, LookupError, AttributeError) as error:
        return None, *failure(error)


def failure(error: Exception) -> tuple[str, str]:
    """Return the status of what failed like this, and the reason in one line."""
    if isinstance(error, ValueError):
        return "refused", str(error)
    said = (str(error) or "no message").replace("raised:\n", "raised: ").splitlines()[0]  # of torch.compile two
    reason = f"{type(error).__name__}: {said}"
    return "out_of_memory" if is_out_of_memory(error) else "failed", reason


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on a device or in the host's allocator."""
    signs = ("out of memory", "can't allocate memory", "bad_alloc", "cannot allocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)


def _logit_differences(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[float] | None:
    """Return the arms' largest logit difference per step; None unless both were fed the same sequence."""
    if not one or len(one) != len(other):
        return None
    return [float((a.float() - b.float()).abs().max()) for a, b in zip(one, other, strict=True)]
