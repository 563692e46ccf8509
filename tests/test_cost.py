"""The cost model against Transformers itself: real modules' parameters, real caches' bytes, torch's FLOP counter."""

import pytest
import torch
import transformers
import yaml
from torch.utils.flop_counter import FlopCounterMode

from kvlab import models, weights
from kvlab.analyse import cost
from kvlab.analyse.architecture import FAMILIES, KNOWN_MODELS
from kvlab.measure import decoding, timing

torch.set_num_threads(1)
SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
GPT = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
LATENT = {**SMALL, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 8,
          "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip
MIXTURE = {**SMALL, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 8}
VARIANTS = {  # (model_type, what its configuration says)
    **{kind: (kind, SMALL) for kind in FAMILIES if kind not in ("gpt2", "gpt_bigcode", "deepseek_v2", "deepseek_v3")},
    "llama with biases": ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "llama tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen2 windowed late": ("qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 16,
                                      "max_window_layers": 2}),
    "qwen3 head_dim": ("qwen3", {**SMALL, "head_dim": 32}),
    "mistral windowed": ("mistral", {**SMALL, "sliding_window": 16}),
    "gemma2 hybrid": ("gemma2", {**SMALL, "sliding_window": 16, "head_dim": 32}),
    "gemma3 hybrid": ("gemma3_text", {**SMALL, "sliding_window": 16, "head_dim": 32, "num_hidden_layers": 7}),
    "gpt2": ("gpt2", GPT),
    "gpt2 inner": ("gpt2", {**GPT, "n_inner": 100, "tie_word_embeddings": False}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "opt narrow": ("opt", {**SMALL, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "stablelm biased": ("stablelm", {**SMALL, "use_qkv_bias": True, "qk_layernorm": True,
                                     "use_parallel_residual": True}),
    "phi normed": ("phi", {**SMALL, "qk_layernorm": True, "num_key_value_heads": 4}),
    "falcon grouped": ("falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon serial": ("falcon", {**SMALL, "parallel_attn": False, "multi_query": False}),
    "deepseek_v2": ("deepseek_v2", LATENT),
    "deepseek_v2 lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 2, "topk_group": 1, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", {**MIXTURE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**MIXTURE, "decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
}  # fmt: skip
EVERY = pytest.mark.parametrize("kind, settings", VARIANTS.values(), ids=VARIANTS.keys())


def configuration(kind, settings):
    named = {**settings, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.CONFIG_MAPPING[kind](**named)


def model_of(config, device="cpu", attention="eager"):
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.config._experts_implementation = "eager"  # the counter knows no grouped kernels
    return model.eval()


def shape_of(config):
    return cost.architecture(weights.outline(config)["config"])


@EVERY
def test_parameters_are_those_of_the_real_modules(kind, settings):
    config = configuration(kind, settings)
    assert cost.parameters(shape_of(config)) == sum(w.numel() for w in model_of(config, "meta").parameters())


@pytest.mark.parametrize("name", sorted(set(cost.known_models())))
def test_a_well_known_model_has_its_published_size(name):
    written = yaml.safe_load(KNOWN_MODELS.read_text())[name]
    model = model_of(transformers.CONFIG_MAPPING[written["model_type"]](**written), "meta")
    assert cost.parameters(cost.known_models()[name]) == sum(w.numel() for w in model.parameters())


@EVERY
def test_kv_bytes_are_those_of_a_real_cache(kind, settings):
    config, prompt = configuration(kind, settings), list(range(1, 21))
    generation = decoding.generate(model_of(config), prompt, 5, use_cache=True, synchronize=timing.synchronizer("cpu"))
    assert cost.kv_cache_bytes(shape_of(config), len(prompt) + 4, "float32") == generation.kv_cache_bytes


@EVERY
def test_flops_are_those_that_torch_counts(kind, settings):
    config = configuration(kind, settings)
    model, shape = model_of(config), shape_of(config)
    last_logits = decoding._last_logits_function(model)
    ids, past = torch.randint(1, 300, (2, 24)), transformers.DynamicCache(config=config)
    with torch.inference_mode(), FlopCounterMode(display=False) as prefill:
        last_logits(ids, past, True)
    with torch.inference_mode(), FlopCounterMode(display=False) as step:
        last_logits(ids[:, :1], past, True)
    assert prefill.get_total_flops() == pytest.approx(cost.prefill_flops(shape, 24, batch=2), rel=0.01)
    assert step.get_total_flops() == pytest.approx(cost.decode_step_flops(shape, 24, batch=2), rel=0.01)


@pytest.mark.parametrize("architecture", sorted(models.TINY_ARCHITECTURES))
def test_the_outline_of_every_random_model_can_be_costed(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    source = models.resolve(f"random:{architecture}")
    if architecture == "mamba":
        with pytest.raises(ValueError, match="no KV cache"):
            cost.architecture(models.outline(source).config)
        return
    count = sum(w.numel() for w in model_of(weights.config(source), "meta").parameters())
    assert cost.parameters(cost.architecture(models.outline(source).config)) == count


def test_a_kept_outline_without_a_configuration_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    source = models.resolve("random:llama")
    models.outline(source)
    (kept,) = (tmp_path / "outlines").iterdir()
    kept.write_text('{"model_type": "llama", "max_positions": 1}')
    assert models.outline(source).max_positions == 256 and models.outline(source).config["hidden_size"] == 64


def test_a_decode_step_reads_no_untied_embedding_and_no_idle_expert():
    llama, tied = (shape_of(configuration("llama", {**SMALL, "tie_word_embeddings": tie})) for tie in (False, True))
    assert cost.step_weight_bytes(llama, "float32") == cost.step_weight_bytes(tied, "float32")
    assert cost.weight_bytes(llama, "float32") - cost.step_weight_bytes(llama, "float32") == 320 * 64 * 4
    lite = cost.known_models()["DeepSeek-V2-Lite"]
    one, many = (cost.step_weight_bytes(lite, "bfloat16", batch) / 2 for batch in (1, 10_000))
    assert 2.4e9 < one < 2.8e9  # "2.4 B activated parameters", its publisher says
    assert many == pytest.approx(cost.parameters(lite) - lite.embedding)


def test_latent_attention_keeps_latents():
    lite = cost.known_models()["DeepSeek-V2-Lite"]
    for layout in ("transformers", "engine"):
        assert cost.kv_cache_bytes_per_token(lite, "bfloat16", layout=layout) == 27 * (512 + 64) * 2


def test_a_dynamic_cache_copies_what_it_holds_and_eager_attention_repeats_the_heads():
    llama = cost.known_models()["Llama-3-8B"]
    held = cost.kv_cache_bytes(llama, 100, "bfloat16")
    copied = {(attention, cache): cost.cache_copy_bytes(llama, 100, "bfloat16", attention, cache) / held
              for attention in ("eager", "sdpa") for cache in ("dynamic", "static")}  # fmt: skip
    assert copied == {("eager", "dynamic"): 10, ("eager", "static"): 8, ("sdpa", "dynamic"): 2, ("sdpa", "static"): 0}


def test_an_unknown_model_type_is_answered_with_the_nearest_known_one():
    with pytest.raises(ValueError, match="'qwen9'.*'qwen3'|'qwen9'.*'qwen2'"):
        cost.architecture({"model_type": "qwen9"})
