"""Prefill against attention in float64: whole prompts, chunks over a cached context, several sequences at once."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.interpreter.paged_cases import (
    DTYPES,
    LAYER,
    MATRIX,
    OPTIONS,
    assert_close,
    attention,
    make_case,
    queries,
)
from tieredkv.kernels.launch import Tile
from tieredkv.kernels.paged_prefill import paged_prefill

# (new tokens, context) of each sequence: whole prompts, chunks at the end of a context, a single token, none.
BATCHES = ([(5, 5), (1, 60), (20, 150)], [(33, 33), (0, 40), (17, 64)], [(47, 130)])


def starts_of(news: list[int], first: int = 0) -> torch.Tensor:
    return torch.tensor([first + sum(news[:s]) for s in range(len(news) + 1)], dtype=torch.int32)


def check(dtype, head_dim, block_size, group, option, batch, *, kv_heads=1, tile=None):
    window, softcap = OPTIONS[option]
    news, lens = [new for new, _ in batch], [length for _, length in batch]
    case = make_case(lens, block_size, kv_heads, head_dim, DTYPES[dtype])
    starts = starts_of(news)
    q = queries(sum(news), kv_heads * group, head_dim, DTYPES[dtype])
    ours = paged_prefill(
        q, case.blocks, LAYER, case.tables, case.lens, starts, 0.2, window=window, softcap=softcap, tile=tile
    )
    for s, new in enumerate(news):
        part = slice(int(starts[s]), int(starts[s]) + new)
        if new:
            assert_close(ours[part], attention(q[part], case.keys[s], case.values[s], 0.2, window, softcap))


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "group", "option", "batch"), MATRIX)
def test_prefill_is_causal_attention_over_cached_and_new(dtype, head_dim, block_size, group, option, batch):
    check(dtype, head_dim, block_size, group, option, BATCHES[batch], kv_heads=1 + group % 2)


@pytest.mark.parametrize("option", range(len(OPTIONS)))
@pytest.mark.parametrize(("dtype", "head_dim", "group"), [("fp32", 64, 3), ("fp16", 80, 4), ("bf16", 128, 7)])
def test_prefill_of_each_type_with_each_option(dtype, head_dim, group, option):
    check(dtype, head_dim, 16, group, option, BATCHES[0])


@pytest.mark.parametrize("option", range(len(OPTIONS)))
def test_tiles_much_smaller_than_the_prompt(option):
    """Many tiles on each side of the window and of the diagonal."""
    check("fp32", 64, 16, 3, option, [(100, 100), (70, 170)], tile=Tile(32, 16, 4, 2))


@pytest.mark.matrix
@pytest.mark.parametrize("group", [8, 9, 17, 32, 64])
def test_wide_groups(group):
    check("fp16", 64, 16, group, 3, [(9, 70), (3, 3)])


@pytest.mark.matrix
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8, 13])
def test_each_tile_finds_its_sequence(num_seqs):
    batch = [((7 * s) % 19, (7 * s) % 19 + 11 * (s % 3)) for s in range(num_seqs)]
    check("fp32", 64, 16, 2, 0, [(new, max(length, 1)) for new, length in batch], tile=Tile(16, 16, 4, 2))


@pytest.mark.matrix
def test_a_chunk_at_the_end_of_128k_tokens():
    check("fp16", 64, 64, 2, 0, [(3, 131_072)])


def test_a_chunked_prompt_is_the_whole_prompt():
    case = make_case([120], 16, 1, 64, torch.float32)
    q = queries(120, 2, 64, torch.float32)
    whole = paged_prefill(q, case.blocks, LAYER, case.tables, case.lens, starts_of([120]), 0.2)
    for low, high in [(0, 50), (50, 51), (51, 120)]:
        length = torch.tensor([high], dtype=torch.int32)
        part = paged_prefill(q[low:high], case.blocks, LAYER, case.tables, length, starts_of([high - low]), 0.2)
        torch.testing.assert_close(part, whole[low:high], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_before", [3, 40])
def test_the_prefills_of_a_mixed_batch_leave_other_rows_alone(num_before):
    news, lens = [6, 20], [30, 20]
    case = make_case(lens, 16, 2, 64, torch.float32)
    q = queries(num_before + 26 + 4, 4, 64, torch.float32)
    starts = starts_of(news, first=num_before)
    out = torch.full_like(q, 7.0)
    tile = Tile(16, 16, 4, 2)
    paged_prefill(q, case.blocks, LAYER, case.tables, case.lens, starts, 0.2, out=out, tile=tile)
    assert (out[:num_before] == 7.0).all()
    assert (out[num_before + 26 :] == 7.0).all()
    for s, (low, high) in enumerate(itertools.pairwise(starts.tolist())):
        assert_close(out[low:high], attention(q[low:high], case.keys[s], case.values[s], 0.2))


def test_strides_of_queries_are_followed():
    case = make_case([40], 16, 2, 64, torch.float32)
    q = queries(30, 4, 64, torch.float32)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    ours = paged_prefill(by_head, case.blocks, LAYER, case.tables, case.lens, starts_of([30]), 0.2)
    assert_close(ours, attention(q, case.keys[0], case.values[0], 0.2))
