"""What compilers keep, after a kill: without this a machine that lost power once never compiles again."""

import os
import subprocess
import sys

import pytest

from kvlab.measure import compilation


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))


def test_what_a_killed_compilation_left_half_written_is_thrown_away():
    program = "from kvlab.measure import compilation as c; (c.begin('torch') / 'half.so').touch()"
    subprocess.run([sys.executable, "-c", program], check=True)  # ends without an end, as a killed one does
    folder = compilation.begin("torch")
    assert [path.name for path in folder.iterdir()] == [f"unfinished-{os.getpid()}"]


def test_what_was_compiled_to_the_end_is_kept():
    folder = compilation.begin("torch")
    (folder / "whole.so").touch()
    compilation.end(folder)
    compilation.end(compilation.begin("torch"))
    assert [path.name for path in folder.iterdir()] == ["whole.so"]


def test_a_compilation_that_failed_is_forgotten_by_the_next_one():
    (compilation.begin("torch") / "half.so").touch()
    assert not (compilation.begin("torch") / "half.so").exists()


def test_another_process_that_compiles_right_now_keeps_its_files():
    folder = compilation.begin("torch")
    compilation.end(folder)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (folder / f"unfinished-{other.pid}").touch()
    (folder / "growing.so").touch()
    assert (compilation.begin("torch") / "growing.so").exists()
    other.communicate()
