"""What the attention kernels share: where a tile of keys lies in the pool, products, soft-capped scores.

Triton only; no host code but the flag that says whether the interpreter runs.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Read when Triton decides it: at import. The interpreter keeps a bfloat16 number as the 16-bit integer of the same bits,
# and its product multiplies those integers (Triton 3.9); kernels widen such operands first, which changes no value.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_block_ids(table_ptr, positions, context_len, BLOCK_SIZE: tl.constexpr):
    """The block of each position of a sequence; the table is not read past the context."""
    return tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < context_len, other=0)


@triton.jit
def token_offsets(block_ids, positions, stride_block, stride_token, BLOCK_SIZE: tl.constexpr):
    """Offsets int64 of the tokens at `positions` from the pool's start. A pool may hold more than 2^31 numbers."""
    return block_ids.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_token


@triton.jit
def load_rows(row_ptrs, in_context, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [rows, BLOCK_D] of one head. What is masked off is not read and counts as 0, whatever lies there."""
    dims = tl.arange(0, BLOCK_D)
    ptrs = row_ptrs[:, None] + dims[None, :]
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            rows = tl.load(ptrs, mask=in_context[:, None], other=0.0)
        else:
            rows = tl.load(ptrs, mask=in_context[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            rows = tl.load(ptrs)
        else:
            rows = tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return rows


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """a @ b in float32; 32-bit operands are not shortened to 19 bits."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cap(scores, softcap):
    """softcap * tanh(scores / softcap), through one exponential: tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends."""
    power = tl.exp2(scores * (2.0 * LOG2_E / softcap))
    return softcap * (1.0 - 2.0 / (power + 1.0))
