"""Attention over the block pool in plain torch: the oracle for every other kernel, and the path that serves on a CPU.

Three operations on the pool `blocks [num_blocks, layers, 2 (key, value), block_size, kv_heads, head_dim]`:

    kv_write        put the keys and values of new tokens into their slots
    paged_decode    one query token per sequence over the sequence's whole context
    paged_prefill   many query tokens per sequence, causal, over cached and new context

Each comes twice: as a function of the batch's arrays, which says what is meant, and as a function of a *plan* made once
per step for all layers, which does the work. Index tensors of all layers are made by one addition, not one per layer.

Two options change what is computed. `window`: a query sees its own key and the `window - 1` before it (transformers'
`sliding_window`); 0 means all. `softcap`: scores become `softcap * tanh(score / softcap)` (transformers' `softcap`); 0 means
off. Both are per call, because models have them in some layers only; blocks before a window may still be read.

Knows nothing of requests or of who owns a block. Invariants: a block outside a sequence's table never reaches its output,
not even as 0 x NaN: tables are read only up to the context's last block, and rows shorter than their neighbours are
padded with a block of their own. Within a sequence's last block, slots past the context must hold finite numbers
(see `pool.clear_blocks`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

# Query tokens that share one product in prefill. Longer: more masked work on the diagonal; shorter: more, smaller products.
QUERY_BLOCK = 256
# Decodes share one padded product while the longest context is at most this many times the shortest, plus the slack.
SPREAD_RATIO = 1.5
SPREAD_SLACK = 64
# Below this many sequences the fused CPU attention is faster than two batched products; from here on it is slower.
_SMALL_DECODE = 3


def half_indices(block_ids: NDArray[np.int32], num_layers: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where the keys and the values of some blocks lie, for all layers at once.

    block_ids  [...]
    returns    `num_layers` tensors int64 [2 * block_ids.size]: rows of the pool viewed as `[blocks * layers * 2, -1]`,
               first those of all keys, then those of all values
    """
    halves = np.arange(2 * num_layers, dtype=np.int64).reshape(num_layers, 2, 1)
    index = halves + (block_ids.reshape(-1).astype(np.int64) * (2 * num_layers))
    return torch.from_numpy(index.reshape(num_layers, -1)).to(device).unbind(0)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where the new tokens go: per layer int64 [2 * T], rows of the pool viewed as `[blocks * layers * 2 * block_size, -1]`."""

    rows: tuple[torch.Tensor, ...]


def plan_write(slots: NDArray[np.int64], num_layers: int, block_size: int, device: torch.device) -> WritePlan:
    """`slots` int64 [T]: block id * block size + offset in the block."""
    base = (slots // block_size) * (2 * num_layers * block_size) + slots % block_size
    halves = np.arange(2 * num_layers, dtype=np.int64).reshape(num_layers, 2, 1) * block_size
    return WritePlan(torch.from_numpy((halves + base).reshape(num_layers, -1)).to(device).unbind(0))


def write_planned(rows: torch.Tensor, layer: int, plan: WritePlan, k: torch.Tensor, v: torch.Tensor) -> None:
    """`rows` is the pool viewed as `[blocks * layers * 2 * block_size, kv_heads * head_dim]`; k, v [T, kv_heads, head_dim]."""
    rows.index_copy_(0, plan.rows[layer], torch.cat((k, v)).view(-1, rows.shape[1]))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sequences with one query token each, close enough in context length to share one product.

    members      int64 [B], rows of the decode queries; None when the group is all of them in order
    index        per layer int64 [2 * B * N]: see `half_indices`; N blocks per sequence
    context_len  keys that are read per sequence
    mask         [B, 1, 1, context_len], 0 or -inf, or None when all contexts have this length
    lens         int64 [B, 1], each sequence's context
    windows      window -> its mask, made when first asked for and shared by the layers that have it
    """

    members: torch.Tensor | None
    index: tuple[torch.Tensor, ...]
    num_sequences: int
    context_len: int
    mask: torch.Tensor | None
    lens: NDArray[np.int64]
    windows: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_for(self, window: int, like: torch.Tensor) -> torch.Tensor | None:
        """The mask under a sliding window; in the type and on the device of `like`."""
        if not 0 < window < self.context_len:
            return self.mask
        if window not in self.windows:
            positions = np.arange(self.context_len)
            hidden = (positions >= self.lens) | (positions < self.lens - window)
            self.windows[window] = _minus_infinity(torch.from_numpy(hidden)[:, None, None], like.dtype, like.device)
        return self.windows[window]


def _minus_infinity(hidden: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """-inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden.to(device), float("-inf"))


def plan_decode(
    block_tables: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    num_layers: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[DecodePlan]:
    """Group the sequences by context length and prepare each group's reads. block_tables [B, N], context_lens [B]."""
    if len(context_lens) == 0:
        return []
    order: NDArray[np.intp] | None = None
    bounds = [0, len(context_lens)]
    if context_lens.max() > context_lens.min() * SPREAD_RATIO + SPREAD_SLACK:
        order = np.argsort(context_lens, kind="stable")
        bounds = _split_by_length(context_lens[order])
    plans = []
    for low, high in itertools.pairwise(bounds):
        members = np.arange(low, high) if order is None else order[low:high]
        lens = context_lens[members]
        longest = int(lens.max())
        num_blocks = -(-longest // block_size)
        tables = block_tables[members, :num_blocks]
        mask = None
        if int(lens.min()) != longest:
            # Past a sequence's end read its own first block again: masked out, and finite whatever other blocks hold.
            past_end = np.arange(num_blocks) * block_size >= lens[:, None]
            tables = np.where(past_end, tables[:, :1], tables)
            late = torch.from_numpy(np.arange(longest) >= lens[:, None])[:, None, None]
            mask = _minus_infinity(late, dtype, device)
        plans.append(
            DecodePlan(
                members=None if order is None else torch.from_numpy(members).to(device),
                index=half_indices(tables, num_layers, device),
                num_sequences=len(lens),
                context_len=longest,
                mask=mask,
                lens=lens[:, None].astype(np.int64),
            )
        )
    return plans


def _split_by_length(sorted_lens: NDArray[np.int32]) -> list[int]:
    """Bounds of runs in which the longest is within the spread of the shortest."""
    bounds = [0]
    limit = sorted_lens[0] * SPREAD_RATIO + SPREAD_SLACK
    for at, length in enumerate(sorted_lens.tolist()):
        if length > limit:
            bounds.append(at)
            limit = length * SPREAD_RATIO + SPREAD_SLACK
    bounds.append(len(sorted_lens))
    return bounds


def decode_planned(
    q: torch.Tensor,
    halves: torch.Tensor,
    layer: int,
    plan: DecodePlan,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [B, heads, head_dim] -> [B, heads, head_dim].

    The query heads that share a key head become rows of one product: with one row per head the CPU kernel reads each
    key `heads / kv_heads` times and runs a matrix product with one row.
    """
    batch, heads, dim = q.shape
    group = heads // num_kv_heads
    kv = halves.index_select(0, plan.index[layer]).view(2, batch, -1, num_kv_heads, dim)[:, :, : plan.context_len]
    mask = plan.mask_for(window, q)
    if batch < _SMALL_DECODE and not softcap:
        k, v = kv.transpose(2, 3).unbind(0)
        grouped = q.view(batch, num_kv_heads, group, dim)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, dim)
    k, v = kv.transpose(2, 3).reshape(2, batch * num_kv_heads, plan.context_len, dim).unbind(0)
    # Heads may lie outermost, as rotating a part of each leaves them: then this copies.
    scores = torch.bmm((q * scale).reshape(batch * num_kv_heads, group, dim), k.transpose(1, 2))
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.view(batch, num_kv_heads, group, plan.context_len).add_(mask)
    return torch.bmm(torch.softmax(scores, -1, out=scores), v).view(batch, heads, dim)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One sequence with T query tokens, the last T of its context.

    low, high    its rows among the step's tokens
    index        per layer int64 [2 * N], see `half_indices`
    context_len  keys, cached and new
    """

    low: int
    high: int
    index: tuple[torch.Tensor, ...]
    context_len: int

    @property
    def num_cached(self) -> int:
        return self.context_len - (self.high - self.low)


def plan_prefill(
    block_table: NDArray[np.int32],
    low: int,
    high: int,
    context_len: int,
    num_layers: int,
    block_size: int,
    device: torch.device,
) -> PrefillPlan:
    """`block_table` [>= blocks of the context]."""
    num_blocks = -(-context_len // block_size)
    return PrefillPlan(low, high, half_indices(block_table[:num_blocks], num_layers, device), context_len)


def prefill_planned(
    q: torch.Tensor,
    halves: torch.Tensor,
    layer: int,
    plan: PrefillPlan,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [T, heads, head_dim] -> [T, heads, head_dim].

    Rows of queries go in blocks: scores of one block against every key up to its last query, mask on the diagonal part
    only, softmax in place, product with the values. The query group is folded into the rows, as in decode. Under a window
    the keys begin with the first query's window, and the mask of that edge is the diagonal's, turned over:

        row i sees keys i .. i + window - 1, counted from the window of row 0
    """
    tokens, heads, dim = q.shape
    group = heads // num_kv_heads
    kv = halves.index_select(0, plan.index[layer]).view(2, -1, num_kv_heads, dim)[:, : plan.context_len]
    k, v = kv.transpose(1, 2).contiguous().unbind(0)
    rows = (q.view(tokens, num_kv_heads, group, dim).permute(1, 0, 2, 3) * scale).reshape(num_kv_heads, -1, dim)
    out = torch.empty_like(rows)
    mask = _causal_mask(q.dtype, q.device)
    for low in range(0, tokens, QUERY_BLOCK):
        high = min(low + QUERY_BLOCK, tokens)
        first_new, num_keys = plan.num_cached + low, plan.num_cached + high
        window_low = first_new - window + 1 if window else 0
        first_key = max(window_low, 0)
        block = slice(low * group, high * group)
        scores = torch.bmm(rows[:, block], k[:, first_key:num_keys].transpose(1, 2))
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_row = scores.view(num_kv_heads, high - low, group, num_keys - first_key)
        by_row[..., first_new - first_key :].add_(mask[: high - low, :, : high - low])
        num_cut = high - low - (first_key - window_low)
        if window and num_cut > 0:
            by_row[..., :num_cut].add_(mask.transpose(0, 2)[: high - low, :, high - low - num_cut : high - low])
        torch.bmm(torch.softmax(scores, -1, out=scores), v[:, first_key:num_keys], out=out[:, block])
    return out.view(num_kv_heads, tokens, group, dim).permute(1, 0, 2, 3).reshape(tokens, heads, dim)


@functools.cache
def _causal_mask(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[QUERY_BLOCK, 1, QUERY_BLOCK]: -inf where the key lies after the query, else 0; its corner serves any smaller block."""
    late = torch.ones((QUERY_BLOCK, QUERY_BLOCK), dtype=torch.bool, device=device).triu_(1)
    return _minus_infinity(late, dtype, device).unsqueeze(1)


def kv_write(blocks: torch.Tensor, layer: int, slots: NDArray[np.int64], k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k, v [T, kv_heads, head_dim] into `slots` int64 [T] of one layer."""
    _, num_layers, _, block_size, kv_heads, dim = blocks.shape
    write_planned(blocks.view(-1, kv_heads * dim), layer, plan_write(slots, num_layers, block_size, k.device), k, v)


def paged_decode(
    q: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    block_tables: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """softmax(q K^T * scale) V per sequence over its context; q [B, heads, head_dim], block_tables [B, N], context_lens [B]."""
    _, num_layers, _, block_size, kv_heads, dim = blocks.shape
    halves = blocks.view(-1, block_size * kv_heads * dim)
    plans = plan_decode(block_tables, context_lens, num_layers, block_size, q.dtype, q.device)
    return decode_groups(q, halves, layer, plans, kv_heads, scale, window, softcap)


def decode_groups(
    q: torch.Tensor,
    halves: torch.Tensor,
    layer: int,
    plans: Sequence[DecodePlan],
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`decode_planned` for every group; q [B, heads, head_dim] -> [B, heads, head_dim]."""
    if len(plans) == 1:
        return decode_planned(q, halves, layer, plans[0], num_kv_heads, scale, window, softcap)
    out = torch.empty_like(q)
    for plan in plans:
        members = plan.members
        if members is not None:
            out[members] = decode_planned(q[members], halves, layer, plan, num_kv_heads, scale, window, softcap)
    return out


def paged_prefill(
    q: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    block_tables: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of the last tokens of each context; q [T, heads, head_dim], sequence s owns rows
    `[query_starts[s], query_starts[s + 1])`, which are the last tokens of its context."""
    _, num_layers, _, block_size, kv_heads, dim = blocks.shape
    halves = blocks.view(-1, block_size * kv_heads * dim)
    out = torch.empty_like(q)
    for s, context_len in enumerate(context_lens.tolist()):
        low, high = int(query_starts[s]), int(query_starts[s + 1])
        plan = plan_prefill(block_tables[s], low, high, context_len, num_layers, block_size, q.device)
        out[low:high] = prefill_planned(q[low:high], halves, layer, plan, kv_heads, scale, window, softcap)
    return out
