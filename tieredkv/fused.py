"""Decoder layers of the Llama family in few, large operations, for the CPU.

transformers runs about sixty small operations per layer; on a CPU a decode step spends more time between products than in
them. Where a model has the common structure, this module runs the same arithmetic itself:

    hidden -> norm -> q|k|v as one product -> rotate q|k at once -> pool -> attention -> output product, + hidden inside
           -> norm -> gate|up as one product -> silu(gate) * up -> down product, + hidden inside

Structure is decided by what modules are there and of which kind, not by the model's name. What structure cannot show (a
multiplier somewhere in a forward method) is found by comparing logits with stock transformers before anything is packed:
that is the caller's duty. Knows nothing of requests or of who owns a block.

Invariant: equal to the stock model up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tieredkv.attention import AttentionStep, KVBatch
from tieredkv.layout import KVLayout
from tieredkv.linear import StackedLinear
from tieredkv.norm import Norm

_SILU = ("silu", "swish")
# Rows that go through the second half of a layer together: their intermediate values fit in the second-level cache.
_TILE = 256
# Models up to this size keep a second, plain copy of their weights, which makes one stream's step a sixth faster.
_ROW_COPIES_NBYTES = 512 * 1024**2
# Attributes of attention modules that change what they compute.
_SPECIAL_ATTENTION = ("sliding_window", "use_rope", "sinks", "attn_logit_softcapping", "softcap")


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights and constants."""

    index: int
    num_heads: int
    scale: float
    input_norm: Norm
    qkv: StackedLinear
    q_norm: Norm | None
    k_norm: Norm | None
    output: StackedLinear
    post_norm: Norm
    gate_up: StackedLinear
    down: StackedLinear


class FusedModel:
    """A causal language model as a loop over fused layers. Built unpacked: it reads the transformers modules' weights."""

    def __init__(
        self,
        embedding: nn.Embedding,
        rotary: nn.Module,
        layers: list[_Layer],
        norm: Norm,
        head: StackedLinear,
        layout: KVLayout,
        tied: bool,
    ) -> None:
        self._embedding = embedding
        # What embeds: the module, or the head's packed weight where they share it.
        self._embed: Callable[[torch.Tensor], torch.Tensor] = embedding
        self._rotary = rotary
        self._layers = layers
        self._norm = norm
        self._head = head
        self._tied = tied
        self._num_kv_heads = layout.num_kv_heads
        self._head_dim = layout.head_dim

    def pack(self) -> None:
        """Lay the weights out for speed, layer by layer, and empty the transformers modules: these no longer run."""
        gated = [layer.gate_up for layer in self._layers]
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.output, layer.down)]
        keep_rows = sum(linear.nbytes for linear in gated + linears) <= _ROW_COPIES_NBYTES
        for linear in linears:
            linear.pack(keep_rows=keep_rows)
        for linear in gated:
            linear.pack(keep_rows=keep_rows, gated=True)
        shared = self._tied and self._head.can_be_read
        if not shared:
            # A mapped file stays in memory as a whole as long as one tensor lies in it. Tied modules have one parameter.
            self._embedding.weight.data = self._embedding.weight.data.clone()
        self._head.pack(keep_rows=keep_rows or self._tied)
        if shared:
            self._embed = self._head.weight_rows
            self._embedding.weight = nn.Parameter(self._embedding.weight.new_empty(0), requires_grad=False)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, kv_batch: AttentionStep
    ) -> torch.Tensor:
        """Logits [N, vocabulary] of the `rows` [N] of the step's tokens; token_ids, positions int64 [T]."""
        hidden = self._embed(token_ids)
        cos, sin = self._rotation(hidden, positions)
        for layer in self._layers:
            hidden = self._run(layer, hidden, cos, sin, kv_batch)
        if not len(rows):
            # A part of a long prompt: nothing is sampled, and torch's weight normalisation divides by the number of rows.
            none: torch.Tensor = hidden.new_empty((0, self._embedding.num_embeddings))
            return none
        return self._head(hidden.index_select(0, rows), self._norm)

    def _rotation(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [T, 1, head_dim], with ones where the head is not rotated, and sin [T, 1, rotated / 2] of this step."""
        cos, sin = self._rotary(hidden[None], positions[None])
        cos, sin = cos[0], sin[0, :, : sin.shape[-1] // 2]
        if cos.shape[-1] < self._head_dim:
            cos = F.pad(cos, (0, self._head_dim - cos.shape[-1]), value=1.0)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _run(
        self, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_batch: AttentionStep
    ) -> torch.Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        heads, kv_heads = layer.num_heads, self._num_kv_heads
        qkv = layer.qkv(hidden, layer.input_norm).view(-1, heads + 2 * kv_heads, self._head_dim)
        normed = layer.q_norm is not None and layer.k_norm is not None
        if not normed and isinstance(kv_batch, KVBatch) and kv_batch.write_rotated(layer.index, qkv, cos, sin):
            q = qkv[:, :heads]
        else:
            rotated, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
            if layer.q_norm is not None and layer.k_norm is not None:
                rotated = torch.cat((layer.q_norm(qkv[:, :heads]), layer.k_norm(qkv[:, heads : heads + kv_heads])), 1)
            rotated = rotate(rotated, cos, sin)
            q, k = rotated[:, :heads], rotated[:, heads:]
            kv_batch.write(layer.index, k, v)
        attended = kv_batch.attend(layer.index, q, layer.scale)
        hidden = layer.output.add(attended.reshape(len(qkv), -1), hidden)
        if len(hidden) <= _TILE:
            return _mlp(layer, hidden)
        return torch.cat([_mlp(layer, rows) for rows in torch.split(hidden, _TILE)])


def _mlp(layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
    """The second half of a layer; hidden [T, hidden] -> [T, hidden]."""
    return layer.down.add(layer.gate_up.gated(hidden, layer.post_norm), hidden)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, head_dim] in the two-halves convention: `(a, b) -> (a cos - b sin, b cos + a sin)`."""
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half : 2 * half], sin, value=-1)
    out[..., half : 2 * half].addcmul_(x[..., :half], sin)
    return out


def from_model(model: Any, layout: KVLayout) -> FusedModel | None:
    """The model as fused layers, unpacked, or None where its structure is not the one known here."""
    top = _children(model)
    base = _children(top.get("model"))
    head, embedding, layers = top.get("lm_head"), base.get("embed_tokens"), base.get("layers")
    if set(top) != {"model", "lm_head"} or set(base) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    if type(head) is not nn.Linear or type(embedding) is not nn.Embedding or not isinstance(layers, nn.ModuleList):
        return None
    if getattr(model.config, "hidden_act", None) not in _SILU:
        return None
    norm = _read_norm(base["norm"])
    found = [_read_layer(layer, layout) for layer in layers]
    known = [layer for layer in found if layer is not None]
    if norm is None or len(known) != len(found) or [layer.index for layer in known] != list(range(layout.num_layers)):
        return None
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    return FusedModel(embedding, base["rotary_emb"], known, norm, StackedLinear([head]), layout, tied)


def _children(module: nn.Module | None) -> dict[str, nn.Module]:
    """Child modules that compute something when not training."""
    if module is None:
        return {}
    return {k: m for k, m in module.named_children() if not isinstance(m, nn.Dropout | nn.Identity)}


def _read_norm(module: nn.Module | None) -> Norm | None:
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return None
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    return Norm(weight.detach(), eps)


def _read_linears(children: dict[str, nn.Module], *choices: tuple[str, ...]) -> list[nn.Linear] | None:
    """The first choice of names that are all there as plain linear layers."""
    for names in choices:
        found = [m for m in (children.get(name) for name in names) if type(m) is nn.Linear]
        if len(found) == len(names):
            return found
    return None


def _read_layer(module: nn.Module, layout: KVLayout) -> _Layer | None:
    """A decoder layer's parts, or None when it has other parts, lacks one, or their shapes do not fit the layout."""
    children = _children(module)
    if set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    attention, mlp = _children(children["self_attn"]), _children(children["mlp"])
    qkv = _read_linears(attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
    output = _read_linears(attention, ("o_proj",))
    gate_up = _read_linears(mlp, ("gate_proj", "up_proj"), ("gate_up_proj",))
    down = _read_linears(mlp, ("down_proj",))
    input_norm, post_norm = _read_norm(children["input_layernorm"]), _read_norm(children["post_attention_layernorm"])
    q_norm, k_norm = _read_norm(attention.get("q_norm")), _read_norm(attention.get("k_norm"))
    if qkv is None or output is None or gate_up is None or down is None or input_norm is None or post_norm is None:
        return None
    num_linears = len(qkv) + len(output)
    if len(attention) != num_linears + (q_norm is not None) + (k_norm is not None) or (q_norm is None) != (
        k_norm is None
    ):
        return None
    self_attn: Any = children["self_attn"]
    if any(getattr(self_attn, name, None) is not None for name in _SPECIAL_ATTENTION):
        return None
    num_heads = output[0].in_features // layout.head_dim
    width = sum(linear.out_features for linear in qkv)
    if width != (num_heads + 2 * layout.num_kv_heads) * layout.head_dim or num_heads % layout.num_kv_heads:
        return None
    if any(norm is not None and norm.weight.numel() != layout.head_dim for norm in (q_norm, k_norm)):
        return None
    return _Layer(
        index=int(self_attn.layer_idx),
        num_heads=num_heads,
        scale=float(self_attn.scaling),
        input_norm=input_norm,
        qkv=StackedLinear(qkv),
        q_norm=q_norm,
        k_norm=k_norm,
        output=StackedLinear(output),
        post_norm=post_norm,
        gate_up=StackedLinear(gate_up),
        down=StackedLinear(down),
    )
