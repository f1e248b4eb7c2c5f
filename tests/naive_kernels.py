"""The kernels by their definition, in plain torch on tensors: slow, obvious, and without Triton."""

from __future__ import annotations

import torch

from tieredkv.kernel_step import KernelOps


def kv_write(blocks, layer, slots, k, v) -> None:
    block_size = blocks.shape[3]
    blocks[slots // block_size, layer, 0, slots % block_size] = k
    blocks[slots // block_size, layer, 1, slots % block_size] = v


def _attend(q, blocks, layer, table, context_len: int, scale: float, window: int, softcap: float):
    """q [T, heads, head_dim], the last T tokens of the context."""
    num, heads, dim = q.shape
    block_size, kv_heads = blocks.shape[3], blocks.shape[4]
    table = table[: -(-context_len // block_size)].long()
    k, v = blocks[table, layer].transpose(0, 1).reshape(2, -1, kv_heads, dim)[:, :context_len]
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(context_len - num, context_len)[:, None]
    keys = torch.arange(context_len)[None]
    seen = (keys <= at) & (keys > at - window if window else keys >= 0)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).to(q.dtype)


def paged_decode(
    q, blocks, layer, block_tables, context_lens, scale, *, window=0, softcap=0.0, out=None
) -> torch.Tensor:
    out = torch.empty_like(q) if out is None else out
    for s, length in enumerate(context_lens.tolist()):
        if length:
            out[s] = _attend(q[s : s + 1], blocks, layer, block_tables[s], length, scale, window, softcap)[0]
        else:
            out[s] = 0
    return out


def paged_prefill(
    q, blocks, layer, block_tables, context_lens, query_starts, scale, *, window=0, softcap=0.0, out=None
) -> torch.Tensor:
    out = torch.empty_like(q) if out is None else out
    starts = query_starts.tolist()
    for s, length in enumerate(context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        out[rows] = _attend(q[rows], blocks, layer, block_tables[s], length, scale, window, softcap)
    return out


OPS = KernelOps(kv_write, paged_decode, paged_prefill)
