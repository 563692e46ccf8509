"""The law and the memory forecast: what arithmetic and analysis say of made-up and of real tiny models."""

import fake_frames
import numpy as np
import pytest

from kvlab import models
from kvlab.analyse import cost, footprint, law, summary

LENGTHS = np.array([16, 32, 64, 128, 256, 512, 1024, 2048])


def test_a_law_finds_its_coefficients_again_and_none_is_negative():
    found = law.fit(LENGTHS, 0.05 + 2e-3 * LENGTHS + 5e-7 * LENGTHS**2)
    assert (found.constant_s, found.linear_s, found.quadratic_s) == pytest.approx((0.05, 2e-3, 5e-7))
    falling = law.fit(LENGTHS, 1.0 / LENGTHS)
    assert min(vars(falling).values()) >= 0 and falling(2048) > 0


def test_short_lengths_weigh_as_much_as_long_ones():
    times = 0.05 + 2e-3 * LENGTHS
    times[-1] *= 1.2  # by absolute errors, this one would bend the law everywhere
    errors = law.fit(LENGTHS, times)(LENGTHS) / times - 1
    assert np.abs(errors[:4]).max() < 0.1


def frame(step_s, lengths=LENGTHS):
    rows = fake_frames.generations(kernels=("sdpa",), repetitions=1).iloc[:1]
    made = [rows.assign(context_length=n, output_tokens=2, tpot_s=step_s(n + 1), use_cache=True) for n in lengths]
    return law.step_times(summary.pd.concat(made))


def test_every_second_length_is_left_out_and_the_longest_is_fitted():
    found = law.residuals(frame(lambda n: 0.05 + 2e-3 * n + (0.1 if n == 1025 else 0)))
    assert found.loc[found["left_out"], "context_length"].tolist() == [16, 64, 256, 1024]
    errors = found.set_index("context_length")["residual"]
    assert errors[1024] == pytest.approx(2.1 / 2.2 - 1, abs=0.01), "a length left out cannot bend the law"
    assert errors.drop(1024).abs().max() < 0.01


def test_too_few_lengths_have_no_law():
    times = frame(lambda n: 1.0, LENGTHS[:2])
    assert law.laws(times) == [] and law.residuals(times).empty


def architecture(name="llama"):
    return cost.architecture(models.outline(models.resolve(f"random:{name}")).config)


def test_arithmetic_has_no_quadratic_part_with_the_cache_and_no_constant_part_without():
    a = architecture()
    cached = law.arithmetic(a, True, "float32", "sdpa", 200)
    uncached = law.arithmetic(a, False, "float32", "sdpa", 200)
    assert sum(cached) == pytest.approx(1) and sum(uncached) == pytest.approx(1)
    assert cached[2] == 0 and uncached[0] == 0 and min(cached[:2]) > 0 and min(uncached[1:]) > 0
    assert law.arithmetic(a, False, "float32", "sdpa", 100)[2] < uncached[2], "attention's share grows"


def point(**changes):
    base = {"context_length": 1000, "output_tokens": 24, "dtype": "bfloat16", "attention": "sdpa", "batch_size": 1}
    return base | changes


def test_a_forecast_grows_with_what_costs_memory():
    expects = footprint.Forecast(architecture(), 2**30)
    usual = expects.peak_bytes(point())
    for changes in ({"dtype": "float32"}, {"attention": "eager"}, {"batch_size": 2}, {"context_length": 2000}):
        assert expects.peak_bytes(point(**changes)) > usual, changes
    cache = cost.kv_cache_bytes(expects.architecture, 1024, "bfloat16")
    assert usual - expects.peak_bytes(point(), use_cache=False) == cache
    assert expects.fits(point()) and not expects.fits(point(attention="eager", context_length=20000))


def test_a_forecast_needs_a_known_model_and_the_memory_of_its_device():
    config, there = models.outline(models.resolve("random:llama")).config, {"memory_bytes": 8, "memory_limit_bytes": 5}
    assert footprint.forecast(config, there, "cpu").available_bytes == 5
    assert footprint.forecast(config, there | {"card_memory_bytes": 7}, "cuda").available_bytes == 7
    assert footprint.forecast(config, there | {"card_memory_bytes": None}, "cuda") is None
    assert footprint.forecast({"model_type": "unheard of"}, there, "cpu") is None


def weighed(**changes):
    return {
        "kind": "memory", "point": point(), "use_cache": True, "repetition": 1, "status": "ok", "reason": None,
        "parameter_bytes": 500, "kv_cache_bytes": 40, "peak_memory_bytes": 900, "resident_set_before_bytes": 700,
        "resident_set_bytes": 760, "reserved_memory_bytes": None, "memory_source": "VmHWM", "cpu_time_s": 1.0,
    } | changes  # fmt: skip


def test_br23_the_parts_of_a_peak_are_named_apart_and_unknown_ones_are_missing():
    on_cpu = footprint.parts([weighed()]).iloc[0]
    assert (on_cpu["weights_bytes"], on_cpu["kv_cache_bytes"], on_cpu["activation_bytes"]) == (500, 40, 160)
    assert np.isnan(on_cpu["reserve_bytes"]) and np.isnan(on_cpu["predicted_bytes"])
    card = {"memory_source": "torch.cuda.max_memory_allocated", "reserved_memory_bytes": 1000}
    on_card = footprint.parts([weighed(**card)]).iloc[0]
    assert (on_card["activation_bytes"], on_card["reserve_bytes"]) == (360, 100)
    lost = footprint.parts([weighed(status="out_of_memory", peak_memory_bytes=None)]).iloc[0]
    assert np.isnan(lost["activation_bytes"]) and lost["weights_bytes"] == 500
    assert footprint.parts([weighed(use_cache=False, kv_cache_bytes=None)])["kv_cache_bytes"].item() == 0
