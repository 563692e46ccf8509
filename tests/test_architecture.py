"""The walls between the rooms: what a maintainer would lose if an import crossed one, or a notebook grew a loop."""

import ast
import json
import re
import subprocess
import sys

import pytest

from kvlab import paths, report

LIBRARY = sorted((paths.ROOT / "kvlab").rglob("*.py"))
ALLOWED = {  # room -> rooms of kvlab that it may import
    "records": set(),
    "paths": set(),
    "declarations": {"paths"},
    "params": {"declarations", "paths"},
    "prompts": set(),
    "hub": {"models", "paths"},
    "doctor": {"analyse", "hub", "models", "params"},
    "models": {"paths", "weights"},
    "weights": {"hub", "paths", "models"},
    "sweep": {"records", "params", "paths"},
    "measure": {"measure", "models", "weights", "prompts", "paths", "records"},
    "analyse": {"analyse", "records"},
    "article": {"article", "analyse", "records", "paths"},
    "report": {"analyse", "article", "hub", "measure", "models", "params", "paths", "records", "sweep"},
    "whatif": {"analyse", "article", "measure", "models", "params", "paths", "records", "sweep"},
    "explore": {"analyse", "article", "measure", "models", "params", "paths", "prompts", "report", "sweep", "weights",
                "whatif"},
    "__main__": {"doctor", "params", "report", "whatif"},
    "__init__": set(),
}
FORBIDDEN = {  # room -> packages it never imports, directly or not
    "analyse": {"torch", "transformers", "vllm"},
    "article": {"torch", "transformers", "vllm"},
    "models": {"torch", "transformers"},
    "hub": {"torch", "transformers"},
    "doctor": {"torch", "transformers", "vllm"},
    "measure": {"pandas", "matplotlib"},
    "sweep": {"torch", "pandas", "matplotlib"},
}


def room(path):
    parts = path.relative_to(paths.ROOT / "kvlab").with_suffix("").parts
    return parts[0]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(paths.ROOT)))
def test_imports_point_one_way(path):
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "kvlab" and len(parts) > 1:
            target = parts[1]
            assert target in ALLOWED[room(path)] | {"__version__"}, f"{path.name} imports {name}"
        assert parts[0] not in FORBIDDEN.get(room(path), ()), f"{path.name} imports {name}"


def test_charts_redraw_and_a_rerun_starts_without_torch():
    names = "kvlab.report, kvlab.article.charts, kvlab.measure.serving, kvlab.measure.worker"
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


def cells(path, kind):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_every_notebook_of_the_page_is_executed():
    assert sorted(report.EXECUTION_ORDER) == [path.stem for path in NOTEBOOKS if path.stem != "explore"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs_and_name_no_machine(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"  # BR-45
    for cell in cells(path, "code"):
        assert not cell["outputs"] and cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_code_cell_is_short_and_has_no_machinery(path):
    for cell in cells(path, "code"):
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", []):
            continue
        assert len(source.splitlines()) <= 12
        assert not re.search(r"^\s*(for|while|with|try|def|class)\b", source, re.M), source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_paragraph_exists_in_both_languages(path):
    languages = [cell["metadata"]["tags"][0] for cell in cells(path, "markdown")]
    assert languages == ["zh", "en"] * (len(languages) // 2)
