"""Folders for what compilers keep: one in which a compilation was cut off is thrown away, for it may hold half a file.

PyTorch and vLLM load whatever lies in theirs, so a process killed at the wrong moment would fail every later run.
"""

import os
import shutil
from pathlib import Path

import psutil

from kvlab import paths

MARK = "unfinished-"  # and the process id of who compiles


def begin(name: str) -> Path:
    """The folder of that name, marked as being written to; emptied first where an earlier mark was left behind."""
    folder = paths.cache() / "compiled" / name
    marks = [int(mark.name.removeprefix(MARK)) for mark in folder.glob(f"{MARK}*")]
    if any(pid == os.getpid() or not psutil.pid_exists(pid) for pid in marks):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    _mark(folder).touch()
    return folder


def end(folder: Path) -> None:
    """What was compiled works: keep it."""
    _mark(folder).unlink(missing_ok=True)


def _mark(folder: Path) -> Path:
    return folder / f"{MARK}{os.getpid()}"
