"""Whether a model would be computed rightly, decided by checks and not by names.

Two looks: `check_config` before any weight is read, and `probe_attention` on the loaded model, which records what each
layer really hands to attention. Knows what the kernels can do (causal softmax attention over all earlier tokens, one
head size, grouped queries); knows no blocks. Every refusal is an `UnsupportedModelError` that names its reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tieredkv.errors import ConfigError, UnsupportedModelError

# The variants whose rotated keys depend on the position alone, never on how long the prompt has become.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_PROBE = "tieredkv_probe"
_MULTIMODAL = ("vision_config", "audio_config", "text_config", "speech_config", "image_token_id", "image_token_index")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")
_REFUSED_ARGUMENTS = {
    "softcap": "attention logit soft-capping",
    "s_aux": "attention sinks",
    "sliding_window": "a sliding window",
    "position_bias": "attention biased by position",
    "attention_mask": "attention under its own mask",
}


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What the probe saw: the same for every layer, except `scalings`, one per layer."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scalings: tuple[float, ...]


def check_config(config: Any, max_model_len: int | None) -> int:
    """Refuse what the kernels would compute wrongly; return the most tokens that this model supports.

    A sliding window as wide as that number never hides a token, so it is switched off in `config`. Raises
    `UnsupportedModelError`, or `ConfigError` for a `max_model_len` beyond the model.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not supported: only decoders have a prefix to reuse")
    if any(getattr(config, name, None) is not None for name in _MULTIMODAL):
        raise UnsupportedModelError("multimodal models are not supported: a block's identity covers text tokens only")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            "quantized weights are not supported: use a checkpoint in 16 or 32 bits, or a GGUF file"
        )
    if any(getattr(config, name, None) for name in _LATENT):
        raise UnsupportedModelError("multi-head latent attention is not supported")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError("layers that share another layer's keys and values are not supported")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("attention biased by position (ALiBi) is not supported")
    for name in ("attn_logit_softcapping", "attn_logit_cap"):
        if getattr(config, name, None):
            raise UnsupportedModelError(f"attention logit soft-capping ({name}) is not supported")
    for kind in rope_kinds(config):
        if kind not in _STATIC_ROPE:
            raise UnsupportedModelError(
                f"RoPE of type {kind!r} may rotate a key differently as the prompt grows, which makes cached keys wrong"
            )
    trained = _context_length(config)
    if max_model_len is not None and trained is not None and max_model_len > trained:
        raise ConfigError(f"the model supports at most {trained} tokens, got {max_model_len}", key="max_model_len")
    wanted = max_model_len or trained
    if wanted is None:
        raise ConfigError(
            "must be given: the model's config does not say how many tokens it supports", key="max_model_len"
        )
    window = _sliding_window(config)
    if window is None:
        return trained or wanted
    if wanted > window:
        raise UnsupportedModelError(
            f"the model attends to a sliding window of {window} tokens, which is not supported for contexts longer than "
            f"the window; --max-model-len {window} or less makes it exact"
        )
    config.sliding_window = None
    return window if trained is None else min(window, trained)


def rope_kinds(config: Any) -> Iterator[str]:
    """The RoPE types in use: one, or one per kind of layer; none for models without RoPE."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for one in nested or [parameters]:
        yield str(one.get("rope_type") or one.get("type") or "default")


def _context_length(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _sliding_window(config: Any) -> int | None:
    """The window when all layers have it; None when no layer has one. Raises for any other kind or mix of layers."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"layers of type {sorted(unknown)[0]!r} are not supported, only full attention is")
    if len(kinds) == 2:
        raise UnsupportedModelError("models that mix full and sliding-window attention are not supported")
    window = getattr(config, "sliding_window", None)
    if kinds == {"sliding_attention"}:
        raise UnsupportedModelError("layers of type 'sliding_attention' are not supported, only full attention is")
    if kinds == {"full_attention"} or window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window)


def check_model_class(model_class: Any) -> None:
    """Refuse a model whose code would not pass our attention its arguments. Raises `UnsupportedModelError`."""
    name = model_class.__name__
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not let its attention be replaced (_supports_attention_backend is not set)"
        )
    accepted = inspect.signature(model_class.forward).parameters
    for argument in ("position_ids", "logits_to_keep"):
        if argument not in accepted:
            raise UnsupportedModelError(
                f"{name}.forward does not accept {argument}, so tokens cannot be placed in a batch"
            )


def probe_attention(model: Any) -> AttentionFacts:
    """Run two tokens through the loaded model and check every call that reaches attention.

    Raises `UnsupportedModelError` when a layer mixes tokens by other means than one call of causal attention, or asks
    for something that the kernels do not do.
    """
    from transformers import AttentionInterface

    calls: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], float]] = []
    marker = object()

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        if kwargs.get("kv_batch") is not marker:
            raise UnsupportedModelError(f"{type(module).__name__} does not pass our argument on to attention")
        for argument, meaning in _REFUSED_ARGUMENTS.items():
            if (attention_mask if argument == "attention_mask" else kwargs.get(argument)) is not None:
                raise UnsupportedModelError(f"{meaning} is not supported ({type(module).__name__} asks for it)")
        if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(module).__name__} attends to later tokens, which cannot be cached")
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        layer = getattr(module, "layer_idx", None)
        calls.append(
            (-1 if layer is None else int(layer), tuple(query.shape), tuple(key.shape), tuple(value.shape), scaling)
        )
        output = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_PROBE, record)
    before = model.config._attn_implementation
    tokens = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    model.set_attn_implementation(_PROBE)
    try:
        with torch.inference_mode():
            model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=model.device),
                kv_batch=marker,
            )
    finally:
        model.set_attn_implementation(before)
    num_layers = int(model.config.num_hidden_layers)
    if sorted(call[0] for call in calls) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{len(calls)} calls of attention in {num_layers} layers: every layer must call it exactly once with its own "
            "index (recurrent and state-space layers are not supported)"
        )
    _, query, key, value, _ = calls[0]
    if any(call[1:4] != (query, key, value) for call in calls) or key != value or query[-1] != key[-1]:
        raise UnsupportedModelError("keys and values must have one shape in all layers")
    return AttentionFacts(num_layers, query[1], key[1], key[-1], tuple(call[4] for call in sorted(calls)))
