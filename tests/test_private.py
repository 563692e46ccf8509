"""Nothing personal leaves a machine: what is committed, and what a run on a machine full of secrets would record."""

import getpass
import json
import os
import re
import socket
import sys
from types import SimpleNamespace

import fake_nvml
import pytest

from kvlab import models, params, paths, sweep
from kvlab.measure import provenance, sampling
from kvlab.measure.worker import Worker
from kvlab.records import Store, without_places

PUBLISHED = sorted(
    path
    for folder in ("results", "figures", "notebooks", "params")
    for path in (paths.ROOT / folder).rglob("*")
    if path.suffix in (".jsonl", ".json", ".ipynb", ".html", ".svg", ".yaml", ".txt")
    and not {"executed", "smoke"} & set(path.parts)
)
PRIVATE = {
    "a home folder": r"/(?:home|Users)/\w|/root/|[A-Z]:\\Users\\",
    "a folder of one machine": r"(?<![\w.])/(?:tmp|mnt|workspace|opt|var|srv)/\w",
    "a token": r"\b(?:hf_|sk-|ghp_|ms-)[A-Za-z0-9-]{16,}|Bearer [A-Za-z0-9]",
    "an address": r"\b[\w.+-]+@[\w-]+\.\w{2,}\b",
    "a host of a private network": r"\b(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}\b",
}
SECRETS = {
    "USER": "wang-xiaoming", "LOGNAME": "wang-xiaoming", "HOSTNAME": "dsw-rented-4711", "HOME": "/home/wang-xiaoming",
    "HF_TOKEN": "hf_aVerySecretTokenOfOurs", "MODELSCOPE_API_TOKEN": "ms-a-very-secret-token-of-ours",
    "KVLAB_TOKEN": "sk-another-secret-token", "PWD": "/home/wang-xiaoming/kvlab",
}  # fmt: skip


def text_of(path):
    """The file's text without inlined pictures and fonts, whose letters mean nothing."""
    return re.sub(r"base64,[A-Za-z0-9+/=\\n]+", "", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: str(path.relative_to(paths.ROOT)))
def test_what_is_committed_names_no_person_no_place_and_no_secret(path):
    text = text_of(path)
    for what, pattern in PRIVATE.items():
        assert not (found := re.search(pattern, text)), f"{what}: {text[max(0, found.start() - 30) : found.end() + 30]}"


@pytest.mark.parametrize("secret", ["/home/wang/x", "hf_aVerySecretTokenOfOurs", "a.b@example.org", "10.1.2.3"])
def test_the_patterns_would_notice(secret):
    assert any(re.search(pattern, f'"reason": "cannot read {secret}"') for pattern in PRIVATE.values())


@pytest.fixture
def full_of_secrets(monkeypatch, tmp_path):
    """An environment whose variables, host name and card would all give somebody away."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "wang-xiaoming-cache"))
    monkeypatch.setattr(socket, "gethostname", lambda: SECRETS["HOSTNAME"])
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.make())
    return {*SECRETS.values(), str(tmp_path), str(paths.ROOT), getpass.getuser(), os.uname().nodename}


def given_away(record, secrets):
    text = json.dumps(record)
    return sorted(secret for secret in secrets if re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text))


def test_neither_environment_nor_telemetry_gives_anybody_away(full_of_secrets):
    with sampling.Telemetry() as window:
        pass
    assert given_away([provenance.environment(), window.record()], full_of_secrets) == []


def test_neither_does_a_measured_pair_on_a_folder_of_ones_own(full_of_secrets, tmp_path):
    folder = tmp_path / "wang-xiaoming-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**models.TINY, "model_type": "llama"}))
    point = {"dtype": "float32", "attention": "sdpa", "cache": "dynamic", "context_length": 8, "output_tokens": 3}
    with Worker(models.resolve(f"random:{folder}"), "float32", "cpu", threads=1) as worker:
        records = worker.measure_pair(point, 1)
    assert [record["status"] for record in records] == ["ok", "ok"]
    assert given_away(records, full_of_secrets) == []


def test_a_model_that_cannot_be_loaded_is_told_without_the_folder_it_is_in(full_of_secrets, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**models.TINY, "model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"torn")
    point = {"dtype": "float32", "attention": "sdpa", "cache": "dynamic", "context_length": 8, "output_tokens": 3}
    with Worker(models.resolve(str(folder)), "float32", "cpu", threads=1) as worker:
        records = worker.measure_pair(point, 1)
    store = Store(tmp_path / "records" / "s1b.jsonl", {"environment": "e", "boot": "b"})
    kept = [store.append(record) for record in records]
    assert {record["status"] for record in kept} == {"failed"} and all(record["reason"] for record in kept)
    assert given_away(kept, full_of_secrets) == []


@pytest.mark.parametrize(
    "said, kept",
    [
        ("OSError: /home/wang/models/qwen/config.json is missing", "OSError: config.json is missing"),
        ("no file in '/mnt/data/m' or ~/.cache/x/y.bin", "no file in 'm' or y.bin"),
        (
            "100 tokens/s, 3/4 of vllm:x, https://example.org/a/b",
            "100 tokens/s, 3/4 of vllm:x, https://example.org/a/b",
        ),
    ],
)
def test_a_reason_keeps_its_words_and_loses_its_places(said, kept):
    assert without_places(said) == kept


def test_points_and_parameters_name_a_folder_without_saying_where_it_is(full_of_secrets, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path / "out"))
    address = "http://gpu-host.example:8000/v1"
    p = SimpleNamespace(**params.load("cpu", [f"model={tmp_path}/qwen base_url={address}"]))
    points = [point for point, _ in [*sweep.on_off_points(p), *sweep.serving_points(p)]]
    sweep.remember_parameters(vars(p))
    stored = sweep.parameters("cpu")
    assert given_away([points, stored], full_of_secrets | {address, "gpu-host.example"}) == []
    read_back = SimpleNamespace(**stored)  # the article asks for the same points by what is stored
    assert sweep.on_off_points(read_back) == sweep.on_off_points(p)
    assert sweep.serving_points(read_back) == sweep.serving_points(p)
    assert points[0]["model"] != sweep.model_point(SimpleNamespace(**vars(p) | {"model": "/elsewhere/qwen"}))["model"]


def test_the_recorded_name_of_a_folder_finds_it_again_on_this_machine(full_of_secrets, tmp_path):
    folder = tmp_path / "wang" / "qwen"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    for model in (str(folder), f"random:{folder}"):
        assert models.resolve(paths.public_model(model) if models.resolve(model) else "").path == str(folder)
