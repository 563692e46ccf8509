"""The whole way of the data, for real: the smoke profile from parameters to page, twice, and then under Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from kvlab import params, paths, records, sweep
from kvlab.analyse import summary


def command(folder, *more):
    environment = os.environ | {"KVLAB_OUTPUT": str(folder)}
    arguments = [sys.executable, "-m", "kvlab", "report", "--profile", "smoke", *more]
    return arguments, {"env": environment, "cwd": paths.ROOT}


def run(folder, *more):
    arguments, where = command(folder, *more)
    return subprocess.run(arguments, **where, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder


def left_behind():
    """vLLM and worker processes of this user that no test has stopped."""
    names = ("vllm.entrypoints", "kvlab.measure.child", "VLLM::")
    return [p for p in psutil.process_iter(["cmdline"]) if any(n in " ".join(p.info["cmdline"] or []) for n in names)]


@pytest.mark.slow
def test_smoke_measures_every_point_and_proves_every_pair(smoke):
    p = sweep.SimpleNamespace(**params.load("smoke"))
    folder = smoke / "results" / "smoke"
    pairs = summary.pairs(records.load(folder / "s1b.jsonl"))
    assert pairs["refusal"].isna().all()
    measured = pairs[~pairs["control"]]
    assert len(measured) == sum(repetitions for _, repetitions in sweep.on_off_points(p))
    longest = measured[measured["context_length"] == max(p.context_lengths)]
    assert (longest["tpot_speedup"] > 2).all()
    points = summary.points(records.load(folder / "s1.jsonl"))
    assert len(points) == len(sweep.serving_points(p))
    assert points["tokens_conserved"].all() and points["void"].isna().all() and not points["failed"].any()


@pytest.mark.slow
def test_smoke_leaves_a_page_in_both_languages_and_nothing_running(smoke):
    folder = smoke / "results" / "smoke"
    for language, word in (("zh", "预填充"), ("en", "prefill")):
        page = (folder / f"article.{language}.html").read_text()
        assert word in page and "Traceback" not in page
        assert not re.search(r"(src|href)=\"https?://", page)
        assert str(smoke) not in page and str(paths.ROOT) not in page
        for name in ("tpot_by_context", "ttft_by_context", "speedups_by_context", "step_curve", "kv_bytes_by_context"):
            assert (smoke / "figures" / "smoke" / f"{name}.{language}.svg").stat().st_size > 1000
    assert not left_behind()


@pytest.mark.slow
def test_the_smoke_profile_gives_no_verdict(smoke):
    page = (smoke / "results" / "smoke" / "article.en.html").read_text()
    assert "no verdict" in page and ">supported<" not in page


@pytest.mark.slow
def test_a_second_run_measures_nothing_and_redraws_the_same_pictures(smoke):
    before = {path: path.read_bytes() for path in (smoke / "figures").rglob("*.*g")}
    stored = {path: path.read_bytes() for path in (smoke / "results" / "smoke").glob("*.jsonl")}
    done = run(smoke)
    assert done.returncode == 0, done.stderr
    assert "nothing to measure" in done.stderr
    assert {path: path.read_bytes() for path in stored} == stored
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_fresh_start_after_ctrl_c_in_serving_goes_on_and_leaves_no_server(smoke):
    """Ctrl-C in the middle of 02: no process, the records so far stay, the same command ends well."""
    path = smoke / "results" / "smoke" / "s1.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["point"].get("concurrency") != 8]
    path.write_text("".join(line + "\n" for line in kept))
    arguments, where = command(smoke)
    process = subprocess.Popen(arguments, **where, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "vLLM is starting" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    said = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert "the same command goes on" in said and "Traceback" not in said
    deadline_s = time.monotonic() + 20
    while left_behind() and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert not left_behind()
    assert path.read_text().splitlines()[: len(kept)] == kept


REFUSED = {
    "context_lengths=[8190]": "at most",
    "context_lenghts=[128]": "did you mean 'context_lengths'",
    "device=cuda": "use PROFILE=cpu",
    "model=smollm2": "did you mean",
}


@pytest.mark.parametrize("assignment", REFUSED)
def test_parameters_that_cannot_be_used_stop_the_run_with_one_sentence_and_nothing_written(tmp_path, assignment):
    done = run(tmp_path, "--set", assignment)
    assert done.returncode == 2
    assert REFUSED[assignment] in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_two_runs_on_one_profile_never_interleave(tmp_path, monkeypatch):
    from kvlab import report

    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path))
    with report.exclusive("smoke"):
        done = run(tmp_path)
    assert done.returncode == 2 and "another run is writing results/smoke" in done.stderr
