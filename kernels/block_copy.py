"""Copy whole blocks within a pool or between pools: gather, scatter or both, as pairs of block ids.

    source, destination  [num_blocks, ...]  contiguous, blocks of the same size and type; may be the same tensor
    pairs                int64 [N, 2]       (block of the source, block of the destination)

For copies on the device, such as collecting scattered blocks into one staging area or spreading them from it. Between host
and device the copy engine's DMA is faster, which needs no multiprocessor. Knows nothing of layers or owners. Invariants:
bytes are moved, never numbers, so NaN payloads survive; no synchronisation. The order of pairs is undefined: no block may
be a destination twice, or a source and a destination of one call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tieredkv.kernels.launch import launch_options

# 8-byte words per program, 32 KiB: large enough to amortise a program, small enough that one block fills several
# multiprocessors. Each of 128 threads moves 16 bytes at a time.
CHUNK_WORDS = 4096
COPY_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"], do_not_specialize=["block_units"])
def block_copy_kernel(destination_ptr, source_ptr, pairs_ptr, block_units, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """One chunk of one block. Blocks are measured in units of 16 bytes, two words, what a thread moves at once."""
    pair = tl.program_id(0).to(tl.int64)
    block_words = block_units * 2
    source = source_ptr + tl.load(pairs_ptr + 2 * pair) * block_words
    destination = destination_ptr + tl.load(pairs_ptr + 2 * pair + 1) * block_words
    low = tl.program_id(1) * CHUNK
    for start in range(low, tl.minimum(low + CHUNK, block_words), STEP):
        words = start + tl.arange(0, STEP)
        here = words < block_words
        tl.store(destination + words, tl.load(source + words, here), here)


def block_copy(destination: torch.Tensor, source: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy block `pairs[i, 0]` of `source` over block `pairs[i, 1]` of `destination`, for all i; shapes as in the module.

    Both on one device (or pinned host memory that the device can address). Raises `ValueError` for tensors that are not
    contiguous, whose blocks differ, or whose block is not a multiple of 16 bytes.
    """
    if not (source.is_contiguous() and destination.is_contiguous() and pairs.is_contiguous()):
        raise ValueError("source, destination and pairs must be contiguous")
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise ValueError(
            f"blocks differ: {source.dtype} {source.shape[1:]}, {destination.dtype} {destination.shape[1:]}"
        )
    block_nbytes = source[0].numel() * source.element_size()
    if block_nbytes % 16:
        raise ValueError(f"a block must be a multiple of 16 bytes, got {block_nbytes}")
    num_pairs = pairs.shape[0]
    if num_pairs == 0:
        return
    # Pairs along the one axis of a grid that may be longer than 65,535.
    block_copy_kernel[(num_pairs, triton.cdiv(block_nbytes, 8 * CHUNK_WORDS))](
        destination.view(torch.int64),
        source.view(torch.int64),
        pairs,
        block_nbytes // 16,
        CHUNK=CHUNK_WORDS,
        STEP=COPY_WARPS * 64,
        **launch_options(COPY_WARPS),
    )
