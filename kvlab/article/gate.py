"""The gate before a page: outputs, parameters and records must come from one and the same run."""

from datetime import datetime
from pathlib import Path

import nbformat


def problem(notebook: nbformat.NotebookNode, values: dict, records: list[Path]) -> str | None:
    """Why an executed notebook does not show the run it belongs to, as the key of a sentence; None when it does.

    `values` are the run's parameters, `records` the files that were appended to before the notebook read them.
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
    ended_s = datetime.fromisoformat(run["end_time"]).timestamp() if run.get("end_time") else 0.0
    return "gate.records_newer" if any(path.stat().st_mtime > ended_s for path in records) else None
