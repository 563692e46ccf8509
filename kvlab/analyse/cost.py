"""Arithmetic on a model's configuration: parameters, bytes and FLOPs that the report predicts before it measures.

What Transformers executes, checked against its own modules, caches and FLOP counts. A FLOP count is of matrix products:
twice their multiplications, with attention over all keys that enter the kernel (a causal mask discounts nothing).
"""

from kvlab.analyse.architecture import Architecture, Block, architecture, known_models

__all__ = ["Architecture", "architecture", "known_models"]
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
BLOCK_TOKENS = 16  # vLLM's default block
LAYOUTS = ("transformers", "engine")


def _size(matrices: tuple) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def parameters(a: Architecture) -> int:
    """All weights, tied ones once, every expert counted."""
    blocks = sum(_size(b.linears) + _size(b.expansion) + b.vectors + b.experts * _size(b.expert) for b in a.blocks)
    return a.embedding + a.positions + blocks + a.final_vectors + a.head


def weight_bytes(a: Architecture, dtype: str) -> int:
    return parameters(a) * BYTES_PER_VALUE[dtype]


def step_weight_bytes(a: Architecture, dtype: str, batch: int = 1) -> int:
    """Bytes of weights that one decode step reads: no untied input embedding, no unused expert.

    With a batch, each expert is read once if any sequence needs it; they are taken to choose independently.
    """
    idle = a.positions + (a.embedding if a.head >= a.embedding else 0)
    idle += sum(b.experts * (1 - b.active / b.experts) ** batch * _size(b.expert) for b in a.blocks if b.experts)
    return round((parameters(a) - idle) * BYTES_PER_VALUE[dtype])


def kv_values(a: Architecture, tokens: int, layout: str) -> int:
    """Numbers in the cache of one sequence.

    "transformers": a dynamic cache of release 5 after a forward pass; a window of W keeps W - 1 tokens, latent
    attention keeps the latent and expands it again at each step. "engine": a window keeps W, the latent stays as it is.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    engine = layout == "engine"
    per_token = (a.kv_heads if engine else a.stored_heads) * (a.key_dim + a.value_dim)
    kept = [tokens if b.window is None else min(tokens, b.window - (not engine)) for b in a.blocks]
    return (a.latent_dim or per_token) * sum(kept)


def kv_cache_bytes(a: Architecture, tokens: int, dtype: str, batch: int = 1, layout: str = "transformers") -> int:
    """Bytes of the KV cache that holds `tokens` tokens of each of `batch` sequences; layouts as in `kv_values`."""
    return batch * kv_values(a, tokens, layout) * BYTES_PER_VALUE[dtype]


def kv_cache_bytes_per_token(a: Architecture, dtype: str, layout: str = "transformers") -> int:
    """Bytes that one token adds to the cache while no window is full yet."""
    return kv_cache_bytes(a, 1, dtype, layout=layout)


def requests_that_fit(
    a: Architecture, tokens: int, memory_bytes: float, reserve_bytes: float, dtype: str, kv_dtype: str | None = None
) -> int:
    """Requests of `tokens` tokens whose cache an engine can hold beside the weights; 0 where even these do not fit.

    The cache is handed out in blocks of 16 tokens. `kv_dtype` is the cache's type where it differs from the weights'.
    """
    held = kv_cache_bytes(a, in_blocks(tokens), kv_dtype or dtype, layout="engine")
    return max(0, int((memory_bytes - reserve_bytes - weight_bytes(a, dtype)) // held))


def in_blocks(tokens: int) -> int:
    """Tokens rounded up to whole blocks of an engine's cache."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def forward_flops(a: Architecture, tokens: int, keys: list[int] | int, batch: int = 1) -> int:
    """FLOPs of a forward pass over `tokens` new tokens per sequence that attend to `keys` keys (one or one a layer)."""
    keys = keys if isinstance(keys, list) else [keys] * a.layers
    linear = sum(_size(b.linears) + b.active * _size(b.expert) for b in a.blocks)
    attention = a.heads * (a.key_dim + a.value_dim) * sum(keys)
    expansion = sum(_size(b.expansion) * each for b, each in zip(a.blocks, keys))
    return 2 * batch * (tokens * (linear + attention) + expansion + _head(a))


def _head(a: Architecture) -> int:
    """Multiplications of the output head, for one position."""
    return a.vocab * a.head_input + (2 * a.head_input * a.hidden if a.head_input != a.hidden else 0)


def prefill_flops(a: Architecture, tokens: int, batch: int = 1) -> int:
    """FLOPs of a prefill of `tokens` tokens with the last position's logits only; also of a step without cache."""
    return forward_flops(a, tokens, tokens, batch)


def decode_step_flops(a: Architecture, context: int, batch: int = 1) -> int:
    """FLOPs of one step with cache, when `context` tokens are before the one that enters."""
    return forward_flops(a, 1, [attended(b, context) for b in a.blocks], batch)


def attended(block: Block, context: int) -> int:
    """Keys that one new token attends to in this layer, its own included."""
    return 1 + (context if block.window is None else min(context, block.window - 1))


def cache_copy_bytes(
    a: Architecture, tokens: int, dtype: str, attention: str = "sdpa", cache: str = "dynamic", batch: int = 1
) -> int:
    """Bytes read and written per decode step around a cache of `tokens` tokens, beyond reading it for attention.

    A dynamic cache joins the new token by copying all it holds. Eager attention copies keys and values once per query
    head and reads the copies in their place; SDPA does where a window's mask keeps it from taking groups. Latents are
    expanded: keys and values are written, and the keys copied once more to join their rotary part.
    """
    held = kv_cache_bytes(a, tokens, dtype, batch)
    copied = 2 * held if cache == "dynamic" else 0
    repeats = a.heads // a.stored_heads
    masked = any(b.window is not None and tokens >= b.window for b in a.blocks)
    if a.latent_dim:
        return copied + held * a.heads * (3 * a.key_dim + a.value_dim) // a.latent_dim
    if repeats > 1 and (attention == "eager" or (attention == "sdpa" and masked)):
        copied += 2 * repeats * held
    return copied
