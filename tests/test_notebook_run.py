"""What a reader is told when a notebook stops, and in which interpreter it runs at all."""

import json
import sys

import nbformat
import pytest

from kvlab import params, paths, report
from kvlab.article import prose

PARAMETERS = 'profile: str = "smoke"\nlanguage: str = "both"'
KILL = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs cells as the report's only notebook; returns why it stopped, the executed notebook and the English page."""
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path / "out"))
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(report, "PAGE_ORDER", ("part",))

    monkeypatch.setattr(report, "EXECUTION_ORDER", ("part",))

    def run(*sources):
        cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell(PARAMETERS)]
        cells[1].metadata["tags"] = ["parameters"]
        cells += [nbformat.v4.new_code_cell(source) for source in sources]
        metadata = {"language_info": {"name": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "part.ipynb")
        params.declared.cache_clear()
        why = report.execute("part", {"profile": "smoke", "language": "en"})
        pages = report.write_pages("smoke", {"part": why} if why else {}, ("en",))
        return why, nbformat.read(report.executed_path("smoke", "part"), as_version=4), pages[-1].read_text()

    return run


def outputs(notebook):
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def test_parameters_reach_the_notebook(run):
    why, executed, _ = run("print(profile, language)")
    assert why is None and "smoke en" in outputs(executed)


def test_br46_a_killed_kernel_ends_the_notebook_and_keeps_what_was_shown(run):
    why, executed, page = run("print('first')", "print('second')", KILL, "print('never')")
    assert "kernel died" in why
    assert outputs(executed).split() == ["first", "second"]
    assert "Notebook part failed" in page


def test_a_failing_cell_is_named_in_the_page_without_a_machine_path(run):
    why, _, page = run("print('before')", "raise ValueError('the card is gone')", "print('never')")
    assert why == "ValueError: the card is gone"
    assert "the card is gone" in page and "before" in page and str(paths.ROOT) not in page


def test_br45_the_notebook_runs_in_this_interpreter_whatever_kernels_the_user_has(run, tmp_path, monkeypatch):
    stranger = tmp_path / "jupyter" / "kernels" / "python3"
    stranger.mkdir(parents=True)
    spec = {"argv": ["/nonexistent/python", "-f", "{connection_file}"], "display_name": "theirs", "language": "python"}
    (stranger / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    why, executed, _ = run("import sys; print(sys.executable)")
    assert why is None and outputs(executed).strip() == sys.executable


def test_br47_progress_bars_and_stderr_leave_nothing_in_the_page(run):
    bar = "import sys\nfor i in range(50): print(f'\\r{i * 2}%|####', end='')\nprint('dis' + 'turbed', file=sys.stderr)"
    _, _, page = run(bar)
    assert page.count("%|####") <= 1 and "disturbed" not in page


VALUES = {"profile": "smoke", "language": "en"}
TAMPERED = {  # what somebody changed behind the run's back -> the words of the gate
    "failed": lambda note: note.cells[-1].metadata.papermill.update(exception=True),
    "unfinished": lambda note: note.cells[-1].metadata.papermill.update(status="pending"),
    "out_of_order": lambda note: note.cells[-1].update(execution_count=9),
    "other_parameters": lambda note: note.metadata.papermill.parameters.update(language="zh"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_br50_outputs_of_another_run_do_not_pass_the_gate(run, what):
    _, notebook, _ = run("print('measured')")
    assert report.contradictions(VALUES, {"part"}) == {}
    TAMPERED[what](notebook)
    nbformat.write(notebook, report.executed_path("smoke", "part"))
    assert report.contradictions(VALUES, {"part"}) == {"part": prose.plain(f"gate.{what}", "en")}


def test_br50_records_that_the_article_has_not_read_do_not_pass_the_gate(run):
    run("print('read')")
    (paths.results("smoke") / "s1b.jsonl").write_text("")
    assert report.contradictions(VALUES, {"part"}) == {"part": prose.plain("gate.records_newer", "en")}


def test_a_page_says_that_a_newer_run_has_begun_until_it_is_written_anew(run):
    """Whatever ends that run, kill -9 included: the mark is set before anything is measured."""
    _, _, page = run("print('first')")
    stale = prose.plain("status.stale", "en")
    assert stale not in page
    report.mark_stale("smoke")
    report.mark_stale("smoke")
    marked = (paths.results("smoke") / "article.en.html").read_text()
    assert marked.count(stale) == 1
    assert stale not in run("print('second')")[2]
