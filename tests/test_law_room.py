"""S1b's charts of law, steps, outputs and memory: both languages, failures visible, sentences from the frames."""

import functools

import fake_frames
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from test_charts import crosses, words
from test_law import weighed

from kvlab.analyse import footprint, law, summary
from kvlab.article import drawing, footprint_room, law_room, prose, readings


def outputs():
    rng, rows = np.random.default_rng(6), []
    for tokens in (2, 8, 32):
        for repetition in range(3):
            total = tokens / (1 + (tokens - 1) / 9)
            row = {"attention": "sdpa", "context_length": 256, "output_tokens": tokens, "repetition": repetition}
            row |= {"control": False, "refusal": None, "tpot_speedup": 9 * fake_frames.noise(rng)}
            rows.append(row | {"total_speedup": total * 0.97})
    return summary.pd.DataFrame(rows)


def parts():
    found = []
    for attention in ("eager", "sdpa"):
        for length in (128, 512, 2048):
            lost = attention == "eager" and length == 2048
            place = {"attention": attention, "context_length": length, "output_tokens": 1, "dtype": "float32"}
            for use_cache in (True, False):
                bytes_ = {"kv_cache_bytes": 2**15 * length * use_cache, "parameter_bytes": 2**29}
                bytes_ |= {"peak_memory_bytes": None if lost else 2**30 + 2**16 * length}
                status = {"status": "out_of_memory" if lost else "ok", "resident_set_before_bytes": 2**30}
                found.append(weighed(point=place, use_cache=use_cache, **bytes_, **status))
    return footprint.parts(found)


FRAMES = {
    "law_by_context": lambda: (law.residuals(law.step_times(fake_frames.generations())),),
    "steps_over_lengths": lambda: (fake_frames.steps(output=9),),
    "speedups_by_output": lambda: (outputs(),),
    "memory_by_part": lambda: (parts(),),
}
NONE = {
    "law_by_context": lambda: (law.residuals(law.step_times(summary.generations([]))),),
    "steps_over_lengths": lambda: (summary.steps([]),),
    "speedups_by_output": lambda: (summary.pairs([]),),
    "memory_by_part": lambda: (footprint.parts([]),),
}


def chart_named(name):
    return getattr(footprint_room if name == "memory_by_part" else law_room, name)


@functools.cache
def drawn(name, language):
    return chart_named(name)(*FRAMES[name](), language)


@pytest.mark.parametrize("name", FRAMES)
def test_every_label_is_translated(name):
    seen = {language: words(drawn(name, language)) for language in prose.LANGUAGES}
    assert seen["zh"] and not seen["zh"] & seen["en"]


@pytest.mark.parametrize("name", FRAMES)
def test_a_chart_has_a_sentence_in_both_languages_and_says_when_nothing_was_measured(name):
    draw = chart_named(name)
    numbers = readings.of(draw.reading, *FRAMES[name]())
    for language in prose.LANGUAGES:
        for part in ("alt", "reading"):
            assert prose.plain(f"charts.{name}.{part}", language, **numbers)
    assert readings.of(draw.reading, *NONE[name]()) is None
    assert "no measurement yet" in words(draw(*NONE[name](), "en"))


def test_a_law_in_panels_shows_hollow_what_only_tests_it():
    above = drawn("law_by_context", "en").axes[1]
    hollow = [dots for dots in above.collections if to_hex(dots.get_facecolor()[0]) == "#ffffff"]
    assert {float(x) for dots in hollow for x, _ in dots.get_offsets()} == {256 + 8.0, 1024 + 2.0}


def test_the_step_over_its_prefill_comes_from_one_generation():
    steps = fake_frames.steps(output=9)
    steps["ttft_s"] = steps.groupby("pair")["step_s"].transform("first") / 1.5
    ratios = law.recomputed(steps)
    assert set(ratios["use_cache"]) == {False} and set(ratios["step"]) == {1}
    np.testing.assert_allclose(ratios["step_over_prefill"], ratios["step_s"] / ratios["ttft_s"])


def test_the_total_speedup_stays_under_the_dotted_ceiling():
    (ax,) = drawn("speedups_by_output", "en").axes
    ceiling = next(line for line in ax.lines if line.get_linestyle() == ":")
    np.testing.assert_array_equal(ceiling.get_xdata(), ceiling.get_ydata())
    numbers = readings.of(law_room.speedups_by_output.reading, outputs())
    assert (numbers["fewest"], numbers["most"]) == (2, 32) and numbers["total_fewest"].median < 2


def test_memory_that_ran_out_is_a_cross_and_parts_are_stacked_to_the_peak():
    figure = drawn("memory_by_part", "en")
    assert [crosses(ax) for ax in figure.axes[:2]] == [[(2.0,)], [(2.0,)]]
    with_cache = figure.axes[3]
    tops = [bar.get_y() + bar.get_height() for bar in with_cache.patches]
    assert max(tops) == 2**29 + 2**16 * 2048
    named = {text.get_text() for text in figure.legends[0].findobj(Text)}
    assert {"weights", "KV cache", "activations and logits"} <= named and "allocator's reserve" not in named


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(prose, "display", lambda data, raw, metadata: outputs.append(data))
    return outputs


def test_tables_and_sentences_of_the_law_hold_both_arms(shown):
    frame = fake_frames.generations()
    times = law.step_times(frame)
    law_room.law_in_words(times, "en", "source")
    assert "quadratic" in shown[0]["text/plain"]
    law_room.terms(times, None, "float32", "en", "source")
    assert shown[1]["text/html"].count("<tr>") == 1 + 4
    law_room.residuals(law.residuals(times), summary.pd.DataFrame(columns=["attention"]), "en", "source")
    assert shown[2]["text/html"].count("left out") == 4
    law_room.law_in_words(times.iloc[:0], "en", "source")
    assert "Too little" in shown[3]["text/plain"]


def test_br25_a_difference_is_told_with_its_place_and_margin(shown):
    pairs = fake_frames.pairs().assign(first_difference=np.nan, margin=np.nan)
    pairs.loc[pairs.index[-1], ["first_difference", "margin"]] = (3, 0.0125)
    law_room.agreement(pairs, "en", "source")
    first, second = (data["text/plain"] for data in shown)
    assert "identical tokens" in first and "58 of 60" in first  # one differs, one lost an arm
    assert "output token 3" in second and "0.0125" in second and "not equal" in second


def test_the_least_sure_speedup_is_named_with_its_reach(shown):
    pairs = fake_frames.pairs()
    at = (pairs["attention"] == "sdpa") & (pairs["context_length"] == 256)
    pairs.loc[at, "tpot_speedup"] = [4.0, 4.0, 5.0, 5.0, 5.0, 7.0]
    law_room.sureness(pairs, 0.0, "en", "source")
    law_room.sureness(pairs, 0.1, "zh", "source")
    law_room.sureness(summary.pairs([]), 0.0, "en", "source")
    least, _, again = (data["text/plain"] for data in shown)
    assert "256 tokens with SDPA" in least and "40\u00a0%" in least and "n = 6" in least
    assert "10\u00a0%" in again


def test_br33_the_article_says_that_a_quantised_file_ran_dequantised(shown):
    record = {"file_type": "GGUF Q4_0", "dequantised": True, "parameter_bytes": 2**29}
    law_room.what_ran([record, {"status": "failed"}], "float32", "en", "source")
    law_room.what_ran([record | {"file_type": "safetensors", "dequantised": False}], "float32", "en", "source")
    law_room.what_ran([{"parameter_bytes": 1}], "float32", "en", "source")
    quantised, plain = (data["text/plain"] for data in shown)
    assert "GGUF Q4_0" in quantised and "float32" in quantised and "dequantised): 512\u00a0MiB" in quantised
    assert "dequantised" not in plain


def test_kinds_of_cache_are_compared_only_where_there_are_two(shown):
    frame = fake_frames.generations(kernels=("sdpa",)).assign(cache="dynamic")
    law_room.cache_kinds(frame, "en", "source")
    assert not shown
    law_room.cache_kinds(summary.pd.concat([frame, frame.assign(cache="static")]), "en", "source")
    assert "static cache" in shown[0]["text/html"]


def test_memory_is_also_a_table_with_what_is_missing_left_open(shown):
    footprint_room.memory_table(parts(), "en", "source")
    assert shown[0]["text/html"].count("<tr>") == 1 + 6 and "n/a" in shown[0]["text/html"]
    assert drawing.COLOUR["cache"] == footprint_room.PART_COLOUR["kv_cache_bytes"]
