"""Weights: from a model's source to a model in memory or a folder for a server; no code of a model's own is run."""

import inspect
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import transformers
from filelock import FileLock
from transformers.utils import logging

from kvlab import hub, models, paths
from kvlab.models import RANDOM_SEED, TINY, TINY_ARCHITECTURES, ModelSource, check_files, resolve

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_KERNELS = ("eager", "sdpa", "flash_attention_2")
MANIFEST = "kvlab-manifest.json"
QUICK = ("slice", "thin")  # kinds of source whose random weights are filled in quickly
MADE_UP = ("random", *QUICK)
FILL_BLOCK = 2**20  # random numbers that a quickly filled model repeats
MEMORY_MARGIN = 1.1  # of the weights: activations, a short cache and the libraries' own


def config(source: ModelSource) -> transformers.PretrainedConfig:
    """Return the model's configuration without its weights; rotary settings are right in either spelling."""
    if source.kind == "random" and source.path in TINY_ARCHITECTURES:
        return _tiny_config(source.path)
    if source.kind == "slice":
        written = _with_both_rotary_spellings(models.slice_config(source.path))
        return transformers.CONFIG_MAPPING[written.pop("model_type")](**written)
    if source.kind == "thin":
        return _thin(config(resolve(source.name.partition(":")[2])))
    if source.kind in hub.HUBS:
        folder = _local_folder(source, with_weights=False)
    else:
        folder = Path(source.path) if source.kind == "random" else served_folder(source, "float32", convert=False)
    if folder is None:
        with _quietly_offline():
            return transformers.AutoConfig.from_pretrained(
                source.path, gguf_file=source.gguf_file, trust_remote_code=False)  # fmt: skip
    written = _with_both_rotary_spellings(models.read_config(folder))
    settings = _as_transformers_reads(folder, written)
    if hasattr(settings, "rope_theta") and "rope_theta" in written:  # before release 5
        settings.rope_theta = written["rope_theta"]
        settings.rope_scaling = written.get("rope_scaling")
    return settings


def _as_transformers_reads(folder: Path, written: dict) -> transformers.PretrainedConfig:
    architecture, release = written["model_type"], transformers.__version__
    if architecture not in transformers.CONFIG_MAPPING:
        own_code = "; code that comes with a model (auto_map) is never run" if "auto_map" in written else ""
        raise ValueError(f"config.json: Transformers {release} has no architecture {architecture[:40]!r}{own_code}")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its own checks of a foreign file raise whatever they like
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"config.json: Transformers {release} refuses it ({said}); take the model's own") from None


def _tiny_config(architecture: str) -> transformers.PretrainedConfig:
    if architecture not in transformers.CONFIG_MAPPING:
        raise ValueError(f"Transformers {transformers.__version__} has no architecture {architecture}")
    unlike = {"n_layer"} & TINY_ARCHITECTURES[architecture].keys()  # GPT2 has names of its own
    common = {"vocab_size": TINY["vocab_size"], "initializer_range": 0.2} if unlike else TINY
    return transformers.CONFIG_MAPPING[architecture](**{**common, **TINY_ARCHITECTURES[architecture]})


def _thin(settings: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Shrink a configuration to matrices of next to nothing: the same layers, operations and launches remain."""
    for name, value in models.OWN["thin"].items():
        if getattr(settings, name, None) is not None:
            setattr(settings, name, value)
    settings.pad_token_id = None  # it may lie beyond the small vocabulary
    return settings


def max_positions(settings: transformers.PretrainedConfig) -> int:
    """Return how many positions prompt and output may take; raises ValueError where none is stated."""
    text = settings.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(getattr(text, name, None), int):
            return getattr(text, name)
    raise ValueError(f"the configuration of {settings.model_type} states no limit of positions")


def outline(settings: transformers.PretrainedConfig) -> dict:
    """Return what a plan needs: positions, vocabulary, special token ids, and `config` with the model's shape.

    Raises ValueError for a model without a KV cache, in which there is nothing to measure.
    """
    _refuse_without_kv_cache(settings)
    text = settings.get_text_config()
    named = [getattr(text, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    special = {i for entry in named for i in (entry if isinstance(entry, list) else [entry])} - {None}
    names = ("model_type", "vocab_size")
    shape = {name: getattr(text, name, None) for name in names} | {"max_positions": max_positions(settings)}
    return shape | {"special_token_ids": sorted(special), "config": json.loads(text.to_json_string(use_diff=False))}


def load(source: ModelSource, dtype: str, device: str = "cpu", attention: str = "sdpa") -> torch.nn.Module:
    """Return the model in eval mode, in exactly this dtype; raises ValueError for what cannot be measured."""
    for value, choices in ((dtype, DTYPES), (attention, ATTENTION_KERNELS)):
        if value not in choices:
            raise ValueError(f"{value!r} is none of {', '.join(choices)}")
    settings = config(source)
    _refuse_without_kv_cache(settings)
    wanted = {"attn_implementation": attention, **_dtype_keyword(dtype)}
    if source.kind in QUICK:
        model = _quickly_filled(settings, wanted, dtype, device)
    elif source.kind == "random":
        model = _random_model(settings, wanted).to(device)
    else:
        placed = {} if device == "cpu" else {"device_map": {"": device}}
        with _quietly_offline():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                served_folder(source, dtype), config=settings, use_safetensors=True, local_files_only=True,
                trust_remote_code=False, **wanted, **placed)  # fmt: skip
    return model.eval()


def _random_model(settings: transformers.PretrainedConfig, wanted: dict) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(RANDOM_SEED)
        return transformers.AutoModelForCausalLM.from_config(settings, **wanted)


def _quickly_filled(settings: transformers.PretrainedConfig, wanted: dict, dtype: str, device: str) -> torch.nn.Module:
    """Make a model whose weights repeat one block of random numbers: seconds where drawing them takes minutes.

    Raises MemoryError where the weights would not fit into the memory that is free.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings, **wanted)
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    free = _free_memory_bytes() if device == "cpu" else torch.cuda.mem_get_info()[0]
    if needed * MEMORY_MARGIN > free:
        wanted_gib, free_gib = needed * MEMORY_MARGIN / 2**30, free / 2**30
        raise MemoryError(f"it needs {wanted_gib:.1f} GiB of memory, {free_gib:.1f} GiB are free")
    model.to_empty(device=device)
    model.tie_weights()
    block = torch.empty(FILL_BLOCK, dtype=getattr(torch, dtype), device=device)
    block.uniform_(-0.02, 0.02, generator=torch.Generator(device).manual_seed(RANDOM_SEED))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            flat = weight.view(-1)
            for part in flat.split(FILL_BLOCK):
                part.copy_(block[: len(part)]) if weight.dim() > 1 else part.fill_(float("norm" in name))
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):  # its buffers are computed, not learnt
                for name, buffer in type(module)(config=settings).named_buffers():
                    getattr(module, name).copy_(buffer)
    return model


@contextmanager
def first_layers(model: torch.nn.Module, count: int | None):
    """Let the model be its first `count` layers and its head for a while; None leaves it whole."""
    whole, settings = getattr(model.base_model, "layers", None), model.config
    try:
        if count is not None:
            model.base_model.layers, settings.num_hidden_layers = whole[:count], count
        yield model
    finally:
        if count is not None:
            model.base_model.layers, settings.num_hidden_layers = whole, len(whole)


def _free_memory_bytes() -> int:
    """Return what this process may still take: the system's free memory, at most a container's limit."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return min([psutil.virtual_memory().available] + ([int(text)] if text.isdigit() else []))


def switch_attention(model: torch.nn.Module, attention: str) -> bool:
    """Change a loaded model's attention kernel in place; False where only loading can."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(attention)
    elif getattr(model, "_supports_attention_backend", False):
        model.config._attn_implementation = attention
    return model.config._attn_implementation == attention


def _refuse_without_kv_cache(settings: transformers.PretrainedConfig) -> None:
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)
    if model_class is None:
        raise ValueError(f"{settings.model_type} is not a causal language model that Transformers has")
    if "past_key_values" not in inspect.signature(model_class.forward).parameters:
        raise ValueError(f"{settings.model_type} has no KV cache: there is nothing to switch on or off")


def _dtype_keyword(dtype: str) -> dict:
    """Name the dtype argument as the installed Transformers calls it."""
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    return {name: getattr(torch, dtype)}


@contextmanager
def _quietly_offline():
    """Keep the hub library from the network and progress bars from the page while local files are read."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    with_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        if with_bars:
            logging.enable_progress_bar()


def stored(source: ModelSource) -> dict:
    """Return how the weights are stored, and whether they are expanded to another type before anything runs."""
    if source.kind in MADE_UP:
        return {"file_type": "random weights", "dequantised": False}
    converted = served_folder(source, "float32", convert=False) if source.gguf_file else None
    noted = json.loads((converted / MANIFEST).read_bytes()).get("file_type") if converted else None
    return {"file_type": noted or _file_type(source), "dequantised": bool(source.gguf_file)}


def file_hashes(source: ModelSource) -> dict[str, str]:
    """Return the first 16 digits of the sha256 of the source's configuration and weights, by file name."""
    if source.kind in MADE_UP:
        return {}
    folder = _local_folder(source)
    names = [source.gguf_file] if source.gguf_file else ["config.json", *_names(folder, "*.safetensors")]
    return {name: hub.sha256(folder / name)[:16] for name in names}


def _names(folder: Path, pattern: str) -> list[str]:
    return sorted(file.name for file in folder.glob(pattern))


def _file_type(source: ModelSource) -> str:
    """Return how the weights are stored; for GGUF the quantisation of most of their bytes, such as Q4_1."""
    if not source.gguf_file:
        return "safetensors"
    from gguf import GGUFReader

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(Path(source.path) / source.gguf_file).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    return f"GGUF {max(sizes, key=sizes.get)}"


def _local_folder(source: ModelSource, with_weights: bool = True) -> Path:
    """Return the folder of the source's files, checked; a hub's model is fetched first."""
    folder = hub.snapshot(source, with_weights) if source.kind in hub.HUBS else Path(source.path)
    if source.kind in hub.HUBS and with_weights:
        check_files(folder)
    return folder


def served_folder(source: ModelSource, dtype: str, convert: bool = True) -> Path | None:
    """Return a folder with safetensors, configuration and tokenizer, written once where there is none.

    GGUF and random weights are written to $KVLAB_CACHE or ~/.cache/kvlab; a torn folder is noticed by
    its manifest and redone. With `convert=False`, None stands for a folder that is still to be written.
    """
    if source.kind in QUICK:
        raise ValueError(f"{source.name} is measured in Transformers only; no folder is written for a server")
    if source.kind != "random" and not source.gguf_file:
        return _local_folder(source)
    cache = paths.cache()
    stored = hub.sha256(Path(source.path) / source.gguf_file)[:12] if source.gguf_file else source.revision
    name = re.sub(r"[^\w.-]+", "_", f"{source.name}-{stored}-{dtype}-transformers-{transformers.__version__}")
    if not convert:
        return cache / name if _intact(cache / name) else None
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{name}.lock"):
        if not _intact(cache / name):
            _write_served(source, dtype, cache / name)
    return cache / name


def _write_served(source: ModelSource, dtype: str, folder: Path) -> None:
    """Write the folder under another name and rename it when it is whole."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    if source.gguf_file:
        model = _from_gguf(source, dtype)
        with _quietly_offline():
            reader = transformers.AutoTokenizer
            tokenizer = reader.from_pretrained(source.path, gguf_file=source.gguf_file, trust_remote_code=False)
            tokenizer.chat_template = None  # not needed, and its names would become names of files
            tokenizer.save_pretrained(part)
    else:
        model = _random_model(config(source), _dtype_keyword(dtype))
    with _quietly_offline():
        model.save_pretrained(part, safe_serialization=True)
    written = _with_both_rotary_spellings(json.loads((part / "config.json").read_bytes()))
    (part / "config.json").write_text(json.dumps(written, indent=2))
    files = {name: [(part / name).stat().st_size, hub.sha256(part / name)] for name in _names(part, "*")}
    manifest = {"source": source.name, "dtype": dtype, "file_type": _file_type(source), "files": files}
    (part / MANIFEST).write_text(json.dumps(manifest, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)


def _from_gguf(source: ModelSource, dtype: str) -> torch.nn.Module:
    """Load a GGUF file expanded to this dtype: what runs then is no longer the quantised model."""
    plain = {}
    if hasattr(transformers, "GgufConfig"):
        plain["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _quietly_offline():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.path, gguf_file=source.gguf_file, local_files_only=True, trust_remote_code=False,
            **plain, **_dtype_keyword(dtype))  # fmt: skip
    model.config.__dict__.pop("quantization_config", None)  # nothing in the folder is quantised any more
    return model


def _intact(folder: Path) -> bool:
    """Tell whether every file is there with the size and hash that the manifest gives."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        return all(
            (folder / name).stat().st_size == size and hub.sha256(folder / name) == digest
            for name, (size, digest) in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _with_both_rotary_spellings(written: dict) -> dict:
    """Return config.json's content with rope_parameters (Transformers 5) and rope_theta (before it)."""
    both, new = dict(written), written.get("rope_parameters") or {}
    if "rope_theta" in new:
        both.setdefault("rope_theta", new["rope_theta"])
        scaling = {key: value for key, value in new.items() if key != "rope_theta"}
        if scaling.get("rope_type", "default") != "default":
            both.setdefault("rope_scaling", scaling)
    elif "rope_theta" in written:
        scaling = written.get("rope_scaling") or {"rope_type": "default"}
        both["rope_parameters"] = {**scaling, "rope_theta": written["rope_theta"]}
    return both
