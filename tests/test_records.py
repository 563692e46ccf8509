"""What was measured must survive a torn line, a rerun and a second machine."""

import json
import resource

import pytest

from kvlab import records

ENVIRONMENT = {"environment": "e1", "boot": "b1"}


def line(**more):
    return {
        "experiment": "s1b",
        "kind": "generation",
        "point": {"n": 1},
        "repetition": 1,
        "status": "ok",
    } | more


def test_a_record_is_on_disk_at_once_with_what_only_the_store_knows(tmp_path):
    store = records.Store(tmp_path / "s1b.jsonl", ENVIRONMENT)
    store.append(line())
    written = json.loads((tmp_path / "s1b.jsonl").read_text())
    assert (written["environment"], written["boot"], written["schema"]) == ("e1", "b1", records.SCHEMA)
    assert store.load() == [written]


def test_a_line_torn_at_any_byte_loses_nothing_else(tmp_path):
    path = tmp_path / "s1b.jsonl"
    store = records.Store(path, ENVIRONMENT)
    first, second = store.append(line(note="中文")), store.append(line(repetition=2, note="缓存"))
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match="torn"):
            again = records.Store(path, ENVIRONMENT)
        assert again.load() == [first]
        assert again.append(line(repetition=3))["repetition"] == 3
        assert [r["repetition"] for r in again.load()] == [1, 3]
    path.write_bytes(whole[:-1])  # only the newline was lost: the record is whole
    assert records.Store(path, ENVIRONMENT).load() == [first, second]


@pytest.fixture
def room():
    """Lets files of this process grow to so many bytes and no further, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda bytes_: resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("bytes_left", [0, 1, 40])
def test_a_full_disk_leaves_no_half_of_a_record(tmp_path, room, bytes_left):
    path = tmp_path / "s1b.jsonl"
    store = records.Store(path, ENVIRONMENT)
    store.append(line())
    whole = path.read_bytes()
    room(len(whole) + bytes_left)
    with pytest.raises(OSError):
        store.append(line(repetition=2))
    assert path.read_bytes() == whole
    room(2**20)
    store.append(line(repetition=2))
    assert [r["repetition"] for r in store.load()] == [1, 2]


def test_a_damaged_line_in_the_middle_is_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "s1b.jsonl"
    store = records.Store(path, ENVIRONMENT)
    store.append(line())
    with open(path, "ab") as file:
        file.write(b'\xff{broken\n[1]\n{}\n{"schema":"1","kind":"generation"}\n')
    store.append(line(repetition=2))
    with pytest.warns(UserWarning, match="line 2, 3, 4, 5"):
        assert [r["repetition"] for r in records.load(path)] == [1, 2]


def test_nan_and_infinity_are_refused_since_missing_is_null(tmp_path):
    store = records.Store(tmp_path / "s1b.jsonl", ENVIRONMENT)
    with pytest.raises(ValueError):
        store.append(line(peak_memory_bytes=float("nan")))
    assert store.load() == []


def test_a_store_shows_its_own_environment_only(tmp_path):
    path = tmp_path / "s1b.jsonl"
    records.Store(path, ENVIRONMENT).append(line())
    other = records.Store(path, {"environment": "e2", "boot": "b2"})
    assert other.load() == []


def test_records_of_a_newer_schema_are_not_misread(tmp_path):
    (tmp_path / "s1b.jsonl").write_text(json.dumps({"schema": records.SCHEMA + 1}) + "\n")
    with pytest.raises(ValueError, match="update kvlab"):
        records.load(tmp_path / "s1b.jsonl")


def test_an_environment_is_remembered_once_a_boot(tmp_path):
    for boot in ("b1", "b1", "b2"):
        records.remember_environment(tmp_path, ENVIRONMENT | {"boot": boot})
    assert [e["boot"] for e in records.environments(tmp_path)] == ["b1", "b2"]
