"""Pools full of NaN in which a few sequences own blocks, and attention over them written out in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

NUM_LAYERS = 2
LAYER = 1
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
GROUPS = (1, 3, 4, 7)
# (window, softcap); windows shorter than a block, than a tile, and longer than some contexts.
OPTIONS = ((0, 0.0), (5, 0.0), (0, 1.5), (40, 2.5))
# As a share of the largest value of the output: a rounding of the type in the products' weights and in the result.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# Every type with every head dim, block size and group; options and lengths take turns, so that each pair of values occurs.
MATRIX = [
    (dtype, head_dim, block_size, group, sum(at) % len(OPTIONS), (at[0] + at[1] + 2 * at[2] + at[3]) % 3)
    for at in itertools.product(range(len(DTYPES)), *(range(len(x)) for x in (HEAD_DIMS, BLOCK_SIZES, GROUPS)))
    for dtype, head_dim, block_size, group in [
        (list(DTYPES)[at[0]], HEAD_DIMS[at[1]], BLOCK_SIZES[at[2]], GROUPS[at[3]])
    ]
]


@dataclass
class Case:
    """A pool in which each sequence owns scattered blocks. All else is NaN: other blocks, the null block, other layers,
    and the slots past a context in a sequence's own last block. Tables end in the id of a block of NaN."""

    blocks: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_case(lens: list[int], block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Case:
    rng = torch.Generator().manual_seed(sum(lens) * 31 + head_dim)
    counts = [-(-length // block_size) for length in lens]
    num_blocks = sum(counts) + 3
    order = (torch.randperm(num_blocks - 2, generator=rng) + 2).tolist()
    blocks = torch.full((num_blocks, NUM_LAYERS, 2, block_size, kv_heads, head_dim), math.nan, dtype=dtype)
    tables = torch.ones(len(lens), max(counts) + 1, dtype=torch.int32)
    keys, values = [], []
    for s, (length, count) in enumerate(zip(lens, counts, strict=True)):
        own = [order.pop() for _ in range(count)]
        tables[s, :count] = torch.tensor(own, dtype=torch.int32)
        kv = torch.randn(2, length, kv_heads, head_dim, generator=rng).to(dtype)
        for position in range(0, length, block_size):
            part = kv[:, position : position + block_size]
            blocks[own[position // block_size], LAYER, :, : part.shape[1]] = part
        keys.append(kv[0])
        values.append(kv[1])
    return Case(blocks, tables, torch.tensor(lens, dtype=torch.int32), keys, values)


def queries(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(tokens + heads)).to(dtype)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """float64 [T, heads, head_dim]: q are the last T of the S tokens in k, v [S, kv_heads, head_dim]; one query at a time."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    outputs = []
    for t, query in enumerate(q.double()):
        end = len(k) - len(q) + t + 1
        first = max(0, end - window) if window else 0
        scores = (query * k[first:end]).sum(-1) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        outputs.append((scores.softmax(0)[..., None] * v[first:end]).sum(0))
    return torch.stack(outputs) if outputs else q.double()


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(ours).all()
    error = (ours.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[ours.dtype], f"relative error {error:.2g}"
