"""One token taken apart, predictions and tiers: the arithmetic, the verdicts, and charts in both languages."""

import re
import warnings
from types import SimpleNamespace

import fake_frames
import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from kvlab.analyse import breakdown, cost, explanations, predictions, published, tiers
from kvlab.article import anatomy, prose

LARGE = cost.known_models()["Qwen2.5-7B-Instruct"]
SMALL = cost.known_models()["SmolLM2-135M-Instruct"]
P = SimpleNamespace(
    model="small", dtype="float32", device="cpu", threads=2, server_threads=1, attention_kernels=["sdpa"], base_url="",
    profile="fake", context_lengths=[512], price_per_hour=3.6,
)  # fmt: skip
READ, COPY = 20e9, 10e9


def ceiling(quantity, value, threads=2, repetitions=6):
    names = {"quantity": quantity, "dtype": "float32", "threads": threads, "shape": "", "process": "p", "unit": ""}
    return [names | {"repetition": r, "value": value * (1 + 0.001 * r)} for r in range(repetitions)]


def ceilings():
    rows = ceiling("read", READ) + ceiling("read", READ / 2, threads=1) + ceiling("copy", COPY)
    rows += ceiling("gemm", 100e9) + ceiling("layer", 1e-4) + ceiling("sampling", 1e-4)
    return pd.DataFrame(rows)


def generations(model="small", cache="dynamic", tpot_s=0.06):
    frame = fake_frames.generations(kernels=("sdpa",))
    return frame[frame["context_length"] == 512].assign(model=model, cache=cache, dtype="float32", tpot_s=tpot_s)


def compiled(**more):
    return generations(cache="static", tpot_s=0.03).assign(compiled=True, warmup_s=70.0, **more)


def apart(*more):
    eager = [generations(cache="static", tpot_s=0.05), generations("thin:small", "static", 0.015)]
    return pd.concat([generations("thin:small", tpot_s=0.02), *eager, *more])


def stacks(tpot_s=0.06, taken_apart=None):
    frame, eager = apart(compiled()) if taken_apart is None else taken_apart, fake_frames.requests()
    requests = pd.concat([eager, eager.assign(enforce_eager=False, tpot_s=eager["tpot_s"] / 2)])
    return breakdown.tokens(P, SMALL, generations(tpot_s=tpot_s), frame, requests, ceilings())


def slices(per_layer_s=0.1, head_s=0.2, layers=(1, 2, 4), repetitions=6):
    rows = [
        {"layers": k, "repetition": r, "process": "p", "context_length": 64, "output_tokens": 4}
        | {"tpot_s": (head_s + per_layer_s * k) * (1 + 0.001 * r), "ttft_s": (0.5 + k) * (1 + 0.001 * r)}
        for k in layers
        for r in range(repetitions)
    ]
    return pd.DataFrame(rows, columns=breakdown.SLICE)


def test_a_token_is_its_parts_and_what_they_leave_unexplained():
    parts = breakdown.waterfall(stacks())
    for stack, rows in parts.groupby("stack"):
        assert rows["seconds"].sum() == pytest.approx(rows["tpot_s"].iloc[0]), stack
    weights = parts[(parts["stack"] == "dynamic") & (parts["part"] == "weights")]["seconds"].item()
    assert weights == pytest.approx(cost.step_weight_bytes(SMALL, "float32") / READ, rel=0.01)
    assert list(dict.fromkeys(parts["stack"])) == list(breakdown.STACKS)
    launch = parts[parts["part"] == "launch"].set_index("stack")["seconds"]
    assert dict(launch) == {"dynamic": 0.02, "static": 0.015}  # each from the thin model under its own cache


def test_a_stacks_floor_knows_its_own_threads():
    found = {token.stack: token for token in stacks()}
    assert found["vllm_eager"].threads == 1 and found["dynamic"].threads == 2
    assert found["vllm_eager"].parts["weights"] == pytest.approx(2 * found["dynamic"].parts["weights"])


def test_only_a_dynamic_cache_is_copied():
    found = {token.stack: token.parts for token in stacks()}
    assert found["dynamic"]["cache_copies"] > 0 == found["static"]["cache_copies"]


def test_on_a_card_only_launches_that_exceed_the_work_count():
    apart = generations("thin:small", tpot_s=0.04)
    card = SimpleNamespace(**vars(P) | {"device": "cuda"})
    (token,) = breakdown.tokens(card, SMALL, generations(), apart, fake_frames.requests()[:0], ceilings())
    work_s = token.floor_s + token.parts["cache_copies"]
    assert token.parts["launch"] == pytest.approx(0.04 - work_s)


def test_a_server_elsewhere_has_no_floor_here():
    elsewhere = SimpleNamespace(**vars(P) | {"base_url": "http://127.0.0.1:8000"})
    found = breakdown.tokens(
        elsewhere, SMALL, generations(), generations("thin:small"), fake_frames.requests(), ceilings()
    )
    assert [token.stack for token in found] == ["dynamic"]


def test_requests_of_one_run_are_one_repetition():
    (served,) = [token for token in stacks() if token.stack == "vllm_eager"]
    assert served.removable.n == fake_frames.requests()["repetition"].nunique()


def test_compiled_and_eager_are_told_apart():
    found = {token.stack: float(token.tpot_s.median()) for token in stacks()}
    assert found["static_compiled"] == 0.03 and found["static"] == 0.05
    assert found["vllm_compiled"] == pytest.approx(found["vllm_eager"] / 2)


@pytest.mark.parametrize(
    "more, said",
    [
        ([compiled()], "Compiling Transformers took up to 70 s"),
        ([compiled(status="refused", reason="tokens_differ")], "static cache: the arms chose different tokens."),
        ([compiled(status="failed", reason="no compiler")], "static cache: no compiler."),
        ([], "static cache: this run holds no measurement"),
    ],
    ids=["measured", "refused", "failed", "not asked"],
)
def test_the_page_says_what_compiling_changed_or_why_it_is_not_there(more, said, monkeypatch):
    shown = []
    monkeypatch.setattr(prose, "emit", lambda data, language, **tags: shown.append(data["text/plain"]))
    frame = apart(*more)
    anatomy.compiled(stacks(taken_apart=frame), frame, "en", source="s")
    text = " ".join(shown).replace("\u00a0", " ")
    assert said in text and "token of compiled vLLM" in text
    assert ("Without a panel" in text) == (said[0] != "C")


def test_slices_are_carried_on_along_their_line():
    fit = breakdown.extrapolated(slices(), "tpot_s", 28)
    assert fit["whole_s"].iloc[0] == pytest.approx(0.2 + 28 * 0.1) and fit["per_layer_s"].iloc[0] == pytest.approx(0.1)
    assert breakdown.extrapolated(slices(layers=(4,)), "tpot_s", 28).empty  # one slice is no line


@pytest.mark.parametrize(
    "small_s, layer_factor, verdict",
    [(0.2, 1.05, "supported"), (0.035, 3.0, "not_supported")],
    ids=["contrast", "none"],
)
def test_q3_follows_from_the_shares_above_the_floor(small_s, layer_factor, verdict):
    floor_s = cost.step_weight_bytes(LARGE, "float32") / READ
    frame = slices(per_layer_s=floor_s * layer_factor / 28, head_s=0.0)
    large = breakdown.slice_removable(frame, LARGE, "float32", READ)
    assert explanations.engine(stacks(small_s), large, 2.0).verdict == verdict


def test_q3_without_a_slice_has_no_verdict():
    large = breakdown.slice_removable(slices(layers=()), LARGE, "float32", READ)
    answer = explanations.engine(stacks(), large, None)
    assert answer.verdict == "no_verdict" and prose.plain("verdict.q3.no_verdict", "en", **answer.numbers)


def test_throughput_grows_from_one_request_to_the_most():
    points = fake_frames.points()
    assert explanations.throughput_growth(points) == pytest.approx(8**0.7, rel=0.2)
    assert explanations.throughput_growth(points[points["concurrency"] > 1]) is None


def kept_bytes(extra=0):
    frame = fake_frames.generations().assign(dtype="float32")
    tokens = frame["context_length"] + frame["output_tokens"] - 1
    exact = tokens * cost.kv_cache_bytes_per_token(SMALL, "float32") + extra
    return frame.assign(kv_cache_bytes=np.where(frame["use_cache"], exact, np.nan))


def test_q5_is_exact_or_not():
    assert explanations.memory(kept_bytes(), SMALL, "float32").verdict == "supported"
    assert explanations.memory(kept_bytes(extra=1), SMALL, "float32").verdict == "not_supported"
    one_process = kept_bytes().query("repetition == 0")  # many lengths, one repetition
    assert explanations.memory(one_process, SMALL, "float32").verdict == "no_verdict"


POINT = {"model": "small", "dtype": "float32", "attention": "sdpa", "cache": "dynamic", "context_length": 512,
         "output_tokens": 8, "batch_size": 1}  # fmt: skip


def generation(at, **more):
    shared = {
        "kind": "generation",
        "point": POINT,
        "repetition": 1,
        "status": "ok",
        "recorded_at": at,
        "use_cache": True,
    }
    return shared | {"arrival_times_s": [1.0, 1.1], "chunk_tokens": [1, 1]} | more


def test_a_prediction_is_written_once_and_says_whether_it_came_first():
    m = predictions.machine(ceilings(), P, "here")
    (first,) = predictions.records(m, SMALL, [POINT], [])
    assert predictions.records(m, SMALL, [POINT], [first]) == []
    assert predictions.records(None, SMALL, [POINT], []) == []
    written = first | {"recorded_at": "2026-01-02"}
    for measured, when in ((["2026-01-03"], "before"), (["2026-01-01", "2026-01-03"], "after"), ([], "unmeasured")):
        (row,) = predictions.rows([written], [generation(at) for at in measured])
        assert row["when"] == when
    assert predictions.machine(ceilings().query("quantity != 'copy'"), P, "here") is None


def test_residuals_are_measured_over_predicted_without_controls():
    (written,) = predictions.records(predictions.machine(ceilings(), P, "here"), SMALL, [POINT], [])
    frame = predictions.residuals(
        [written], [generation(""), generation("", control=True), generation("", status="failed")]
    )
    assert len(frame) == 2
    ratio = frame.set_index("figure")["ratio"]
    assert ratio["tpot_cache_s"] == pytest.approx(0.1 / written["predicted"]["tpot_cache_s"])


def test_the_calibrated_predictor_is_judged_on_lengths_it_has_not_seen():
    here = predictions.machine(ceilings(), P, "here")
    frames = [f.assign(cache="dynamic", batch_size=1) for f in (fake_frames.generations(), fake_frames.pairs())]
    fitted = predictions.calibrated(here, SMALL, "float32", *frames)
    assert {p.case.context for p in fitted.held_out} & {p.case.context for p in fitted.fitted_on} == set()
    one_length = [frame[frame["context_length"] == 512] for frame in frames]
    assert predictions.calibrated(here, SMALL, "float32", *one_length) is None
    assert predictions.calibrated(None, SMALL, "float32", *frames) is None


@pytest.fixture(scope="module")
def gaps():
    there = tiers.predicted(published.calibrated("A10"), LARGE, "Qwen2.5-7B", "bfloat16")
    here = predictions.machine(ceilings(), P, "here")
    return tiers.gaps(slices(), LARGE, here, published.known_machines()["A10"], there)


def test_tiers_compare_weights_not_bytes(gaps):
    ceiling_of = gaps.set_index("phase")["ceiling"]
    assert ceiling_of["tpot"] == pytest.approx(600e9 / READ * 2, rel=0.01)  # two bytes a weight there, four here
    assert ceiling_of["ttft"] == pytest.approx(125e12 / 100e9, rel=0.01)


def test_a_gap_off_its_ratio_is_explained_by_the_shares_of_their_ceilings_that_both_machines_reach(gaps):
    for row in gaps.to_dict("records"):
        assert row["gap"] == pytest.approx(row["ceiling"] * row["reached"] / row["reached_here"])
        assert 0 < row["reached"] < 1  # a card does not exceed its data sheet
    tpot = gaps.set_index("phase").loc["tpot"]
    floor_s = cost.step_weight_bytes(LARGE, "float32") / READ
    assert tpot["reached_here"] == pytest.approx(floor_s / tpot["here"].median, rel=0.01)
    told = prose.plain("verdict.q4.predicted_only", "en", **explanations.tiers(gaps).numbers)
    assert prose.friendly(tpot["reached"], "%") in told and prose.friendly(tpot["reached_here"], "%") in told


def test_q4_is_never_more_than_predicted(gaps):
    answer = explanations.tiers(gaps)
    assert answer.verdict == "predicted_only"
    assert explanations.tiers(gaps[:0]).verdict == "no_verdict"
    assert (gaps["gap_low"] < gaps["gap"]).all() and (gaps["gap"] < gaps["gap_high"]).all()
    low, high = (prose.friendly(gaps[f"gap_{end}"].iloc[0], "x") for end in ("low", "high"))
    assert f"({low} to {high})" in prose.plain("answer.q4_effect", "en", **answer.numbers)


def test_a_price_needs_a_price_and_a_throughput():
    assert tiers.cost_per_million(3.6, 1000.0) == pytest.approx(1.0)
    assert tiers.cost_per_million(0.0, 1000.0) is None and tiers.cost_per_million(3.6, float("nan")) is None


def frames():
    (written,) = predictions.records(predictions.machine(ceilings(), P, "here"), SMALL, [POINT], [])
    other = written | {"point": POINT | {"context_length": 1024}}
    seen = [generation("") | {"repetition": r, "use_cache": c} for r in range(6) for c in (True, False)]
    seen += [r | {"point": other["point"]} for r in seen]
    return {
        "waterfall": (breakdown.waterfall(stacks()),),
        "slice_by_layers": (slices(), 28),
        "prediction_residuals": (predictions.residuals([written, other], seen),),
    }


CHARTS = ["waterfall", "slice_by_layers", "prediction_residuals", "tier_gaps"]


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_drawn_and_read_in_both_languages(name, gaps):
    given, draw, seen = frames().get(name, (gaps,)), getattr(anatomy, name), {}
    for language in prose.LANGUAGES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a glyph that the font lacks
            figure = draw(*given, language)
        texts = {text.get_text() for text in figure.findobj(Text) if text.get_visible()}
        seen[language] = {text for text in texts if re.search(r"[A-Za-z\u3400-\u9fff]{3}", text)}
        numbers = draw.reading(*given)
        assert prose.plain(f"charts.{name}.reading", language, **numbers)
        assert prose.plain(f"charts.{name}.alt", language, **numbers)
    assert not any(re.search(r"[\u3400-\u9fff]", text) for text in seen["en"])
    assert seen["zh"] and not {
        text for text in seen["zh"] & seen["en"] if not text.startswith(("TTFT", "TPOT", "FLOP/s"))
    }


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_without_measurements_says_so(name):
    empty = {"waterfall": (breakdown.waterfall([]),), "slice_by_layers": (slices(layers=()), 28)}
    empty["prediction_residuals"] = (predictions.residuals([], []),)
    empty["tier_gaps"] = (tiers.gaps(slices(layers=()), LARGE, None, None, {}),)
    assert getattr(anatomy, name)(*empty[name], "en")


def test_a_predicted_row_is_labelled_with_its_range(monkeypatch):
    shown = []
    monkeypatch.setattr(prose, "display", lambda data, raw, metadata: shown.append(data.get("text/html", "")))
    own = tiers.measured("a CPU", P, generations(), fake_frames.points())
    there = tiers.predicted(published.calibrated("A10"), LARGE, "Qwen2.5-7B", "bfloat16")
    anatomy.side_by_side([own, there], "en", "results/")
    assert "predicted" in shown[0] and "measured" in shown[0] and " to " in shown[0] and "Price" in shown[0]
