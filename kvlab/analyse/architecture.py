"""A model's configuration as the shapes that cost arithmetic needs, for the causal models whose layers we know."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
KNOWN_MODELS = FOLDER / "known_models.yaml"


@dataclass(frozen=True)
class Block:
    """One layer: matrices as (inputs, outputs); `expert` is one of `experts`, of which a token uses `active`."""

    linears: tuple[tuple[int, int], ...]
    vectors: int  # parameters of biases and norms
    operations: int  # kernels that eager execution launches, without those of the attention kernel
    elementwise: int  # numbers per token that those of them read and write which multiply no matrices
    window: int | None = None  # tokens that this layer attends to; None for all
    expert: tuple[tuple[int, int], ...] = ()
    experts: int = 0
    active: int = 0
    expansion: tuple[tuple[int, int], ...] = ()  # of latents, applied to every cached token again at each step


@dataclass(frozen=True, eq=False)  # told apart by identity: a cheap key of what was counted for it
class Architecture:
    """A causal language model's shape. `latent_dim` is what latent attention needs to keep per token and layer."""

    model_type: str
    hidden: int
    heads: int
    kv_heads: int  # of the architecture; what a cache keeps of them is `stored_heads`
    stored_heads: int
    key_dim: int
    value_dim: int
    latent_dim: int | None
    vocab: int
    max_positions: int
    blocks: tuple[Block, ...]
    embedding: int  # parameters of the input embedding and what is joined to it
    positions: int  # parameters of learned positions
    head: int  # parameters of the output head that are not the input embedding's
    final_vectors: int
    head_input: int  # width that enters the output head

    @property
    def layers(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True)
class Family:
    """How a model type builds its layers; a string names the configuration's entry that decides."""

    norm: str = "rms"  # "rms" (weight), "layer" (weight and bias), "scale" (a layer norm without bias)
    norms: int = 2
    gated: bool = True
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    qk_norm: str = ""  # "head": one vector of a head's size each; "full": over all heads
    rotary: bool = True
    fused_qkv: bool = False
    fused_gate: bool = False
    activation: int = 1  # kernels
    windowed: bool = False  # `sliding_window` holds for every layer unless layer_types says otherwise
    tied: bool = False  # what an absent tie_word_embeddings means


FAMILIES = {kind: Family(**how) for kind, how in yaml.safe_load((FOLDER / "families.yaml").read_bytes()).items()}
NAMES = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "positions": ("max_position_embeddings", "n_positions"),
    "inner": ("ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
}
MULTI_HEAD = ("gpt2", "gpt_neox", "opt")  # whatever their configuration says of KV heads
LEARNED_POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}  # rows beyond the positions
KERNELS = {"rms": 8, "layer": 1, "scale": 1}  # of one norm


def architecture(config: Mapping) -> Architecture:
    """Read a configuration (a config.json or `models.outline(source).config`).

    Raises ValueError for a model type without KV cache or with layers that we do not know, with the nearest we do.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        near = (difflib.get_close_matches(str(kind), FAMILIES, 1, 0.5) or ["llama"])[0]
        reason = "it may have no KV cache, or layers unknown to us"
        raise ValueError(f"no cost model for model type {kind!r} ({reason}); the nearest known is {near!r}")
    family, hidden, heads = FAMILIES[kind], _entry(config, "hidden"), _entry(config, "heads")
    shape, tied = _attention(config, hidden, heads), config.get("tie_word_embeddings", FAMILIES[kind].tied)
    blocks = tuple(_block(config, family, shape, index) for index in range(_entry(config, "layers")))
    width = config.get("word_embed_proj_dim") or hidden  # OPT-350m embeds narrower than its layers
    vocab, projections = config["vocab_size"], 2 * width * hidden if width != hidden else 0
    rows = LEARNED_POSITIONS.get(kind)
    positions = 0 if rows is None else (_entry(config, "positions") + rows) * hidden
    final = 0 if config.get("do_layer_norm_before") is False else _norm(family, hidden)
    head = (0 if tied else vocab * width) + (vocab if family.head_bias else 0)
    return Architecture(
        kind, hidden, heads, **shape, vocab=vocab, max_positions=_entry(config, "positions"), blocks=blocks,
        embedding=vocab * width, positions=positions, head=head + projections, final_vectors=final, head_input=width,
    )  # fmt: skip


@cache
def known_models() -> dict[str, Architecture]:
    """Published configurations by name; no weights are involved."""
    return {name: architecture(config) for name, config in yaml.safe_load(KNOWN_MODELS.read_bytes()).items()}


def _entry(config: Mapping, name: str, default: int | None = None) -> int:
    found = next((config[each] for each in NAMES[name] if config.get(each) is not None), default)
    if found is None:
        raise ValueError(f"the configuration of {config['model_type']} has none of {', '.join(NAMES[name])}")
    return found


def _decides(setting: bool | str, config: Mapping) -> bool:
    return bool(config.get(setting)) if isinstance(setting, str) else setting


def _norm(family: Family, width: int) -> int:
    return 2 * width if family.norm == "layer" else width


def _attention(config: Mapping, hidden: int, heads: int) -> dict:
    """What a token leaves in the cache: heads kept, their sizes, and the latent that would do."""
    if config.get("kv_lora_rank"):
        key, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
        latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return {"kv_heads": heads, "stored_heads": heads, "key_dim": key, "value_dim": value, "latent_dim": latent}
    size, kv_heads = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
    stored, kv_heads = None, heads if config["model_type"] in MULTI_HEAD else kv_heads
    if config["model_type"] == "falcon":
        grouped = config.get("new_decoder_architecture", False)  # there its code repeats the heads, then stores them
        kv_heads = config["num_kv_heads"] if grouped else 1 if config.get("multi_query", True) else heads
        stored = heads if grouped else None
    if config["model_type"] == "gpt_bigcode":
        kv_heads = 1 if config.get("multi_query", True) else heads
    return {"kv_heads": kv_heads, "stored_heads": stored or kv_heads, "key_dim": size, "value_dim": size,
            "latent_dim": None}  # fmt: skip


def _block(config: Mapping, family: Family, shape: dict, index: int) -> Block:
    hidden, heads = _entry(config, "hidden"), _entry(config, "heads")
    attention, expansion, biases = _projections(config, family, shape, hidden, heads)
    mixture = _mixture(config, hidden, index)
    mlp, mlp_biases = mixture.pop("shared", None), 0
    if mlp is None:
        inner = _entry(config, "inner", 4 * hidden)
        mlp = _mlp(hidden, inner, family)
        mlp_biases = sum(out for _, out in mlp) if _decides(family.mlp_bias, config) else 0
    norms = _norm_count(config, family)
    vectors = norms * _norm(family, hidden) + biases + mlp_biases + _inner_norms(config, family, shape, heads)
    linears = (*attention, *mlp)
    kernels, passes = _elementwise(config, family, norms, shape, linears)
    return Block(linears, vectors, len(linears) + len(expansion) + kernels, passes, _window(config, family, index),
                 expansion=expansion, **mixture)  # fmt: skip


def _projections(config: Mapping, family: Family, shape: dict, hidden: int, heads: int) -> tuple:
    """Matrices of attention, those that expand latents, and how many parameters all their biases have."""
    out = (heads * shape["value_dim"], hidden)
    if shape["latent_dim"]:
        rank, latent = config.get("q_lora_rank"), config["kv_lora_rank"]
        wide = heads * shape["key_dim"]
        query = [(hidden, rank), (rank, wide)] if rank else [(hidden, wide)]
        down = (hidden, shape["latent_dim"])
        up = (latent, heads * (config["qk_nope_head_dim"] + shape["value_dim"]))
        biased = _decides(family.qkv_bias, config)
        return [*query, down, out], (up,), ((rank or 0) + down[1] + hidden) * biased
    kv = shape["kv_heads"] * shape["key_dim"]
    parts = [heads * shape["key_dim"], kv, kv]
    inputs = [(hidden, sum(parts))] if family.fused_qkv else [(hidden, part) for part in parts]
    biases = sum(parts) * _decides(family.qkv_bias, config) + hidden * _decides(family.out_bias, config)
    return [*inputs, out], (), biases


def _mlp(hidden: int, inner: int, family: Family) -> list[tuple[int, int]]:
    up = [(hidden, 2 * inner)] if family.fused_gate else [(hidden, inner)] * (1 + family.gated)
    return [*up, (inner, hidden)]


def _mixture(config: Mapping, hidden: int, index: int) -> dict:
    """A mixture of experts in this layer, with `shared` for what every token passes; empty for a dense layer."""
    experts = next((config[name] for name in NAMES["experts"] if config.get(name)), 0)
    dense = index < config.get("first_k_dense_replace", 0) or index in config.get("mlp_only_layers", ())
    if not experts or dense or (index + 1) % config.get("decoder_sparse_step", 1):
        return {}
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared_inner = config.get("n_shared_experts", 0) * inner or config.get("shared_expert_intermediate_size", 0)
    shared = [(hidden, shared_inner)] * 2 + [(shared_inner, hidden)] if shared_inner else []
    if config.get("shared_expert_intermediate_size"):
        shared.append((hidden, 1))  # its gate
    return {"shared": [(hidden, experts), *shared], "expert": ((hidden, inner), (hidden, inner), (inner, hidden)),
            "experts": experts, "active": config.get("num_experts_per_tok") or 1}  # fmt: skip


def _norm_count(config: Mapping, family: Family) -> int:
    if config["model_type"] == "falcon":
        both = config.get("num_ln_in_parallel_attn") or 2
        return both if config.get("new_decoder_architecture") else 1 if config.get("parallel_attn", True) else 2
    return 1 if config.get("use_parallel_residual") and config["model_type"] == "stablelm" else family.norms


def _inner_norms(config: Mapping, family: Family, shape: dict, heads: int) -> int:
    """Parameters of norms inside attention: of queries and keys, or of latents."""
    if shape["latent_dim"]:
        return (config.get("q_lora_rank") or 0) + config["kv_lora_rank"]
    if config.get("qk_layernorm") and config["model_type"] == "phi":
        return 4 * shape["key_dim"]
    if config.get("qk_layernorm"):
        return (heads + shape["kv_heads"]) * shape["key_dim"]
    sizes = {"head": 2, "full": heads + shape["kv_heads"]}
    return sizes.get(family.qk_norm, 0) * shape["key_dim"]


def _elementwise(config: Mapping, family: Family, norms: int, shape: dict, linears: tuple) -> tuple[int, int]:
    """Kernels of eager execution between the matrix products, and the numbers per token that they read and write."""
    hidden, heads = _entry(config, "hidden"), _entry(config, "heads")
    norm, inner_norms = KERNELS[family.norm], 2 * bool(family.qk_norm or config.get("kv_lora_rank"))
    partial = config["model_type"] in ("phi", "gpt_neox", "stablelm")  # they split and join around the rotation
    rotation = (12 if partial else 10) * family.rotary
    kernels = (norms + inner_norms) * norm + rotation + 2 + 2 + family.activation + family.gated  # cache, residuals
    rotated, inner = (heads + shape["kv_heads"]) * shape["key_dim"], linears[-1][0]
    passes = 2 * norms * norm * hidden + 6 * hidden + rotation * rotated
    return kernels, passes + (2 * family.activation + 3 * family.gated) * inner


def _window(config: Mapping, family: Family, index: int) -> int | None:
    types, window = config.get("layer_types"), config.get("sliding_window")
    if types and types[index] not in ("full_attention", "sliding_attention"):
        raise ValueError(f"no cost model for a layer of type {types[index]!r}")
    if types:
        return window if types[index] == "sliding_attention" else None
    if config["model_type"] in ("gemma2", "gemma3_text"):  # before layer_types: every other layer, five of six
        return window if (index + 1) % (2 if config["model_type"] == "gemma2" else 6) else None
    if config.get("use_sliding_window"):
        return window if index >= config.get("max_window_layers", 0) else None
    return window if family.windowed else None
