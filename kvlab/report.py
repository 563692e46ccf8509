"""One command from parameters to page: check, execute the notebooks in order, split by language, render."""

import logging
import os
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import nbformat
import papermill
from filelock import FileLock, Timeout
from nbclient.exceptions import CellExecutionError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from kvlab import hub, models, params, paths, records, sweep
from kvlab.analyse import summary
from kvlab.article import comparison, gate, prose, render, sections
from kvlab.article.comparison import NotComparable
from kvlab.article.race import Race
from kvlab.measure import telemetry

EXECUTION_ORDER = (
    "01_machine", "02_vllm_serving", "03_kv_cache_on_off", "04_tpot_anatomy", "05_kv_cache_memory", "06_cpu_vs_gpu",
    "00_article",
)  # fmt: skip
PAGE_ORDER = tuple(sorted(EXECUTION_ORDER))


class RunInProgress(RuntimeError):
    """Another process writes into the same profile's results."""


def report(profile: str, assignments: list[str]) -> int:
    """Measure what a profile lacks and write its page in both languages; 0, or 1 where a notebook failed."""
    values = checked(profile, assignments)
    start_s = time.monotonic()
    fetch_model(values)
    with exclusive(profile), shown_progress(profile):
        mark_stale(profile)
        sweep.remember_parameters(values)
        failures = {name: why for name in EXECUTION_ORDER if (why := execute(name, values))}
        failures |= sweep.unmeasured(profile) | contradictions(values, set(EXECUTION_ORDER) - set(failures))
        pages = write_pages(profile, failures, prose.languages(values["language"]))
    for name, why in failures.items():
        print(f"kvlab: {name} stopped: {why}", file=sys.stderr)
    print(f"kvlab: {', '.join(paths.public(page) for page in pages)} written, {time.monotonic() - start_s:.0f} s")
    return 1 if failures else 0


def checked(profile: str, assignments: list[str]) -> dict:
    """All parameters of a run; raises ParameterError before anything is loaded or written."""
    values = params.load(profile, assignments)
    check_device(values)
    check_records(profile)
    try:
        source = models.resolve(values["model"], values["model_revision"])
        params.check_positions(values, models.outline(source).max_positions)
    except params.ParameterError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        raise params.ParameterError(f"model: {' '.join(str(error).split())}") from None
    return values


def fetch_model(values: dict) -> None:
    """Fetch a hub's weights now, with the hub's own progress on the terminal; an interrupted fetch goes on here."""
    source = models.resolve(values["model"], values["model_revision"])
    if source.kind in hub.HUBS:
        try:
            hub.snapshot(source)
        except ValueError as error:
            raise params.ParameterError(f"model: {error}") from None


def check_records(profile: str) -> None:
    """Raise ParameterError where a file of records cannot be read at all; damaged lines are for the run to report."""
    for path in sorted(paths.results(profile).glob("*.jsonl")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                records.load(path)
        except ValueError as error:
            raise params.ParameterError(str(error)) from None
        except OSError as error:
            raise params.ParameterError(
                f"{paths.public(path)} cannot be read ({error.strerror}); move it away, then the run measures anew"
            ) from None


def check_device(values: dict) -> None:
    """Raise ParameterError where the profile is for a card that this machine does not have."""
    found, wanted = (telemetry.card() or {}).get("model"), values["expected_device"]
    if wanted and found != wanted or values["device"] == "cuda" and not found:
        raise params.ParameterError(
            f"params/{values['profile']}.yaml is for {wanted or 'a CUDA device'}, "
            f"this machine has {found or 'no CUDA device'}; use PROFILE=cpu"
        )


@contextmanager
def exclusive(profile: str):
    """Hold the profile's results; a second run on the same profile is refused."""
    folder = paths.results(profile)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "run.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunInProgress(f"another run is writing {paths.public(folder)}; wait for it to end") from None
    with lock:
        yield


@contextmanager
def shown_progress(profile: str):
    """Show on the terminal what the kernels report through the file named by KVLAB_PROGRESS."""
    path = paths.results(profile) / "progress.log"
    path.write_text("")
    os.environ |= {"KVLAB_PROGRESS": str(path), "TQDM_DISABLE": "1"}  # no bar of a library reaches the page
    done = threading.Event()
    follower = threading.Thread(target=follow, args=(path, done), daemon=True)
    follower.start()
    try:
        yield
    finally:
        done.set()
        follower.join()


def follow(path: Path, done: threading.Event) -> None:
    with open(path, encoding="utf-8") as file:
        while not done.is_set() or file.tell() < path.stat().st_size:
            line = file.readline()
            print(f"  {line}" if line else "", end="", file=sys.stderr, flush=True)
            if not line:
                done.wait(0.2)


def executed_path(profile: str, name: str) -> Path:
    return paths.results(profile) / "executed" / f"{name}.ipynb"


def execute(name: str, values: dict) -> str | None:
    """Run one notebook with its parameters in a kernel of this interpreter; the reason where it failed."""
    source, target = paths.NOTEBOOKS / f"{name}.ipynb", executed_path(values["profile"], name)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"kvlab: {name}", file=sys.stderr, flush=True)
    read = gate.digests(paths.results(values["profile"]))
    own = [str(paths.ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(own).rstrip(os.pathsep)  # the kernel imports this checkout
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # and runs in this environment, whatever kernels the user has
    for name_of_log in ("papermill", "traitlets", "asyncio"):  # how a notebook ended is said once, in words of ours
        logging.getLogger(name_of_log).setLevel(logging.CRITICAL + 1)
    try:
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters={key: values[key] for key in params.declared(source)},
            kernel_name="python3",
            progress_bar=False,
            log_output=False,
            cwd=os.getcwd(),  # a relative folder means the same here and there
            extra_arguments=["--log-level=CRITICAL"],  # the kernel says nothing on the terminal
        )
    except PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}"
    except (DeadKernelError, CellExecutionError) as error:
        return f"its kernel died ({error})"
    executed = nbformat.read(target, as_version=4)
    executed.metadata["kvlab"] = {"records": read}
    nbformat.write(executed, target)
    return None


def compare(one: str, other: str) -> int:
    """Write results/compare_<one>_<other>.<language>.html; raises NotComparable where that would mislead."""
    try:
        for name in (one, other):
            check_records(params.profile_path(name).stem)
        runs = [sweep.last_run(name) for name in (one, other)]
    except FileNotFoundError as error:
        raise NotComparable(str(error)) from None
    comparison.check(*(p for _, p in runs))
    found = [{name: run.store(name).load() for name in ("s1b", "s1")} for run, _ in runs]
    tables = {
        "s1b": comparison.on_off(*(summary.generations(stored["s1b"]) for stored in found)),
        "s1": comparison.serving(*(summary.requests(stored["s1"]) for stored in found)),
    }
    if not any(tables.values()):
        raise NotComparable(f"{one} and {other} have no point in common; measure the same lengths")
    machines = tuple(sections.machine_words(run.environment) for run, _ in runs)
    for language in prose.LANGUAGES:
        page = paths.output_root() / "results" / f"compare_{one}_{other}.{language}.html"
        beside = comparison.notebook((one, other), machines, tables, language)
        href = page.name.replace(f".{language}.", f".{next(x for x in prose.LANGUAGES if x != language)}.")
        paths.replace(page, render.page([beside], language, other_language_href=href))
        print(f"kvlab: {paths.public(page)} written")
    return 0


def race(profile: str) -> int:
    """Write figures/<profile>/race.<language>.gif: the recorded long generation as it ran, the arms side by side."""
    try:
        run, p = sweep.last_run(params.profile_path(profile).stem)
    except FileNotFoundError as error:
        raise params.ParameterError(str(error)) from None
    found = summary.of_kind(run.records("s1b", sweep.curve_points(p)), "generation")
    arrivals = {r["use_cache"]: r["arrival_times_s"] for r in found if r["status"] == "ok"}
    if len(arrivals) < 2:
        raise params.ParameterError(f"results/{profile} holds no long generation; set step_curve_repetitions above 0")
    for language in prose.LANGUAGES:
        drawn = Race(language, p.step_curve_context_length, p.step_curve_output_tokens)
        paths.replace(run.figures / f"race.{language}.gif", drawn.gif(arrivals))
    print(f"kvlab: {paths.public(run.figures)}/race.*.gif written")
    return 0


def mark_stale(profile: str) -> None:
    """Say on top of the pages there are that a newer run has begun, so that one that dies leaves no page unmarked."""
    for language in prose.LANGUAGES:
        page = paths.results(profile) / f"article.{language}.html"
        if page.exists():
            paths.replace(page, render.with_warning(page.read_text(encoding="utf-8"), "status.stale", language))


def contradictions(values: dict, names: set[str]) -> dict[str, str]:
    """Notebook -> why its outputs are not those of this run (see `gate.problem`)."""
    folder = paths.results(values["profile"])
    found = {}
    for name in sorted(names):
        written = gate.digests(folder) if name == EXECUTION_ORDER[-1] else None  # it reads them all, last
        notebook = nbformat.read(executed_path(values["profile"], name), as_version=4)
        if key := gate.problem(notebook, values, written):
            found[name] = prose.plain(key, "en")
    return found


def write_pages(profile: str, failures: dict[str, str], languages: tuple[str, ...]) -> list[Path]:
    """Split every executed notebook by language and write one self-contained page per language asked for.

    `failures` maps a notebook that stopped to its reason, which stands on top of the page.
    """
    folder, pages = paths.results(profile), []
    present = [name for name in PAGE_ORDER if executed_path(profile, name).exists()]
    executed = {name: nbformat.read(executed_path(profile, name), as_version=4) for name in present}
    unshown = {name: why for name, why in failures.items() if not (name in executed and shows_error(executed[name]))}
    for language in languages:
        parts = [render.split(notebook, language) for notebook in executed.values()]
        for name, part in zip(executed, parts):
            paths.replace(folder / f"{name}.{language}.ipynb", nbformat.writes(part) + "\n")
        warnings = [prose.plain("status.failed_notebook", language, notebook=n, reason=r) for n, r in unshown.items()]
        foot = sections.provenance(profile, language)
        pages.append(folder / f"article.{language}.html")
        paths.replace(pages[-1], render.page(parts, language, provenance=foot, warnings=warnings))
    return pages


def shows_error(notebook: nbformat.NotebookNode) -> bool:
    """A cell of the notebook ended with an exception, which its page shows by itself."""
    return any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", []))
