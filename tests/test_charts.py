"""The charts: both languages, glyphs, ticks for people, failures visible, files identical on redraw."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import fake_frames
import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.font_manager import get_font
from matplotlib.text import Text

from kvlab.analyse import summary
from kvlab.article import charts, drawing, prose, readings

CHARTS = [
    "mechanism", "tpot_by_context", "ttft_by_context", "speedups_by_context", "step_curve", "phase_share",
    "serving_by_concurrency", "kv_usage_by_concurrency", "growth_side_by_side", "kv_bytes_by_context",
]  # fmt: skip
SAME_IN_BOTH = {"vLLM"}
TICK = re.compile(r"^(0|[\d,.]+( (ns|µs|ms|s|B|KiB|MiB|GiB|%|倍)|x)?)$")


@functools.cache
def drawn(name, language):
    """The chart of the made-up frames; drawing it fails on a glyph that the font lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return getattr(charts, name)(*fake_frames.frames_of(name), language)


def words(figure):
    """Texts that are seen, without numbers."""
    texts = {text.get_text() for text in figure.findobj(Text) if text.get_visible()}
    return {text for text in texts if re.search(r"[A-Za-z\u3400-\u9fff]", text) and not TICK.match(text)}


@pytest.mark.parametrize("name", CHARTS)
def test_every_label_is_translated_and_every_glyph_exists(name):
    seen = {language: words(drawn(name, language)) for language in prose.LANGUAGES}
    assert seen["zh"] and not (seen["zh"] & seen["en"]) - SAME_IN_BOTH
    assert not any(re.search(r"[\u3400-\u9fff]", text) for text in seen["en"])

def test_a_chart_takes_the_packages_font_where_the_system_has_one_of_the_same_name(monkeypatch):
    name, file = "Noto Sans CJK SC", font_manager.findfont("DejaVu Sans")
    drawing.font_path()
    (own,) = [entry for entry in font_manager.fontManager.ttflist if entry.name == name]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [dataclasses.replace(own, fname=file)])
    drawing.font_path.cache_clear()  # as in a process that has drawn nothing yet
    packaged = drawing.font_path()
    assert font_manager.findfont(name) == str(packaged) != file



def test_the_font_has_every_character_of_both_tables():
    characters = {char for each in prose.LANGUAGES for text in prose.table_of(each).values() for char in text}
    glyphs = get_font(drawing.font_path()).get_charmap()
    assert sorted(char for char in characters - {"\n"} if ord(char) not in glyphs) == []


@pytest.mark.parametrize("name", [each for each in CHARTS if each not in ("mechanism", "phase_share")])
def test_ticks_are_for_people(name):
    for ax in drawn(name, "en").axes:
        ticks = [
            tick.get_text() for tick in [*ax.get_xticklabels(), *ax.get_yticklabels()] if tick.get_text()
        ]
        assert ticks and all(TICK.match(tick) for tick in ticks), ticks


def test_context_ticks_are_the_measured_lengths():
    labels = [tick.get_text() for tick in drawn("tpot_by_context", "en").axes[0].get_xticklabels()]
    assert {"128", "2,048"} <= set(labels) <= {"128", "256", "512", "1,024", "2,048"}


def crosses(ax):
    return [
        tuple(each.get_offsets()[:, 0])
        for each in ax.collections
        if each.get_offset_transform() == ax.get_xaxis_transform() and len(each.get_offsets())
    ]


def test_failures_are_crosses_at_their_length():
    eager, sdpa = drawn("tpot_by_context", "en").axes
    assert crosses(eager) == [(2048.0,)] and crosses(sdpa) == []
    assert crosses(drawn("speedups_by_context", "en").axes[0]) == [(2048.0,)]
    assert crosses(drawn("serving_by_concurrency", "en").axes[2]) == [(8.0,)]


def test_growth_starts_at_one_in_both_stacks():
    for ax in drawn("growth_side_by_side", "en").axes:
        np.testing.assert_allclose([line.get_ydata()[0] for line in ax.lines], [1.0, 1.0])


def test_total_speedup_is_drawn_under_its_ceiling():
    ax = drawn("speedups_by_context", "en").axes[1]
    ceiling = next(line for line in ax.lines if line.get_linestyle() == ":")
    np.testing.assert_array_equal(ceiling.get_ydata(), list(fake_frames.CONTEXTS.values()))
    dots = np.concatenate(
        [each.get_offsets() for each in ax.collections if each.get_offset_transform() == ax.transData]
    )
    assert all(height < fake_frames.CONTEXTS[int(x)] for x, height in dots if np.isfinite(height))


def test_kv_bytes_lie_on_the_formula():
    ax = drawn("kv_bytes_by_context", "en").axes[0]
    (tokens, formula), dots = ax.lines[0].get_data(), ax.collections[0].get_offsets()
    np.testing.assert_allclose(np.interp(dots[:, 0], tokens, formula), dots[:, 1])


def real_empty(frame):
    """The frame that analyse makes when there are no records, of the same kind as the made-up one."""
    makers = (summary.generations, summary.pairs, summary.steps, summary.requests, summary.points)
    return max((make([]) for make in makers), key=lambda each: len(set(each.columns) & set(frame.columns)))


@pytest.mark.parametrize("name", CHARTS[1:])
def test_without_measurements_a_chart_says_so(name):
    made_up = fake_frames.frames_of(name)
    frames = [real_empty(frame) if hasattr(frame, "columns") else frame for frame in made_up]
    assert "no measurement yet" in words(getattr(charts, name)(*frames, "en"))
    assert readings.of(name, *frames) is None


@pytest.mark.parametrize("name", ["generations", "pairs", "steps", "requests", "points"])
def test_made_up_frames_have_only_columns_of_real_ones(name):
    made_up, real = getattr(fake_frames, name)(), getattr(summary, name)([])
    assert set(made_up.columns) <= set(real.columns)


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(
        prose, "display", lambda data, raw, metadata: outputs.append((data, metadata["kvlab"]))
    )
    return outputs


def test_show_saves_and_displays_both_languages_identically_on_redraw(shown, tmp_path):
    before = dict(matplotlib.rcParams)
    frames, files = fake_frames.frames_of("tpot_by_context"), []
    for _ in range(2):
        charts.show(
            "tpot",
            charts.tpot_by_context,
            *frames,
            figures_dir=tmp_path / "figures",
            source=fake_frames.SOURCE,
        )
        files.append({path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()})
    assert sorted(files[0]) == ["tpot.en.png", "tpot.en.svg", "tpot.zh.png", "tpot.zh.svg"]
    assert files[0] == files[1]
    assert dict(matplotlib.rcParams) == before
    (zh, zh_tags), (sentence, sentence_tags), (_, en_tags), _ = shown[:4]
    assert {"image/png", "image/svg+xml"} <= set(zh) and b"<dc:date>" not in files[0]["tpot.zh.svg"]
    assert zh_tags["figure"] == en_tags["figure"] == "tpot" and zh_tags["source"] == fake_frames.SOURCE
    assert "2,048" in en_tags["alt"] and " s " in en_tags["alt"] and "折线图" in zh_tags["alt"]
    assert sentence_tags == {"language": "zh"} and fake_frames.SOURCE in sentence["text/markdown"]


def test_another_process_draws_the_same_bytes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from kvlab import paths; from kvlab.article import charts, drawing\n"
        "for kind, data in drawing.images(charts.mechanism('zh')).items():\n"
        "    paths.replace(Path(sys.argv[1]) / kind, data)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(charts.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=60)
    for kind, data in drawing.images(drawn("mechanism", "zh")).items():
        assert (tmp_path / kind).read_bytes() == data


def test_figures_stay_small_enough_for_a_page():
    sizes = [len(drawing.images(drawn(name, "zh"))["svg"]) for name in ("speedups_by_context", "step_curve")]
    assert max(sizes) < 200_000
