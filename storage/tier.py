"""The face that every tier below the device shows to the cache. Knows bytes and hashes, no tokens and no tensors.

A tier keeps blocks, each a slab of `block_nbytes` bytes under its 32-byte hash. A lookup is a promise about nothing: a
block that was there may be gone, short or damaged when it is loaded, and then the load says so and the caller computes
the tokens instead.

Invariant of every implementation: `load` returns True only if `target` holds exactly the bytes that `store` was given
for that hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tier(Protocol):
    """Host memory or disk, as seen from above. Sizes in bytes; hashes are 32 bytes, head of a prefix first."""

    @property
    def capacity_nbytes(self) -> int: ...

    @property
    def used_nbytes(self) -> int: ...

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes`, from the first one on, are resident. Changes nothing, not even recency."""
        ...

    def load(self, block_hash: bytes, target: memoryview) -> bool:
        """Fill `target` with the block; False (and `target` undefined) if it is missing, short or fails verification."""
        ...

    def store(self, block_hash: bytes, parent: bytes, source: memoryview) -> bool:
        """Keep a copy of `source`; False if the tier refuses, for example because `parent` is not resident."""
        ...

    def clear(self) -> int:
        """Forget every block that is neither pinned nor in use; returns how many went."""
        ...
