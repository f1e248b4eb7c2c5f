"""Writing and copying blocks, and pools too large for 32-bit offsets."""

from __future__ import annotations

import mmap

import pytest
import torch

from tests.kernels.interpreter.paged_cases import BLOCK_SIZES, DTYPES, HEAD_DIMS, assert_close, attention, queries
from tieredkv.kernels.block_copy import block_copy
from tieredkv.kernels.kv_write import kv_write
from tieredkv.kernels.launch import decode_tile
from tieredkv.kernels.paged_decode import paged_decode
from tieredkv.kernels.paged_prefill import paged_prefill


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_fills_its_slots_and_nothing_else(dtype, head_dim, block_size):
    blocks = torch.zeros(5, 3, 2, block_size, 3, head_dim, dtype=DTYPES[dtype])
    slots = torch.tensor([4 * block_size + block_size - 1, block_size, 2 * block_size + 3])
    # As a model hands them over: heads outermost.
    k, v = torch.randn(2, 3, 3, head_dim).to(DTYPES[dtype]).transpose(1, 2).contiguous().transpose(1, 2)
    kv_write(blocks, 1, slots, k, v)
    for token, slot in enumerate(slots.tolist()):
        written = blocks[slot // block_size, 1, :, slot % block_size]
        assert torch.equal(written, torch.stack((k[token], v[token])))
        written.zero_()
    assert not blocks.any()


def test_padded_rows_end_in_the_null_block():
    blocks = torch.zeros(3, 1, 2, 8, 2, 64)
    k, v = torch.randn(2, 4, 2, 64)
    kv_write(blocks, 0, torch.tensor([17, 0, 0, 0]), k, v)
    assert torch.equal(blocks[2, 0, :, 1], torch.stack((k[0], v[0])))
    assert not blocks[1].any()
    assert not blocks[2, 0, :, 2:].any()


def test_blocks_are_copied_bit_by_bit_within_and_between_pools():
    source = torch.randint(-(2**31), 2**31, (6, 2, 2, 8, 3, 40), dtype=torch.int64).to(torch.int32).view(torch.float32)
    before = source.view(torch.int32).clone()
    staging = torch.zeros(3, *source.shape[1:])
    block_copy(staging, source, torch.tensor([[4, 0], [1, 2]]))
    block_copy(source, source, torch.tensor([[5, 3]]))
    copied, now = staging.view(torch.int32), source.view(torch.int32)
    assert torch.equal(copied[0], before[4])
    assert torch.equal(copied[2], before[1])
    assert not copied[1].any()
    assert torch.equal(now[3], before[5])
    assert torch.equal(now[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]])


def test_a_block_larger_than_a_program_moves_is_copied_whole():
    source = torch.randn(2, 3, 2, 64, 4, 72)
    target = torch.zeros_like(source)
    block_copy(target, source, torch.tensor([[0, 1]]))
    assert torch.equal(target[1], source[0])
    assert not target[0].any()


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(2, 8), torch.zeros(2, 16)),
        (torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.float16)),
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        (torch.zeros(8, 2).T, torch.zeros(2, 8)),
    ],
)
def test_blocks_that_do_not_match_are_refused(target, source):
    with pytest.raises(ValueError, match=r"block|contiguous"):
        block_copy(target, source, torch.tensor([[0, 1]]))


def test_offsets_beyond_31_bits():
    """A pool of 2^31 + 2^24 numbers and more: address space only, pages exist where something is written."""
    block_shape = (2, 2, 64, 2, 64)
    num_blocks = (2**31 + 2**24) // (2 * 2 * 64 * 2 * 64) + 3
    memory = mmap.mmap(-1, num_blocks * 2 * 2 * 64 * 2 * 64 * 2)
    blocks = torch.frombuffer(memory, dtype=torch.float16).view(num_blocks, *block_shape)
    assert blocks.numel() > 2**31
    ids = [num_blocks - 1, 1, num_blocks - 2]
    tables, length = torch.tensor([ids], dtype=torch.int32), torch.tensor([140], dtype=torch.int32)
    slots = torch.tensor([ids[t // 64] * 64 + t % 64 for t in range(140)])
    k, v = torch.randn(2, 140, 2, 64, generator=torch.Generator().manual_seed(5)).to(torch.float16)
    kv_write(blocks, 1, slots, k, v)
    assert torch.equal(blocks[ids[0], 1, 0], k[:64])
    q = queries(9, 4, 64, torch.float16)
    ours = paged_prefill(q, blocks, 1, tables, length, torch.tensor([0, 9], dtype=torch.int32), 0.2)
    assert_close(ours, attention(q, k, v, 0.2))
    assert_close(paged_decode(q[-1:], blocks, 1, tables, length, 0.2), attention(q[-1:], k, v, 0.2))
    block_copy(blocks, blocks, torch.tensor([[ids[0], 2], [1, ids[2] - 1]]))
    assert torch.equal(blocks[2], blocks[ids[0]])
    assert torch.equal(blocks[ids[2] - 1], blocks[1])


def test_a_tile_holds_the_whole_group():
    for group in range(1, 65):
        assert decode_tile(2, 128, group).block_m >= max(group, 16)
