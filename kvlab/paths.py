"""Where everything lives: the one place that builds a path."""

import hashlib
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"


def output_root() -> Path:
    """Folder that holds `results/` and `figures/`: the repository, unless KVLAB_OUTPUT names another."""
    return Path(os.environ.get("KVLAB_OUTPUT") or ROOT)


def results(profile: str) -> Path:
    return output_root() / "results" / profile


def figures(profile: str) -> Path:
    return output_root() / "figures" / profile


def cache() -> Path:
    """Folder outside the repository for converted weights: KVLAB_CACHE or ~/.cache/kvlab."""
    return Path(os.environ.get("KVLAB_CACHE") or Path.home() / ".cache" / "kvlab")


def replace(path: Path, content: str | bytes) -> None:
    """Write a file in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)


def public(path: str | Path) -> str:
    """`path` as it may be printed: relative to the output root or the repository, else its last part."""
    path = Path(path)
    for root in (output_root(), ROOT):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name


def public_model(model: str) -> str:
    """A model's name as it may be recorded: a folder by its last part and a few digits that tell it from others."""
    kind, _, place = model.rpartition(":")
    if not place.startswith((".", "/", "~")):
        return model
    path = Path(place).expanduser().resolve()
    name = f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"
    return f"{kind}:{name}" if kind else name
