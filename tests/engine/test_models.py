"""A model is found, checked, loaded and named; one that would be computed wrongly is refused with the reason."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.engine.test_model_runner import sequences
from tests.models_for_tests import ARCHITECTURES, EOS_TOKEN_ID, VOCAB_SIZE, build, config_of, hf_tokenizer
from tests.naive_kernels import OPS
from tieredkv import support
from tieredkv.batch import build_batch
from tieredkv.config import Config, ModelConfig
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.model_runner import ModelRunner
from tieredkv.models import LoadedModel, choose_device, choose_dtype, load_model, stock_logits
from tieredkv.sequence import ScheduledSequence, Sequence

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
    assert 0.0 <= stages[0] <= stages[-1] < 1.0, "what follows loading still has to be done"
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


def test_a_window_as_wide_as_the_context_is_no_window(tmp_path):
    folder = build("mistral", tmp_path / "tiny", sliding_window=64)
    wider = load(folder, max_model_len=65)
    assert (wider.max_model_len, wider.facts.windows) == (2048, (64, 64, 64))
    loaded = load(folder, max_model_len=64)
    assert loaded.max_model_len == 64
    assert loaded.facts.is_plain
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
        ("GPTNeoXConfig", {}),
        ("GlmConfig", {"head_dim": 16}),
        ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("Cohere2Config", {"sliding_window": 7}),
    ],
)
def test_other_decoders_whose_attention_fits_are_served(kind, settings, tmp_path):
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
    made = sequences([50] * 5)
    expected = [stock_logits(loaded.model, sequence.token_ids, "eager") for sequence in made]
    for ops in (OPS, None):
        runner = ModelRunner(loaded, Config.load({"device": "cpu", "num_gpu_blocks_override": 200}), ops=ops)
        runner.self_check()
        for found, stock in zip(run_side_by_side(runner, sequences([50] * 5)), expected, strict=True):
            tolerance = 1e-4 * stock.abs().max().item()
            for position, row in found.items():
                torch.testing.assert_close(row, stock[position], rtol=1e-4, atol=tolerance)


def run_side_by_side(runner: ModelRunner, made: list[Sequence]) -> list[dict[int, torch.Tensor]]:
    """Compute equally long sequences together: a prompt's half, some tokens one a step, the rest; logits by position."""
    prompts = [list(sequence.token_ids) for sequence in made]
    found: list[dict[int, torch.Tensor]] = [{} for _ in made]
    borders = [0, 25, 26, 27, 28, len(prompts[0])]
    for start, end in itertools.pairwise(borders):
        parts = []
        for sequence, prompt in zip(made, prompts, strict=True):
            sequence.token_ids = prompt[:end]
            parts.append(ScheduledSequence(sequence, start, end - start))
        for rows, row in zip(found, runner.logits(build_batch(parts, 16)), strict=True):
            rows[end - 1] = row.clone()
    return found


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
        ({"s_aux": torch.zeros(4)}, "sinks"),
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


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen2MoeConfig", {"use_sliding_window": True, "max_window_layers": 1, "moe_intermediate_size": 32}),
        ("PhimoeConfig", {"num_local_experts": 4}),
    ],
)
def test_a_window_that_only_the_mask_knows_of_is_noticed(kind, settings):
    """transformers' own attention goes by the mask; prompts shorter than the window would be answered rightly."""
    config = getattr(transformers, kind)(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        sliding_window=4000,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="the mask hides the token 4095 before"):
        support.probe_attention(model)


@pytest.mark.parametrize(("window", "told"), [(4000, 4001), (4000, 3999), (4000, None), (None, 4000)])
def test_a_window_that_is_not_the_masks_is_noticed(window, told, monkeypatch):
    """What a layer tells attention must be what the mask says, to the token, however wide the window."""
    model = AutoModelForCausalLM.from_config(config_of("mistral", sliding_window=window)).eval()
    assert support.probe_attention(model).windows == (window,) * 3
    for layer in model.model.layers:
        original = layer.self_attn.forward
        monkeypatch.setattr(
            layer.self_attn,
            "forward",
            functools.partial(with_window, original, told),
        )
    with pytest.raises(UnsupportedModelError, match=r"layer 0: the mask (hides|shows)"):
        support.probe_attention(model)


def with_window(forward, window, *args, **kwargs):
    """A layer's forward that tells attention of another window than its mask has."""
    from transformers import AttentionInterface

    name = forward.__self__.config._attn_implementation
    original = AttentionInterface._global_mapping[name]
    AttentionInterface.register(name, lambda *a, **k: original(*a, **(k | {"sliding_window": window})))
    try:
        return forward(*args, **kwargs)
    finally:
        AttentionInterface.register(name, original)


def test_the_probe_leaves_the_model_as_it_was(monkeypatch):
    model = probed(monkeypatch)
    before = model.config._attn_implementation
    facts = support.probe_attention(model)
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (3, 4, 2, 16)
    assert facts.scalings == (0.25,) * 3
    assert facts.is_plain
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


class MixingConstructor(LlamaForCausalLM):
    """A model whose constructor adds what `torch.arange` makes to what other functions make."""

    num_made = 0

    def __init__(self, config) -> None:
        type(self).num_made += 1
        super().__init__(config)
        assert (torch.arange(3) + torch.zeros(3)).shape == (3,)


class TooLargeConstructor(LlamaForCausalLM):
    num_made = 0

    def __init__(self, config) -> None:
        type(self).num_made += 1
        super().__init__(config)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def serve_as(model_class: type, monkeypatch) -> None:
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, LlamaConfig, model_class)


def test_a_model_whose_constructor_mixes_devices_is_loaded_all_the_same(tmp_path, monkeypatch):
    folder = build("llama", tmp_path / "tiny")
    expected = load(folder).model.state_dict()
    serve_as(MixingConstructor, monkeypatch)
    found = load(folder).model.state_dict()
    assert MixingConstructor.num_made == 2
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_model_that_fails_in_another_way_is_not_tried_again(tmp_path, monkeypatch):
    serve_as(TooLargeConstructor, monkeypatch)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load(build("llama", tmp_path / "tiny"))
    assert TooLargeConstructor.num_made == 1


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


def test_one_changed_field_of_attention_changes_the_namespace(tmp_path):
    folder = build("gemma2", tmp_path / "first")
    loaded = load(folder)
    assert loaded.facts.windows == (20, None, 20, None)
    assert loaded.facts.softcaps == (2.0,) * 4
    assert loaded.facts.scalings == (24**-0.5,) * 4
    digests = {"as is": loaded.namespace.digest}
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    changes = {
        "scaling": {"query_pre_attn_scalar": 32},
        "softcap": {"attn_logit_softcapping": 3.0},
        "no softcap": {"attn_logit_softcapping": None},
        "window": {"sliding_window": 21},
        "layers": {"layer_types": kinds},
        "order of layers": {"layer_types": kinds[::-1]},
        "no window": {"layer_types": ["full_attention"] * 4},
    }
    for name, change in changes.items():
        edited = Path(shutil.copytree(folder, tmp_path / name))
        digests[name] = load(edit_config(edited, **change)).namespace.digest
    assert len(set(digests.values())) == len(digests)


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
