"""What a reader would lose: an interval that is too narrow, a speed-up without proof, two machines in one chart."""

import math

import pytest

from kvlab.analyse import findings, summary

POINT = {"attention": "sdpa", "cache": "dynamic", "context_length": 8, "output_tokens": 3, "batch_size": 1}


def generation(use_cache, pair="a", step_s=0.1, **changes):
    n, steps = changes.get("point", POINT)["context_length"], 3
    return {
        "experiment": "s1b",
        "kind": "generation",
        "environment": "e",
        "boot": "b",
        "point": POINT,
        "pair": pair,
        "repetition": 1,
        "status": "ok",
        "use_cache": use_cache,
        "arrival_times_s": [1.0 + step_s * i for i in range(steps)],
        "chunk_tokens": [1] * steps,
        "input_lengths": [n] + [1] * (steps - 1) if use_cache else [n + i for i in range(steps)],
        "cache_lengths": [n + i for i in range(steps)] if use_cache else [None] * steps,
        "token_ids": [5, 6, 7],
        "top2_margins": [1.0, 1.0, 1.0],
    } | changes


@pytest.mark.parametrize("n, expected", [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))])
def test_median_interval_is_the_published_pair_of_order_statistics(n, expected):
    estimate = summary.interval([float(i) for i in range(n, 0, -1)])
    assert (estimate.low, estimate.high) == expected


def test_small_n_is_wider_than_its_own_range_and_gives_no_verdict():
    estimate = summary.interval([1.0, 1.1, 1.2])
    assert estimate.low < 1.0 and estimate.high > 1.2
    assert not estimate.conclusive


def test_missing_values_are_left_out_and_an_empty_set_has_no_median():
    assert summary.interval([None, math.nan, 2.0]).n == 1
    assert math.isnan(summary.interval([]).median)


def test_instability_is_named():
    assert summary.interval([1.0, 1.0, 1.01, 1.0]).stable == "ok"
    assert summary.interval([1.0, 1.15, 1.0, 1.15]).stable == "unstable"
    assert summary.interval([1.0, 2.0, 1.0, 2.0]).stable == "strongly unstable"


def test_br16_percentiles_interpolate_whatever_the_order_and_p99_needs_a_hundred():
    assert summary.percentile([30, 10, 20], 50) == 20
    assert summary.percentile([], 50) is None
    assert summary.percentile([7], 50) == 7
    assert summary.percentile(range(99), 99) is None
    assert summary.percentile(range(101), 99) == pytest.approx(99)


def test_a_proven_pair_has_its_ratios():
    frame = summary.pairs([generation(True), generation(False, step_s=0.4)])
    assert frame["refusal"].isna().all()
    assert frame["tpot_speedup"].item() == pytest.approx(4.0)
    assert frame["total_speedup"].item() == pytest.approx(1.8 / 1.2)
    assert frame["ttft_ratio"].item() == pytest.approx(1.0)


REFUSED = {
    "cache_not_used": (
        generation(True, input_lengths=[8, 9, 10], cache_lengths=[None] * 3),
        generation(False),
    ),
    "cache_not_off": (generation(True), generation(False, input_lengths=[8, 1, 1])),
    "tokens_differ": (generation(True, token_ids=[5, 6, 8]), generation(False)),
    "two_boots": (generation(True, boot="other"), generation(False)),
    "arm_missing": (generation(True, status="out_of_memory"), generation(False)),
    "output_counts_differ": (generation(True, chunk_tokens=[1, 1]), generation(False)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_pair_without_proof_has_no_speedup(why):
    """BR-29 among them: arms of different token counts are not compared."""
    frame = summary.pairs(list(REFUSED[why]))
    assert frame["refusal"].item() == why
    assert frame[["ttft_ratio", "tpot_speedup", "total_speedup"]].isna().all(axis=None)


def test_a_cache_that_holds_a_live_list_in_the_other_arm_is_not_off():
    pair = generation(True), generation(False, cache_lengths=[8, 9, 10])
    assert summary.refusal(*pair) == "cache_not_off"


@pytest.mark.parametrize(
    "lengths, grew", [([4, 4, 4], True), ([8, 9, 10], True), ([8, 8, 8], False), ([8, 9, 11], False)]
)
def test_a_cache_grows_by_one_or_stays_at_its_window(lengths, grew):
    assert summary.cache_grew(lengths, 8) is grew


def test_br25_sixteen_bit_arms_may_differ_only_in_a_near_tie_within_rounding():
    def pair(margin, difference):
        fed = {
            "fed_sequence": True,
            "logit_differences": [difference] * 3,
            "top2_margins": [9.0, 9.0, margin],
        }
        return generation(True, token_ids=[5, 6, 8], **fed), generation(False, **fed)

    assert summary.refusal(*pair(margin=0.01, difference=0.02)) is None
    assert summary.refusal(*pair(margin=0.10, difference=0.02)) == "tokens_differ"
    assert summary.refusal(*pair(margin=0.10, difference=5.0)) == "tokens_differ"


def test_br25_arms_that_differ_in_a_near_tie_pass_and_are_not_called_equal():
    fed = {"fed_sequence": True, "logit_differences": [0.02] * 3, "top2_margins": [9.0, 0.01, 0.005]}
    found = [generation(True, token_ids=[5, 1, 2], **fed), generation(False, **fed)]
    row = summary.pairs(found).iloc[0]
    assert row["refusal"] is None and (row["first_difference"], row["margin"]) == (2, 0.01)
    assert summary.pairs([generation(True), generation(False)])["first_difference"].isna().all()


def sweep_of(repetitions, speedup):
    """Pairs over three lengths whose TPOT speed-up at length n is speedup(n); TTFT equal up to 1 %."""
    found = []
    for repetition in range(1, repetitions + 1):
        for n in (8, 16, 32):
            both = {"point": POINT | {"context_length": n}, "repetition": repetition}
            name, jitter = f"{n}/{repetition}", 1 + repetition / 100
            found += [
                generation(True, name, 0.1 * jitter, **both),
                generation(False, name, 0.1 * speedup(n), **both),
            ]
    return summary.pairs(found)


def test_verdicts_follow_the_numbers():
    grows, flat = sweep_of(6, lambda n: n / 4), sweep_of(6, lambda n: 1.0)
    assert findings.phase(grows).verdict == findings.growth(grows).verdict == "supported"
    assert findings.phase(flat).verdict == findings.growth(flat).verdict == "not_supported"


def test_intervals_that_allow_both_leave_the_question_undecided():
    noisy = sweep_of(6, lambda n: 1.0)
    noisy["tpot_speedup"] *= 1 + 0.2 * (noisy["repetition"] % 2 - 0.5)
    noisy.loc[noisy["context_length"] == 32, "tpot_speedup"] **= -1
    assert findings.growth(noisy).verdict == findings.phase(noisy).verdict == "undecided"


def test_a_control_that_cannot_be_one_refutes_the_experiment():
    broken = sweep_of(6, lambda n: n / 4)
    broken["ttft_ratio"] = 1.5
    assert findings.phase(broken).verdict == "not_supported"


def test_no_verdict_below_six_repetitions_however_clear_it_looks():
    few = sweep_of(5, lambda n: n)
    assert findings.phase(few).verdict == findings.growth(few).verdict == "no_verdict"


def test_no_measurement_is_no_verdict_and_no_crash():
    empty = summary.pairs([])
    assert findings.phase(empty).verdict == findings.growth(empty).verdict == "no_verdict"
    assert findings.break_even(empty) == (None, False)


def test_break_even_is_the_first_length_that_pays_and_says_when_it_is_the_shortest():
    assert findings.break_even(sweep_of(6, lambda n: 4.0)) == (8, True)
    assert findings.break_even(sweep_of(6, lambda n: 0.5 if n < 32 else 4.0)) == (32, False)


def test_local_slopes_find_the_exponent():
    found = []
    for n in (8, 16, 32):
        found.append(generation(False, f"{n}", 1e-3 * n**2, point=POINT | {"context_length": n}))
    slopes = findings.local_slopes(summary.generations(found))["slope"]
    assert list(slopes) == pytest.approx([2.0, 2.0])


def serving_point(**changes):
    return {
        "kind": "point",
        "status": "ok",
        "attempt": "x",
        "repetition": 1,
        "point": {"concurrency": 1, "context_length": 8, "output_tokens": 3},
        "server_deltas": {"generation_tokens": 6, "prefix_hits": 0, "prefix_queries": 100},
        "server_samples": [{"t_s": 1.5, "kv_cache_usage": 0.25, "running": 1, "waiting": 0}],
    } | changes


def request(index, status="ok"):
    base = {
        "kind": "request",
        "attempt": "x",
        "repetition": 1,
        "phase": "measured",
        "stream": 0,
        "status": status,
    }
    return base | {
        "point": serving_point()["point"],
        "sent_s": 1.5 * index,
        "arrival_times_s": [0.5, 1.0, 1.5],
        "chunk_tokens": [1, 1, 1],
    }


def test_br15_prompts_found_in_the_prefix_cache_void_the_point():
    clean, warm = {"prefix_hits": 1, "prefix_queries": 100}, {"prefix_hits": 2, "prefix_queries": 100}
    assert summary.points([serving_point(server_deltas=clean)])["void"].item() is None
    assert summary.points([serving_point(server_deltas=warm)])["void"].item() == "prefix_hits"
    assert summary.prefix_hit_share(serving_point(server_deltas=None)) is None


def test_br09_failed_requests_are_counted_and_a_lost_token_is_seen():
    row = summary.points([request(0), request(1), request(2, "failed"), serving_point()]).iloc[0]
    assert (row["completed"], row["failed"]) == (2, 1)
    assert not row["tokens_conserved"]
    assert summary.points([request(0), request(1), serving_point()])["tokens_conserved"].item()


def test_littles_law_is_one_when_arrivals_latency_and_flight_agree():
    assert summary.littles_law([request(i) for i in range(4)], (0.0, 6.0)) == pytest.approx(1.0)
    assert summary.littles_law([request(0), request(3)], (0.0, 6.0)) == pytest.approx(1.0)
    assert summary.littles_law([], None) is None


def test_the_clients_ttft_is_held_against_the_servers_own():
    own = {"ttft_sum_s": 0.8, "ttft_count": 2}
    row = summary.points([request(0), request(1), serving_point(server_deltas=own)]).iloc[0]
    assert row["client_over_server_ttft"] == pytest.approx(1.25)
    others_too = summary.points([request(0), serving_point(server_deltas=own)]).iloc[0]
    assert pytest.approx(others_too["client_over_server_ttft"], nan_ok=True) == float("nan")


def test_requests_of_an_interrupted_point_are_not_counted():
    assert summary.requests([request(0), request(1)]).empty


def test_a_pair_spoilt_on_purpose_is_refused_and_in_no_result():
    both_off = generation(False), generation(False) | {"use_cache": True}
    spoilt = [r | {"negative_control": True, "pair": "spoilt"} for r in both_off]
    found = [generation(True), generation(False), *spoilt]
    assert summary.negative_controls(found) == ["cache_not_used"]
    assert len(summary.pairs(found)) == 1 and len(summary.generations(found)) == 2


def test_a_saturated_client_says_so():
    late = summary.points([request(0), request(1), serving_point(event_loop_lag_s=[0.2, 0.3])])
    quiet = summary.points([request(0), request(1), serving_point(event_loop_lag_s=[0.0002, 0.3])])
    assert late["client_saturated"].item() and not quiet["client_saturated"].item()


def test_a_speedup_is_sure_when_its_interval_lies_within_the_share_asked_for():
    def two(name, step_s):
        return [generation(True, name), generation(False, name, step_s)]

    steady = sum((two(n, 0.5) for n in range(6)), [])
    noisy = steady[:-2] + two(5, 0.8)
    assert not findings.too_wide(steady, 0.1) and findings.too_wide(noisy, 0.1)
    assert findings.too_wide(steady[:2], 0.1), "one pair has no interval yet"
    refused = [record | {"cache_lengths": None} for record in steady if record["use_cache"]] + steady[1::2]
    assert not findings.too_wide(refused, 0.1), "more of what is refused narrows nothing"
