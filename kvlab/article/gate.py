"""The gate before a page: outputs, parameters and records must come from one and the same run."""

import hashlib
from pathlib import Path

import nbformat


def digests(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of every record file of a results folder: what they hold counts, not what a clock says."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.jsonl"))}


def problem(notebook: nbformat.NotebookNode, values: dict, records: dict[str, str] | None) -> str | None:
    """Why an executed notebook does not show the run it belongs to, as the key of a sentence; None when it does.

    `values` are the run's parameters, `records` the `digests` of the files that this notebook has to have read.
    """
    run, notes = notebook.metadata.get("papermill", {}), [c.metadata.get("papermill", {}) for c in notebook.cells]
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    if run.get("exception") or any(note.get("exception") for note in notes):
        return "gate.failed"
    if any(note.get("status") != "completed" for note in notes):
        return "gate.unfinished"
    if counts != list(range(1, len(counts) + 1)):
        return "gate.out_of_order"
    if any(values.get(name) != value for name, value in run.get("parameters", {}).items()):
        return "gate.other_parameters"
    read = notebook.metadata.get("kvlab", {}).get("records")
    return "gate.records_newer" if records is not None and records != read else None
