"""Launch shapes: which tile sizes, warps and pipeline stages a kernel gets, and into how many parts a decode is split.

Chosen from the problem alone (type, head dim, query group, architecture, numbers of sequences and heads), from a recorded
table; nothing is tuned at start. Knows neither torch nor Triton, so whoever sizes buffers or captures graphs can ask here.

Invariants: every number returned depends only on what the host knows, never on device data; `aot.py` compiles exactly
the shapes that these functions can return.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Streaming multiprocessors of an H100 or H200 (SXM), assumed where no device can be asked.
DEFAULT_NUM_SMS = 132
# Decode programs that one multiprocessor holds at a time: three of about 70 KiB in 227 KiB.
_DECODE_RESIDENT = 3
# Programs to start per resident place: contexts of one batch differ, so the work must come in more pieces than places.
_DECODE_WAVES = 4
# Fewest tiles of a part where the batch alone fills the device: shorter parts would mostly wait for their first load.
_MOST_MIN_TILES = 8
_MOST_SPLITS = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries (tokens x heads of a group) and keys per step of a program's loop; warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (bytes per number, padded head dim) -> (keys, warps, stages).
#
# Decode is bound by memory. A device that moves 4.8 TB/s at a latency of 0.8 us has 3.8 MB on the way, 29 KiB for each of
# 132 multiprocessors. A tile of 64 keys and values of 128 16-bit numbers is 32 KiB; three stages keep one on the way while
# one is computed, and three programs share a multiprocessor: three times what is needed. Other head dims keep the bytes
# per tile. It fits the 99 KiB of smaller cards too.
#
# 32-bit numbers are multiplied exactly, by the general cores, for checking models rather than for serving them: tiles are
# what keeps the operands in registers.
_DECODE: dict[tuple[int, int], tuple[int, int, int]] = {
    (2, 64): (128, 4, 3),
    (2, 128): (64, 4, 3),
    (2, 256): (32, 4, 3),
    (4, 64): (16, 4, 3),
    (4, 128): (16, 4, 3),
    (4, 256): (16, 8, 3),
}
# (bytes per number, padded head dim) -> {compute capability from which on the row holds: (rows, keys, warps, stages)}.
#
# Prefill is bound by arithmetic. 128 rows use each key and value 128 times, which keeps the second-level cache below its
# rate at 600 TFLOP/s, and make two warp groups of 64 rows. From 9.0 on the products read queries and keys from shared
# memory: 64 rows by 64 keys take as long to read as to multiply, by 128 keys three quarters of that. 8.x and 12.0 hold
# operands in registers, which is what limits their tiles. With fewer than three stages nothing is loaded ahead.
_PREFILL: dict[tuple[int, int], dict[int, tuple[int, int, int, int]]] = {
    (2, 64): {80: (128, 64, 8, 3), 90: (128, 128, 8, 3), 120: (128, 64, 8, 3)},
    (2, 128): {80: (128, 32, 8, 3), 90: (128, 128, 8, 3), 120: (128, 32, 8, 3)},
    (2, 256): {80: (64, 32, 8, 3), 90: (128, 32, 8, 3), 120: (64, 32, 8, 3)},
    (4, 64): {80: (32, 16, 4, 3)},
    (4, 128): {80: (32, 16, 8, 2)},
    (4, 256): {80: (32, 16, 8, 3)},
}
# Masks and caps of the options take registers that the widest tile does not leave.
_MOST_KEYS_WITH_OPTIONS = {(2, 128): 64}


def launch_options(num_warps: int, num_stages: int = 3) -> dict[str, int | bool]:
    """Triton's options of a launch. A product and a sum may become one instruction: it is faster and rounds once."""
    options: dict[str, int | bool] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if num_warps == 16:
        # All that 512 threads can have; left to itself the assembler takes half of it and spills.
        options["maxnreg"] = 128
    return options


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least 16, that holds `head_dim`: the width of a tile. Loads of the padding are masked off."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _table_key(itemsize: int, head_dim: int) -> tuple[int, int]:
    return itemsize, min(max(padded_head_dim(head_dim), 64), 256)


def decode_tile(itemsize: int, head_dim: int, group: int) -> Tile:
    """`group` query heads share a key head and become the rows of one product; tensor cores want at least 16 rows."""
    block_m = max(16, 1 << (group - 1).bit_length())
    block_n, num_warps, num_stages = _DECODE[_table_key(itemsize, head_dim)]
    if itemsize == 4 and block_m > 16:
        # Exact products hold all rows in registers: more rows take more warps, and then fewer loads ahead.
        num_warps, num_stages = (8, num_stages) if block_m == 32 else (16, 2)
    return Tile(block_m, block_n, num_warps, num_stages)


def prefill_tile(itemsize: int, head_dim: int, group: int, arch: int, options: bool = False) -> Tile:
    """Rows are (query token, head of the group) pairs: `block_m // group` tokens per tile. `options`: window or softcap."""
    key = _table_key(itemsize, head_dim)
    rows = _PREFILL[key]
    block_m, block_n, num_warps, num_stages = rows[max((start for start in rows if start <= arch), default=min(rows))]
    if options:
        block_n = min(block_n, _MOST_KEYS_WITH_OPTIONS.get(key, block_n))
    # A tile holds at least one token's group; what it has more in rows it gets in warps where the compiler then spills less.
    growth = max(1, (1 << (group - 1).bit_length()) // block_m)
    return Tile(block_m * growth, block_n, min(num_warps * growth, 16) if arch >= 90 else num_warps, num_stages)


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """How one decode batch is run. Fixed by padded sizes, so it may be captured in a graph and replayed at any lengths.

    num_splits       parts of each context at most; 1: no merge pass, no workspace
    min_tiles        fewest tiles in a part; a short context uses fewer parts than `num_splits`
    workspace_numel  float32 numbers needed: per sequence, head and part, the partial output and its log-sum
    """

    tile: Tile
    num_splits: int
    min_tiles: int
    workspace_numel: int


@functools.lru_cache(maxsize=1024)
def decode_launch(
    itemsize: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    num_sms: int = DEFAULT_NUM_SMS,
    num_splits: int | None = None,
) -> DecodeLaunch:
    """Tile and split for `num_seqs` queries whose contexts are at most `max_context` tokens (a bound, not today's longest).

    Each (sequence, key head) pair is one program; where that is too few, contexts are cut so that about `_DECODE_WAVES`
    programs per resident place exist. Each sequence's own length is divided on the device: one long context among short
    ones is cut into as many parts as if all were long. `num_splits` overrides the choice.
    """
    tile = decode_tile(itemsize, head_dim, num_heads // num_kv_heads)
    pairs = max(1, num_seqs * num_kv_heads)
    most_tiles = max(1, -(-max_context // tile.block_n))
    min_tiles = min(max(pairs // 8, 1), _MOST_MIN_TILES)
    if num_splits is None:
        wanted = -(-_DECODE_WAVES * _DECODE_RESIDENT * num_sms // pairs)
        num_splits = max(1, min(wanted, -(-most_tiles // min_tiles), _MOST_SPLITS))
    else:
        min_tiles = 1
    numel = num_seqs * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0
    return DecodeLaunch(tile, num_splits, min_tiles, numel)
