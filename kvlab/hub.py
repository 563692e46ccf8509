"""Files of models from a hub: fetched once, pinned from then on, and told apart by their hashes; no torch."""

import hashlib
import json
import re
from pathlib import Path

from kvlab import paths
from kvlab.models import ModelSource

CONFIGURATION = ("*.json", "*.txt", "*.model", "*.tiktoken")  # no code: nothing else of a repository is fetched
WEIGHTS = ("*.safetensors",)
HUBS = {"modelscope": "modelscope", "huggingface": "huggingface_hub"}


def snapshot(source: ModelSource, weights: bool = True) -> Path:
    """Folder of a hub's model; once fetched it is used as it is, without the network and whatever the hub has later.

    An interrupted download goes on where it stopped. `weights=False` fetches the configuration and the tokenizer
    alone. Raises ValueError where the hub's library is missing or fails, and for a model without safetensors.
    """
    notes = paths.cache() / "snapshots"
    whole, configuration = (notes / f"{_name(source)}{part}.json" for part in ("", "-configuration"))
    pinned = _pinned(whole) or (None if weights else _pinned(configuration))
    if pinned:
        return pinned
    folder = _fetch(source, (*CONFIGURATION, *(WEIGHTS if weights else ())))
    if weights and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{source.name} has no safetensors, and kvlab loads nothing that could hold code")
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    kept = json.dumps({"folder": str(folder), "files": files}, indent=1)
    paths.replace(whole if weights else configuration, kept)
    return folder


def is_fetched(source: ModelSource) -> bool:
    """The model's weights have been fetched, and stand where they were put."""
    return _pinned(paths.cache() / "snapshots" / f"{_name(source)}.json") is not None


def _name(source: ModelSource) -> str:
    return re.sub(r"[^\w.-]+", "_", f"{source.name}-{source.revision or 'first fetched'}")


def _pinned(kept: Path) -> Path | None:
    """The folder that was fetched, while every file in it has the size it had then."""
    try:
        known = json.loads(kept.read_bytes())
        folder = Path(known["folder"])
        whole = all((folder / name).stat().st_size == size for name, size in known["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return folder if whole else None


def _fetch(source: ModelSource, patterns: tuple[str, ...]) -> Path:
    try:
        if source.kind == "modelscope":
            from modelscope import snapshot_download
        else:
            from huggingface_hub import snapshot_download
    except ImportError:
        package = HUBS[source.kind]
        raise ValueError(
            f"{source.name} needs the package {package}: pip install {package}, or give a local folder"
        ) from None
    try:
        return Path(snapshot_download(source.path, revision=source.revision, allow_patterns=list(patterns)))
    except Exception as error:  # each hub's library has classes of its own
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source.name} cannot be fetched ({why}); the same command goes on where this stopped, a local folder"
            " needs no network"
        ) from None


def sha256(file: Path) -> str:
    """The file's hash, kept in the cache folder: computed again only when its size or time of change differs."""
    state = file.stat()
    name = hashlib.sha256(json.dumps([str(file.resolve()), state.st_size, state.st_mtime_ns]).encode()).hexdigest()
    kept = paths.cache() / "hashes" / name[:2] / name
    if not kept.exists():
        with file.open("rb") as stream:
            paths.replace(kept, hashlib.file_digest(stream, "sha256").hexdigest())
    return kept.read_text()
