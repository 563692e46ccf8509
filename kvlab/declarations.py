"""What can be set: the parameters that the notebooks declare, and the names in a SET.

Standard library alone, so that set-up can refuse a mistyped name before it installs anything.
"""

import ast
import difflib
import json
import re
from functools import cache
from pathlib import Path

from kvlab import paths

LONGEST_TEXT = 1000
ASSIGNMENT = re.compile(
    r"""\s*([A-Za-z_]\w*)\s*=\s*((?:"(?:\\.|[^"\\])*"|'[^']*'|[^"'\s]|\s(?!\s*[A-Za-z_]\w*\s*=))*)(?=\s|\Z)"""
)
BEGUN = re.compile(r"\s*[A-Za-z_]\w*\s*=")


class ParameterError(ValueError):
    """A parameter that cannot be used; the message names the key and the mend."""


@cache
def declared(notebook: Path) -> dict[str, tuple[str, object]]:
    """Name -> (type, default) of the one cell tagged `parameters`; raises ParameterError without exactly one."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        raise ParameterError(f"{notebook.name} has {len(tagged)} cells tagged `parameters`; it needs exactly one")
    found = {}
    for statement in ast.parse("".join(tagged[0]["source"])).body:
        if not isinstance(statement, ast.AnnAssign):
            raise ParameterError(f"{notebook.name}: a parameter is written `name: type = default`")
        found[statement.target.id] = (ast.unparse(statement.annotation), ast.literal_eval(statement.value))
    return found


def all_declared(folder: Path = paths.NOTEBOOKS) -> dict[str, tuple[str, object]]:
    """Every parameter of every notebook; raises ParameterError where two notebooks disagree on one."""
    found: dict[str, tuple[str, object]] = {}
    for notebook in sorted(folder.glob("*.ipynb")):
        for name, declaration in declared(notebook).items():
            if found.setdefault(name, declaration) != declaration:
                raise ParameterError(f"{notebook.name} declares {name} otherwise than another notebook does")
    return found


def written_assignments(text: str) -> dict[str, str]:
    """Name -> value as written, of `a=1 b=[2, 3]`: assignments separated by blanks, quotes respected."""
    found, position, text = {}, 0, text.strip()
    while position < len(text):
        part = ASSIGNMENT.match(text, position) if len(text) <= 10 * LONGEST_TEXT else None
        if part is None:
            mend = "close every quote" if BEGUN.match(text, position) else 'write it as in SET="repetitions=6"'
            raise ParameterError(f"SET={shown(text)} is not of the form name=value; {mend}")
        if part[1] in found:
            raise ParameterError(f"SET: {part[1]} is given twice; leave one out")
        found[part[1]] = part[2].strip()
        position = part.end()
    return found


def check_name(name: str, known) -> None:
    """Raise ParameterError for a name that is not among those known, with the nearest one."""
    if name not in known:
        mend = nearest(name, known) or f"; there are: {', '.join(known)}"
        raise ParameterError(f"unknown parameter {shown(name)}{mend}")


def nearest(name: str, names) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """A value as a sentence can quote it: on one line, and not the whole of a long one."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
