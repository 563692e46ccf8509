"""Parameters of a run: declared by the notebooks, given by a flat YAML profile, checked before anything is loaded."""

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import yaml

from kvlab import paths
from kvlab.declarations import (
    LONGEST_TEXT,
    ParameterError,
    all_declared,
    check_name,
    declared,
    nearest,
    shown,
    written_assignments,
)

LIMITS = yaml.safe_load(Path(__file__).with_name("limits.yaml").read_bytes())
CHOICES = LIMITS["choices"]
HIGHEST = 1_000_000
TYPES = {"int": int, "float": float, "str": str, "bool": bool}
WRITTEN = {"int": "a whole number such as 2", "float": "a number such as 0.5", "bool": "true or false",
           "str": "text (in quotes, where it looks like a number or a date)"}  # fmt: skip


def profile_path(profile: str) -> Path:
    """Path of a profile's YAML file; raises ParameterError that names the nearest profile."""
    path = paths.PARAMS / f"{profile}.yaml"
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", profile) and path.exists():
        return path
    names = sorted(p.stem for p in paths.PARAMS.glob("*.yaml"))
    raise ParameterError(f"no profile {profile!r} in params/; there are: {', '.join(names)}{nearest(profile, names)}")


def load(profile: str, assignments: list[str] = ()) -> dict:
    """Values of a profile with `name=value` overrides, complete and checked; raises ParameterError."""
    path = profile_path(profile)
    try:
        given = read_yaml(path.read_text(encoding="utf-8"), f"params/{path.name}")
    except (OSError, UnicodeError):
        raise ParameterError(f"params/{path.name} is no readable text file; write it anew in UTF-8") from None
    for text in assignments:
        given |= read_assignments(text)
    if given.pop("profile", profile) != profile:
        raise ParameterError(f"params/{path.name}: profile is the file's name; leave the key out")
    values = {name: default for name, (_, default) in all_declared().items()} | given | {"profile": profile}
    check(values, where=f"params/{path.name} with SET" if assignments else f"params/{path.name}")
    return values


def read_assignments(text: str) -> dict:
    """Values of `a=1 b=[2, 3]`: assignments separated by blanks, each value written as in YAML, quotes respected."""
    return {name: read_value(value, f"SET: {name}") for name, value in written_assignments(text).items()}


class StrictLoader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key written twice, and what a flat profile has no use for: & * and !."""

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor or getattr(event, "tag", None):
            raise ParameterError("write the value out, without YAML's & * and !")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for k in keys:
            if keys.count(k) > 1:
                raise ParameterError(f"{k} is given twice; leave one out")
        return super().construct_mapping(node, deep=deep)


def read_value(text: str, where: str) -> object:
    """What YAML reads in a text; raises ParameterError in our own words, with the line where there are several."""
    try:
        return yaml.load(text, StrictLoader)
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        mark, lines = getattr(error, "problem_mark", None), text.splitlines()
        number = min(mark.line, len(lines) - 1) if mark and lines else 0
        place = f"{where}, line {number + 1}" if len(lines) > 1 else where
        raise ParameterError(
            f"{place}: {shown(lines[number] if lines else text)} cannot be read; close every quote and bracket, "
            "and put text with : or # into quotes"
        ) from None


def read_yaml(text: str, where: str) -> dict:
    values = read_value(text, where)
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
    try:
        for name, value in values.items():
            check_name(name, known)
            check_type(name, value, known[name][0])
            check_value(name, value)
        check_together(values)
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None


def check_type(name: str, value: object, annotation: str) -> None:
    inner = re.fullmatch(r"list\[(\w+)\]", annotation)
    if inner and not (isinstance(value, list) and all(has_type(item, inner[1]) for item in value)):
        example = "[eager, sdpa]" if inner[1] == "str" else "[1, 2]"
        raise ParameterError(f"{name} must be a list such as {example}, not {shown(value)}")
    if not inner and not has_type(value, annotation):
        raise ParameterError(f"{name} must be {WRITTEN[annotation]}, not {shown(value)}")


def has_type(value: object, annotation: str) -> bool:
    if isinstance(value, bool):  # YAML's true is not the number 1
        return annotation == "bool"
    return isinstance(value, (int, float) if annotation == "float" else TYPES[annotation])


def check_value(name: str, value: object) -> None:
    items = value if isinstance(value, list) else [value]
    if value == [] and name not in LIMITS["may_be_empty"]:
        raise ParameterError(f"{name} is empty; give at least one value")
    if len(set(items)) != len(items):
        raise ParameterError(f"{name} names a value twice: {shown(value)}; leave one out")
    for item in items:
        if name in CHOICES and item not in CHOICES[name]:
            raise ParameterError(f"{name} must be one of {', '.join(CHOICES[name])}, not {shown(item)}")
        if isinstance(item, str) and (len(item) > LONGEST_TEXT or not item.isprintable()):
            raise ParameterError(f"{name} must be one line of at most {LONGEST_TEXT} characters")
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            lowest = 0 if name in LIMITS["may_be_zero"] else 1 if isinstance(item, int) else 1e-9
            highest = LIMITS["highest"].get(name, HIGHEST)
            if not lowest <= item <= highest:
                raise ParameterError(f"{name} must lie between {lowest:g} and {highest}, not {shown(item)}")
            if name in LIMITS["at_least_two"] and item < 2:
                raise ParameterError(f"{name} must be at least 2; one token has no TPOT")
            if name in LIMITS["shares"] and item >= 1:
                raise ParameterError(f"{name} is a share of {LIMITS['shares'][name]}, below 1")


def check_together(values: dict) -> None:
    check_server_arguments(values.get("server_arguments", ""))
    check_secrets(values)
    if values.get("base_url") and not re.match(r"https?://[^/\s]", values["base_url"]):
        raise ParameterError(f"base_url must begin with http:// or https://, not {values['base_url']!r}")
    if max(values.get("shared_prefix_lengths") or [0]) >= values.get("reuse_context_length", 1):
        raise ParameterError("shared_prefix_lengths must lie below reuse_context_length")


def check_server_arguments(text: str) -> None:
    """Refuse what would undo a promise, abbreviated or with underscores too, as vLLM's own parser takes it."""
    for word in text.split():
        name = word.split("=")[0].removeprefix("--").split(".")[0].replace("_", "-") if word.startswith("--") else ""
        refused = [argument for argument in LIMITS["refused_arguments"] if name and argument.startswith(name)]
        if refused:
            raise ParameterError(f"server_arguments must not contain --{refused[0]}; leave it out")


def check_secrets(values: dict) -> None:
    """Secrets come from the environment alone; what might be one is not repeated in the sentence."""
    variable, url = values.get("token_variable", ""), values.get("base_url", "")
    if variable and not os.environ.get(variable):
        raise ParameterError(
            "token_variable is the name of an environment variable that holds the token, and there is none of that "
            "name; export it first"
        )
    if "@" in url or "?" in url:
        raise ParameterError(
            "base_url must hold no password and no key; put it into an environment variable and name that in "
            "token_variable"
        )


def longest_sequence(values: dict) -> tuple[str, int, int]:
    """Of all sequences of a run the longest: the parameter it comes from, its context and its output, in tokens."""
    served = longest_served_output(values)
    lengths = values["context_lengths"]
    candidates = [("context_lengths", length, output_tokens_at(values, length)) for length in lengths] + [
        ("context_lengths", max(lengths), served),
        ("step_curve_context_length", values["step_curve_context_length"], values["step_curve_output_tokens"]),
        ("serving_context_length", values["serving_context_length"], served),
        ("output_lengths_context", values["output_lengths_context"], max(values["output_lengths"])),
        ("reuse_context_length", values["reuse_context_length"], 2 if values["full_cache_space_gib"] else -math.inf),
    ]
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
