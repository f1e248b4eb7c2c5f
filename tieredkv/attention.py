"""Attention for transformers' models over the block pool, and what a step prepares for it.

`register()` makes "tieredkv" an attention implementation of transformers. A model loaded with it computes queries, keys
and values itself and calls `paged_attention`, which stores the new keys and values in the pool and attends over the
blocks of each sequence. The step's `AttentionStep` travels through the model as the keyword `kv_batch`: a `KVBatch` in
plain torch on a CPU, a `kernel_step.KernelStep` on CUDA.

Knows nothing of requests, of who owns a block, or of how a model is built. Invariants: everything that depends on the
step alone is computed once, in its `AttentionStep`, never per layer; a feature that is not computed is refused.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AttentionInterface

from tieredkv.batch import Batch
from tieredkv.errors import InvariantError, UnsupportedModelError
from tieredkv.kernels import cpu_decode, cpu_linear, cpu_prefill, cpu_rotary, reference
from tieredkv.pool import KVPool

NAME = "tieredkv"
# Keyword -> what it means; each changes the result, so a value that is not None or 0 must not be ignored.
_REFUSED = {"s_aux": "attention sinks", "position_bias": "attention biased by position"}


class AttentionStep(Protocol):
    """One step's view of the pool: where new keys and values go, and which blocks each sequence reads."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the keys and values of the step's tokens; k, v [T, kv_heads, head_dim]."""
        ...

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        """Attention of the step's tokens, whose keys and values are written; q [T, heads, head_dim], same shape back.

        A query sees the last `window` keys, its own included (0: all); scores become `softcap * tanh(score * scale /
        softcap)` (0: as they are).
        """
        ...


class KVBatch:
    """An `AttentionStep` in plain torch, and through kernels that read blocks where they lie where the CPU has them.

    Rows of q, k, v are the step's tokens in the order of `Batch`: decodes first, then prefills.
    """

    def __init__(self, batch: Batch, pool: KVPool) -> None:
        layout = pool.layout
        self.pool = pool
        self.num_decodes = num_decodes = batch.num_decodes
        self._writes = reference.plan_write(batch.slots, layout.num_layers, layout.block_size, pool.device)
        self._tables, self._lens = batch.block_tables[:num_decodes], batch.context_lens[:num_decodes]
        starts = batch.query_starts.tolist()
        # Per sequence with several new tokens: its rows, its blocks, its context.
        self._prefills = [
            (slice(starts[s], starts[s + 1]), batch.block_tables[s], int(batch.context_lens[s]))
            for s in range(num_decodes, batch.num_sequences)
        ]
        pool.clear_blocks(_opened_blocks(batch, layout.block_size))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `AttentionStep`."""
        reference.write_planned(self.pool.rows, layer, self._writes, k, v)

    def write_rotated(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Rotate the queries and keys of qkv [T, heads + 2 * kv_heads, head_dim] in place, store keys and values;
        False where nothing was done because there is no kernel for it. cos, sin: see `cpu_rotary.rotate_and_store`."""
        if {qkv.dtype, cos.dtype, sin.dtype, self.pool.dtype} != {torch.bfloat16} or self.pool.device.type != "cpu":
            return False
        if not cpu_rotary.can_run(self.pool.layout.head_dim, 2 * sin.shape[-1]):
            return False
        rows, places = self.pool.rows, self._writes.rows[layer]
        cpu_rotary.rotate_and_store(qkv, self.pool.layout.num_kv_heads, cos, sin, rows, places)
        return True

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        """See `AttentionStep`."""
        halves, kv_heads = self.pool.halves, self.pool.layout.num_kv_heads
        in_place = self._in_place(q.shape[1]) and not softcap

        def decode(rows: torch.Tensor) -> torch.Tensor:
            if in_place:
                return cpu_decode.paged_decode(rows, self.pool.blocks, layer, self._tables, self._lens, scale, window)
            return reference.decode_groups(rows, halves, layer, self._decodes, kv_heads, scale, window, softcap)

        def prefill(rows: torch.Tensor, number: int) -> torch.Tensor:
            _, table, context_len = self._prefills[number]
            if in_place:
                return cpu_prefill.paged_prefill(rows, self.pool.blocks, layer, table, context_len, scale, window)
            plan = self._prefill_plans[number]
            return reference.prefill_planned(rows, halves, layer, plan, kv_heads, scale, window, softcap)

        if not self._prefills:
            return decode(q)
        if not self.num_decodes and len(self._prefills) == 1:
            return prefill(q, 0)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.num_decodes:
            out[: self.num_decodes] = decode(q[: self.num_decodes])
        for number, (part, _, _) in enumerate(self._prefills):
            out[part] = prefill(q[part], number)
        return out

    def _in_place(self, num_heads: int) -> bool:
        """Whether the kernels that read blocks where they lie serve this pool."""
        pool, layout = self.pool, self.pool.layout
        if pool.dtype != torch.bfloat16 or pool.device.type != "cpu":
            return False
        shape = layout.head_dim, num_heads // layout.num_kv_heads, layout.block_size
        return cpu_decode.can_run(*shape) and cpu_prefill.can_run(*shape)

    @functools.cached_property
    def _decodes(self) -> list[reference.DecodePlan]:
        layout = self.pool.layout
        return reference.plan_decode(
            self._tables, self._lens, layout.num_layers, layout.block_size, self.pool.dtype, self.pool.device
        )

    @functools.cached_property
    def _prefill_plans(self) -> list[reference.PrefillPlan]:
        layout, device = self.pool.layout, self.pool.device
        return [
            reference.plan_prefill(table, part.start, part.stop, length, layout.num_layers, layout.block_size, device)
            for part, table, length in self._prefills
        ]


def compile_ahead(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Compile the CPU's kernels for a bfloat16 model of this shape, so that they are there when it is first run.

    For another thread than the one that loads the model: LLVM leaves the interpreter to it.
    """
    group = num_heads // num_kv_heads
    cpu_linear.can_run()
    cpu_decode.can_run(head_dim, group, block_size)
    cpu_prefill.can_run(head_dim, group, block_size)
    cpu_rotary.can_run(head_dim, head_dim)


def _opened_blocks(batch: Batch, block_size: int) -> list[int]:
    """Blocks whose first slot is written in this step and whose last is not: the rest may hold a former owner's numbers."""
    last = (batch.context_lens - 1) // block_size
    starts = batch.context_lens - np.diff(batch.query_starts)
    opened = (batch.context_lens % block_size != 0) & (last * block_size >= starts)
    block_ids: list[int] = batch.block_tables[np.flatnonzero(opened), last[opened]].tolist()
    return block_ids


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    kv_batch: AttentionStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] after RoPE.

    Returns ([1, T, heads, head_dim], None). Raises `InvariantError` when the step's `kv_batch` did not arrive, and
    `UnsupportedModelError` for a feature that would change the result.
    """
    if kv_batch is None:
        raise InvariantError("attention was called without kv_batch: the model does not pass unknown keywords on")
    for name, meaning in _REFUSED.items():
        value_given = kwargs.get(name)
        if isinstance(value_given, torch.Tensor) or value_given:
            raise UnsupportedModelError(f"the model uses {meaning} ({name}), which this attention does not compute")
    if attention_mask is not None:
        raise UnsupportedModelError(
            "the model brings an attention mask of its own, which this attention does not apply"
        )
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise InvariantError(f"attention module without a layer index: {type(module).__name__}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kv_batch.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = kv_batch.attend(layer, query[0].transpose(0, 1), scale, sliding_window or 0, softcap or 0.0)
    return attended.unsqueeze(0), None


def register() -> None:
    """Make "tieredkv" known to transformers; harmless when called again."""
    AttentionInterface.register(NAME, paged_attention)
