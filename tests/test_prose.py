"""The article's words: two complete tables, numbers for people, nothing inserted can become markup."""

import math
import re
import string
from pathlib import Path
from types import SimpleNamespace

import fake_frames
import pandas as pd
import pytest
import yaml
from bs4 import BeautifulSoup
from nbconvert.filters import markdown2html

import kvlab.article
from kvlab.analyse import summary
from kvlab.article import prose, readings

FOLDER = Path(kvlab.article.__file__).parent
CHINESE = re.compile(r"[\u3400-\u9fff]")
NAMES = {"n", "vLLM", "GPU", "CPU", "TTFT", "TPOT", "ITL", "PagedAttention", "kvlab", "English", "token/s"}


def placeholders(template):
    return sorted((name, unit) for _, name, unit, _ in string.Formatter().parse(template) if name)


def test_no_string_is_missing_in_a_language():
    assert sorted(prose.table_of("zh")) == sorted(prose.table_of("en"))


@pytest.mark.parametrize("key", sorted(prose.table_of("en")))
def test_both_languages_fill_in_the_same_numbers(key):
    assert placeholders(prose.table_of("zh")[key]) == placeholders(prose.table_of("en")[key])


@pytest.mark.parametrize("key", sorted(prose.table_of("en")))
def test_every_string_is_in_its_language(key):
    words = re.sub(r"\{[^}]*\}", "", prose.table_of("zh")[key]).strip()
    if re.search(r"[A-Za-z]", words) and words not in NAMES:
        assert CHINESE.search(words), f"{key} is not translated"
    assert not CHINESE.search(prose.table_of("en")[key].replace("中文", ""))


@pytest.mark.parametrize("language", prose.LANGUAGES)
def test_no_key_stands_twice_in_a_table(language):
    """Neither within a file (YAML would keep the last one silently) nor in two files of the table."""
    everywhere = []
    for path in sorted(prose.TEXTS.glob(f"*.{language}.yaml")):
        mappings = [("", yaml.compose(path.read_text(encoding="utf-8")))]
        for prefix, mapping in mappings:
            for key, value in mapping.value:
                nested = isinstance(value, yaml.MappingNode)
                mappings += [(f"{prefix}{key.value}.", value)] if nested else []
                everywhere += [] if nested else [prefix + key.value]
            keys = [key.value for key, _ in mapping.value]
            assert len(keys) == len(set(keys)), sorted(key for key in keys if keys.count(key) > 1)
    assert len(everywhere) == len(set(everywhere)), sorted(k for k in everywhere if everywhere.count(k) > 1)


def test_keys_that_the_library_names_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    named = re.findall(r'prose\.(?:say|text|both|plain)\(\s*"([\w.]+)"', sources)
    assert len(named) > 10
    assert [key for key in named if key not in prose.table_of("en")] == []


@pytest.mark.parametrize(
    "value, unit, english",
    [
        (0.0331, "s", "33 ms"), (9.21, "s", "9.2 s"), (0.142, "s", "142 ms"), (0.00012, "s", "120 µs"),
        (0.9996, "s", "1.0 s"), (142.3, "x", "142x"), (5.21, "x", "5.2x"), (1.016, "x", "1.02x"),
        (22.5 * 2**20, "B", "22.5 MiB"), (46080, "B", "45 KiB"), (24 * 2**30, "B", "24 GiB"), (0, "B", "0 B"),
        (0.213, "%", "21 %"), (1.0, "%", "100 %"), (2048, "count", "2,048"), (38.4, "rate", "38.4 tokens/s"),
        (math.nan, "s", "n/a"), (None, "x", "n/a"), (math.inf, "x", "n/a"), (0.0, "s", "0 s"),
    ],
)  # fmt: skip
def test_numbers_for_people(value, unit, english):
    assert prose.friendly(value, unit) == english


def test_a_ratio_reads_naturally_in_chinese():
    assert prose.friendly(142.3, "x", "zh") == "142 倍"


def test_an_interval_is_quoted_with_its_n():
    estimate = SimpleNamespace(n=6, median=5.2, low=5.0, high=5.4, stable="ok")
    assert prose.friendly_interval(estimate, "x") == "5.2x (95 % interval 5.0 to 5.4, n = 6)"
    assert prose.friendly_interval(estimate, "x", "zh") == "5.2 倍（95 % 区间 5.0 至 5.4，n = 6）"


def test_an_interval_shows_that_its_ends_differ():
    estimate = SimpleNamespace(n=8, median=0.0331, low=0.03304, high=0.03312, stable="ok")
    assert prose.friendly_interval(estimate, "s") == "33 ms (95 % interval 33.0 to 33.1, n = 8)"


def test_one_value_has_no_interval_and_unsteady_ones_say_so():
    assert prose.friendly_interval(summary.interval([2.0]), "x") == "2.0x (n = 1, too few for an interval)"
    unsteady = summary.interval([1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 1.5])
    assert prose.friendly_interval(unsteady, "x").endswith("n = 7), strongly unstable")


def rendered(markdown):
    return BeautifulSoup(markdown2html(markdown), "html.parser")


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        "a*b*c_d_e",
        "[x](javascript:alert(1))",
        "`code`",
        '"><img src=x onerror=y>',
    ],
)
@pytest.mark.parametrize("language", prose.LANGUAGES)
def test_a_hostile_name_stays_text(name, language):
    sentence = prose.text("status.failed", language, source="s", context_length=128, reason=name)
    page = rendered(sentence)
    assert name in page.get_text()
    assert {element.name for element in page.find_all()} <= {"p", "span"}


def test_a_hostile_source_stays_an_attribute():
    page = rendered(prose.text("status.failed", "en", source='"><script>', context_length=128, reason="r"))
    assert page.find("span", class_="number")["title"] == '"><script>' and not page.find("script")


def test_numbers_carry_their_source():
    page = rendered(prose.text("verdict.q2.pays_from", "en", source="results/a.jsonl", context_length=1024))
    assert [(each["title"], each.get_text()) for each in page.select("span.number")] == [
        ("results/a.jsonl", "1,024")
    ]


def test_markup_made_by_prose_is_not_escaped_twice():
    reason = prose.both("refusal.two_boots")
    assert "&amp;" not in prose.text("status.failed", "zh", context_length=1, reason=reason)
    assert "重启" in prose.text("status.failed", "zh", context_length=1, reason=reason)


def test_a_missing_number_is_named():
    with pytest.raises(KeyError, match="context_length"):
        prose.text("verdict.q2.pays_from", "en")
    with pytest.raises(KeyError, match="no.such.key"):
        prose.text("no.such.key", "en")
    with pytest.raises(ValueError, match='"fr"'):
        prose.languages("fr")


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(
        prose, "display", lambda data, raw, metadata: outputs.append((data, metadata["kvlab"]))
    )
    return outputs


def test_say_tags_each_language(shown):
    prose.say("verdict.q2.pays_from", context_length=1024)
    assert [tags for _, tags in shown] == [{"language": "zh"}, {"language": "en"}]
    prose.say("verdict.q2.pays_from", "en", source="s", context_length=1024)
    assert shown[-1][0]["text/plain"].startswith("The cache pays from 1,024 tokens on")


def test_table_is_escaped_and_in_each_language(shown):
    rows = [
        {"claim": prose.both("answer.q1_claim"), "effect": summary.interval([2.0]), "machine": "<b>card</b>"}
    ]
    headings = {"claim": "answer.claim", "effect": "answer.effect:x", "machine": "answer.machine"}
    prose.table(rows, headings, source="results/a.jsonl")
    zh, en = (BeautifulSoup(data["text/html"], "html.parser") for data, _ in shown)
    assert [cell.get_text() for cell in zh.select("th[scope=col]")] == ["论断", "效果", "机器"]
    assert [cell.get_text() for cell in en.select("td")][1:] == [
        "2.0x (n\u00a0=\u00a01, too few for an interval)",
        "<b>card</b>",
    ]
    assert en.select("td.number")[0]["title"] == "results/a.jsonl" and not en.find("b")


@pytest.mark.parametrize("name", sorted(prose.TABLES))
def test_every_column_of_a_table_has_a_heading(name):
    keys = [heading.partition(":")[0] for heading in prose.TABLES[name].values()]
    assert [key for key in keys if key not in prose.table_of("en")] == []


def test_a_table_shows_entries_as_words_and_says_that_it_has_no_rows(shown):
    rows = [{"attention": "sdpa", "use_cache": False}, {"attention": "eager", "use_cache": True}]
    prose.table(rows, "law_terms", "en")
    for word in ("SDPA attention", "eager attention", "without cache", "with cache"):
        assert word in shown[-1][0]["text/html"]
    prose.table([], "law_terms", "en")
    assert shown[-1][0]["text/plain"] == prose.plain("status.no_data", "en")


def test_glossary_explains_every_term(shown):
    prose.glossary()
    for data, _ in shown:
        terms = BeautifulSoup(data["text/html"], "html.parser")
        assert len(terms.find_all("dt")) == len(terms.find_all("dd")) == 8


@pytest.mark.parametrize("language", prose.LANGUAGES)
@pytest.mark.parametrize("verdict", ["supported", "not_supported", "no_verdict"])
def test_every_verdict_is_a_sentence(verdict, language):
    estimate = summary.interval([4.0, 4.1, 4.2, 4.3, 4.4, 4.5])
    phase = {"context_length": 2048, "tpot_speedup": estimate, "ttft_ratio": estimate, "n": 6}
    trend = {
        "shortest": 128,
        "longest": 2048,
        "speedup_shortest": estimate,
        "speedup_longest": estimate,
        "n": 6,
    }
    for key, numbers in (("q1", phase), ("q2", trend)):
        assert prose.plain(f"answer.{verdict}", language)
        assert "2,048" in prose.plain(f"verdict.{key}.{verdict}", language, **numbers)


def test_readings_agree_with_the_frames():
    frame = fake_frames.generations()
    numbers = readings.tpot_by_context(frame)
    good = frame[(frame["attention"] == "sdpa") & frame["use_cache"]]
    assert numbers["cache_high"] == good[good["context_length"] == 2048]["tpot_s"].median()
    assert readings.speedups_by_context(fake_frames.pairs())["refused"] == 1
    assert readings.mechanism() == {"prompt": 6, "steps": 4, "last": 10, "with_cache": 4, "without_cache": 34}
    assert (
        readings.of("tpot_by_context", frame[frame["context_length"] == 128]) is None
    )  # no growth from one length


def test_control_points_and_warm_up_enter_no_reading():
    frame, sent = fake_frames.generations(), fake_frames.requests()
    extra = frame.assign(control=True, tpot_s=9.0, ttft_s=9.0)
    assert readings.tpot_by_context(pd.concat([frame, extra])) == readings.tpot_by_context(frame)
    with_warm_up = pd.concat([sent, sent.assign(phase="warmup", tpot_s=9.0)])
    points, reading = fake_frames.points(), readings.serving_by_concurrency
    assert reading(with_warm_up, points) == reading(sent, points)


def test_no_line_of_a_table_breaks_between_a_number_and_its_unit():
    rows = [{"ttft": 0.138, "ratio": summary.Estimate(24, 1.02, 0.94, 1.11, "unstable")}]
    table = prose.html_table(rows, {"ttft": "label.ttft:s", "ratio": "sections.ttft_ratio:x"}, "en", "records")
    assert "138\u00a0ms" in table and "95\u00a0%" in table and "n\u00a0=\u00a024" in table
