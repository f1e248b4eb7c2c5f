"""A GGUF file, dequantized to a folder in Hugging Face layout: config.json, model.safetensors, tokenizer files.

Knows the file format's names for dense decoders (Llama, Mistral, Qwen2, Qwen3, Phi-3) and nothing of caches or devices.
Every tensor of the file is either mapped, or known to be redundant, or the file is refused: a silently dropped tensor
is a wrong model. Names and keys follow the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tieredkv.errors import UnsupportedModelError
from tieredkv.gguf_tokenizer import write_tokenizer

_HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
# These store query and key rows in interleaved pairs, the others in halves as transformers does.
_INTERLEAVED = frozenset({"llama", "mistral"})
_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"^blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Fields:
    """The file's key-value pairs; keys of the model start with its architecture's name."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def model(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.model(key)
        if value is None:
            raise UnsupportedModelError(f"the GGUF file lacks the key {self.architecture}.{key}")
        return value


def convert(file: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write config, weights (bfloat16 unless the file holds float32 or float16) and tokenizer of `file` into `folder`.

    Raises `UnsupportedModelError` for an architecture, a tensor or a RoPE variant that would come out wrong.
    """
    progress("Reading the GGUF file", 0.0)
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, IndexError, OverflowError) as error:
        raise UnsupportedModelError(f"{file.name} is not a readable GGUF file: {error}") from error
    fields = _Fields(reader)
    if fields.architecture not in _HF_CLASSES:
        raise UnsupportedModelError(
            f"GGUF files of architecture {fields.architecture!r} are not supported, only {', '.join(_HF_CLASSES)}; "
            "a folder in Hugging Face layout may work"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    dtype = _stored_dtype(tensors)
    config = _config(fields, tensors, dtype)
    weights: dict[str, torch.Tensor] = {}
    for done, (name, tensor) in enumerate(tensors.items()):
        progress(f"Dequantizing to {dtype}", done / len(tensors))
        if name == _ROPE_FACTORS:
            continue
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if fields.architecture in _INTERLEAVED and re.search(r"\.attn_[qk]\.", name):
            heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
            array = deinterleave(array, heads)
        weights[_hf_name(name, fields.architecture)] = torch.tensor(array).to(_DTYPES[dtype])
    progress("Writing the converted weights", 0.95)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    eos = {fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")} - {None}
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": sorted(int(i) for i in eos)}
    _write_json(folder / "generation_config.json", generation)
    progress("Writing the tokenizer", 0.98)
    write_tokenizer(file, fields.get, folder)


def deinterleave(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head from pairs `(x0, y0, x1, y1, ...)` to halves `(x0, x1, ..., y0, y1, ...)`, as transformers rotates."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _hf_name(name: str, architecture: str) -> str:
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name]
    found = _LAYER_NAME.match(name)
    if not found or found[2] not in _LAYER_TENSORS:
        raise UnsupportedModelError(f"the GGUF file holds the tensor {name!r}, which no supported architecture has")
    part = _LAYER_TENSORS[found[2]]
    if architecture == "phi3" and found[2] == "ffn_up":
        part = "mlp.gate_up_proj"
    return f"model.layers.{found[1]}.{part}.{found[3]}"


def _stored_dtype(tensors: Mapping[str, Any]) -> str:
    """bfloat16, or the type of all matrices where the file is not quantized."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds and kinds <= {"F16", "F32"} else "bfloat16"


def _config(fields: _Fields, tensors: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    architecture = fields.architecture
    if fields.model("expert_count", 0):
        raise UnsupportedModelError("GGUF files with mixture-of-experts layers are not supported")
    hidden = int(fields.required("embedding_length"))
    heads = int(fields.required("attention.head_count"))
    head_dim = int(fields.model("attention.key_length", hidden // heads))
    if int(fields.model("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError("keys and values of this GGUF model differ in head size")
    context = int(fields.required("context_length"))
    window = fields.model("attention.sliding_window")
    if window and architecture.startswith("qwen"):
        raise UnsupportedModelError(
            "this GGUF file names a sliding window but not which layers have it: convert the model's own folder instead"
        )
    if window and architecture == "llama":
        # The same weights; of the two classes, only this one attends within a window.
        architecture = "mistral"
    config: dict[str, Any] = {
        "architectures": [_HF_CLASSES[architecture]],
        "model_type": architecture,
        "dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields.required("feed_forward_length")),
        "num_hidden_layers": int(fields.required("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.model("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        # Single precision in the file: without rounding, 1e-05 would come back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields.required('attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "sliding_window": int(window) if window else None,
        "rope_parameters": _rope(fields, tensors, head_dim, context),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "phi3":
        config["original_max_position_embeddings"] = context
    return config


def _rope(fields: _Fields, tensors: Mapping[str, Any], head_dim: int, context: int) -> dict[str, Any]:
    rotated = int(fields.model("rope.dimension_count", head_dim))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(fields.model("rope.freq_base", 10000.0))}
    if rotated != head_dim:
        if fields.architecture != "phi3":
            raise UnsupportedModelError(f"partial RoPE in a GGUF file of architecture {fields.architecture!r}")
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = fields.model("rope.scaling.type", "none")
    if any(name.startswith("rope_factors_") for name in tensors):
        raise UnsupportedModelError("RoPE of type 'longrope' changes cached keys as a prompt grows")
    if _ROPE_FACTORS in tensors:
        factors = np.asarray(gguf.dequantize(tensors[_ROPE_FACTORS].data, tensors[_ROPE_FACTORS].tensor_type))
        return rope | llama3_scaling(factors.ravel(), rope["rope_theta"], rotated)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"RoPE scaling of type {kind!r} in a GGUF file is not supported")
    rope |= {"rope_type": kind, "factor": float(fields.required("rope.scaling.factor"))}
    if kind == "yarn":
        original = fields.model("rope.scaling.original_context_length", context)
        rope["original_max_position_embeddings"] = int(original)
    return rope


def llama3_scaling(factors: NDArray[np.float32], theta: float, rotated: int) -> dict[str, Any]:
    """The parameters behind a stored factor per frequency, found by trying the published ones.

    Llama 3.1 divides slow frequencies by 8, Llama 3.2 by 32, and blends between wavelengths of 8192 / 4 and 8192 / 1.
    """
    frequencies = theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    wavelengths = 2 * math.pi / frequencies
    factor, low, high, original = round(float(factors.max()), 3), 1.0, 4.0, 8192
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError("the GGUF file scales RoPE by a table that is not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
