"""The greedy loop: what it counts, what it times, what it refuses. Tiny random models, float32."""

import gc
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers

from kvlab import models, weights
from kvlab.analyse import summary
from kvlab.measure import decoding, memory, timing

FAMILIES = ["llama", "qwen2", "mistral", "gemma", "gpt2", "qwen3", "deepseek_v3"]
PROMPT_TOKENS, OUTPUT_TOKENS = 24, 64
KNOWS_WINDOWS = int(transformers.__version__.split(".")[0]) >= 5  # a static cache of 4.49 has room for all tokens
torch.set_num_threads(1)
gc.freeze()  # collecting between the arms need not walk through all of torch


def load(architecture, attention="sdpa", dtype="float32"):
    if architecture not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {architecture}")
    return weights.load(models.resolve(f"random:{architecture}"), dtype, "cpu", attention)


def point(**changes):
    return {
        "dtype": "float32", "attention": "sdpa", "cache": "dynamic", "context_length": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS, "batch_size": 1, **changes,
    }  # fmt: skip


def arms(records):
    cached, uncached = sorted(records, key=lambda record: not record["use_cache"])
    return cached, uncached


def measured(model, **changes):
    return arms(decoding.measure_pair(model, point(**changes), numpy.random.default_rng(5)))


def expected_cache_bytes(settings, tokens, batch_size=1):
    """Bytes from the configuration alone: keys and values of each head, or MLA's latent."""
    if settings.model_type == "deepseek_v3":
        width = settings.kv_lora_rank + settings.qk_rope_head_dim
    else:
        heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
        shared_width = settings.hidden_size // settings.num_attention_heads
        width = 2 * heads * (getattr(settings, "head_dim", None) or shared_width)
    return batch_size * settings.num_hidden_layers * tokens * width * 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_br25_both_arms_give_the_same_tokens_and_show_their_switch(architecture, attention):
    model = load(architecture, attention)
    cached, uncached = measured(model, attention=attention)
    assert cached["status"] == uncached["status"] == "ok"
    assert cached["token_ids"] == uncached["token_ids"]
    assert len(set(cached["token_ids"])) > 5, "a model that repeats one token proves nothing"
    assert cached["input_lengths"] == [PROMPT_TOKENS] + [1] * (OUTPUT_TOKENS - 1)
    assert uncached["input_lengths"] == [PROMPT_TOKENS + step for step in range(OUTPUT_TOKENS)]
    assert uncached["cache_lengths"] == [None] * OUTPUT_TOKENS and uncached["kv_cache_bytes"] is None
    held = cached["cache_lengths"][-1]
    if held < PROMPT_TOKENS:  # a cache sized to the window: one token less, as the newest comes on top
        assert set(cached["cache_lengths"]) == {model.config.sliding_window - 1}
    else:
        assert cached["cache_lengths"] == [PROMPT_TOKENS + step for step in range(OUTPUT_TOKENS)]
    assert cached["kv_cache_bytes"] == expected_cache_bytes(model.config, held)
    assert min(cached["top2_margins"]) > 0 and len(cached["top2_margins"]) == OUTPUT_TOKENS


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_static_cache_gives_the_same_tokens_and_has_room_for_all_of_them_or_for_the_window(architecture):
    model = load(architecture)
    cached, uncached = measured(model, cache="static")
    if cached["status"] == "refused":  # GPT-2 before Transformers 5
        assert "takes no static cache in this release" in cached["reason"] and uncached["status"] == "ok"
        return
    assert cached["token_ids"] == uncached["token_ids"]
    assert cached["cache_lengths"] == [PROMPT_TOKENS + step for step in range(OUTPUT_TOKENS)]
    room = PROMPT_TOKENS + OUTPUT_TOKENS
    if architecture == "mistral" and KNOWS_WINDOWS:
        room = model.config.sliding_window
    assert cached["kv_cache_bytes"] == expected_cache_bytes(model.config, room)


def test_a_batch_decodes_every_sequence_and_holds_a_cache_for_each():
    model = load("llama")
    cached, uncached = measured(model, batch_size=3, output_tokens=8)
    assert cached["token_ids"] == uncached["token_ids"]
    assert [len(step) for step in cached["token_ids"]] == [3] * 8
    assert len({tuple(row) for row in zip(*cached["token_ids"], strict=True)}) == 3
    assert cached["kv_cache_bytes"] == expected_cache_bytes(model.config, PROMPT_TOKENS + 7, batch_size=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_br25_in_16_bits_both_arms_are_fed_one_sequence_and_their_difference_is_kept(dtype):
    cached, uncached = measured(load("llama", dtype=dtype), dtype=dtype, output_tokens=12)
    assert cached["fed_sequence"] and uncached["fed_sequence"]
    assert cached["logit_differences"] == uncached["logit_differences"]
    assert len(cached["logit_differences"]) == 12
    for step, difference in enumerate(cached["logit_differences"]):
        agree = cached["token_ids"][step] == uncached["token_ids"][step]
        assert agree or cached["top2_margins"][step] < 2 * difference
    assert max(cached["logit_differences"]) < 1
    assert cached["kv_cache_bytes"] * 2 == expected_cache_bytes(load("llama").config, PROMPT_TOKENS + 11)


def test_the_difference_of_logits_is_the_largest_of_each_step():
    one, other = torch.zeros(2, 1, 3, dtype=torch.float16), torch.tensor([[[0, 0.5, -1]], [[0, 0, 0.25]]])
    assert decoding._logit_differences(list(one), list(other)) == [1.0, 0.25]
    assert decoding._logit_differences([], []) is None


def test_a_fed_sequence_goes_in_instead_of_the_choices():
    model, feed = load("llama"), list(range(100, 108))
    fed = decoding.generate(model, list(range(3, 27)), 8, True, timing.synchronizer("cpu"), feed=feed)
    teacher = model(input_ids=torch.tensor([list(range(3, 27)) + feed[:7]])).logits[0, 23:]
    assert fed.token_ids == teacher.argmax(dim=-1).tolist()
    assert torch.allclose(torch.cat(fed.logits), teacher, atol=1e-4)
    two = teacher.topk(2).values
    assert fed.top2_margins == pytest.approx((two[:, 0] - two[:, 1]).tolist(), abs=1e-3)


def test_the_negative_control_is_labelled_as_a_pair_but_shows_that_no_cache_was_used():
    records = decoding.measure_negative_control(load("llama"), point(), numpy.random.default_rng(5))
    cached, uncached = arms(records)
    assert cached["negative_control"] and cached["use_cache"] and not uncached["use_cache"]
    assert cached["input_lengths"] == uncached["input_lengths"] == [24 + step for step in range(64)]
    assert cached["cache_lengths"] == [None] * 64 and cached["kv_cache_bytes"] is None


class IgnoresTheSwitch(torch.nn.Module):
    """A model that always reads everything it has seen, whatever it is told about its cache."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config, self.seen = inner, inner.config, None

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, past_key_values=None, use_cache=None, logits_to_keep=0):
        first = self.seen is None or input_ids.shape[-1] > 1
        self.seen = input_ids if first else torch.cat([self.seen, input_ids], dim=-1)
        logits = self.inner(input_ids=self.seen, use_cache=False).logits[:, -1:]
        return SimpleNamespace(logits=logits, past_key_values=past_key_values)


def test_a_model_that_ignores_the_switch_is_visible_in_the_raw_record():
    cached, uncached = measured(IgnoresTheSwitch(load("llama")), output_tokens=8)
    assert cached["token_ids"] == uncached["token_ids"], "its tokens alone would not give it away"
    assert cached["input_lengths"] == [24 + step for step in range(8)]
    assert set(cached["cache_lengths"]) == {0}


def test_br29_the_end_token_ends_nothing():
    model = load("llama")
    free = measured(model, output_tokens=32)[0]
    model.config.eos_token_id = free["token_ids"][5]
    model.generation_config.eos_token_id = free["token_ids"][5]
    prompt = list(range(3, 27))
    lengths = [len(decoding.generate(model, prompt, 32, use_cache, timing.synchronizer("cpu")).token_ids)
               for use_cache in (True, False)]  # fmt: skip
    assert lengths == [32, 32]


class AsynchronousDevice:
    """Stands for a device: a launch returns after 1 ms, the work takes 50 ms, the first 500 ms more."""

    def __init__(self):
        self.busy_until, self.launches, self.waits = 0.0, 0, 0

    def launch(self):
        time.sleep(0.001)
        cold = 0.5 if self.launches == 0 else 0.0
        self.launches += 1
        self.busy_until = max(self.busy_until, time.perf_counter()) + 0.05 + cold

    def synchronize(self):
        self.waits += 1
        time.sleep(max(0.0, self.busy_until - time.perf_counter()))


def asynchronous(model, monkeypatch):
    device, forward = AsynchronousDevice(), model.forward
    monkeypatch.setattr(timing, "synchronizer", lambda _: device.synchronize)

    def launched(input_ids, past_key_values=None, use_cache=None, logits_to_keep=0):
        device.launch()
        return forward(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache,
                       logits_to_keep=logits_to_keep)  # fmt: skip

    model.forward = launched
    return device


def test_br31_times_are_the_devices_not_the_launches_and_start_up_is_left_out(monkeypatch):
    model = load("llama")
    device = asynchronous(model, monkeypatch)
    for record in measured(model, output_tokens=4):
        steps_s = numpy.diff([0.0, *record["arrival_times_s"]])
        assert (steps_s > 0.050).all() and (steps_s < 0.150).all(), steps_s
        assert record["warmup_forwards"] == 2
    assert device.waits >= device.launches + 3  # before each start and at each stamp


def test_warm_up_runs_once_for_a_shape_family(monkeypatch):
    model = load("llama")
    device = asynchronous(model, monkeypatch)
    measured(model, output_tokens=2)
    after_first = device.launches
    measured(model, output_tokens=3)
    assert (after_first, device.launches) == (2 + 2 * 2, after_first + 2 * 3)


def compiled(model, monkeypatch, compile_call):
    """The record of a compiled generation and its row, with `compile_call(model)` in the compiler's place."""
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: compile_call(self), raising=False)
    asked = point(cache="static", compiled=True, output_tokens=6)
    record = decoding.measure_generation(model, asked, numpy.random.default_rng(5))
    return record, summary.generations([record]).iloc[0]


def test_a_compiled_generation_compiles_before_the_clock_and_proves_its_tokens_by_the_eager_ones(monkeypatch):
    entered = []

    def slow_at_first(model):
        def step(input_ids, **rest):
            time.sleep(0.0 if entered else 1.0)
            entered.append(input_ids.shape[-1])
            return model(input_ids=input_ids, **rest)

        return step

    record, row = compiled(load("llama"), monkeypatch, slow_at_first)
    assert entered == [1] * 10  # five steps to warm up, five under the clock; the prefill stays eager
    assert record["warmup_s"] > 1 > record["arrival_times_s"][-1]
    assert record["cache_lengths"] == list(range(PROMPT_TOKENS, PROMPT_TOKENS + 6))
    assert record["token_ids"] == record["eager"]["token_ids"] and row["status"] == "ok" and row["compiled"]


def test_a_compiled_generation_that_chooses_other_tokens_is_refused(monkeypatch):
    def wrong(model):
        return lambda input_ids, **rest: model(input_ids=input_ids.flip(0) * 0 + 7, **rest)

    _, row = compiled(load("llama"), monkeypatch, wrong)
    assert (row["status"], row["reason"]) == ("refused", "tokens_differ")


def test_without_a_compiler_a_compiled_generation_is_a_failure_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    record, row = compiled(load("llama"), monkeypatch, lambda model: model)
    assert row["status"] == "failed" and "install g++" in row["reason"] and "\n" not in row["reason"]


def test_the_reason_of_a_compilation_that_fails_names_its_cause(monkeypatch):
    def fails(model):
        raise RuntimeError("backend='inductor' raised:\nCppCompileError: C++ compile error\n\nCommand: g++")

    record, _ = compiled(load("llama"), monkeypatch, fails)
    assert record["status"] == "failed"
    assert record["reason"] == "RuntimeError: backend='inductor' raised: CppCompileError: C++ compile error"


@pytest.mark.slow
def test_a_real_compiler_gives_the_eager_tokens():
    asked = point(cache="static", compiled=True, output_tokens=6)
    record = decoding.measure_generation(load("llama"), asked, numpy.random.default_rng(5))
    assert summary.generations([record])["status"].item() == "ok", record["reason"]


def test_br28_cache_size_and_length_are_read_from_every_generation_of_caches():
    def states():
        return torch.zeros(1, 2, 5, 4, dtype=torch.float16)

    nested = tuple((states(), states()) for _ in range(2))
    lists = SimpleNamespace(key_cache=[states(), states()], value_cache=[states(), states()])
    layers = SimpleNamespace(layers=[SimpleNamespace(keys=states(), values=states()) for _ in range(2)])
    for cache in (nested, lists, layers):
        assert (memory.kv_cache_bytes(cache), memory.cache_length(cache)) == (320, 5)
    with pytest.raises(TypeError, match=transformers.__version__):
        memory.kv_cache_bytes(object())


def test_br32_the_models_last_position_may_be_used_and_no_more():
    model = load("llama")
    model.config.max_position_embeddings = 64
    for record in measured(model, context_length=60, output_tokens=4):
        assert record["status"] == "ok"
    for record in measured(model, context_length=60, output_tokens=10):
        assert record["status"] == "refused" and record["arrival_times_s"] is None
        assert "60" in record["reason"] and "10" in record["reason"] and "64" in record["reason"]


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_memory_that_runs_out_is_a_record_and_the_other_arm_still_runs(error):
    model = load("llama")
    forward = model.forward

    def runs_out(input_ids, past_key_values=None, use_cache=None, logits_to_keep=0):
        if input_ids.shape[-1] > PROMPT_TOKENS:
            raise error
        return forward(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache,
                       logits_to_keep=logits_to_keep)  # fmt: skip

    model.forward = runs_out
    cached, uncached = measured(model, output_tokens=4)
    assert (cached["status"], uncached["status"]) == ("ok", "out_of_memory")
    assert type(error).__name__ in uncached["reason"] and uncached["arrival_times_s"] is None


def test_another_error_is_a_failed_record_with_its_reason(monkeypatch):
    model = load("llama")
    model.forward = lambda input_ids, past_key_values=None, use_cache=None, logits_to_keep=0: 1 / len([][0])
    for record in measured(model):
        assert record["status"] == "failed" and record["reason"].startswith("IndexError")


def test_an_unknown_cache_kind_is_refused_by_name():
    cached, _ = measured(load("llama"), cache="paged")
    assert cached["status"] == "refused" and "dynamic, static" in cached["reason"]


def test_only_the_last_positions_logits_are_computed():
    for architecture in ("llama", "gpt2"):
        model, rows = load(architecture), []
        head = model.get_output_embeddings()
        head.register_forward_hook(lambda _, inputs, __, rows=rows: rows.append(inputs[0].numel() // 64))
        measured(model, output_tokens=4)
        assert set(rows) == {1}


def test_the_order_of_arms_is_drawn_and_the_prompt_follows_the_generator():
    model = load("llama")
    firsts = {
        decoding.measure_pair(model, point(output_tokens=2), numpy.random.default_rng(seed))[0]["use_cache"]
        for seed in range(12)
    }
    assert firsts == {True, False}
    one, other = (measured(model, output_tokens=9)[0]["token_ids"] for _ in range(2))
    assert one == other
