"""The predictor against measured records and published figures: what a reader of a predicted number relies on."""

import re
from dataclasses import replace

import numpy as np
import pytest

from kvlab import paths, records, whatif
from kvlab.__main__ import main
from kvlab.analyse import calibrate, cost, predict, published, summary
from kvlab.analyse.predict import Case, Machine
from kvlab.article import choice, prose, world

CPU = Machine("a CPU", 12e9, 8e9, {"float32": 100e9, "bfloat16": 50e9}, 3e-4, False, "measured")
KNOWN = cost.known_models()
SMALL, LARGE = KNOWN["SmolLM2-135M"], KNOWN["Qwen2.5-7B-Instruct"]


def case(model=SMALL, context=512, **more):
    return Case(model, context, **{"output_tokens": 8, "dtype": "float32", **more})


def test_on_a_cpu_launch_time_adds_and_on_a_gpu_it_hides():
    quick, slow = (replace(CPU, launch_s_per_layer=each) for each in (0.0, 1e-3))
    assert predict.step_s(slow, case(), 512).value - predict.step_s(quick, case(), 512).value == pytest.approx(30e-3)
    overlapping = replace(slow, launch_overlaps=True)
    assert predict.step_s(overlapping, case(), 512).value < predict.step_s(slow, case(), 512).value
    waits = replace(overlapping, launch_s_per_layer=1.0)
    assert predict.step_s(waits, case(), 512) == predict.Prediction(30.0, "launch-bound")


def test_decode_is_bound_by_bandwidth_and_prefill_by_compute_where_launch_is_cheap():
    cheap = replace(CPU, launch_s_per_layer=1e-6)
    assert predict.tpot_s(cheap, case(LARGE)).regime == "bandwidth-bound"
    assert predict.ttft_s(cheap, case(LARGE)).regime == "compute-bound"


def test_a_step_never_beats_its_floor():
    for name in ("SmolLM2-135M", "Mistral-7B-v0.1", "Gemma-2-9B", "DeepSeek-V2-Lite", "OPT-2.7B"):
        for attention in ("eager", "sdpa"):
            asked = case(KNOWN[name], 256, attention=attention, dtype="bfloat16")
            floor_s = cost.step_weight_bytes(KNOWN[name], "bfloat16") / CPU.read_bandwidth_bytes_per_s
            assert predict.step_s(CPU, asked, 256).value > floor_s


def test_the_cache_gains_more_the_longer_the_context_and_less_in_total_than_per_token():
    gains = [predict.tpot_speedup(CPU, case(context=length)).value for length in (128, 512, 2048)]
    assert gains == sorted(gains)
    total = predict.total_speedup(CPU, case(context=2048))
    assert 1 < total.value < 8 and total.value < gains[-1]


def test_eager_attention_pays_for_its_scores():
    eager, sdpa = (predict.ttft_s(CPU, case(context=4096, attention=each)).value for each in ("eager", "sdpa"))
    assert eager > 1.5 * sdpa


def test_large_scores_are_written_to_pages_given_anew_four_times_a_layer():
    slow = replace(CPU, page_s=1e-6)
    asked = {length: case(context=length, attention="eager") for length in (512, 2048)}
    paid_s = {n: predict.ttft_s(slow, each).value - predict.ttft_s(CPU, each).value for n, each in asked.items()}
    pages = 4 * SMALL.layers * SMALL.heads * 2048**2 * 4 / predict.PAGE_BYTES  # product, scaled, masked, softmax
    assert paid_s == {512: 0, 2048: pytest.approx(pages * 1e-6)}


def test_a_whole_generation_is_bound_by_what_binds_its_longer_phase():
    cheap = replace(CPU, launch_s_per_layer=1e-6)
    for tokens, bound in ((2, ("compute-bound", "prefill")), (512, ("bandwidth-bound", "decode"))):
        for quantity in (predict.total_s, predict.total_speedup, predict.throughput_tokens_per_s):
            found = quantity(cheap, case(LARGE, 512, output_tokens=tokens))
            assert (found.regime, found.phase) == bound
        assert f"({bound[1]})" in choice.table(choice.Choice(cheap, case(LARGE, 512, output_tokens=tokens)), "en")
    assert predict.tpot_s(cheap, case(LARGE)).phase is None


def test_an_engine_shares_the_weights_among_requests_and_is_held_up_by_their_prefills():
    card = published.calibrated("A10").machine
    served = [case(LARGE, batch=n, stack="vllm", dtype="bfloat16", output_tokens=64) for n in (1, 8)]
    one, eight = (predict.throughput_tokens_per_s(card, each).value for each in served)
    assert 3 * one < eight < 8 * one
    assert predict.tpot_s(card, served[1]).value > predict.step_s(card, served[1], 512).value


def test_a_calibration_finds_the_machine_that_made_the_points():
    true = replace(CPU, read_bandwidth_bytes_per_s=7e9, flops_per_s={"float32": 60e9}, launch_s_per_layer=9e-4)
    points = [calibrate.Point(asked, quantity, predict.QUANTITIES[quantity](true, asked).value)
              for length in (128, 256, 512, 1024, 2048) for kernel in ("eager", "sdpa")
              for quantity in ("ttft_s", "tpot_s", "tpot_no_cache_s")
              for asked in [case(context=length, attention=kernel)]]  # fmt: skip
    found = calibrate.on_lengths(CPU, points)
    assert {p.case.context for p in found.held_out} == {256, 1024}
    assert np.abs(found.residuals).max() < 0.05


def test_lengths_not_calibrated_on_are_predicted_within_a_tenth_on_the_committed_cpu_records():
    measured = records.load(paths.ROOT / "results" / "cpu" / "s1b.jsonl")
    measured = [r for r in measured if r["environment"] == measured[-1]["environment"]]
    frames = summary.generations(measured), summary.pairs(measured)
    found = calibrate.on_lengths(CPU, calibrate.measured_points(SMALL, "float32", *frames))
    for kernels in (("sdpa",), ("eager", "sdpa")):  # eager attention alone has three repetitions a length
        for quantities in (("tpot_s", "tpot_no_cache_s"), ("tpot_speedup", "total_speedup")):
            off = [abs(miss) for p, miss in zip(found.held_out, found.residuals)
                   if p.case.attention in kernels and p.quantity in quantities]  # fmt: skip
            assert off and np.median(off) <= 0.10, (kernels, quantities, off)


def test_published_figures_that_nothing_was_fitted_to_are_met():
    table = published.held_against()
    tested = table[~table["calibrates"]]
    off = tested["residual"].abs().groupby(tested["quantity"]).median()
    assert off["tpot_s"] < 0.06 and off["throughput_tokens_per_s"] < 0.10 and off["ttft_s"] < 0.15
    assert table["source"].str.len().min() > 10
    assert set(table[table["calibrates"]]["model"]) & set(tested["model"]) <= {"Qwen2.5-7B-Instruct", "Llama-2-7B",
                                                                              "Llama-3-8B-Instruct"}  # fmt: skip


def test_the_table_of_published_figures_names_every_source_and_shows_none_that_was_fitted(monkeypatch):
    shown = []
    monkeypatch.setattr(prose, "emit", lambda data, language, **tags: shown.append("".join(data.values())))
    held = published.held_against()
    world.table(held, "en")
    tested = held[~held["calibrates"]]
    assert shown[0].count("<tr>") == len(tested) + 1
    assert all(source.split(",")[0] in shown[0] for source in tested["source"])
    assert f"tested on the {len(tested)} others" in shown[1] and "measured by others" in shown[1]


def test_what_was_assumed_of_a_source_is_said_in_the_readers_language(monkeypatch):
    shown = []
    monkeypatch.setattr(prose, "emit", lambda data, language, **tags: shown.append("".join(data.values())))
    held = published.held_against()
    world.table(held, "zh")
    assumed = held[~held["calibrates"]]["source"].drop_duplicates().str.endswith(world.ASSUMED).sum()
    told = [sentence.replace("\N{NO-BREAK SPACE}", " ") for sentence in shown]
    assert assumed and sum("按 64 个 token 计" in sentence for sentence in told) == assumed
    assert not any("not given" in sentence for sentence in told)


def test_small_models_are_launch_bound_on_an_a10_and_seven_billion_are_not():
    card = published.calibrated("A10").machine
    asked = {"context": 256, "dtype": "float16"}
    assert predict.tpot_s(card, case(KNOWN["Qwen1.5-0.5B"], **asked)).regime == "launch-bound"
    assert predict.tpot_s(card, case(LARGE, **asked)).regime == "bandwidth-bound"


def test_an_a10_decodes_like_an_a10g_and_prefills_faster():
    a10, a10g = (published.calibrated(name).machine for name in ("A10", "A10G"))
    asked = case(LARGE, 1024, dtype="float16")
    assert predict.tpot_s(a10, asked).value == pytest.approx(predict.tpot_s(a10g, asked).value, rel=0.02)
    assert predict.ttft_s(a10, asked).value < 0.75 * predict.ttft_s(a10g, asked).value


def test_an_interval_holds_the_value_and_comes_from_the_same_sort_of_figure():
    known = published.calibrated("A10")
    for quantity in ("ttft_s", "tpot_s", "throughput_tokens_per_s"):
        found = known.predict(case(LARGE, dtype="bfloat16"), quantity)
        assert found.low < found.value < found.high
    untested = calibrate.calibrate(CPU, [calibrate.Point(case(), "tpot_s", 0.06)], [])
    assert untested.predict(case(), "tpot_s").low is None


def test_the_command_prints_predictions_labelled_as_such(capsys):
    assert main(["predict", "--model", "Qwen2.5-7B-Instruct", "--machine", "a10", "--concurrency", "8"]) == 0
    printed = capsys.readouterr().out
    assert "predicted, not measured" in printed and "bandwidth-bound in decode" in printed
    assert "Transformers, one request" in printed and "vLLM, 8 at once" in printed
    assert max(map(len, printed.splitlines())) < 130 and "None" not in printed


def test_the_command_foretells_how_long_a_profile_takes_before_an_hour_is_rented(capsys):
    assert main(["predict", "--profile", "a10"]) == 0
    printed = capsys.readouterr().out
    assert "predicted, not measured" in printed and "not counted" in printed
    told = {what: int(value) for what, value in re.findall(r"^  (\w+).*?(\d+) min$", printed, re.MULTILINE)}
    assert abs(told["together"] - told["S1b"] - told["S1"]) <= 1 and told["S1"] > 0
    assert main(["predict", "--profile", "a10", "--set", "concurrencies=[1] compare_compiled=false"]) == 0
    less = re.search(r"S1:.*?(\d+) min", capsys.readouterr().out)[1]
    assert int(less) < told["S1"]
    readme = (paths.ROOT / "README.md").read_text()
    assert re.search(r"takes (\d+) minutes \*\*at the prediction's word", readme)[1] == str(told["together"])
    known = whatif.calibration("a10")
    longest = case(LARGE, 8192, output_tokens=16, attention="eager", dtype="bfloat16")
    pairs_s = 6 * sum(predict.total_s(known.machine, longest, use_cache).value for use_cache in (True, False))
    assert pairs_s < 60 * told["S1b"] < 4 * pairs_s  # eager at the longest context is the dearest point of many


@pytest.mark.parametrize("asked, right", [
    ([], "--profile"),
    (["--machine", "a10"], "--model"),
    (["--profile", "a10", "--model", "gpt2"], "nothing but --set"),
    (["--profile", "a11"], "did you mean 'a10'"),
    (["--profile", "a10", "--set", "repetition=3"], "did you mean 'repetitions'"),
    (["--profile", "a10", "--set", "dtype=int4"], "dtype"),
    (["--model", "Qwen2.5-8B", "--machine", "a10"], "Qwen2.5-7B-Instruct|Qwen2.5-3B-Instruct|Qwen2.5-1.5B"),
    (["--model", "gpt2", "--machine", "a11"], "did you mean 'a10'"),
    (["--model", "gpt2", "--machine", "a10", "--dtype", "int4"], "float16, bfloat16, float32"),
    (["--model", "gpt2", "--machine", "a10", "--context", "1000"], "1024 positions"),
    (["--model", "gpt2", "--machine", "a10", "--concurrency", "0"], "at least 1"),
    (["--model", "random:mamba", "--machine", "a10"], "no KV cache"),
    (["--model", "gpt2", "--machine", "../cpu"], "unknown machine"),
    (["--model", "gpt2", "--machine", "cpuu"], "did you mean 'cpu'"),
    (["--model", "nonsense", "--machine", "a10"], "unknown model 'nonsense'; there are: "),
    (["--profile", "a10", "--context", "12"], "with nothing but --set"),
    (["--profile", "a10", "--dtype", "float16"], "with nothing but --set"),
    (["--model", "gpt2", "--machine", "a10", "--set", "repetitions=1"], "with nothing but --set"),
    (["--context", "12"], "either --model and --machine"),
    (["--model", "gpt2", "--machine", "zz"], "no profile with predictions; there are: "),
])  # fmt: skip
def test_what_cannot_be_predicted_ends_with_2_and_the_nearest_right_name(asked, right, capsys):
    assert main(["predict", *asked]) == 2
    told = capsys.readouterr().err
    assert any(part in told for part in right.split("|")) and "Traceback" not in told


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "hf:Qwen/Qwen2.5-7B-Instruct", "llama-2-7b-hf"])
def test_well_known_models_answer_to_their_usual_names(name):
    assert whatif.architecture(name) in KNOWN.values()


def test_a_measured_profile_is_predicted_from_its_own_ceilings_and_records(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path))
    folder = tmp_path / "results" / "mine"
    folder.mkdir(parents=True)
    measured = (paths.ROOT / "results" / "cpu" / "s1b.jsonl").read_text()
    (folder / "s1b.jsonl").write_text(measured)
    first = records.load(folder / "s1b.jsonl")[0]
    written = {**first, "kind": "prediction", "repetition": 0, "machine": vars(CPU)}
    records.append_line(folder / "predictions.jsonl", written)
    known = whatif.calibration("mine")
    assert known.machine.kind == "calibrated" and len(known.residuals)
    text = "\n".join(whatif.lines("SmolLM2-135M", "mine", "float32", 512, 8, 1))
    assert "vLLM" not in text  # what it costs to serve on a CPU is not predicted
