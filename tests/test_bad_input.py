"""Whatever is mistyped, damaged or hostile gets one sentence with the key and the mend, and nothing is written."""

import errno
import io
import json
import os
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sse_cases import DONE, data, text, usage

from kvlab import models, params, paths, records, report
from kvlab.__main__ import main
from kvlab.measure import client, stream

MEND = re.compile(
    r"must |did you mean|there are:|close every|leave |give |write |use |move it|lie between|at least|take the|update|"
    r"convert|export|put |it takes|refuses it|has no architecture|make report|measure the same"
)
DECLARED = params.all_declared()
BY_TYPE = {
    kind: sorted(name for name, (annotation, _) in DECLARED.items() if annotation == kind)
    for kind in ("int", "float", "bool", "str", "list[int]", "list[str]")
}


def seeded(examples):
    """Hypothesis with the same examples every time, so that a failure is everybody's failure."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck))  # fmt: skip


def accepted(*_):
    raise AssertionError("bad input was accepted: a run would have begun")


def told(*arguments, output, cache):
    """(exit code, what the command said on stderr)."""
    environment = {"KVLAB_OUTPUT": str(output), "KVLAB_CACHE": str(cache)}
    with mock.patch.dict(os.environ, environment), mock.patch.object(report, "exclusive", accepted):
        with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
            return main(list(arguments)), said.getvalue()


def refused(*arguments, names=()):
    """The one sentence of a refusal, which left no file; `names` are words that it has to contain."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out")
        output.mkdir()
        code, said = told(*arguments, output=output, cache=Path(folder, "cache"))
        assert list(output.rglob("*")) == []
    assert code == 2, said
    assert len(said.strip().splitlines()) == 1 and len(said) < 1500 and "Traceback" not in said
    assert said.startswith("kvlab: ") and MEND.search(said), said
    assert all(name in said for name in names), said
    return said


@pytest.mark.parametrize(
    "problem, code, mend",
    [(OSError(errno.ENOSPC, "No space left on device", "s1.jsonl"), 1, "free some space"),
     (OSError(errno.EROFS, "Read-only file system", "s1.jsonl"), 2, "make it writable or set KVLAB_OUTPUT"),
     (KeyboardInterrupt(), 130, "the same command goes on")],
)  # fmt: skip
def test_a_run_that_cannot_go_on_ends_with_its_mend(problem, code, mend, monkeypatch, capsys):
    monkeypatch.setattr(report, "report", mock.Mock(side_effect=problem))
    assert main(["report", "--profile", "smoke"]) == code
    said = capsys.readouterr().err
    assert mend in said and "Traceback" not in said and len(said.strip().splitlines()) == 1


# ---- parameters

WORDS = st.text(st.characters(categories=("L", "N"), max_codepoint=0x9FFF), min_size=1, max_size=12)
WILD = st.floats().filter(lambda x: x < 0 or x != x)
NUMBERS = st.one_of(st.integers(max_value=-1), st.integers(min_value=10**7), WILD)
JUNK = ["null", "[[1]]", "{a: 1}", "2020-01-01", "''", "[null]", "'3'", "[true]", "1:2:x", "!!python/none"]
JUNK = st.sampled_from(JUNK)
BAD_VALUES = {
    "int": st.one_of(NUMBERS.map(str), JUNK, st.just("0.5"), st.just("true"), st.just("[1]")),
    "float": st.one_of(NUMBERS.map(str), JUNK, st.just(".inf"), st.just(".nan"), st.just("yes")),
    "bool": st.one_of(st.integers().map(str), JUNK, st.just("maybe")),
    "str": st.sampled_from(["1", "[a]", "{a: b}", "null", "true", "2020-01-01", '"a\\nb"', "'" + "x" * 2000 + "'"]),
    "list[int]": st.one_of(NUMBERS.map("[{}]".format), JUNK, st.just("128"), st.just("[1, 1]"), st.just("['a']")),
    "list[str]": st.one_of(NUMBERS.map("[{}]".format), JUNK, st.just("eager"), st.just("[eager, eager]")),
}
BAD_PARAMETER = st.sampled_from([(name, kind) for kind, names in BY_TYPE.items() for name in names]).flatmap(
    lambda pair: st.tuples(st.just(pair[0]), BAD_VALUES[pair[1]])
)


@seeded(120)
@given(BAD_PARAMETER)
def test_an_impossible_value_is_refused_by_name(parameter):
    name, value = parameter
    refused("report", "--profile", "smoke", "--set", f"{name}={value}", names=[name])


@seeded(40)
@given(WORDS | st.text(max_size=40) | st.sampled_from(["a=", "=1", "seed=[", "seed='", "seed=1 seed=2", "&a=1"]))
def test_an_assignment_that_is_none_is_refused(said):
    if said.strip():
        refused("report", "--profile", "smoke", f"--set={said}", names=["SET"] if "=" not in said else [])


@seeded(20)
@given(st.sampled_from(sorted(DECLARED)), st.integers(0, 30), st.sampled_from("xqz_"))
def test_a_mistyped_key_is_answered_with_the_right_ones(name, at, letter):
    typed = name[:at] + letter + name[at:]
    if typed not in DECLARED:
        refused("report", "--profile", "smoke", "--set", f"{typed}=1", names=[typed])


HOSTILE_YAML = [
    b"a: &x [1]\nb: *x", b"- 1\n- 2", b"seed: 1\nseed: 2", b"\xff\xfe", b"[" * 3000, b"seed: !!bool x",
    b"a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]", b"seed: !!python/object/apply:os.system [ls]",
]  # fmt: skip


@seeded(40)
@given(
    st.one_of(
        st.binary(min_size=1, max_size=60).filter(lambda content: content.split(b"#")[0].strip()),
        st.text(min_size=1, max_size=60).map(lambda line: f"seed: {line!r}: [".encode("utf-8", "replace")),
        st.sampled_from(HOSTILE_YAML),
    )
)
def test_a_profile_that_is_no_flat_yaml_is_refused(content):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(paths, "PARAMS", Path(folder)):
        Path(folder, "mine.yaml").write_bytes(content)
        refused("report", "--profile", "mine", names=["mine.yaml"])


def test_assignments_may_hold_blanks_and_equals_signs_within_quotes():
    read = params.read_assignments
    assert read("model='a b=c' seed=1") == {"model": "a b=c", "seed": 1}
    assert read('server_arguments="--a=1 --b c=2"') == {"server_arguments": "--a=1 --b c=2"}


# ---- records

GOOD = {"schema": 1, "environment": "e1", "boot": "b1", "experiment": "s1b", "kind": "generation", "repetition": 1,
        "point": {"context_length": 8, "output_tokens": 2}, "status": "ok", "pair": "p", "use_cache": True,
        "arrival_times_s": [0.1, 0.2], "output_tokens": 2}  # fmt: skip
FIELDS = ["schema", "environment", "boot", "kind", "repetition", "status", "arrival_times_s", "output_tokens"]
VALUES = st.sampled_from(["x", {"a": 1}, True, [["x"]], ["a"], -1.5])
DAMAGED_LINE = st.one_of(
    st.binary(min_size=1, max_size=50).map(lambda line: line.replace(b"\n", b" ")).filter(bytes.strip),
    st.tuples(st.sampled_from(FIELDS), VALUES).filter(lambda pair: type(pair[1]) is not type(GOOD[pair[0]])).map(
        lambda pair: json.dumps(GOOD | {pair[0]: pair[1]}).encode()
    ),
    st.just(json.dumps(GOOD)[:-1].encode() + b', "peak_memory_bytes": NaN}'),
    st.just(b"[" * 100_000),
)  # fmt: skip


@seeded(60)
@given(st.lists(DAMAGED_LINE, min_size=1, max_size=4), st.integers(0, 4))
def test_damaged_lines_are_named_and_take_no_record_with_them(lines, place):
    lines = [line for line in lines if not (b'"output_tokens": -1.5' in line or b'["x"]]' in line)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s1b.jsonl")
        good = json.dumps(GOOD).encode()
        path.write_bytes(b"\n".join([*lines[:place], good, *lines[place:], good, b""]))
        before = path.read_bytes()
        if lines:
            with pytest.warns(UserWarning, match="is not a record and was skipped"):
                assert records.load(path) == [GOOD, GOOD]
        assert path.read_bytes() == before


@pytest.mark.parametrize("what", ["newer", "folder"])
@pytest.mark.parametrize("arguments", [("report", "--profile", "smoke"), ("compare", "smoke", "cpu")])
def test_a_file_of_records_that_cannot_be_read_stops_the_run_before_it_begins(tmp_path, what, arguments):
    file = tmp_path / "results" / "smoke" / "s1b.jsonl"
    file.parent.mkdir(parents=True)
    if what == "folder":
        file.mkdir()
    else:
        file.write_text(json.dumps({"schema": records.SCHEMA + 1}) + "\n")
    code, said = told(*arguments, output=tmp_path, cache=tmp_path / "cache")
    assert code == 2 and "s1b.jsonl" in said and MEND.search(said) and "Traceback" not in said
    assert list((tmp_path / "results").rglob("*")) == [file.parent, file]


@pytest.mark.parametrize("lines", [b"", b"{}\n", b"\xff\n[1]\n", json.dumps(GOOD).encode() + b"\n"])
def test_comparing_results_that_hold_no_run_is_refused(tmp_path, lines):
    for name in ("smoke", "cpu"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "environments.jsonl").write_bytes(lines)
        (tmp_path / "results" / name / "parameters.json").write_bytes(lines[:3])
    code, said = told("compare", "smoke", "cpu", output=tmp_path, cache=tmp_path / "cache")
    assert code == 2 and "Traceback" not in said and MEND.search(said)
    assert not list(tmp_path.rglob("*.html"))


# ---- configurations of models

CONFIG = {"model_type": "llama", **models.TINY}
SIZES = sorted(set(models.TINY) - {"initializer_range"})
WRONG = st.sampled_from([-1, 0, 2**40, 10**30, 1.5, "64", [], [64], {"a": 1}, True, "", "NaN"])
IDS = st.sampled_from(["a", 1.5, [1, "b"], {"a": 1}, True])
CHANGES = st.one_of(
    st.tuples(st.sampled_from(SIZES), WRONG),
    st.tuples(st.sampled_from(["bos_token_id", "eos_token_id", "pad_token_id"]), IDS),
    st.tuples(st.sampled_from(["rope_scaling", "rope_parameters"]), st.sampled_from([[1], "x", 3])),
    st.tuples(st.just("model_type"), st.one_of(st.integers(), st.none(), WORDS.map("no_such_{}".format))),
    st.sampled_from([("hidden_size", 65), ("num_key_value_heads", 3)]),
)  # fmt: skip


def model_refused(content, names):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(content)
        model = f"model='random:{folder}'"
        return refused("report", "--profile", "smoke", "--set", model, names=["config.json", *names])


@seeded(80)
@given(CHANGES)
def test_an_impossible_configuration_of_a_model_names_its_key(change):
    name, value = change
    shown = "architecture" if name == "model_type" and isinstance(value, str) else name
    model_refused(json.dumps(CONFIG | {name: value}).encode(), [shown])


@seeded(20)
@given(st.one_of(st.binary(max_size=60), st.sampled_from([b"", b"{", b"[]", b"null", b"3", b"{}", b"[" * 100_000])))
def test_a_configuration_that_is_no_object_is_refused(content):
    model_refused(content, [])


@pytest.mark.parametrize("name", SIZES)
def test_a_configuration_without_a_size_is_filled_in_by_the_architecture_or_refused(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in CONFIG.items() if key != name}))
    source = models.resolve(f"random:{tmp_path}")
    with mock.patch.dict(os.environ, {"KVLAB_CACHE": str(tmp_path / "cache")}):
        try:
            assert models.outline(source).max_positions >= 1
        except ValueError as error:
            assert "config.json" in str(error)


# ---- streams

WHOLE = text("中", **usage(1)) + text("文", **usage(2)) + text("", "length", **usage(2)) + DONE
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(
        ["choices", "usage", "delta", "text", "finish_reason", "completion_tokens", "prompt_tokens", "error", "index"]),
        inner, max_size=4)), max_leaves=12,
)  # fmt: skip
EVENTS = st.one_of(st.dictionaries(st.sampled_from(["choices", "usage", "error", "object"]), ODD, max_size=3), ODD)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
BYTES = st.one_of(
    st.binary(max_size=200),
    st.lists(EVENTS, max_size=5).map(lambda events: HEAD + b"".join(map(data, events)) + DONE),
    st.integers(0, len(WHOLE) - len(DONE) - 80).map(lambda cut: HEAD + WHOLE[:cut]),
    st.lists(st.sampled_from([b"data:", b"\n", b"\r", b":", b"{}", b"[DONE]", b"\xff", b"event: error", b"\0"]),
             max_size=30).map(lambda parts: HEAD + b"".join(parts)),
    st.binary(max_size=60).map(lambda junk: HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n" + junk),
    st.integers(1, 3000).map(lambda times: HEAD + b": ping\n\n" * times),
    st.integers(1, 2000).map(lambda times: HEAD + text("flood") * times),
)  # fmt: skip


@seeded(200)
@given(BYTES, st.lists(st.integers(0, 300), max_size=4))
def test_whatever_a_server_sends_becomes_a_record_and_never_a_success_it_was_not(content, cuts):
    edges = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    reads = [(float(i), content[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:]))]
    run = client.Run(client.Target("http://127.0.0.1:1"), {}, 0, 1, 1, 1.0, None, 1.0, None)
    sent = client.Sent(0, 0, "measured", 2, 2, b"", scheduled_s=0.0, sent_s=0.0, ended_s=9.0, reads=reads)
    record = client._request_record(run, sent)
    with tempfile.TemporaryDirectory() as folder:
        store = records.Store(Path(folder, "s1.jsonl"), {"environment": "e", "boot": "b"})
        store.append(record | {"repetition": 1})
        assert len(store.load()) == 1
    answer = stream.parse(reads)
    assert (record["status"] == "ok") == (answer.error is None)
    if record["status"] == "ok":
        assert answer.finish_reason is not None or answer.done
    else:
        assert record["reason"]


