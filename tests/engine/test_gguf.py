"""A GGUF file becomes the model that it was made from, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models_for_tests import ARCHITECTURES, EOS_TOKEN_ID, VOCAB_SIZE, build, config_of, hf_tokenizer
from tieredkv import gguf as gguf_files
from tieredkv.config import ModelConfig
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.gguf_tokenizer import byte_level_tokenizer
from tieredkv.models import LoadedModel, load_model, stock_logits
from tieredkv.tokenizer import Tokenizer

TOKENS = [5, 260, 17, 81, 262, 30, 99, 260]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDKV_CACHE_DIR", str(tmp_path / "cache"))


def load(model: Path | str, **settings) -> LoadedModel:
    return load_model(ModelConfig(model=str(model), device="cpu", **settings), 16)


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


def write_bare_gguf(path: Path, architecture: str = "llama", vocab_size: int = 8, fields=None, tensors=()) -> Path:
    """A file with an embedding, `fields` and the named `tensors`, but no layers."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_context_length(4096)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (fields or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    for name in ("token_embd.weight", *tensors):
        writer.add_tensor(name, torch.zeros(vocab_size, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "fields", "tensors", "reason"),
    [
        ("llama", {"llama.expert_count": 4}, (), "mixture-of-experts"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, (), "'longrope'"),
        ("phi3", {}, ("rope_factors_long.weight",), "'longrope'"),
        ("llama", {"llama.rope.dimension_count": 8}, (), "partial RoPE"),
        ("llama", {"llama.attention.value_length": 8}, (), "differ in head size"),
        ("llama", {"llama.rope.scaling.type": "linear"}, (), r"lacks the key llama\.rope\.scaling\.factor"),
        ("llama", {}, ("blk.0.ssm_a.weight",), r"tensor 'blk\.0\.ssm_a\.weight'"),
        ("llama", {"tokenizer.ggml.model": "bert"}, (), "'bert'"),
        ("stablelm", {}, (), "architecture 'stablelm'"),
    ],
)
def test_gguf_files_that_would_come_out_wrong(architecture, fields, tensors, reason, tmp_path):
    path = write_bare_gguf(tmp_path / "x.gguf", architecture, fields=fields, tensors=tensors)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(path)


WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    *[f"<0x{b:02X}>" for b in range(256)],
    "▁",
    "a",
    "b",
    "▁a",
    "▁b",
    "ab",
    "▁ab",
    "<|user|>",
]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-1000.0, -5.0, -6.0, -1.0, -2.0, -3.0, -4.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 7 + [3],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def converted(path: Path, folder: Path) -> Path:
    folder.mkdir()
    gguf_files.convert(path, folder, lambda stage, fraction: None)
    return folder


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab a", ["<s>", "▁ab", "▁a"]),
        ("日", ["<s>", "▁", "<0xE6>", "<0x97>", "<0xA5>"]),
        ("<|user|>a b", ["<s>", "<|user|>", "a", "▁b"]),
    ],
)
def test_a_sentencepiece_vocabulary_in_a_gguf_file(text, pieces, tmp_path):
    path = write_bare_gguf(tmp_path / "x.gguf", vocab_size=len(WORDS), fields=SENTENCEPIECE)
    tokenizer = Tokenizer.from_folder(converted(path, tmp_path / "out"))
    tokens = tokenizer.encode(text)
    assert [WORDS[i] for i in tokens] == pieces
    assert tokenizer.decode(tokens) == text.removeprefix("<|user|>")
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("architecture", "fields", "rope"),
    [
        (
            "llama",
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 5e5},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        ),
        (
            "qwen2",
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 2.0,
                "qwen2.rope.scaling.original_context_length": 2048,
            },
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048},
        ),
        (
            "phi3",
            {"phi3.rope.dimension_count": 12},
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        ),
    ],
)
def test_rope_in_a_gguf_file(architecture, fields, rope, tmp_path):
    path = write_bare_gguf(tmp_path / "x.gguf", architecture, len(WORDS), SENTENCEPIECE | fields)
    config = AutoConfig.from_pretrained(converted(path, tmp_path / "out"))
    assert rope.items() <= config.rope_parameters.items()


def test_a_window_in_a_gguf_file_is_not_forgotten(tmp_path):
    fields = SENTENCEPIECE | {"llama.attention.sliding_window": 512}
    path = write_bare_gguf(tmp_path / "x.gguf", "llama", len(WORDS), fields)
    config = AutoConfig.from_pretrained(converted(path, tmp_path / "out"))
    assert (config.model_type, config.sliding_window) == ("mistral", 512)


def test_a_window_of_unknown_layers_is_refused(tmp_path):
    fields = SENTENCEPIECE | {"qwen2.attention.sliding_window": 512}
    path = write_bare_gguf(tmp_path / "x.gguf", "qwen2", len(WORDS), fields)
    with pytest.raises(UnsupportedModelError, match="not which layers have it"):
        converted(path, tmp_path / "out")


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
