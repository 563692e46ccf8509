"""One what-if without a measurement: a model on a machine at a context and a concurrency, as `predict` prints it."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

from kvlab import models, params, paths, records, sweep
from kvlab.analyse import calibrate, cost, predict, published, summary
from kvlab.analyse.predict import Case, Machine, Prediction
from kvlab.article import prose
from kvlab.measure.serving import request_counts

QUANTITIES = {  # printed name and unit
    "ttft_s": ("TTFT", "s"), "tpot_s": ("TPOT", "s"), "tpot_no_cache_s": ("TPOT without KV cache", "s"),
    "total_s": ("total time", "s"), "tpot_speedup": ("TPOT speed-up", "x"), "total_speedup": ("total speed-up", "x"),
    "throughput_tokens_per_s": ("throughput", "rate"),
}  # fmt: skip
ALONE = tuple(QUANTITIES)[:-1]
SERVED = ("ttft_s", "tpot_s", "throughput_tokens_per_s")
RESERVE = 0.1  # of the memory: activations and the engine's own


def architecture(model: str) -> cost.Architecture:
    """A well-known model by its name, or any source `models.resolve` takes; ValueError with what to ask instead."""
    known = cost.known_models()
    by_stem = {_stem(name): a for name, a in known.items()}
    if _stem(model) in by_stem:
        return by_stem[_stem(model)]
    if ":" not in model and not model.startswith((".", "/", "~")):
        raise ValueError(f"unknown model {model!r}; {_instead(_stem(model), {_stem(name): name for name in known})}")
    return cost.architecture(models.outline(models.resolve(model)).config)


def _stem(name: str) -> str:
    """The name without owner, case and what does not change the shape: "Qwen/Qwen2.5-7B-Instruct" is "qwen257b"."""
    bare = re.sub(r"(-instruct|-chat|-hf|-it)+$", "", re.split(r"[/:]", name)[-1].lower())
    return re.sub(r"[^a-z0-9]", "", bare)


def _instead(asked: str, names: dict[str, str]) -> str:
    """The name whose key is near to what was asked, else all names."""
    near = difflib.get_close_matches(asked, names, 1)
    return f"did you mean {names[near[0]]!r}?" if near else f"there are: {', '.join(sorted(names.values()))}"


def calibration(machine: str) -> calibrate.Calibration:
    """A card of the data sheets, or a profile whose ceilings are recorded; ValueError with what to ask instead."""
    cards = {name.lower(): name for name in published.known_machines()}
    if machine.lower() in cards:
        return published.calibrated(cards[machine.lower()])
    written = _recorded(machine, "predictions")
    if not written:
        profiles = sorted(file.parent.name for file in paths.results("").glob("*/predictions.jsonl"))
        mend = _instead(machine.lower(), {name: name for name in (*cards, *profiles)})
        raise ValueError(f"unknown machine {machine!r}: no card of ours and no profile with predictions; {mend}")
    return _on_records(Machine(**written[-1]["machine"]), _recorded(machine, "s1b"))


def _recorded(profile: str, experiment: str) -> list[dict]:
    """Records of the environment that wrote last into a profile's results; none for what is no name of a profile."""
    if not re.fullmatch(r"[\w.-]+", profile):
        return []
    found = records.load(paths.results(profile) / f"{experiment}.jsonl")
    return [r for r in found if r["environment"] == found[-1]["environment"]]


def _on_records(ceilings: Machine, measured: list[dict]) -> calibrate.Calibration:
    """The machine fitted to its own S1b, as far as the model measured there is one whose shape we can read."""
    points = {(r["point"]["model"], r["point"]["dtype"]) for r in measured if r.get("kind") == "generation"}
    found = []
    for model, dtype in sorted(points):
        of_one = [r for r in measured if (r["point"]["model"], r["point"]["dtype"]) == (model, dtype)]
        frames = summary.generations(of_one), summary.pairs(of_one)
        found += calibrate.measured_points(architecture(model), dtype, *frames)
    return calibrate.on_lengths(ceilings, found)


def lines(
    model: str, machine: str, dtype: str, context: int, output: int, concurrency: int, attention: str = "sdpa"
) -> list[str]:
    """The printed answer; raises ValueError for what cannot be asked."""
    a, known = architecture(model), calibration(machine)
    _check(a, known.machine, dtype, context, output, concurrency)
    alone = Case(a, context, output, dtype=dtype, attention=attention)
    served = replace(alone, batch=concurrency, stack="vllm")
    asked = f"{context:,} tokens in, {output:,} out"
    return [
        f"{model} on {known.machine.name} ({dtype}), {asked}: predicted, not measured",
        f"machine: {known.machine.source or 'its own records'}",
        f"{known.machine.kind}: {_residuals(known)}",
        "",
        *_table("Transformers, one request", known, alone, ALONE),
        *(_table(f"vLLM, {concurrency} at once", known, served, SERVED) if known.machine.launch_overlaps else ()),
        *_memory(a, known.machine, dtype, context + output),
    ]


def duration_lines(profile: str, assignments: list[str]) -> list[str]:
    """How long a profile's measuring takes at the prediction's word; raises ValueError for what cannot be asked."""
    p = SimpleNamespace(**params.load(profile, assignments))
    card = p.expected_device.removeprefix("NVIDIA ")
    if not card and not _recorded(profile, "predictions"):
        raise ValueError(f"nothing is known yet of the machine of profile {profile}: make report PROFILE={profile}")
    a, known = architecture(p.model), calibration(card or profile)
    minutes = {"S1b: both arms of every pair": _pairs_s(p, a, known.machine) / 60}
    if known.machine.launch_overlaps:
        minutes["S1: every request of every load"] = _requests_s(p, a, known.machine) / 60
    return [
        f"profile {profile} on {known.machine.name}: predicted, not measured",
        f"{known.machine.kind}: {_residuals(known)}",
        "",
        *(f"  {what:<34}{value:>6.0f} min" for what, value in minutes.items()),
        f"  {'together':<34}{sum(minutes.values()):>6.0f} min",
        "",
        "not counted: set-up and download, loading the model and starting servers, warm-up, what weighs memory and",
        "takes one token apart, and drawing; repetitions beyond the profile's, where interval_within asks for them",
    ]


def _pairs_s(p: SimpleNamespace, a: cost.Architecture, m: Machine) -> float:
    """Seconds of S1b's generations, with the cache and without it."""
    asked, total_s = sweep.on_off_points(p), 0.0
    for x, repetitions in asked:
        case = Case(a, x["context_length"], x["output_tokens"], x["batch_size"], x["dtype"], x["attention"], x["cache"])
        total_s += repetitions * sum(predict.total_s(m, case, use_cache).value for use_cache in (True, False))
    return total_s


def _requests_s(p: SimpleNamespace, a: cost.Architecture, m: Machine) -> float:
    """Seconds of S1's requests, those that warm up included; compiled or not makes no difference to the prediction."""
    points = sweep.serving_points(p) + sweep.open_loop_points(p) + sweep.cache_points(p) + sweep.compared_points(p)
    total_s = 0.0
    for x, repetitions in points:
        requests, at_once = sum(request_counts(p, x)), x["concurrency"] or 1
        case = Case(a, x["context_length"], x["output_tokens"], at_once, x["dtype"], stack="vllm")
        each_s = 1 / x["request_rate_per_s"] if x["loop"] == "open" else predict.total_s(m, case).value / at_once
        total_s += repetitions * requests * each_s
    return total_s


def _check(a: cost.Architecture, m: Machine, dtype: str, context: int, output_tokens: int, concurrency: int) -> None:
    predict.flops_per_s(m, dtype)
    for name, value in (("context", context), ("output", output_tokens), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if context + output_tokens > a.max_positions:
        raise ValueError(f"{context} + {output_tokens} tokens do not fit the model's {a.max_positions} positions")


def _residuals(known: calibrate.Calibration) -> str:
    if not len(known.residuals):
        return "nothing to test it on"
    off = summary.percentile(abs(known.residuals), 50)
    return f"median error {off:.0%} on {len(known.residuals)} figures that it was not fitted to"


def _table(title: str, known: calibrate.Calibration, case: Case, quantities: Iterable[str]) -> Iterable[str]:
    yield f"{title:<28}{'predicted':>16}   {'interval':<36}regime"
    for quantity in quantities:
        found, (name, unit) = known.predict(case, quantity), QUANTITIES[quantity]
        value, bound = prose.friendly(found.value, unit), " in ".join(filter(None, (found.regime, found.phase)))
        yield f"  {name:<26}{value:>16}   {_interval(found, unit):<36}{bound}"
    yield ""


def _interval(found: Prediction, unit: str) -> str:
    ends = (found.low, found.high)
    return "none known" if None in ends else " to ".join(prose.friendly(end, unit) for end in ends)


def _memory(a: cost.Architecture, m: Machine, dtype: str, tokens: int) -> list[str]:
    """Exact arithmetic: weights, cache, and how many such requests fit."""
    per_token, weights = cost.kv_cache_bytes_per_token(a, dtype, "engine"), cost.weight_bytes(a, dtype)
    held = cost.kv_cache_bytes(a, tokens, dtype, layout="engine")
    found = [
        f"computed: weights {prose.friendly(weights, 'B')}, KV cache {prose.friendly(per_token, 'B')} per token,"
        f" {prose.friendly(held, 'B')} per request of {tokens:,} tokens"
    ]
    if m.memory_bytes:
        count = cost.requests_that_fit(a, tokens, m.memory_bytes, RESERVE * m.memory_bytes, dtype)
        size = prose.friendly(m.memory_bytes, "B")
        found.append(f"computed: {count:,} such requests fit in {size} with {RESERVE:.0%} of it kept free")
    return found
