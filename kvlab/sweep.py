"""Which points a run consists of, which of them are missing, and one loop that asks a primitive for them."""

import hashlib
import json
import math
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from kvlab import paths
from kvlab.params import all_declared, longest_served_output, output_tokens_at
from kvlab.records import Store, done, environments, key, remember_environment

SLICED_MODEL = "qwen2.5-7b"  # whose first layers stand for a large model where a large one does not fit
MORE_REPETITIONS = 3  # at a time, of a point that is not sure enough


def model_point(p: SimpleNamespace) -> dict:
    """What every point of both experiments states: model, precision and device."""
    return {
        "model": paths.public_model(p.model),
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

    def source(self, *experiments: str) -> str:
        """Where numbers of these experiments come from, as the page says it: record files and environment."""
        files = ", ".join(f"results/{self.profile}/{experiment}.jsonl" for experiment in experiments)
        return f"{files} ({self.environment['environment']})"

    def store(self, experiment: str) -> Store:
        return Store(paths.results(self.profile) / f"{experiment}.jsonl", self.environment)

    def records(self, experiment: str, points: list[tuple[dict, int]]) -> list[dict]:
        """What this environment recorded of these points, and what is about no single point (a server that failed)."""
        wanted = {key({"point": point, "repetition": 0}) for point, _ in points + [(server_of(points), 1)]}
        found = self.store(experiment).load()
        return [r for r in found if key({"point": r["point"], "repetition": 0}) in wanted]


def begin(p: SimpleNamespace, environment: dict) -> Run:
    """Remember what this run is about (its environment and parameters beside the records) and return it."""
    remember_environment(paths.results(p.profile), environment)
    remember_parameters(vars(p))
    return Run(p.profile, environments(paths.results(p.profile))[-1])  # as it was when it first recorded


def remember_parameters(values: dict) -> None:
    """Keep these parameters beside the records, over those of an earlier run: the article reads them there."""
    known = parameters(values["profile"]) | values
    known |= {"model": paths.public_model(known["model"])} if "model" in known else {}
    known |= {"base_url": address_digest(known["base_url"])} if known.get("base_url") else {}
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


def all_runs() -> list[tuple[Run, SimpleNamespace]]:
    """The last run of every profile that has results, whoever measured them."""
    folders = sorted(path.parent for path in paths.results("").glob("*/environments.jsonl"))
    return [last_run(folder.name) for folder in folders if parameters(folder.name)]


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


def speedup_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: (point, repetitions) of all whose speed-up is quoted; some may come twice."""
    return length_points(p) + output_points(p) + cache_kind_points(p)


def on_off_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1b: every pair once, with the most repetitions that any chart asks for."""
    most: dict[str, tuple[dict, int]] = {}
    for point, repetitions in speedup_points(p) + curve_points(p):
        name = key({"point": point, "repetition": 0})
        most[name] = (point, max(repetitions, most.get(name, (point, 0))[1]))
    return list(most.values())


def unsure_points(found: list[dict], p: SimpleNamespace, too_wide) -> list[tuple[dict, int]]:
    """S1b: points whose speed-up has too wide an interval as yet, with a few repetitions more than are recorded."""
    more = {}
    for point, _ in speedup_points(p) if p.interval_within else ():
        mine = [r for r in found if r["point"] == point and not is_control(r)]
        n = max((r["repetition"] for r in mine), default=0)
        if n < p.most_repetitions and too_wide(mine, p.interval_within):
            more[key({"point": point, "repetition": 0})] = (point, min(n + MORE_REPETITIONS, p.most_repetitions))
    return list(more.values())


def unusual(p: SimpleNamespace, *names: str) -> dict:
    """Those of these parameters that are not at their default: they are part of the point then."""
    usual = defaults()
    values = {name: getattr(p, name) for name in names if getattr(p, name) != usual[name]}
    if "base_url" in values:  # a server is told from another, its address is nobody's business
        values["base_url"] = address_digest(values["base_url"])
    return values


def address_digest(base_url: str) -> str:
    """What is recorded of a server's address; of a digest, itself."""
    if re.fullmatch(r"[0-9a-f]{12}", base_url):
        return base_url
    return hashlib.sha256(base_url.encode()).hexdigest()[:12]


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


def serving_point(p: SimpleNamespace, concurrency: int | None, context_length: int) -> dict:
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


def machine_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """(point, repetitions) of the ceilings: reading also with the server's threads, for its floor."""
    size_bytes, square = p.bandwidth_buffer_mib * 2**20, 8192 if p.device == "cuda" else 2048
    reads = {"quantity": "read", "size_bytes": size_bytes}
    wanted = [
        reads,
        {"quantity": "copy", "size_bytes": size_bytes // 2},
        {"quantity": "gemm", "shape": [square] * 3},
        {"quantity": "gemm", "shape": [128, 4096, 4096]},  # a short prompt through one matrix of a 7B model
        {"quantity": "launch"},
        {"quantity": "layer"},
    ]
    points = [ceiling_point(p, **quantity) for quantity in wanted]
    if p.device == "cpu" and p.server_threads != p.threads:
        points.append(ceiling_point(p, **reads) | {"threads": p.server_threads})
    return [(point, p.ceiling_repetitions) for point in points]


def ceiling_point(p: SimpleNamespace, **quantity) -> dict:
    return {"dtype": p.dtype, "device": p.device, "threads": p.threads} | quantity


def anatomy_length(p: SimpleNamespace) -> int:
    """The context length whose token is taken apart: of those of both stacks the one nearest to S1's sweep."""
    return min(p.context_lengths, key=lambda length: abs(length - p.serving_context_length))


def anatomy_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """(point, repetitions) of what takes one token apart beside S1b's own records.

    A static cache, the same layers with matrices of next to nothing under either cache, the choice of a token, and
    where asked for the static cache once more, compiled.
    """
    length = anatomy_length(p)
    token = on_off_point(p, p.attention_kernels[-1], length, output_tokens_at(vars(p), length))
    variants = [{"cache": "static"}, {"model": f"thin:{p.model}"}, {"model": f"thin:{p.model}", "cache": "static"}]
    variants += [{"cache": "static", "compiled": True}] if p.compile_static else []
    points = [token | variant for variant in variants]
    points.append(ceiling_point(p, quantity="sampling", model=p.model))
    return [(point, p.anatomy_repetitions) for point in points]


def slice_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """(point, repetitions) of the first layers of a large architecture: `layers` of the deepest slice."""
    token = on_off_point(p, p.attention_kernels[-1], p.slice_context_length, p.slice_output_tokens)
    named = token | {"model": f"slice:{SLICED_MODEL}/{max(p.slice_layers, default=0)}", "model_revision": None}
    return [(named | {"layers": layers}, p.slice_repetitions) for layers in p.slice_layers]


def open_loop_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1: (point, repetitions) of Poisson arrivals at the rates asked for, whatever the server is busy with."""
    arrivals = {"loop": "open", "requests": p.open_loop_requests}
    plain = serving_point(p, None, p.serving_context_length)
    return [(plain | arrivals | {"request_rate_per_s": rate}, p.serving_repetitions) for rate in p.open_loop_rates]


def cache_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1: (point, repetitions) on a second server, whose KV cache is small and kept across requests.

    First the heaviest load of the plain sweep, which fills it; then prompts of which a part is shared.
    """
    if p.base_url or not p.full_cache_space_gib:
        return []
    small = {"prefix_caching": True, "kv_cache_space_bytes": int(p.full_cache_space_gib * 2**30)}
    full = serving_point(p, max(p.concurrencies, default=8), p.serving_context_length) | small
    reused = serving_point(p, 1, p.reuse_context_length) | small | {"output_tokens": 2, "output_jitter": 0.0}
    shared = [reused | {"shared_prefix_tokens": n} for n in (0, *p.shared_prefix_lengths)]
    return [(point, p.serving_repetitions) for point in (full, *shared)]


def other_mode(p: SimpleNamespace) -> SimpleNamespace:
    """The same parameters with `enforce_eager` the other way round."""
    return SimpleNamespace(**vars(p) | {"enforce_eager": not p.enforce_eager})


def compared_points(p: SimpleNamespace) -> list[tuple[dict, int]]:
    """S1: the points at concurrency 1 once more in the other mode, compiled or eager; none unless asked for."""
    again = [each for each in serving_points(other_mode(p)) if each[0]["concurrency"] == 1]
    return again if p.compare_compiled and not p.base_url else []


def cache_model_len(p: SimpleNamespace) -> int:
    """Positions that the longest request of `cache_points` needs."""
    return max(p.serving_context_length + longest_served_output(vars(p)), p.reuse_context_length + 2)


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


def on_off(run: Run, p: SimpleNamespace, open_worker, forecast=None, too_wide=None) -> None:
    """Measure what S1b lacks: each repetition in a process of its own, points shuffled, a control first and last.

    `open_worker()` is a context manager; its `.measure_pair(point, repetition, control)` returns both arms' records.
    `forecast` says what memory a point will need (see `analyse.footprint`); what it announced may run out.
    `too_wide(records, share)` says of one point's records whether `interval_within` asks for more of them.
    """
    store = run.store("s1b")
    found = store.load()
    pending = missing(found, "generation", on_off_points(p), p.remeasure)
    unweighed = missing(found, "memory", memory_points(p), p.remeasure)
    announce([point for point, _ in pending + unweighed], forecast)
    progress = Progress("S1b", len(pending) + len(unweighed))
    pairs(store, p, pending, open_worker, forecast, progress)
    if unweighed:
        with open_worker(for_memory=True) as worker:
            for point, repetition in unweighed:
                keep(store, worker.measure_memory(point, repetition), forecast=forecast)
                progress.done(f"memory, {point['attention']} {point['context_length']} tokens")
    while unsure := unsure_points(store.load(), p, too_wide):
        pending = missing(store.load(), "generation", unsure)
        progress = Progress("S1b, until the intervals are narrow enough", len(pending))
        pairs(store, p, pending, open_worker, forecast, progress)


def pairs(store: Store, p: SimpleNamespace, pending: list, open_worker, forecast, progress: "Progress") -> None:
    """Measure pairs of arms, (point, repetition) each: a process per repetition, a control first and last in it."""
    control = on_off_point(p, p.attention_kernels[-1], *shortest(p))
    for repetition in sorted({r for _, r in pending}):
        points = [point for point, r in pending if r == repetition]
        random.Random(f"{p.seed}/{repetition}").shuffle(points)
        with open_worker() as worker:
            for point in [control, *points, control]:
                keep(store, worker.measure_pair(point, repetition, control=point is control), forecast=forecast)
                if point is not control:
                    progress.done(f"{point['attention']} {point['context_length']} tokens, repetition {repetition}")
            if repetition == 1:  # once: a pair with the cache silently off in both arms, which has to be refused
                keep(store, worker.measure_pair(control, repetition, negative_control=True))


def machine(run: Run, p: SimpleNamespace, open_worker) -> None:
    """Measure what is missing of the ceilings, all repetitions in one process; `open_worker(None)` holds no model."""
    single(run, p, "machine", machine_points(p), open_worker)


def anatomy(run: Run, p: SimpleNamespace, open_worker) -> None:
    """Measure what is missing of a token's anatomy; `open_worker(model)` is a context manager, a process per model."""
    single(run, p, "anatomy", anatomy_points(p) + slice_points(p), open_worker)


def single(run: Run, p: SimpleNamespace, experiment: str, points: list[tuple[dict, int]], open_worker) -> None:
    """Measure the missing points one by one, those of one model in one process, the repetitions interleaved."""
    store = run.store(experiment)
    pending = missing(store.load(), None, points, p.remeasure) if points else []
    progress = Progress(experiment, len(pending))
    for model in dict.fromkeys(point.get("model") for point, _ in pending):
        with open_worker(model) as worker:
            for point, repetition in [each for each in pending if each[0].get("model") == model]:
                ask = worker.measure_ceiling if "quantity" in point else worker.measure_generation
                keep(store, ask(point, repetition), experiment)
                what = point.get("quantity") or point["model"] + ", compiled" * ("compiled" in point)
                progress.done(f"{what}, repetition {repetition}")


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
    """Append what a worker returned; a point that ran out of memory says whether that had been announced."""
    for record in records:
        if record["status"] == "out_of_memory":
            record = record | {"announced": forecast is not None and not forecast.fits(record["point"])}
        store.append(record | {"experiment": experiment})


def unmeasured(profile: str) -> dict[str, str]:
    """Experiment -> why some of its points still have no valid record after a run; empty when all is there."""
    run, p = last_run(profile)
    served = serving_points(p) + open_loop_points(p) + cache_points(p) + compared_points(p)
    wanted = {
        "s1": ("point", served),
        "s1b": (None, on_off_points(p) + memory_points(p)),
        "machine": (None, machine_points(p)),
        "anatomy": (None, anatomy_points(p) + slice_points(p)),
    }
    found = {}
    for experiment, (kind, points) in wanted.items():
        stored = run.store(experiment).load()
        reasons = [r["reason"] for r in stored if not done(r) and r.get("reason")] or ["not run"]
        if left := missing(stored, kind, points):
            found[experiment.upper()] = f"{len(left)} points without a valid measurement ({reasons[-1]})"
    return found


def shortest(p: SimpleNamespace) -> tuple[int, int]:
    length = min(p.context_lengths)
    return length, output_tokens_at(vars(p), length)


def serving(
    run: Run, p: SimpleNamespace, points: list, open_server, measure_point, unavailable: type[Exception]
) -> None:
    """Measure what S1 lacks of `points`, on one server start; an `unavailable` server is a record with its reason.

    `open_server()` is a context manager; `measure_point(server, point, repetition, keep)` keeps each record.
    """
    store = run.store("s1")
    pending = missing(store.load(), "point", points, p.remeasure)
    if not pending:
        say("S1: nothing to measure, all points are recorded")
        return
    random.Random(p.seed).shuffle(pending)
    try:
        with open_server() as server:
            progress = Progress("S1", len(pending))
            for point, repetition in pending:
                measure_point(server, point, repetition, store.append)
                progress.done(f"{load_of(point)}, {point['context_length']} tokens")
    except unavailable as error:
        say(str(error))  # with the end of the server's log, which may name paths and stays out of the record
        shared = {"experiment": "s1", "kind": "server", "repetition": 0, "status": "failed"}
        store.append(shared | {"point": server_of(points), "reason": str(error).splitlines()[0]})


def load_of(point: dict) -> str:
    open_loop = point["loop"] == "open"
    return f"{point['request_rate_per_s']:g} requests/s" if open_loop else f"concurrency {point['concurrency']}"


def server_of(points: list[tuple[dict, int]]) -> dict:
    """What a server that does not start was to be: the point of its failure."""
    stated = ("model", "model_revision", "dtype", "device", "enforce_eager", "prefix_caching")
    point = points[0][0] if points else {}
    return {name: point[name] for name in stated if name in point}


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
