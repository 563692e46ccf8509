"""Ceilings and made-up models: raw times, work that is really done, and nothing that outgrows the machine."""

import pytest
import torch
from test_sweep import run, smoke  # noqa: F401  (a fixture and the parameters of a small run)

from kvlab import models, sweep, weights
from kvlab.analyse import summary
from kvlab.measure import decoding, machine, memory
from kvlab.measure.worker import Worker

CPU = {"device": "cpu", "dtype": "float32", "threads": 1}
QUANTITIES = [
    {"quantity": "read", "size_bytes": 2**20}, {"quantity": "copy", "size_bytes": 2**20},
    {"quantity": "gemm", "shape": [8, 16, 32]}, {"quantity": "launch"}, {"quantity": "layer"},
]  # fmt: skip


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda q: q["quantity"])
def test_a_ceiling_is_raw_times_and_the_work_of_one_call(quantity):
    record = machine.measure(CPU | quantity)
    assert len(record["samples_s"]) == machine.CALLS[quantity["quantity"]] and min(record["samples_s"]) > 0
    work = {name: record[name] for name in ("bytes", "flops", "launches") if name in record}
    expected = {"read": 2**20, "copy": 2**21, "gemm": 2 * 8 * 16 * 32}.get(quantity["quantity"])
    assert list(work.values()) == [expected or machine.LAUNCHES[quantity["quantity"]]]


def test_reading_and_copying_share_one_buffer_that_holds_what_is_said():
    call, work = machine._copy(CPU | {"size_bytes": 2**20})
    source, target = call.args[0], call.func.__self__
    assert source.nbytes == target.nbytes == work["bytes"] // 2 == 2**20
    matrix = machine._read(CPU | {"size_bytes": 2**21})[0].args[1]
    assert matrix.data_ptr() == source.data_ptr() and matrix.nbytes == 2**21


def record(quantity, samples_s, repetition=1, threads=2, **work):
    point = {"quantity": quantity, "dtype": "float32", "threads": threads}
    return {"kind": "ceiling", "status": "ok", "point": point, "repetition": repetition, "samples_s": samples_s, **work}


def test_a_ceiling_is_the_best_call_of_a_repetition_in_its_own_unit():
    frame = summary.ceilings(
        [
            record("read", [0.2, 0.1, 0.4], bytes=10),
            record("layer", [0.5, 0.3], launches=3),
            record("gemm", [2.0], flops=8),
        ]
    )
    assert list(zip(frame["value"], frame["unit"])) == [(100.0, "B/s"), (pytest.approx(0.1), "s"), (4.0, "FLOP/s")]


def test_the_servers_threads_have_a_bandwidth_of_their_own():
    points = [point for point, _ in sweep.machine_points(smoke(threads=2, server_threads=1))]
    assert {point["threads"] for point in points if point["quantity"] == "read"} == {1, 2}


def test_ceilings_come_out_of_a_worker_without_a_model(run):  # noqa: F811
    p = smoke(ceiling_repetitions=1, bandwidth_buffer_mib=1, threads=1)
    points = [x for x in sweep.machine_points(p) if x[0]["quantity"] in ("read", "launch")]
    sweep.single(run, p, "machine", points, lambda model: Worker(None, "float32", "cpu", 1))
    found = run.records("machine", points)
    assert [r["status"] for r in found] == ["ok", "ok"] and found[0]["process"] == found[1]["process"]
    assert sweep.missing(found, None, points) == []


@pytest.fixture(scope="module")
def small_slice():
    """The slice's architecture at a size for tests, filled in the same quick way."""
    settings = weights.config(models.resolve("slice:qwen2.5-7b/2"))
    for name, value in (models.OWN["thin"] | {"vocab_size": 512}).items():
        setattr(settings, name, value)
    wanted = {"attn_implementation": "sdpa", **weights._dtype_keyword("float32")}
    return weights._quickly_filled(settings, wanted, "float32", "cpu").eval()


def test_a_slice_is_the_architecture_of_the_large_model():
    settings = weights.config(models.resolve("slice:qwen2.5-7b/4"))
    shape = settings.hidden_size, settings.intermediate_size, settings.num_hidden_layers, settings.vocab_size
    assert shape == (3584, 18944, 4, 152064) and settings.tie_word_embeddings
    assert (settings.num_attention_heads, settings.num_key_value_heads) == (28, 4)


@pytest.mark.parametrize("wrong", ["slice:qwen2.5-7b", "slice:qwen2.5-7b/0", "slice:qwen2.5-7b/29", "slice:llama/2"])
def test_a_slice_that_does_not_exist_names_one_that_does(wrong):
    with pytest.raises(ValueError, match="slice:qwen2.5-7b/4"):
        models.resolve(wrong)


def test_a_quickly_filled_model_computes_with_its_bias_rotation_and_tied_head(small_slice):
    names = dict(small_slice.named_parameters())
    assert any(name.endswith("q_proj.bias") for name in names) and "lm_head.weight" not in names
    assert all(torch.isfinite(weight).all() for weight in names.values())
    reference = type(small_slice.model.rotary_emb)(config=small_slice.config)
    assert torch.equal(small_slice.model.rotary_emb.inv_freq, reference.inv_freq)
    logits = small_slice(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all() and logits.std() > 0


def test_the_first_layers_run_alone_and_come_back(small_slice):
    point = {"context_length": 8, "output_tokens": 3, "dtype": "float32", "attention": "sdpa", "layers": 1}
    with weights.first_layers(small_slice, 1) as model:
        record = decoding.measure_generation(model, point, decoding.numpy.random.default_rng(0))
    whole = decoding.measure_generation(small_slice, point | {"layers": 2}, decoding.numpy.random.default_rng(0))
    assert record["status"] == "ok" and record["use_cache"] and "pair" not in record
    assert 2 * record["kv_cache_bytes"] == whole["kv_cache_bytes"]
    assert record["parameter_bytes"] < whole["parameter_bytes"] == memory.parameter_bytes(small_slice)


def test_a_slice_beyond_the_free_memory_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(weights, "_free_memory_bytes", lambda: 2**30)
    with pytest.raises(MemoryError, match=r"needs \d+\.\d GiB of memory, 1\.0 GiB are free") as refused:
        weights.load(models.resolve("slice:qwen2.5-7b/4"), "float32")
    assert decoding.is_out_of_memory(refused.value)  # a shortage that was foreseen is a result, not a failure


def test_a_thin_model_keeps_the_layers_and_loses_the_work(tmp_path):
    thin = weights.load(models.resolve("thin:random:llama"), "float32")
    whole = weights.config(models.resolve("random:llama"))
    assert thin.config.num_hidden_layers == whole.num_hidden_layers
    assert thin.config.hidden_size == models.OWN["thin"]["hidden_size"] < whole.hidden_size
    assert torch.isfinite(thin(torch.tensor([[1, 2]])).logits).all()
    with pytest.raises(ValueError, match="measured in Transformers only"):
        weights.served_folder(models.resolve("thin:random:llama"), "float32")


def test_a_tokens_anatomy_asks_each_model_in_one_process(run):  # noqa: F811
    opened = []

    class Answering:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def measure_generation(self, point, repetition):
            return [{"kind": "generation", "point": point, "repetition": repetition, "status": "ok"}]

        def measure_ceiling(self, point, repetition):
            return [{"kind": "ceiling", "point": point, "repetition": repetition, "status": "ok"}]

    def open_worker(model):
        opened.append(model)
        return Answering()

    p = smoke(anatomy_repetitions=2, slice_repetitions=2)
    sweep.anatomy(run, p, open_worker)
    assert opened == [p.model, f"thin:{p.model}", "slice:qwen2.5-7b/4"]
    sweep.anatomy(run, p, open_worker)
    assert len(opened) == 3  # nothing was missing
    slices = run.records("anatomy", sweep.slice_points(p))
    assert sorted(r["point"]["layers"] for r in slices) == [1, 1, 2, 2, 4, 4]
