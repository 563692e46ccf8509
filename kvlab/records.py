"""Append-only records: one JSON object a line, written and flushed the moment a measurement exists.

Raw values only. Statistics are computed on load by `kvlab.analyse`; a missing value is null, a failure is a record.
"""

import errno
import json
import os
import re
import warnings
from datetime import UTC, datetime
from pathlib import Path

SCHEMA = 1
PROTOCOL = 1  # raised by hand when a number changes its meaning; part of the environment id
PLACE = re.compile(r"(?<![\w/.])~?/(?:[^\s/'\"`,;:()]+/)+([^\s/'\"`,;:()]*)")  # an absolute path, its last part
NUMBERS = re.compile(r"_(s|w|bytes|tokens|lengths?|ids|margins|differences)$")  # fields of these hold numbers or null
LISTS = ("arrival_times_s", "chunk_tokens", "input_lengths", "cache_lengths", "token_ids")


class Store:
    """One experiment's file for one environment; `append` adds what only the store knows."""

    def __init__(self, path: Path, environment: dict):
        self.path, self.environment = Path(path), environment
        self.path.parent.mkdir(parents=True, exist_ok=True)
        set_aside_torn_line(self.path)

    def append(self, record: dict) -> dict:
        """Write one record and return it as stored; raises ValueError for NaN and infinity, which are not null."""
        record = {
            "schema": SCHEMA,
            "environment": self.environment["environment"],
            "boot": self.environment["boot"],
            "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **record,
        }
        told = {name: without_places(record[name]) for name in ("reason", "detail") if record.get(name)}
        record |= told  # what went wrong is told to everybody, where somebody's files are is not
        append_line(self.path, record)
        return record

    def load(self) -> list[dict]:
        """Records of this environment, in the order they were written."""
        return [r for r in load(self.path) if r["environment"] == self.environment["environment"]]


def without_places(text: str) -> str:
    """The text with every absolute path cut down to its last part."""
    return PLACE.sub(r"\1", text)


def append_line(path: Path, value: dict) -> None:
    """Append one line in a single write, then flush it to the disk."""
    line = (json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)  # a full disk leaves no half of a line for the next one to join
            raise


def set_aside_torn_line(path: Path) -> None:
    """Move an unfinished last line into `<name>.torn`, so that the next record starts on a line of its own."""
    content = path.read_bytes() if path.exists() else b""
    if not content or content.endswith(b"\n"):
        return
    whole, _, torn = content.rpartition(b"\n")
    try:
        complete = isinstance(json.loads(torn), dict)
    except ValueError:
        complete = False
    if complete:  # only its newline was lost
        with open(path, "ab") as file:
            file.write(b"\n")
        return
    with open(path.with_name(path.name + ".torn"), "ab") as file:
        file.write(torn + b"\n")
    os.truncate(path, len(whole) + 1 if whole else 0)
    warnings.warn(f"{path.name}: a torn last line was set aside in {path.name}.torn", stacklevel=2)


def load(path: Path) -> list[dict]:
    """All records of a file (an absent file holds none); lines that are no record are skipped with a warning."""
    path = Path(path)
    if not path.exists():
        return []
    found, broken = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            value = json.loads(line, parse_constant=refuse_constant) if line.strip() else None
        except (ValueError, RecursionError):
            value = ()
        if is_record(value):
            found.append(value)
        elif value is not None:
            broken.append(number)
    if broken:
        warnings.warn(f"{path.name}: line {', '.join(map(str, broken))} is not a record and was skipped", stacklevel=2)
    newer = {r["schema"] for r in found if r["schema"] > SCHEMA}
    if newer:
        raise ValueError(f"{path.name} holds records of schema {max(newer)}; this kvlab reads {SCHEMA}: update kvlab")
    return found


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number that a record may hold")


def is_record(value: object) -> bool:
    """The value has what every reader of records relies on; an environment is a record without a kind."""
    if not isinstance(value, dict) or type(value.get("schema")) is not int:
        return False
    if value["schema"] > SCHEMA:
        return True
    needed = {"environment": str, "boot": str}
    needed |= {"kind": str, "repetition": int, "status": str} if "kind" in value else {}
    point = value.get("point", {})
    return (
        all(type(value.get(name)) is kind for name, kind in needed.items())
        and isinstance(point, dict)
        and all(isinstance(value.get(name) or [], list) for name in LISTS)
        and all(are_numbers(field) for name, field in [*value.items(), *point.items()] if NUMBERS.search(name))
    )


def are_numbers(field: object) -> bool:
    """A number, null, or a list of them; what is nested deeper is not looked at."""
    items = field if isinstance(field, list) else [field]
    return all(item is None or type(item) in (int, float, list, dict) for item in items)


def environments(folder: Path) -> list[dict]:
    """Environments that wrote into a results folder, oldest first; the last one is the current one."""
    return load(Path(folder) / "environments.jsonl")


def remember_environment(folder: Path, environment: dict) -> None:
    """Append the environment to environments.jsonl unless it is the last one there already (same id and boot)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    set_aside_torn_line(folder / "environments.jsonl")
    known = environments(folder)
    same = known and all(known[-1].get(key) == environment[key] for key in ("environment", "boot"))
    if not same:
        append_line(folder / "environments.jsonl", {"schema": SCHEMA, **environment})


def done(record: dict) -> bool:
    """The record needs no rerun: it is valid, or memory ran out where that had been announced."""
    return record["status"] == "ok" or record["status"] == "out_of_memory" and record.get("announced", True)


def key(record: dict) -> str:
    """Identity of what was measured within one experiment: point and repetition, as a canonical string."""
    return json.dumps([record["point"], record["repetition"]], sort_keys=True, ensure_ascii=False)
