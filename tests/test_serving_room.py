"""S1 beyond the plain sweep: each number worked out by hand, each chart in both languages."""

import warnings
from types import SimpleNamespace

import pandas as pd
import pytest
from test_charts import words
from test_sweep import smoke

from kvlab import sweep
from kvlab.analyse import dialects, summary
from kvlab.analyse import serving as s1
from kvlab.article import prose, readings, sections
from kvlab.article import serving_room as room
from kvlab.measure import serving

SERVER = {"kv_cache_space_bytes": 1000, "kv_block_tokens": 4, "kv_blocks": 25, "kv_cache_tokens": 90}
SERVER |= {"max_model_len": 9}
CLOSED = {"loop": "closed", "concurrency": 2, "context_length": 10, "output_tokens": 3}


def request(sent_s, times, stream=0, attempt="a", **more):
    return {
        "kind": "request", "attempt": attempt, "phase": "measured", "status": "ok", "repetition": 1, "stream": stream,
        "sent_s": sent_s, "client_wait_s": 0.0, "arrival_times_s": times, "chunk_tokens": [1] * len(times),
        "token_count_source": "usage", "output_tokens": len(times), "prompt_tokens": 10, "point": CLOSED, **more,
    }  # fmt: skip


def point(attempt="a", asked=CLOSED, samples=(), deltas=None, **server):
    return {
        "kind": "point", "attempt": attempt, "status": "ok", "repetition": 1, "point": asked, "measured_from_s": 100.0,
        "server_samples": list(samples), "server_deltas": deltas or {}, "server": SERVER | server,
    }  # fmt: skip


def sample(t_s, usage, running, waiting, preemptions):
    gauges = {"kv_cache_usage": usage, "running": running, "waiting": waiting}
    return {"t_s": t_s, **gauges, "preemptions": preemptions}


def test_the_same_records_under_other_definitions():
    """Two requests of 3 and 5 tokens: a first token after 1 s and 3 s, then one every 0.1 s and 0.2 s."""
    sent = [request(0.0, [1.0, 1.1, 1.2]), request(0.0, [3.0, 3.2, 3.4, 3.6, 3.8], stream=1)]
    rows = {(row["tool"], row["tpot_name"]): row for row in dialects.table(sent, 2)}
    per_token = {key: row["tpot_s"] for key, row in rows.items()}
    assert per_token == pytest.approx({
        ("kvlab", "TPOT"): 0.15,
        ("kvlab", "after_first_chunk"): 0.15,
        ("vLLM, SGLang", "TPOT"): 0.15,
        ("vLLM, SGLang", "ITL"): (2 * 0.1 + 4 * 0.2) / 6,
        ("GuideLLM", "TPOT"): (1.2 + 3.8) / 8,  # the first token's time spread over all, each token weighing the same
        ("GuideLLM", "ITL"): (0.2 + 0.8) / 6,
        ("AIPerf", "ITL"): 0.15,
        ("llmperf", "inter-token latency"): (1.2 / 3 + 3.8 / 5) / 2,
    })  # fmt: skip
    assert {row["ttft_s"] for row in rows.values()} == {2.0}
    assert rows["kvlab", "TPOT"]["throughput_tokens_per_s"] is None  # too few for a steady window
    assert rows["AIPerf", "ITL"]["throughput_tokens_per_s"] == pytest.approx(8 / 3.8)
    assert dialects.spread(list(rows.values()), "tpot_s") == pytest.approx(0.625 / 0.15)


def test_chunks_of_several_tokens_are_told_from_tokens(monkeypatch):
    """Two tokens at 1 s, two more at 1.6 s: 0.2 s per token, 0.3 s once the first chunk's are left out."""
    shown = []
    monkeypatch.setattr(prose, "display", lambda data, raw, metadata: shown.append(str(data)))
    pairs = request(0.0, [1.0, 1.6], chunk_tokens=[2, 2], output_tokens=4)
    rows = {row["tpot_name"]: row["tpot_s"] for row in dialects.table([pairs], 1) if row["tool"] != "GuideLLM"}
    assert (rows["TPOT"], rows["after_first_chunk"]) == (pytest.approx(0.2), pytest.approx(0.3))
    assert rows["between_chunks"] == pytest.approx(0.6)
    untold = request(0.0, [1.0, 1.6], chunk_tokens=[None, None], output_tokens=4)
    names = {row["tpot_name"] for row in dialects.table([pairs, untold], 1)}
    assert "after_first_chunk" not in names and "between_chunks" in names
    room.definitions_table([pairs, point()], "both", "s")
    for language, table in zip(("zh", "en"), shown, strict=False):
        for name in ("after_first_chunk", "between_chunks"):
            assert prose.plain(f"serving.{name}", language) in table and name not in table


def test_a_server_that_did_not_start_is_told_until_something_was_measured(monkeypatch):
    shown = []
    monkeypatch.setattr(prose, "say", lambda key, language, **numbers: shown.append((key, numbers["reason"])))
    failed = {"kind": "server", "status": "failed", "reason": "no C++ compiler"}
    sections.missing([point(), failed], "en", "serving.not_compared")
    sections.missing([failed, point()], "en")
    assert shown == [("serving.not_compared", "no C++ compiler")]


def test_definitions_without_a_usable_request_give_nothing_and_no_error():
    failed = request(0.0, [], status="failed")
    rows = dialects.table([failed, request(0.0, [1.0])], 1)
    assert {row["tpot_s"] for row in rows} == {row["ttft_s"] for row in rows} == {None}
    assert dialects.spread(rows, "tpot_s") is None


def test_capacity_is_predicted_to_the_block_and_counted_as_vllm_counts_it():
    """1000 bytes at 10 a token are 25 blocks of 4; a request of 9 tokens takes 3 of them: 8.33 requests, 75 tokens."""
    (row,) = s1.capacity([point()], 10)
    assert (row["blocks_predicted"], row["blocks"]) == (25, 25)
    assert (row["tokens_predicted"], row["tokens"]) == (75, 90)
    (real,) = s1.capacity([point(kv_cache_space_bytes=59055800, kv_block_tokens=128, max_model_len=1060)], 46080)
    assert (real["blocks_predicted"], real["tokens_predicted"]) == (10, 1177)  # what vLLM 0.32 said of this cache
    assert s1.capacity([point(kv_block_tokens=None)], 10) == s1.capacity([point()], None) == []
    assert s1.kv_bytes_per_token({"model_type": "mamba"}, "float32") is None


def test_pages_waste_the_rest_of_a_block_and_contiguous_memory_the_rest_of_the_maximum():
    """Two requests hold 12 and 14 tokens (the last output token is never fed): 12 and 16 in pages, 20 each else."""
    records = [request(0, [1, 2, 3]), request(0, [1, 2, 3, 4, 5]), request(0, [1], status="failed")]
    wasted = s1.waste([*records, point(max_model_len=20)])
    assert wasted["paged"] == pytest.approx(1 - 26 / 28) and wasted["contiguous"] == pytest.approx(1 - 26 / 40)
    assert wasted["requests"] == 2 and s1.waste([*records, point(kv_block_tokens=None)]) is None


def test_goodput_counts_what_keeps_both_limits():
    """Two streams, a request of 1 s each, six apiece; every other one of stream 1 starts too slowly."""
    sent = [request(float(i), [0.2, 0.6, 1.0], 0) for i in range(6)]
    sent += [request(i + 0.5, [0.2 if i % 2 else 0.9, 0.95, 1.0], 1) for i in range(6)]
    (row,) = s1.goodput([*sent, point()], 0.5, 0.5).to_dict("records")
    assert row["requests_per_s"] == pytest.approx(2, rel=0.25)
    assert row["goodput_per_s"] == pytest.approx(row["requests_per_s"] * row["within"])
    assert 0.6 < row["within"] < 0.9
    (strict,) = s1.goodput([*sent, point()], 0.5, 0.1).to_dict("records")
    assert strict["within"] < row["within"]


OPEN = CLOSED | {"loop": "open", "concurrency": None, "request_rate_per_s": 2.0}


def test_open_loop_keeps_the_wait_before_the_send_apart_and_sees_a_queue_that_grows():
    """Requests of 1 s, one a second, are a steady state; where each takes 0.8 s longer than the last, a queue grows."""
    sent = [request(float(i), [0.5, 1.0], i, client_wait_s=0.25, point=OPEN) for i in range(10)]
    histogram = {"ttft_sum_s": 5.0, "ttft_count": 10}
    (row,) = s1.open_loop([*sent, point(asked=OPEN, deltas=histogram)]).to_dict("records")
    assert (row["ttft_s"], row["arrival_ttft_s"], row["arrival_e2e_s"]) == (0.5, 0.75, 1.25)
    assert row["littles_law"] == pytest.approx(1.0) and row["client_over_server_ttft"] == pytest.approx(1.0)
    queued = [r | {"arrival_times_s": [0.5 + 0.8 * i, 1.0 + 0.8 * i]} for i, r in enumerate(sent)]
    (row,) = s1.open_loop([*queued, point(asked=OPEN)]).to_dict("records")
    assert row["littles_law"] < 0.6
    assert s1.open_loop([*sent, point()]).empty


SMALL = CLOSED | {"prefix_caching": True}
LONG = SMALL | {"concurrency": 1, "context_length": 100}


def filling_records():
    samples = [sample(100.0, 0.2, 1, 0, 7), sample(101.0, 1.0, 2, 1, 7), sample(102.0, 0.9, 1, 2, 9)]
    sent = [request(100.0 + i, [1.0 + i, 1.5 + i], i % 2, attempt="f", point=SMALL) for i in range(4)]
    return [*sent, point("f", SMALL, samples, {"preemptions": 2.0})]


def reuse_records():
    records = []
    for shared, hits in ((0, 0), (50, 48), (90, 88)):
        asked, name = LONG | {"shared_prefix_tokens": shared}, f"r{shared}"
        records += [request(i, [1.0 - hits / 100, 2.0], attempt=name, point=asked) for i in range(3)]
        records.append(point(name, asked, deltas={"prefix_hits": hits, "prefix_queries": 100}))
    return records


def test_the_filling_cache_is_told_from_the_first_measured_request_on():
    samples, sends = s1.filling([*filling_records(), *reuse_records()])
    assert list(samples["t_s"]) == list(sends["t_s"])[:3] == [0.0, 1.0, 2.0]
    assert list(samples["preemptions"]) == [0, 0, 2]
    numbers = room.filling_numbers(samples, sends)
    assert (numbers["usage"], numbers["waiting"], numbers["preemptions"]) == (1.0, 2, 2)
    assert numbers["waiting_share"] == pytest.approx(2 / 3)
    assert (numbers["ttft_free"], numbers["ttft_queue"]) == (1.0, 3.0)  # sent at 0 s; at 1, 2 and 3 s


def test_full_and_roomy_compare_the_same_load_only():
    roomy = [request(i, [0.5, 0.75], i % 2) for i in range(3)] + [point()]
    numbers = s1.full_and_roomy(filling_records(), roomy)
    assert numbers["ttft_ratio"] == pytest.approx(2.5 / 0.5) and numbers["tpot_ratio"] == pytest.approx(2.0)
    other = [request(0, [0.5, 0.75]), point(asked=CLOSED | {"concurrency": 4})]
    assert s1.full_and_roomy(filling_records(), other) is None and s1.full_and_roomy([], roomy) is None


def test_br15_a_reused_prefix_voids_a_point_unless_it_is_what_the_point_measures():
    found = {name: r for r in reuse_records() if r["kind"] == "point" for name in [r["point"]["shared_prefix_tokens"]]}
    assert summary.void_reason(found[90]) is None
    hits = {"server_deltas": {"prefix_hits": 2, "prefix_queries": 100}}
    assert summary.void_reason(found[0] | hits) == summary.void_reason(point() | hits) == "prefix_hits"


def test_reuse_holds_the_servers_count_against_the_whole_blocks():
    frame = s1.reuse(reuse_records()).groupby("shared").median()
    assert list(frame["reused"]) == list(frame["whole_blocks"]) == [0.0, 0.48, 0.88]
    assert room.reuse_numbers(s1.reuse(reuse_records()))["speedup"] == pytest.approx(1 / 0.12)


def sweep_frames():
    about = {"context_length": 256, "status": "ok", "phase": "measured", "void": None}
    numbers = [{"ttft_s": 0.2 * c, "tpot_s": 0.03 * c**0.5, "throughput_tokens_per_s": 30 * c**0.6} for c in (1, 2, 4)]
    frame = pd.DataFrame([about | {"concurrency": c} | row for c, row in zip((1, 2, 4), numbers)])
    return frame, frame


FRAMES = {
    "latency_by_throughput": lambda: (*sweep_frames(), 0.5, 0.05),
    "cache_filling": lambda: s1.filling(filling_records()),
    "ttft_by_shared_prefix": lambda: (s1.reuse(reuse_records()),),
}
EMPTY = {
    "latency_by_throughput": lambda: (summary.requests([]), summary.points([]), 0.5, 0.05),
    "cache_filling": lambda: s1.filling([]),
    "ttft_by_shared_prefix": lambda: (s1.reuse([]),),
}


@pytest.mark.parametrize("name", FRAMES)
def test_charts_speak_both_languages_and_say_when_nothing_was_measured(name):
    draw, seen = getattr(room, name), {}
    for language in prose.LANGUAGES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seen[language] = words(draw(*FRAMES[name](), language))
            assert prose.plain("label.no_data", language) in words(draw(*EMPTY[name](), language))
        numbers = readings.of(draw, *FRAMES[name]())
        for part in ("alt", "reading"):
            assert prose.plain(f"charts.{name}.{part}", language, **numbers)
    assert seen["zh"] and not seen["zh"] & seen["en"]
    assert readings.of(draw, *EMPTY[name]()) is None


def test_tables_and_sentences_speak_both_languages(monkeypatch):
    shown = []
    monkeypatch.setattr(prose, "display", lambda data, raw, metadata: shown.append(data))
    sent = [request(float(i), [0.5, 1.0], i % 2) for i in range(8)] + [point(max_model_len=20)]
    arrivals = [request(float(i), [0.5, 1.0], i, point=OPEN) for i in range(4)] + [point(asked=OPEN)]
    room.definitions_table(sent, "both", "s")
    room.goodput(s1.goodput(sent, 1.0, 1.0), "both", "s", 1.0, 1.0)
    room.open_loop(s1.open_loop(arrivals), "both", "s")
    room.capacity(s1.capacity(sent, 10), s1.waste(sent), "both", "s")
    room.full_cache(s1.full_and_roomy(filling_records(), sent), "both", "s")
    assert len(shown) == 2 * 8
    for frame in (s1.goodput([], 1.0, 1.0),):
        room.goodput(frame, "en", "s", 1.0, 1.0)
    room.open_loop(s1.open_loop([]), "en", "s")
    room.definitions_table([], "en", "s")
    room.full_cache(None, "en", "s")
    assert [data["text/plain"] for data in shown[16:]] == [prose.plain("status.no_data", "en")] * 4


@pytest.fixture
def p(monkeypatch):
    outline = SimpleNamespace(vocab_size=1000, special_token_ids=(0, 1))
    monkeypatch.setattr(serving.models, "outline", lambda source: outline)
    monkeypatch.setattr(serving.models, "resolve", lambda *_: None)
    lengths = {"reuse_context_length": 64, "shared_prefix_lengths": [40], "serving_context_length": 32}
    return smoke(full_cache_space_gib=0.1, concurrencies=[4], open_loop_rates=[1.0], **lengths)


def test_br15_prompts_share_exactly_what_the_point_asks_for(p):
    full, cold, warm = (point for point, _ in sweep.cache_points(p))
    asked = {name: serving.point_prompts(p, each, 1, 5) for name, each in (("full", full), ("cold", cold))}
    asked["warm"] = serving.point_prompts(p, warm, 1, 5)
    assert {len(prompt) for prompt in asked["warm"]} == {64}
    assert len({tuple(prompt[:40]) for prompt in asked["warm"]}) == 1
    assert len({tuple(prompt[40:56]) for prompt in asked["warm"]}) == 5
    firsts = [tuple(prompt[:16]) for prompt in (*asked["full"], *asked["cold"], asked["warm"][0])]
    assert len(set(firsts)) == len(firsts)
    assert serving.point_prompts(p, warm, 2, 5)[0][:16] != asked["warm"][0][:16]  # the next repetition starts cold


def test_each_kind_of_point_has_its_number_of_requests(p):
    plain, full, arrivals = sweep.serving_points(p)[0][0], sweep.cache_points(p)[0][0], sweep.open_loop_points(p)[0][0]
    counts = [serving.request_counts(p, each) for each in (plain, full, arrivals)]
    assert counts == [(4, 16), (4, 8), (1, p.open_loop_requests)]


def test_compiled_and_eager_are_compared_at_the_lengths_measured_in_both():
    records = []
    for eager, length, tpot_s in ((True, 128, 0.4), (False, 128, 0.2), (True, 256, 0.4)):
        asked, name = CLOSED | {"concurrency": 1, "context_length": length, "enforce_eager": eager}, f"{eager}{length}"
        records += [request(0.0, [1.0, 1.0 + tpot_s], attempt=name, point=asked), point(name, asked)]
    (row,) = s1.compared(records).to_dict("records")
    assert (row["context_length"], row["ttft_ratio"]) == (128, 1.0) and row["tpot_ratio"] == pytest.approx(2.0)
    assert s1.compared(records[:2]).empty and s1.compared([]).empty


def test_the_other_mode_is_measured_only_when_asked_for(p):
    assert sweep.compared_points(p) == []
    points = [point for point, _ in sweep.compared_points(smoke(compare_compiled=True, context_lengths=[16, 32]))]
    assert {(x["enforce_eager"], x["concurrency"]) for x in points} == {(False, 1)}
    assert {x["context_length"] for x in points} >= {16, 32}
