"""How much room the KV cache leaves: requests that fit beside the weights, by architecture; nothing is measured."""

import pandas as pd

from kvlab.analyse import cost
from kvlab.analyse.architecture import Architecture, known_models

GIGA = 10**9
DTYPE = "bfloat16"  # what these models are served in
MODELS = (
    "OPT-2.7B", "Qwen1.5-7B", "Llama-2-7B", "Falcon-7B", "Llama-3-8B", "Qwen3-8B", "Mistral-7B-v0.1", "Gemma-2-9B",
    "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen2.5-14B-Instruct", "DeepSeek-V2-Lite",
)  # fmt: skip
CHARTED = ("Llama-2-7B", "Llama-3-8B", "Qwen2.5-7B-Instruct", "Mistral-7B-v0.1", "Gemma-2-9B")
LENGTHS = tuple(2**power for power in range(9, 16))
COLUMNS = ["model", "kind", "weight_bytes", "kv_bytes_per_token", "multi_head_bytes_per_token", "shared", "requests",
           "requests_8_bit", "requests_multi_head", "max_positions"]  # fmt: skip


def kind(a: Architecture) -> str:
    """How a model's attention keeps its cache small: "latent", "hybrid", "window", "multi_query", "grouped" or not."""
    windowed = sum(b.window is not None for b in a.blocks)
    if a.latent_dim:
        return "latent"
    if windowed:
        return "window" if windowed == a.layers else "hybrid"
    return "multi_head" if a.kv_heads == a.heads else "multi_query" if a.kv_heads == 1 else "grouped"


def table(tokens: int, memory_gb: float, reserve: float, own: dict[str, Architecture] | None = None) -> pd.DataFrame:
    """One row per well-known model, and per model of `own`; of `memory_gb` the share `reserve` is kept free.

    `shared` is how many times smaller the cache per token is than with keys and values of every head;
    `requests_multi_head` how many requests would fit then, `requests_8_bit` with keys and values of one byte each.
    The counts are missing where a request is longer than the model's positions.
    """
    models = {name: known_models()[name] for name in MODELS} | (own or {})
    rows = [_row(name, a, tokens, memory_gb, reserve) for name, a in models.items()]
    return pd.DataFrame(rows, columns=COLUMNS).astype({name: float for name in COLUMNS if name.startswith("requests")})


def _row(name: str, a: Architecture, tokens: int, memory_gb: float, reserve: float) -> dict:
    memory = (memory_gb * GIGA, memory_gb * GIGA * reserve)
    per_token = cost.kv_cache_bytes_per_token(a, DTYPE, "engine")
    every_head = a.layers * a.heads * (a.key_dim + a.value_dim) * cost.BYTES_PER_VALUE[DTYPE]
    left = max(0.0, memory[0] - memory[1] - cost.weight_bytes(a, DTYPE))
    counts = {
        "requests": cost.requests_that_fit(a, tokens, *memory, DTYPE),
        "requests_8_bit": cost.requests_that_fit(a, tokens, *memory, DTYPE, "float8"),
        "requests_multi_head": int(left // (cost.in_blocks(tokens) * every_head)),
    }
    return {
        "model": name, "kind": kind(a), "weight_bytes": cost.weight_bytes(a, DTYPE), "kv_bytes_per_token": per_token,
        "multi_head_bytes_per_token": every_head, "shared": every_head / per_token, "max_positions": a.max_positions,
        **(counts if tokens <= a.max_positions else dict.fromkeys(counts)),
    }  # fmt: skip


def by_length(memory_gb: float, reserve: float) -> pd.DataFrame:
    """One row per charted model and context length within its positions: `requests` that fit."""
    memory = (memory_gb * GIGA, memory_gb * GIGA * reserve)
    rows = [
        {"model": name, "context_length": tokens, "requests": cost.requests_that_fit(a, tokens, *memory, DTYPE)}
        for name, a in ((name, known_models()[name]) for name in CHARTED)
        for tokens in LENGTHS
        if tokens <= a.max_positions
    ]
    return pd.DataFrame(rows)
