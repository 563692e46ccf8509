"""The room that the cache leaves: counts that a reader can check by hand, charts in both languages."""

import re

import pytest
from matplotlib.text import Text

from kvlab.analyse import cost, room
from kvlab.article import memory_room, prose

ROOM = room.table(4096, memory_gb=24, reserve=0.1)
LENGTHS = room.by_length(24, 0.1)
CHARTS = {"kv_bytes_by_model": (memory_room.kv_bytes_by_model, ROOM),
          "requests_by_context": (memory_room.requests_by_context, LENGTHS)}  # fmt: skip


def row(name, table=ROOM):
    return table[table["model"] == name].iloc[0]


def test_the_room_of_llama_2_is_what_a_hand_computes():
    left = 24e9 * 0.9 - 6_738_415_616 * 2
    assert row("Llama-2-7B")["requests"] == left // (4096 * 32 * 32 * 2 * 128 * 2) == 3


def test_grouped_heads_and_bytes_of_one_change_the_room_as_their_ratio_says():
    qwen = row("Qwen2.5-7B-Instruct")
    assert qwen["shared"] == 7 and qwen["kv_bytes_per_token"] == 57344
    assert qwen["requests_8_bit"] // 2 == qwen["requests"] and qwen["requests"] // 7 == qwen["requests_multi_head"]


def test_every_kind_of_attention_is_named():
    named = {"OPT-2.7B": "multi_head", "Llama-3-8B": "grouped", "Falcon-7B": "multi_query", "Gemma-2-9B": "hybrid",
             "Mistral-7B-v0.1": "window", "DeepSeek-V2-Lite": "latent"}  # fmt: skip
    assert {name: row(name)["kind"] for name in named} == named


def test_a_model_too_large_has_no_room_and_one_too_short_has_no_count():
    assert row("Qwen2.5-14B-Instruct")["requests"] == 0
    assert row("Falcon-7B")["requests"] != row("Falcon-7B")["requests"]  # 2048 positions, 4096 asked


def test_a_full_window_takes_no_more_room():
    mistral = LENGTHS[LENGTHS["model"] == "Mistral-7B-v0.1"].set_index("context_length")["requests"]
    assert mistral[4096] == mistral[32768] < mistral[2048]


def test_room_comes_in_whole_blocks():
    a = cost.known_models()["Llama-2-7B"]
    counts = [cost.requests_that_fit(a, tokens, 24e9, 2.4e9, "bfloat16") for tokens in (497, 512, 513)]
    assert counts[0] == counts[1] > counts[2]


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_translated_and_say_that_they_are_computed(name):
    draw, frame = CHARTS[name]
    assert not any(re.search(r"[\u3400-\u9fff]", text.get_text()) for text in draw(frame, "en").findobj(Text))
    assert any(re.search(r"[\u3400-\u9fff]", text.get_text()) for text in draw(frame, "zh").findobj(Text))
    numbers = draw.reading(frame)
    for language, word in (("zh", "计算"), ("en", "computed")):
        for part in ("title", "caption", "reading"):
            assert word in prose.plain(f"charts.{name}.{part}", language, **numbers).lower()


def test_the_table_counts_and_names_what_does_not_fit(monkeypatch):
    shown = []
    monkeypatch.setattr(prose, "emit", lambda data, language, **tags: shown.append(data["text/plain"]
                        if "text/plain" in data else data["text/html"]))  # fmt: skip
    memory_room.table(ROOM, 4096, "en")
    assert "Qwen2.5-7B-Instruct holds 27 requests" in "".join(shown)
    assert "Qwen2.5-14B-Instruct does not fit" in "".join(shown)
