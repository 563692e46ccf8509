"""Parameters of a run: declared by the notebooks, given by a flat YAML profile, checked before anything is loaded."""

import ast
import difflib
import json
import math
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import yaml

from kvlab import paths

CHOICES = {
    "language": ("zh", "en", "both"),
    "dtype": ("float32", "bfloat16", "float16"),
    "device": ("cpu", "cuda"),
    "attention_kernels": ("eager", "sdpa"),
}
HIGHEST = 1_000_000
REFUSED_ARGUMENTS = ("--trust-remote-code", "--host", "--load-format")  # no foreign code, loopback, safetensors
MAY_BE_ZERO = {"seed", "output_jitter", "step_curve_repetitions"}
TYPES = {"int": int, "float": float, "str": str, "bool": bool}


class ParameterError(ValueError):
    """A parameter that cannot be used; the message names the key and the mend."""


@cache
def declared(notebook: Path) -> dict[str, tuple[str, object]]:
    """Name -> (type, default) of the one cell tagged `parameters`; raises ParameterError without exactly one."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        raise ParameterError(
            f"{notebook.name} has {len(tagged)} cells tagged `parameters`; it needs exactly one"
        )
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


def profile_path(profile: str) -> Path:
    """Path of a profile's YAML file; raises ParameterError that names the nearest profile."""
    path = paths.PARAMS / f"{profile}.yaml"
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", profile) and path.exists():
        return path
    names = sorted(p.stem for p in paths.PARAMS.glob("*.yaml"))
    raise ParameterError(
        f"no profile {profile!r} in params/{nearest(profile, names)}; there are: {', '.join(names)}"
    )


def load(profile: str, assignments: list[str] = ()) -> dict:
    """Values of a profile with `name=value` overrides, complete and checked; raises ParameterError."""
    path = profile_path(profile)
    given = read_yaml(path.read_text(encoding="utf-8"), f"params/{path.name}")
    for text in assignments:
        given |= read_assignments(text)
    if given.pop("profile", profile) != profile:
        raise ParameterError(f"params/{path.name}: profile is the file's name; leave the key out")
    values = {name: default for name, (_, default) in all_declared().items()} | given | {"profile": profile}
    check(values, where=f"params/{path.name} with SET" if assignments else f"params/{path.name}")
    return values


def read_assignments(text: str) -> dict:
    """Values of `a=1 b=[2, 3]`: assignments separated by blanks, each value written as in YAML."""
    parts = [part for part in re.split(r"(?:^|\s+)(?=[A-Za-z_]\w*\s*=)", text.strip()) if part.strip()]
    if not parts and text.strip() or any("=" not in part for part in parts):
        raise ParameterError(f"SET={text!r} is not of the form name=value")
    return read_yaml("\n".join("{}: {}".format(*map(str.strip, part.split("=", 1))) for part in parts), "SET")


class StrictLoader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key written twice."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for k in keys:
            if keys.count(k) > 1:
                raise ParameterError(f"{k} is given twice")
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str, where: str) -> dict:
    try:
        values = yaml.load(text, StrictLoader)
    except (yaml.YAMLError, ParameterError, TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"{where}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ParameterError(f"{where} must be flat lines of `name: value`")
    return values


def from_notebook(scope: dict, notebook: str) -> SimpleNamespace:
    """The declared parameters of a running notebook, checked, as attributes; `scope` is its globals()."""
    names = declared(paths.NOTEBOOKS / f"{notebook}.ipynb")
    values = {name: scope[name] for name in names}
    check(values, where=notebook)
    return SimpleNamespace(**values)


def check(values: dict, where: str) -> None:
    """Raise ParameterError for the first key that is unknown, of a wrong type or impossible."""
    known = all_declared()
    for name, value in values.items():
        if name not in known:
            raise ParameterError(f"{where}: unknown parameter {name!r}{nearest(name, known)}")
        check_type(name, value, known[name][0], where)
        check_value(name, value, where)
    check_together(values, where)


def nearest(name: str, names) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_type(name: str, value: object, annotation: str, where: str) -> None:
    inner = re.fullmatch(r"list\[(\w+)\]", annotation)
    if inner and isinstance(value, list) and all(has_type(item, inner[1]) for item in value):
        return
    if inner or not has_type(value, annotation):
        raise ParameterError(f"{where}: {name} must be {annotation}, not {value!r}")


def has_type(value: object, annotation: str) -> bool:
    if isinstance(value, bool):  # YAML's true is not the number 1
        return annotation == "bool"
    return isinstance(value, (int, float) if annotation == "float" else TYPES[annotation])


def check_value(name: str, value: object, where: str) -> None:
    items = value if isinstance(value, list) else [value]
    if value == [] and name != "concurrencies":
        raise ParameterError(f"{where}: {name} is empty; give at least one value")
    if len(set(items)) != len(items):
        raise ParameterError(f"{where}: {name} names a value twice: {value}")
    for item in items:
        if name in CHOICES and item not in CHOICES[name]:
            raise ParameterError(f"{where}: {name} must be one of {', '.join(CHOICES[name])}, not {item!r}")
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            lowest = 0 if name in MAY_BE_ZERO else 1 if isinstance(item, int) else 1e-9
            if not lowest <= item <= HIGHEST:
                raise ParameterError(f"{where}: {name} must lie between {lowest:g} and {HIGHEST}, not {item}")


def check_together(values: dict, where: str) -> None:
    for argument in REFUSED_ARGUMENTS:
        if argument in values.get("server_arguments", ""):
            raise ParameterError(f"{where}: server_arguments must not contain {argument}; leave it out")
    if values.get("room_reserve", 0) >= 1:
        raise ParameterError(f"{where}: room_reserve is a share of the memory, below 1")
    if values.get("output_jitter", 0) >= 1:
        raise ParameterError(f"{where}: output_jitter is a share of the output length, below 1")
    for name in (
        "output_tokens",
        "long_context_output_tokens",
        "step_curve_output_tokens",
        "serving_output_tokens",
    ):
        if values.get(name, 2) < 2:
            raise ParameterError(f"{where}: {name} must be at least 2; one token has no TPOT")


def longest_sequence(values: dict) -> tuple[str, int, int]:
    """Of all sequences of a run the longest: the parameter it comes from, its context and its output, in tokens."""
    served = longest_served_output(values)
    candidates = [
        ("context_lengths", length, output_tokens_at(values, length)) for length in values["context_lengths"]
    ]
    candidates += [("context_lengths", max(values["context_lengths"]), served)]
    candidates += [
        ("step_curve_context_length", values["step_curve_context_length"], values["step_curve_output_tokens"])
    ]
    candidates += [("serving_context_length", values["serving_context_length"], served)]
    return max(candidates, key=lambda candidate: candidate[1] + candidate[2])


def longest_served_output(values: dict) -> int:
    """Most output tokens that one S1 request asks for, jitter included."""
    return math.ceil(values["serving_output_tokens"] * (1 + values["output_jitter"]))


def output_tokens_at(values: dict, context_length: int) -> int:
    """Output tokens of an S1b pair: fewer from `long_context_from` on, where a step without cache takes seconds."""
    long = context_length >= values["long_context_from"]
    return values["long_context_output_tokens"] if long else values["output_tokens"]


def check_positions(values: dict, max_positions: int) -> None:
    """Raise ParameterError where a sequence would exceed the model's positions, with both numbers."""
    name, context, output = longest_sequence(values)
    if context + output > max_positions:
        mend = f"a context of at most {max_positions - output}" if output < max_positions else "fewer output tokens"
        raise ParameterError(
            f"{name}: {context} tokens of context and {output} of output need {context + output} positions, "
            f"{values['model']} has {max_positions}; use {mend}"
        )
