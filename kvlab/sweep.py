"""Which points a run consists of, which of them are missing, and one loop that asks a primitive for them."""

import hashlib
import json
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from kvlab import paths
from kvlab.params import all_declared, longest_served_output, output_tokens_at
from kvlab.records import Store, done, environments, key, remember_environment


def model_point(p: SimpleNamespace) -> dict:
    """What every point of both experiments states: model, precision and device."""
    return {
        "model": p.model,
        "model_revision": p.model_revision or None,
        "dtype": p.dtype,
        "device": p.device,
    }


@dataclass(frozen=True)
class Run:
    """One profile on one environment: where its records and figures are."""

    profile: str
    environment: dict

    @property
    def figures(self) -> Path:
        return paths.figures(self.profile)

    def store(self, experiment: str) -> Store:
        return Store(paths.results(self.profile) / f"{experiment}.jsonl", self.environment)

    def records(self, experiment: str, points: list[tuple[dict, int]]) -> list[dict]:
        """What this environment recorded of these points, and what is about no single point (a server that failed)."""
        wanted = {key({"point": point, "repetition": 0}) for point, _ in points}
        found = self.store(experiment).load()
        return [r for r in found if r["kind"] == "server" or key({"point": r["point"], "repetition": 0}) in wanted]


def begin(p: SimpleNamespace, environment: dict) -> Run:
    """Remember what this run is about (its environment and parameters beside the records) and return it."""
    remember_environment(paths.results(p.profile), environment)
    remember_parameters(vars(p))
    return Run(p.profile, environments(paths.results(p.profile))[-1])  # as it was when it first recorded


def remember_parameters(values: dict) -> None:
    """Keep these parameters beside the records, over those of an earlier run: the article reads them there."""
    known = parameters(values["profile"]) | values
    text = json.dumps(known, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    paths.replace(paths.results(values["profile"]) / "parameters.json", text)


def last_run(profile: str) -> tuple[Run, SimpleNamespace]:
    """The run that last wrote into a profile's results, and its parameters; raises FileNotFoundError where none did."""
    known = environments(paths.results(profile))
    if not known:
        raise FileNotFoundError(f"results/{profile} holds no run yet; `make report PROFILE={profile}` makes one")
    return Run(profile, known[-1]), SimpleNamespace(**defaults() | parameters(profile))


def parameters(profile: str) -> dict:
    path = paths.results(profile) / "parameters.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: the next run writes it anew
        values = {}
    return values if isinstance(values, dict) else {}


def defaults() -> dict:
    return {name: default for name, (_, default) in all_declared().items()}


def length_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: (point, repetitions) of every context length with every attention kernel."""
    lengths = [(n, output_tokens_at(vars(p), n)) for n in p.context_lengths]
    repetitions = {"eager": min(p.eager_repetitions, p.repetitions)}
    return [
        (on_off_point(p, kernel, *n), repetitions.get(kernel, p.repetitions))
        for kernel in p.attention_kernels
        for n in lengths
    ]


def curve_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: (point, repetitions) of the one long generation whose steps are drawn; none with 0 repetitions."""
    curve = on_off_point(p, p.attention_kernels[-1], p.step_curve_context_length, p.step_curve_output_tokens)
    return [(curve, p.step_curve_repetitions)] if p.step_curve_repetitions else []


def output_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: (point, repetitions) of every output length, at one context length."""
    asked = [(p.output_lengths_context, tokens) for tokens in p.output_lengths]
    return [(on_off_point(p, p.attention_kernels[-1], *lengths), p.output_repetitions) for lengths in asked]


def cache_kind_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: (point, repetitions) of every context length with every kind of cache; none where there is one kind."""
    first = [(point, times) for point, times in length_points(p) if point["attention"] == p.attention_kernels[-1]]
    return [(point | {"cache": kind}, times) for kind in p.caches for point, times in first if len(p.caches) > 1]


def memory_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: (point, repetitions) of what is weighed: the first forward over every second length, the longest included.

    A step without cache is such a forward again, and with the cache a step needs less.
    """
    lengths = sorted(p.context_lengths)[::-2]
    points = [on_off_point(p, kernel, length, 1) for kernel in p.attention_kernels for length in lengths]
    return [(point, p.memory_repetitions) for point in points if p.memory_repetitions]


def on_off_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: every pair once, with the most repetitions that any chart asks for."""
    most: dict[str, tuple[dict, int]] = {}
    for point, repetitions in length_points(p) + output_points(p) + cache_kind_points(p) + curve_points(p):
        name = key({"point": point, "repetition": 0})
        most[name] = (point, max(repetitions, most.get(name, (point, 0))[1]))
    return list(most.values())


def unusual(p: SimpleNamespace, *names: str) -> dict:
    """Those of these parameters that are not at their default: they are part of the point then."""
    usual = defaults()
    values = {name: getattr(p, name) for name in names if getattr(p, name) != usual[name]}
    if "base_url" in values:  # a server is told from another, its address is nobody's business
        values["base_url"] = hashlib.sha256(values["base_url"].encode()).hexdigest()[:12]
    return values


def on_off_point(p: SimpleNamespace, kernel: str, context_length: int, output_tokens: int) -> dict:
    return (
        model_point(p)
        | {
            "threads": p.threads,
            "attention": kernel,
            "cache": p.caches[0],
            "context_length": context_length,
            "output_tokens": output_tokens,
            "batch_size": p.batch_size,
        }
        | unusual(p, "seed")
    )


def serving_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1: (point, repetitions) over concurrency at one context length, and over S1b's lengths at concurrency 1."""
    grid = [(concurrency, p.serving_context_length) for concurrency in p.concurrencies]
    grid += [(1, n) for n in p.context_lengths if (1, n) not in grid]
    return [(serving_point(p, *cell), p.serving_repetitions) for cell in grid]


def serving_point(p: SimpleNamespace, concurrency: int, context_length: int) -> dict:
    return (
        model_point(p)
        | {
            "threads": p.server_threads,
            "engine": "vllm",
            "enforce_eager": p.enforce_eager,
            "prefix_caching": False,
            "chunked_prefill": p.chunked_prefill,
            "loop": "closed",
            "concurrency": concurrency,
            "context_length": context_length,
            "output_tokens": p.serving_output_tokens,
            "output_jitter": p.output_jitter,
            "kv_cache_space_bytes": int(p.kv_cache_space_gib * 2**30),
        }
        | unusual(p, "seed", "server_arguments", "base_url", "serving_min_requests", "serving_requests_per_stream")
    )


def max_model_len(p: SimpleNamespace) -> int:
    """Positions that the longest S1 request needs, prompt and output together."""
    return max([*p.context_lengths, p.serving_context_length]) + longest_served_output(vars(p))


def missing(found: list[dict], kind: str | None, points: list[tuple[dict, int]], remeasure: bool = False) -> list:
    """(point, repetition) of all that these records of one environment lack, repetition by repetition.

    `kind` is the record that completes a point (None: whichever it has); a pair of arms needs both of its records.
    With `remeasure`, new repetitions are numbered behind the recorded ones.
    """
    valid = [r for r in found if kind in (None, r["kind"]) and done(r) and not is_control(r)]
    arms: dict[str, set] = {}
    for r in valid:
        arms.setdefault(r.get("pair"), set()).add(r.get("use_cache"))
    complete = {key(r) for r in valid if r.get("pair") is None or len(arms[r["pair"]]) == 2}
    before = max((r["repetition"] for r in valid), default=0) if remeasure else 0
    last = max((repetitions for _, repetitions in points), default=0)
    wanted = [(x, before + i) for i in range(1, last + 1) for x, repetitions in points if i <= repetitions]
    return [w for w in wanted if key({"point": w[0], "repetition": w[1]}) not in complete]


def is_control(record: dict) -> bool:
    """Records that watch the experiment and are no result of it."""
    return bool(record.get("control") or record.get("negative_control"))


def on_off(run: Run, p: SimpleNamespace, open_worker, forecast=None) -> None:
    """Measure what S1b lacks: each repetition in a process of its own, points shuffled, a control first and last.

    `open_worker()` is a context manager; its `.measure_pair(point, repetition, control)` returns both arms' records.
    `forecast` says what memory a point will need (see `analyse.footprint`); what it announced may run out.
    """
    store = run.store("s1b")
    found = store.load()
    pending = missing(found, "generation", on_off_points(p), p.remeasure)
    unweighed = missing(found, "memory", memory_points(p), p.remeasure)
    announce([point for point, _ in pending + unweighed], forecast)
    progress = Progress("S1b", len(pending) + len(unweighed))
    for repetition in sorted({r for _, r in pending}):
        points = [point for point, r in pending if r == repetition]
        random.Random(f"{p.seed}/{repetition}").shuffle(points)
        control = on_off_point(p, p.attention_kernels[-1], *shortest(p))
        with open_worker() as worker:
            for point in [control, *points, control]:
                keep(store, worker.measure_pair(point, repetition, control=point is control), forecast=forecast)
                if point is not control:
                    progress.done(f"{point['attention']} {point['context_length']} tokens, repetition {repetition}")
            if repetition == 1:  # once: a pair with the cache silently off in both arms, which has to be refused
                keep(store, worker.measure_pair(control, repetition, negative_control=True))
    if unweighed:
        with open_worker(for_memory=True) as worker:
            for point, repetition in unweighed:
                keep(store, worker.measure_memory(point, repetition), forecast=forecast)
                progress.done(f"memory, {point['attention']} {point['context_length']} tokens")


def announce(points: list[dict], forecast) -> None:
    """Say which points will not fit into the memory there, or else what the largest of them will need."""
    if forecast is None or not points:
        return
    distinct = list({key({"point": point, "repetition": 0}): point for point in points}.values())
    for point in [x for x in distinct if not forecast.fits(x)] or [max(distinct, key=forecast.peak_bytes)]:
        needed, there = (value / 2**30 for value in (forecast.peak_bytes(point), forecast.available_bytes))
        what = f"{point['attention']} {point['context_length']} tokens: about {needed:.3g} GiB of memory predicted"
        what += f", {there:.3g} GiB there"
        say(f"S1b: {what}" if forecast.fits(point) else f"S1b: warning: {what}; expected to run out")


def keep(store: Store, records: list[dict], experiment: str = "s1b", forecast=None) -> None:
    for record in records:
        if record["status"] == "out_of_memory":
            record = record | {"announced": forecast is not None and not forecast.fits(record["point"])}
        store.append(record | {"experiment": experiment})


def unmeasured(profile: str) -> dict[str, str]:
    """Experiment -> why some of its points still have no valid record after a run; empty when all is there."""
    run, p = last_run(profile)
    wanted = {"s1": ("point", serving_points(p)), "s1b": (None, on_off_points(p) + memory_points(p))}
    found = {}
    for experiment, (kind, points) in wanted.items():
        stored = run.store(experiment).load()
        left = missing(stored, kind, points)
        if left:
            reasons = [r["reason"] for r in stored if not done(r) and r.get("reason")]
            found[experiment.upper()] = (
                f"{len(left)} points without a valid measurement ({(reasons or ['not run'])[-1]})"
            )
    return found


def shortest(p: SimpleNamespace) -> tuple[int, int]:
    length = min(p.context_lengths)
    return length, output_tokens_at(vars(p), length)


def serving(run: Run, p: SimpleNamespace, open_server, measure_point, unavailable: type[Exception]) -> None:
    """Measure what S1 lacks, on one server start; a server that is `unavailable` is a record with its reason.

    `open_server()` is a context manager; `measure_point(server, point, repetition, keep)` keeps each record.
    """
    store = run.store("s1")
    pending = missing(store.load(), "point", serving_points(p), p.remeasure)
    if not pending:
        say("S1: nothing to measure, all points are recorded")
        return
    random.Random(p.seed).shuffle(pending)
    try:
        with open_server() as server:
            progress = Progress("S1", len(pending))
            for point, repetition in pending:
                measure_point(server, point, repetition, store.append)
                progress.done(f"concurrency {point['concurrency']}, {point['context_length']} tokens")
    except unavailable as error:
        say(str(error))  # with the end of the server's log, which may name paths and stays out of the record
        store.append(server_failure(p, str(error).splitlines()[0]))


def server_failure(p: SimpleNamespace, reason: str) -> dict:
    return {
        "experiment": "s1",
        "kind": "server",
        "point": model_point(p),
        "repetition": 0,
        "status": "failed",
        "reason": reason,
    }


class Progress:
    """Points done, of how many, and the seconds left, as lines on the terminal and never in a notebook."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.count, self.start_s = name, total, 0, time.monotonic()
        say(f"{name}: {total} points to measure" if total else f"{name}: nothing to measure, all points are recorded")

    def done(self, what: str) -> None:
        self.count += 1
        left_s = (time.monotonic() - self.start_s) / self.count * (self.total - self.count)
        say(f"{self.name}: {self.count} of {self.total} ({what}), about {math.ceil(left_s)} s left")


def say(text: str) -> None:
    """One line to whoever watches the run: the file named by KVLAB_PROGRESS, which `kvlab report` shows."""
    target = os.environ.get("KVLAB_PROGRESS")
    if target:
        with open(target, "a", encoding="utf-8") as file:
            file.write(text + "\n")
