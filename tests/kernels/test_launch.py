"""Launch shapes: what a decode's parts cover, what they cost, and that asking for them loads no Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tieredkv.kernels.launch import DEFAULT_NUM_SMS, decode_launch, decode_tile, padded_head_dim, prefill_tile

ROOT = Path(__file__).resolve().parents[2]


def launch(num_seqs: int, max_context: int, num_splits: int | None = None):
    return decode_launch(2, num_seqs, 32, 8, 128, max_context, num_splits=num_splits)


@pytest.mark.parametrize("max_context", [1, 64, 1000, 8192, 131_072])
@pytest.mark.parametrize("num_seqs", [1, 2, 8, 33, 256, 1024])
def test_parts_fill_the_device_when_the_context_allows(num_seqs, max_context):
    made = launch(num_seqs, max_context)
    num_tiles = -(-max_context // made.tile.block_n)
    assert 1 <= made.num_splits <= num_tiles
    # The parts of the longest context together hold all its tiles.
    part = max(-(-num_tiles // made.num_splits), made.min_tiles)
    assert part * made.num_splits >= num_tiles
    pairs = num_seqs * 8
    if pairs * num_tiles >= 8 * DEFAULT_NUM_SMS * made.min_tiles:
        assert pairs * made.num_splits >= 2 * DEFAULT_NUM_SMS


@pytest.mark.parametrize("num_seqs", [1, 8, 256])
def test_the_workspace_is_a_small_share_of_what_is_read(num_seqs):
    made = launch(num_seqs, 8192)
    read_nbytes = num_seqs * 8192 * 2 * 8 * 128 * 2
    assert made.workspace_numel * 4 <= 0.1 * read_nbytes


def test_a_batch_that_fills_the_device_is_not_split():
    made = launch(512, 8192)
    assert made.num_splits == 1
    assert made.workspace_numel == 0


def test_a_workspace_holds_an_output_and_a_sum_for_each_part():
    made = launch(3, 8192, num_splits=5)
    assert made.workspace_numel == 3 * 32 * 5 * (128 + 1)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 103, 120])
def test_every_problem_has_a_tile(arch, head_dim, itemsize):
    for group in (1, 3, 7, 9, 64):
        for tile in (decode_tile(itemsize, head_dim, group), prefill_tile(itemsize, head_dim, group, arch)):
            assert tile.block_m >= group
            assert tile.block_m & (tile.block_m - 1) == 0
            assert tile.block_n >= 16
    assert padded_head_dim(head_dim) >= head_dim


def test_hosts_without_triton_can_ask():
    code = (
        "import sys, tieredkv.kernels.launch, tieredkv.kernels.device, tieredkv.kernels.reference\n"
        "print([m for m in sys.modules if m == 'triton' or m.startswith('triton.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
