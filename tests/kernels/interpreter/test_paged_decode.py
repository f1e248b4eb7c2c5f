"""Decode against attention in float64, with NaN in everything that a sequence does not own."""

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
from tieredkv.kernels.paged_decode import launch_for, paged_decode

LENS = ([1, 37, 150], [16, 0, 65, 128], [33, 200])


def check(dtype, head_dim, block_size, group, option, lens, *, kv_heads=2, num_splits=None):
    window, softcap = OPTIONS[option]
    case = make_case(lens, block_size, kv_heads, head_dim, DTYPES[dtype])
    q = queries(len(lens), kv_heads * group, head_dim, DTYPES[dtype])
    launch = launch_for(q, kv_heads, case.tables.shape[1] * block_size, num_splits)
    # What a former call left in the workspace must not matter.
    workspace = torch.full((launch.workspace_numel,), float("nan"))
    ours = paged_decode(
        q,
        case.blocks,
        LAYER,
        case.tables,
        case.lens,
        0.2,
        window=window,
        softcap=softcap,
        workspace=workspace,
        launch=launch,
    )
    for s, length in enumerate(lens):
        if length == 0:
            assert not ours[s].any()
        else:
            one = slice(s, s + 1)
            assert_close(ours[one], attention(q[one], case.keys[s], case.values[s], 0.2, window, softcap))


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "group", "option", "lens"), MATRIX)
def test_decode_is_attention_over_the_context(dtype, head_dim, block_size, group, option, lens):
    splits = (1, 2, 3)[(head_dim // 16 + group) % 3]
    check(dtype, head_dim, block_size, group, option, LENS[lens], kv_heads=1 + group % 2, num_splits=splits)


@pytest.mark.parametrize("option", range(len(OPTIONS)))
@pytest.mark.parametrize(("dtype", "head_dim", "group"), [("fp32", 64, 3), ("fp16", 80, 4), ("bf16", 128, 7)])
def test_decode_of_each_type_with_each_option(dtype, head_dim, group, option):
    check(dtype, head_dim, 16, group, option, [1, 37, 150], num_splits=2)


@pytest.mark.matrix
@pytest.mark.parametrize("group", [8, 9, 17, 32, 64])
def test_groups_wider_than_a_tile_of_sixteen_rows(group):
    check("fp16", 64, 16, group, 3, [45, 130], kv_heads=1)


@pytest.mark.matrix
@pytest.mark.parametrize(("option", "num_splits"), [*itertools.product(range(len(OPTIONS)), [None, 1, 2, 5, 40])])
def test_any_number_of_parts_gives_the_same(option, num_splits):
    check("fp32", 64, 16, 3, option, [1, 0, 129, 700, 16], kv_heads=1, num_splits=num_splits)


def test_a_short_context_among_long_ones_uses_fewer_parts():
    check("fp32", 64, 16, 1, 0, [3, 900], kv_heads=1, num_splits=5)


@pytest.mark.matrix
def test_a_context_of_128k_tokens():
    check("fp16", 64, 64, 2, 0, [131_072], kv_heads=1, num_splits=7)


def test_strides_of_queries_and_output_are_followed():
    case = make_case([20, 50], 16, 2, 64, torch.float32)
    q = queries(2, 4, 64, torch.float32)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.zeros(2, 4, 128)
    paged_decode(by_head, case.blocks, LAYER, case.tables, case.lens, 0.2, out=wide[..., 64:])
    for s in range(2):
        assert_close(wide[s : s + 1, :, 64:], attention(q[s : s + 1], case.keys[s], case.values[s], 0.2))
    assert not wide[..., :64].any()


def test_the_tile_does_not_change_the_result():
    case = make_case([90], 16, 1, 64, torch.float32)
    q = queries(1, 2, 64, torch.float32)
    launch = launch_for(q, 1, 128, 2)
    small = type(launch)(Tile(16, 16, 4, 2), 2, 1, launch.workspace_numel)
    for one in (launch, small):
        ours = paged_decode(q, case.blocks, LAYER, case.tables, case.lens, 0.2, launch=one)
        assert_close(ours, attention(q, case.keys[0], case.values[0], 0.2))


def test_an_empty_batch_is_nothing():
    case = make_case([5], 16, 1, 64, torch.float32)
    empty = torch.empty(0, 2, 64)
    assert paged_decode(empty, case.blocks, LAYER, case.tables[:0], case.lens[:0], 0.2).shape == (0, 2, 64)
