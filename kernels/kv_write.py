"""Put the keys and values of new tokens into their slots of the block pool.

    k, v   [T, kv_heads, head_dim]  any strides but a contiguous last dimension
    slots  int64 [T]                block id * block size + offset in the block
    blocks [num_blocks, layers, 2, block_size, kv_heads, head_dim]

One program per token copies all its heads, keys and values. Knows nothing of who owns a block. Invariants: exactly the T
slots of one layer change; no synchronisation and no allocation, so a call may be captured in a CUDA graph. A padded row
names a slot of the null block 0, where any number of rows may collide because nothing reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tieredkv.kernels.launch import launch_options, padded_head_dim

# Numbers that one warp moves at once: 32 threads with 16 bytes of 16-bit numbers each.
_NUMBERS_PER_WARP = 256
_MOST_WARPS = 8


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots_ptr"])
def kv_write_kernel(
    blocks_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    layer,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_layer,
    stride_half,
    stride_token,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    real = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    k = tl.load(k_ptr + token * stride_k_token + heads.to(tl.int64) * stride_k_head + dims, real)
    v = tl.load(v_ptr + token * stride_v_token + heads.to(tl.int64) * stride_v_head + dims, real)
    row = (slot // BLOCK_SIZE) * stride_block + layer.to(tl.int64) * stride_layer + (slot % BLOCK_SIZE) * stride_token
    ptrs = blocks_ptr + row + heads * stride_head + dims
    tl.store(ptrs, k, real)
    tl.store(ptrs + stride_half, v, real)


def write_constants(num_kv_heads: int, head_dim: int, block_size: int) -> Mapping[str, int]:
    """The compile-time arguments of `kv_write_kernel`."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_H": 1 << (num_kv_heads - 1).bit_length(),
        "BLOCK_D": padded_head_dim(head_dim),
    }


def write_warps(num_kv_heads: int, head_dim: int) -> int:
    """Warps for one token's numbers."""
    constants = write_constants(num_kv_heads, head_dim, 1)
    return min(max(constants["BLOCK_H"] * constants["BLOCK_D"] // _NUMBERS_PER_WARP, 1), _MOST_WARPS)


def kv_write(blocks: torch.Tensor, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k, v [T, kv_heads, head_dim] in `slots` int64 [T] of layer `layer` of `blocks`; see the module for shapes."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block_stride, layer_stride, half_stride, token_stride, head_stride, _ = blocks.stride()
    kv_write_kernel[(num_tokens,)](
        blocks,
        k,
        v,
        slots,
        layer,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        block_stride,
        layer_stride,
        half_stride,
        token_stride,
        head_stride,
        **write_constants(num_kv_heads, head_dim, blocks.shape[3]),
        **launch_options(write_warps(num_kv_heads, head_dim)),
    )
