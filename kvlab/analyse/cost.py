"""Arithmetic on a model's configuration: what the report predicts before it measures."""

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_cache_bytes_per_token(config, dtype: str) -> int:
    """Bytes that one token adds to the KV cache: keys and values of every layer and KV head.

    `config` is a configuration or its outline (`kvlab.models.outline`). Multi-head, grouped-query and multi-query
    attention differ in their number of KV heads only. Raises ValueError for latent attention: another layout.
    """
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{config.model_type} has latent attention; its cache size is not predicted yet")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * BYTES_PER_VALUE[dtype]
