"""The block pool's memory: one tensor that holds the keys and values of every block.

    blocks [num_blocks, num_layers, 2 (key, value), block_size, num_kv_heads, head_dim]   contiguous

A block is one contiguous slab over all layers, the same bytes as in every other tier. Knows nothing of who owns a block.

Invariants: block 0 is the null block: no sequence owns it, padded writes land there. Every number that attention can read
is finite as long as writers are: fresh memory is zero, and whoever opens a block that it will not fill at once calls
`clear_blocks` first, so that a former owner's leftovers never meet a masked-out weight (0 x NaN is NaN).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tieredkv.layout import KVLayout
from tieredkv.runtime import anonymous_memory


class KVPool:
    """`num_blocks` blocks of `layout` on `device`, with the views that kernels index.

    blocks  [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    halves  [num_blocks * num_layers * 2, block_size * num_kv_heads * head_dim]
            a row is the keys, or the values, of one block in one layer
    rows    [num_blocks * num_layers * 2 * block_size, num_kv_heads * head_dim]
            a row is the key, or the value, of one token in one layer
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        """Raises `ValueError` for fewer than two blocks, since block 0 is never used."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self.dtype = dtype
        shape = (num_blocks, *layout.block_shape)
        self.blocks = _zeros(shape, device, dtype)
        row = layout.num_kv_heads * layout.head_dim
        self.halves = self.blocks.view(num_blocks * layout.num_layers * 2, layout.block_size * row)
        self.rows = self.blocks.view(num_blocks * layout.num_layers * 2 * layout.block_size, row)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.layout.block_nbytes

    def as_bytes(self) -> NDArray[np.uint8]:
        """The blocks of a pool in CPU memory as uint8 `[num_blocks, block_nbytes]`, sharing its memory."""
        array: NDArray[np.uint8] = self.blocks.view(torch.uint8).view(self.num_blocks, -1).numpy()
        return array

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Fill whole blocks with zeros, in all layers."""
        if block_ids:
            self.blocks.index_fill_(0, torch.tensor(block_ids, dtype=torch.int64, device=self.device), 0)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of `shape`.

    On the CPU an anonymous mapping: its pages exist only once written, so a pool of any size opens at once, and they are
    huge where the kernel allows it, which matters because a decode step reads short runs all over the pool.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = anonymous_memory(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
