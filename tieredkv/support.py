"""Whether a model would be computed rightly, decided by checks and not by names.

Two looks: `check_config` before any weight is read, and `probe_attention` on the loaded model, which records what each
layer really hands to attention, and compares it with the masks that transformers' own attention would apply. Knows what
the kernels can do (causal softmax attention over all earlier tokens or over a window of them, scores capped by tanh, one
head size, grouped queries); knows no blocks. Every refusal is an `UnsupportedModelError` that names its reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tieredkv.errors import ConfigError, UnsupportedModelError

# The variants whose rotated keys depend on the position alone, never on how long the prompt has become.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
_PROBE, _MASK_PROBE = "tieredkv_probe", "tieredkv_mask_probe"
# Whether a query sees a key: (batch, head, position of the query, position of the key) -> bool, of tensors.
MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_MULTIMODAL = ("vision_config", "audio_config", "text_config", "speech_config", "image_token_id", "image_token_index")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")
_REFUSED_ARGUMENTS = {
    "s_aux": "attention sinks",
    "position_bias": "attention biased by position",
    "attention_mask": "attention under its own mask",
}


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What the probe saw: the same for every layer, except what comes once per layer.

    A query attends to the last `windows[layer]` tokens, its own included, or to all (None); scores are capped to
    `softcaps[layer] * tanh(score / softcaps[layer])`, or not at all (None).
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scalings: tuple[float, ...]
    windows: tuple[int | None, ...]
    softcaps: tuple[float | None, ...]

    @property
    def is_plain(self) -> bool:
        """Whether every layer attends to everything, uncapped."""
        return not any((*self.windows, *self.softcaps))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that reached attention in the probe, with the shapes of query, key and value."""

    layer: int
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    scaling: float
    window: int | None
    softcap: float | None


def check_config(config: Any, max_model_len: int | None) -> int:
    """Refuse what the kernels would compute wrongly; return the most tokens that this model supports.

    A sliding window of all layers that is as wide as `max_model_len` never hides a token, so it is switched off in `config`.
    Raises `UnsupportedModelError`, or `ConfigError` for a `max_model_len` beyond the model.
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
    kinds = getattr(config, "layer_types", None) or ()
    if unknown := sorted({*kinds} - _LAYER_KINDS):
        raise UnsupportedModelError(
            f"layers of type {unknown[0]!r} are not supported, only full and sliding-window attention are"
        )
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
    window = getattr(config, "sliding_window", None)
    if window is None or kinds or wanted > window or getattr(config, "use_sliding_window", True) is False:
        return trained or wanted
    config.sliding_window = None
    return int(window) if trained is None else min(int(window), trained)


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

    calls: list[_Call] = []
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
        scaling, window, softcap = kwargs.get("scaling"), kwargs.get("sliding_window"), kwargs.get("softcap")
        layer = getattr(module, "layer_idx", None)
        calls.append(
            _Call(
                layer=-1 if layer is None else int(layer),
                shapes=(tuple(query.shape), tuple(key.shape), tuple(value.shape)),
                scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                window=int(window) if window else None,
                softcap=float(softcap) if softcap else None,
            )
        )
        output = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_PROBE, record)
    _run_two_tokens(model, _PROBE, kv_batch=marker)
    num_layers = int(model.config.num_hidden_layers)
    calls.sort(key=lambda call: call.layer)
    if [call.layer for call in calls] != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{len(calls)} calls of attention in {num_layers} layers: every layer must call it exactly once with its own "
            "index (recurrent and state-space layers are not supported)"
        )
    query, key, value = calls[0].shapes
    if any(call.shapes != (query, key, value) for call in calls) or key != value or query[-1] != key[-1]:
        raise UnsupportedModelError("keys and values must have one shape in all layers")
    _check_masks(model, [call.window for call in calls])
    return AttentionFacts(
        num_layers=num_layers,
        num_heads=query[1],
        num_kv_heads=key[1],
        head_dim=key[-1],
        scalings=tuple(call.scaling for call in calls),
        windows=tuple(call.window for call in calls),
        softcaps=tuple(call.softcap for call in calls),
    )


def _run_two_tokens(model: Any, attention_name: str, **arguments: Any) -> None:
    before = model.config._attn_implementation
    model.set_attn_implementation(attention_name)
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device),
                position_ids=torch.arange(2, device=model.device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=model.device),
                **arguments,
            )
    finally:
        model.set_attn_implementation(before)


def _check_masks(model: Any, windows: Sequence[int | None]) -> None:
    """Refuse a model in which some layer's mask hides other tokens than the layer tells attention to hide.

    transformers' own attention goes by the mask, ours by the layer's arguments, and there are models that build a mask for a
    window which their attention is never told of. Prompts shorter than the window would not show it. So every mask is asked
    for as the rule that it is made by, and the rule is tried around the window's edge.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    rules: list[MaskRule] = []
    found: dict[int, MaskRule] = {}

    def remember(q_length: int, kv_length: int, mask_function: MaskRule, **_: Any) -> torch.Tensor:
        rules.append(mask_function)
        return torch.full((1, 1, q_length, kv_length), float(len(rules)))

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        if isinstance(attention_mask, torch.Tensor) and 1 <= (number := int(attention_mask.amax())) <= len(rules):
            found[module.layer_idx] = rules[number - 1]
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_MASK_PROBE, record)
    AttentionMaskInterface.register(_MASK_PROBE, remember)
    _run_two_tokens(model, _MASK_PROBE)
    for layer, rule in found.items():
        window = windows[layer]
        edges = (window - 1, window) if window else ()
        distances = torch.tensor(sorted({-1, *edges, *(2**i - 1 for i in range(25))}))
        at, zero = torch.tensor(2**25), torch.tensor(0)
        seen = rule(zero, zero, at, at - distances).expand(distances.shape)
        expected = (distances >= 0) & (distances < (window or 2**25))
        if wrong := distances[seen != expected].tolist():
            raise UnsupportedModelError(
                f"layer {layer}: the mask {'hides' if expected[distances == wrong[0]] else 'shows'} the token {wrong[0]} "
                f"before a query's own, while attention is told of {f'a window of {window}' if window else 'no window'}"
            )
