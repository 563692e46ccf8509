"""What went wrong has to stand in the article: a failure that a section leaves out passes for a success."""

import fake_frames
import pytest

from kvlab import paths, records
from kvlab.analyse.findings import Answer
from kvlab.analyse.summary import Estimate
from kvlab.article import anatomy, prose, sections

NOTHING = Estimate(0, None, None, None, "ok")


@pytest.fixture(params=prose.LANGUAGES)
def told(request, monkeypatch):
    """Calls a section and returns what a reader of one language sees, as text."""

    def tell(section, *arguments):
        shown = []
        monkeypatch.setattr(prose, "display", lambda data, raw, metadata: shown.append(data))
        section(*arguments, request.param)
        return [(data.get("text/plain") or data["text/html"]).replace("\N{NO-BREAK SPACE}", " ") for data in shown]

    tell.language = request.param
    return tell


def with_source(section):
    return lambda *arguments: section(*arguments, source=fake_frames.SOURCE)


def words(key, language, **numbers):
    return prose.plain(key, language, **numbers)


def test_a_sceptic_is_told_of_refused_pairs_failed_points_and_drift(told):
    frame = fake_frames.generations().assign(control=False)
    shown = told(with_source(sections.trouble), frame, fake_frames.pairs(), Estimate(3, 1.02, 1.0, 1.05, "ok"))
    language, text = told.language, " ".join(shown)
    refused = words("sections.refused", language, count=1, reason=prose.plain("refusal.arm_missing", language))
    failed = words("status.out_of_memory", language, context_length=2048, reason="no memory left")
    assert shown[0] == words("sections.proven", language, proven=59, pairs=60)
    assert refused in text and failed in text and "1.02" in shown[-1]


def test_unsteady_points_are_named_one_by_one(told):
    frame = fake_frames.generations(kernels=("sdpa",))
    shaken = (frame["context_length"] == 512) & frame["use_cache"]
    frame.loc[shaken, "tpot_s"] *= 1 + frame.loc[shaken, "repetition"]
    shown = told(with_source(sections.trouble), frame, fake_frames.pairs(kernels=("sdpa",)), NOTHING)
    assert words("sections.unsteady", told.language, count=1) in shown
    name = sections.unsteady_name({"use_cache": True, "attention": "sdpa"}, told.language)
    assert "512" in shown[-1] and name in shown[-1]


def test_points_that_do_not_count_say_so(told):
    more = {"tokens_conserved": True, "client_saturated": False, "littles_law": 1.0, "client_over_server_ttft": 1.0,
            "prefix_hit_share": 0.0, "event_loop_lag_max_s": 0.001}  # fmt: skip
    good = fake_frames.points(1).assign(**more)
    yes, no = (words(f"checks.{name}", told.language) for name in ("yes", "no"))
    (table,) = told(with_source(sections.serving_checks), good)
    assert f"<td>{no}</td>" not in table and table.count(f"<td>{yes}</td>") == 2 * len(good)
    for spoilt in ({"void": "prefix_reused"}, {"tokens_conserved": False}, {"failed": 1}, {"client_saturated": True}):
        (table,) = told(with_source(sections.serving_checks), good.assign(**spoilt))
        assert table.count(f"<td>{no}</td>") >= len(good), spoilt
    assert told(with_source(sections.serving_checks), good[:0]) == [words("status.no_data", told.language)]


def test_a_server_that_did_not_start_is_said_until_something_was_measured_after_it(told):
    failed = {"kind": "server", "status": "failed", "reason": "no memory left"}
    measured = {"kind": "request", "status": "ok", "reason": None}
    assert told(sections.missing, [measured, failed]) == [
        words("status.missing_section", told.language, reason="no memory left")
    ]
    assert told(sections.missing, [failed, measured]) == [] and told(sections.missing, []) == []


def test_a_negative_control_that_passed_is_told_from_one_that_was_refused(told):
    refused = words("refusal.cache_not_off", told.language)
    shown = told(with_source(sections.negative_control), ["cache_not_off", "cache_not_off"])
    assert shown == [words("sections.negative_control_refused", told.language, reason=refused)]
    assert told(with_source(sections.negative_control), [None]) == [
        words("sections.negative_control_passed", told.language, reason="")
    ]


def test_slices_are_missed_only_where_every_one_failed(told):
    failed, ok = {"status": "out_of_memory", "reason": None}, {"status": "ok", "reason": None}
    assert told(anatomy.unmeasured_slices, [failed]) == [
        words("status.missing_section", told.language, reason="out_of_memory")
    ]
    assert told(anatomy.unmeasured_slices, [failed, ok]) == [] == told(anatomy.unmeasured_slices, [])


def test_where_the_cache_pays_is_said_only_with_a_verdict(told):
    effect, tell = Estimate(6, 2.0, 1.9, 2.1, "ok"), with_source(lambda *rest, source: sections.verdicts(*rest, source))
    numbers = {"speedup_shortest": 1.5, "speedup_longest": 3.0, "shortest": 128, "longest": 2048, "n": 3}
    supported, open_ = (Answer("q2", verdict, effect, numbers) for verdict in ("supported", "no_verdict"))
    pays = words("verdict.q2.pays_from", told.language, context_length=256)
    assert told(tell, [supported], (256, False))[1:] == [pays]
    assert told(tell, [supported], (None, False))[1:] == [words("verdict.q2.pays_nowhere", told.language)]
    assert told(tell, [supported], (128, True))[1:] == [
        words("sections.pays_at_shortest", told.language, context_length=128)
    ]
    assert told(tell, [open_], (256, False)) == [words("verdict.q2.no_verdict", told.language, **numbers)]


def test_the_machine_is_named_in_the_readers_language_and_half_a_cpu_is_not_rounded_away(told):
    environment = {"card_model": None, "cpu_model": "A CPU <b>", "cpu_quota": 1.5}
    named = sections.machine_words(environment)[told.language]
    assert "1.5" in named and ("CPUs" in named) == (told.language == "en") and "<b>" not in named
    assert sections.machine_words(environment | {"card_model": "NVIDIA A10"})[told.language] == "NVIDIA A10"


def test_records_of_two_boots_show_both_dates_and_both_commits(told, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path))
    folder = paths.results("smoke")
    machine = {"environment": "e", "card_model": None, "cpu_model": "A CPU", "cpu_quota": 2.0, "cpu_flags": [],
               "memory_limit_bytes": 1, "system": "Linux", "packages": {}}  # fmt: skip
    for boot, day, commit in (("a", "2026-11-30", "1111"), ("b", "2026-12-04", "2222")):
        code = {"version": "0.1.0", "commit": commit, "dirty": boot == "b"}
        found = machine | {"boot": boot, "recorded_at": f"{day}T10:00:00+00:00", "kvlab": code}
        records.remember_environment(folder, found)
    records.remember_environment(folder, found | {"environment": "another machine", "recorded_at": "2027-01-01"})
    (table,) = told(with_source(sections.machine), found, {"profile": "smoke"})
    assert "2026-11-30, 2026-12-04" in table and "0.1.0, 1111; 0.1.0, 2222 +" in table and "2027" not in table
