"""A slip in these definitions would falsify every chart, so each is held against a stream worked out by hand."""

import pytest

from kvlab.analyse import definitions as d


def record(times, counts=None, **more):
    return {"status": "ok", "arrival_times_s": times, "chunk_tokens": counts or [1] * len(times), **more}


def test_tpot_is_time_after_the_first_token_over_the_tokens_after_it():
    r = record([0.5, 0.6, 0.8])
    assert (d.ttft_s(r), d.e2e_s(r)) == (0.5, 0.8)
    assert d.tpot_s(r) == pytest.approx(0.15)


def test_br06_four_tokens_per_chunk_are_forty_tokens_not_ten():
    r = record([0.1 * i for i in range(1, 11)], [4] * 10)
    assert d.output_tokens(r) == 40
    assert d.tpot_s(r) == pytest.approx(0.9 / 39)
    assert d.tpot_after_first_chunk_s(r) == pytest.approx(0.9 / 36)
    assert d.between_chunks_s(r)[1] == "chunks"


def test_gaps_are_called_itl_only_where_every_chunk_is_one_counted_token():
    assert d.between_chunks_s(record([1.0, 2.0]))[1] == "tokens"
    assert d.between_chunks_s(record([1.0, 2.0], token_count_source="estimated"))[1] == "chunks"
    assert d.between_chunks_s(record([1.0, 2.0], [1, 2]))[1] == "chunks"
    assert d.between_chunks_s({"status": "ok", "arrival_times_s": [1.0, 2.0]})[1] == "chunks"


def test_br07_one_token_has_no_tpot_and_no_text_has_no_ttft():
    assert d.tpot_s(record([0.08])) is None
    silent = record([], [], finished_s=0.08, output_tokens=1)
    assert (d.ttft_s(silent), d.tpot_s(silent), d.e2e_s(silent)) == (None, None, 0.08)
    assert d.tpot_s(silent | {"output_tokens": 3}) is None


def test_a_failed_request_has_no_latency_at_all():
    r = record([0.1, 0.2]) | {"status": "failed"}
    assert (d.ttft_s(r), d.tpot_s(r), d.e2e_s(r)) == (None, None, None)


def test_br12_the_count_is_what_came_never_what_was_asked_for():
    assert d.output_tokens(record([0.1, 0.2], requested_output_tokens=512)) == 2
    untold = record([0.1, 0.2], [None, None])
    assert d.output_tokens(record([], [])) is None
    assert d.output_tokens(untold) is None and d.tpot_s(untold) is None
    assert d.output_tokens(record([0.1], [None], output_tokens=7)) == 7


def test_two_tokens_are_enough_for_tpot_and_two_chunks_for_its_variant():
    assert d.tpot_s(record([0.5, 0.75])) == pytest.approx(0.25)
    assert d.tpot_after_first_chunk_s(record([0.5, 0.75], [3, 2])) == pytest.approx(0.125)
    assert d.tpot_after_first_chunk_s(record([0.5, 0.75], [3, 1])) == pytest.approx(0.25)


def test_the_variant_is_absent_where_a_count_is_not_told_or_nothing_follows_the_first_chunk():
    assert d.tpot_after_first_chunk_s(record([0.5, 0.75, 1.0], [1, None, 1])) is None
    assert d.tpot_after_first_chunk_s(record([0.5], [4])) is None
    assert d.tpot_after_first_chunk_s({"status": "ok", "arrival_times_s": [0.5, 0.75]}) is None
    assert d.tpot_after_first_chunk_s(record([0.5, 0.75], [4, 0])) is None
    assert d.tpot_after_first_chunk_s(record([0.5, 0.75]) | {"status": "failed"}) is None


def test_steps_are_the_gaps_after_the_first_token():
    assert d.step_times_s(record([0.5, 0.75, 1.5])) == [0.25, 0.75]
    assert d.step_times_s({"status": "failed", "arrival_times_s": None}) == []


def test_paired_ratio_is_without_over_with_and_absent_when_one_is():
    assert d.paired_ratio(6.0, 2.0) == 3.0
    assert d.paired_ratio(None, 2.0) is None and d.paired_ratio(6.0, None) is None and d.paired_ratio(6.0, 0.0) is None


def served(stream, sent_s, times):
    return record(times) | {"stream": stream, "sent_s": sent_s}


def test_throughput_counts_the_steady_window_only():
    # Two streams, three requests each, a token every second; stream 1 starts late and ends late.
    requests = [served(0, 3.0 * i, [1.0, 2.0, 3.0]) for i in range(3)]
    requests += [served(1, 2.0 + 3.0 * i, [1.0, 2.0, 3.0]) for i in range(3)]
    assert d.steady_window_s(requests, 2) == (3.0, 9.0)
    assert d.throughput_tokens_per_s(requests, 2) == pytest.approx(2.0)
    lost = {"status": "failed", "stream": 0, "sent_s": 4.0}
    assert d.throughput_tokens_per_s([*requests, lost, served(0, 4.0, [])], 2) == pytest.approx(2.0)


def test_throughput_is_absent_below_three_completions_a_stream():
    requests = [served(s, 3.0 * i, [1.0, 2.0, 3.0]) for s in range(2) for i in range(2)]
    assert d.throughput_tokens_per_s(requests, 2) is None
    assert d.steady_window_s([], 1) is None


def test_throughput_spreads_a_total_over_chunks_that_do_not_tell_theirs():
    # The same answers, four tokens a chunk: told chunk by chunk, or only in the end.
    told = [record([1.0, 2.0, 3.0], [4, 4, 4]) | {"stream": 0, "sent_s": 3.0 * i} for i in range(3)]
    total = [r | {"chunk_tokens": [None] * 3, "output_tokens": 12} for r in told]
    assert d.throughput_tokens_per_s(told, 1) == pytest.approx(4.0)
    assert d.throughput_tokens_per_s(total, 1) == pytest.approx(4.0)
    unknown = [r | {"chunk_tokens": [None] * 3} for r in told]
    assert d.throughput_tokens_per_s(unknown, 1) == pytest.approx(1.0)


def test_throughput_takes_each_chunk_at_its_own_count():
    # Three answers of two and seven tokens; the window, from 1 s to 6 s, leaves out the first chunk of the first.
    requests = [record([1.0, 2.0], [2, 7]) | {"stream": 0, "sent_s": 2.0 * i} for i in range(3)]
    assert d.throughput_tokens_per_s(requests, 1) == pytest.approx((7 + 9 + 9) / 5)


def test_there_is_no_window_while_a_stream_has_answered_nothing():
    requests = [served(0, 3.0 * i, [1.0, 2.0, 3.0]) for i in range(6)]
    assert d.steady_window_s(requests, 1) is not None and d.steady_window_s(requests, 2) is None


def test_failed_requests_open_no_window_though_some_of_their_tokens_came():
    requests = [served(0, 3.0 * i, [1.0, 2.0, 3.0]) for i in range(2)]
    failed = served(0, 6.0, [1.0, 2.0, 3.0]) | {"status": "failed"}
    assert d.steady_window_s([*requests, failed], 1) is None


def test_a_window_without_length_is_none():
    # Stream 1 has its first token in the moment in which stream 0 ends.
    requests = [served(0, float(i), [1.0]) for i in range(5)] + [served(1, 4.0, [1.0, 2.0])]
    assert d.steady_window_s(requests, 2) is None
