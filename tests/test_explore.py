"""The interactive notebook in a real JupyterLab and a real browser: a tinkerer moves, measures, watches and stops."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest
import yaml
from playwright.sync_api import expect, sync_playwright

from kvlab import explore, params, paths
from kvlab.analyse import published
from kvlab.measure.server import free_port

MOVE_MS = 60_000


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path))
    return tmp_path


@pytest.fixture
def explorer(output):
    return explore.Explorer("smoke", "en", published.known_machines())


def test_a_move_changes_the_numbers_and_the_picture(explorer):
    before = explorer._numbers.value, explorer._chart.value
    explorer._controls["context"].value = 1024
    assert explorer._numbers.value != before[0] and explorer._chart.value != before[1]


def test_an_8_bit_cache_halves_the_bytes_and_lets_more_requests_fit(explorer):
    explorer._controls["kv_dtype"].value = "bfloat16"
    wide = explorer.chosen()
    explorer._controls["kv_dtype"].value = "float8"
    narrow = explorer.chosen()
    assert narrow.kv_bytes * 2 == wide.kv_bytes and narrow.requests_that_fit > wide.requests_that_fit


def test_another_model_than_the_loaded_one_is_predicted_and_not_measured(explorer):
    explorer._controls["model"].value = "Qwen2.5-7B-Instruct"
    explorer._measure()
    assert "smollm2" in explorer._said.value and explorer._buttons["stop"].disabled


def test_the_exported_profile_is_one_that_the_report_accepts(explorer, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PARAMS", tmp_path)
    shutil.copy(paths.ROOT / "params" / "smoke.yaml", tmp_path)
    explorer._controls["context"].value = 256
    explorer._controls["output_tokens"].value = 16
    explorer._export()
    assert 256 in yaml.safe_load((tmp_path / "mine.yaml").read_text())["context_lengths"]
    assert 256 in params.load("mine")["context_lengths"] and params.load("mine")["output_tokens"] == 16


def test_both_languages_label_every_control(output):
    for language in ("zh", "en"):
        made = explore.Explorer("smoke", language, published.known_machines())
        assert all(control.description for control in made._controls.values())


def run_notebook(output, **values):
    target = output / "explore.ipynb"
    given = [word for name, value in values.items() for word in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", str(paths.NOTEBOOKS / "explore.ipynb"), str(target), *given]
    environment = os.environ | {"PYTHONPATH": str(paths.ROOT), "JUPYTER_PREFER_ENV_PATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text())


@pytest.mark.parametrize("interactive", [True, False])
def test_without_a_browser_it_still_runs_from_top_to_bottom(output, interactive):
    notebook = run_notebook(output, profile="smoke", interactive=interactive)
    shown = [set(part.get("data", {})) for cell in notebook["cells"] for part in cell.get("outputs", [])]
    assert ({"image/png"} <= set().union(*shown)) != interactive


@pytest.fixture
def lab(output):
    """A JupyterLab on loopback with a token, on a copy of the notebook; its address with the token."""
    folder, port, token = output / "notebooks", free_port(), secrets.token_hex(16)
    folder.mkdir()
    notebook = json.loads((paths.NOTEBOOKS / "explore.ipynb").read_text())
    cell = next(cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", []))
    cell["source"] = [line.replace('"cpu"', '"smoke"').replace('"both"', '"en"') for line in cell["source"]]
    (folder / "explore.ipynb").write_text(json.dumps(notebook))
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={token}"]
    environment = os.environ | {"PYTHONPATH": str(paths.ROOT), "JUPYTER_PREFER_ENV_PATH": "1"}
    command = [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"]
    log = open(output / "lab.log", "w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/api?token={token}", server)
        yield f"{address}/lab/tree/explore.ipynb?token={token}"
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def wait_for(address, server):
    deadline_s = time.monotonic() + 90
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            return urllib.request.urlopen(address, timeout=5).read()
        except OSError:
            time.sleep(0.5)
    pytest.fail("JupyterLab did not start")


@pytest.mark.slow
def test_a_tinkerer_moves_measures_and_watches_in_a_real_jupyterlab(lab, output):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1500, "height": 1400})
        page.set_default_timeout(MOVE_MS)
        expect.set_options(timeout=MOVE_MS)
        page.goto(lab)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        page.get_by_text("| Idle").wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.locator('[data-command="runmenu:run-all"]').click()
        numbers = page.locator(".widget-html table").first
        expect(numbers).to_be_visible()
        before = numbers.inner_text()
        slider = page.locator(".noUi-handle").first  # the context length
        slider.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(numbers).not_to_have_text(before, use_inner_text=True)
        outputs = page.locator(".noUi-handle").nth(1)  # fewer output tokens: the test is about the panel
        outputs.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.get_by_role("button", name="Measure this").click()
        expect(page.get_by_text("Measured and recorded")).to_be_visible(timeout=180_000)
        records = (output / "results" / "smoke" / "s1b.jsonl").read_text().splitlines()
        assert len(records) == 2
        page.get_by_role("button", name="Watch it decode").click()
        expect(page.get_by_text("Watched only")).to_be_visible(timeout=180_000)
        shots = paths.ROOT / "build" / "screenshots"
        shots.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=shots / "explore.png")
        page.get_by_role("button", name="Measure this").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Stopped.")).to_be_visible()
        assert (output / "results" / "smoke" / "s1b.jsonl").read_text().splitlines() == records
        browser.close()
