"""The words that both tiers below the device share. Knows bytes and hashes, no tensors, no files.

A lookup promises nothing: a block that was there may be gone, short or damaged when it is loaded. Then the load says
so, and the caller computes the tokens instead. Only `LoadOutcome.LOADED` means that `target` holds the block's bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tieredkv.types import DEFAULT_PRIORITY

NEVER = 2**64 - 1
"""An expiry that never comes, in microseconds since the epoch."""


class LoadOutcome(enum.StrEnum):
    """What came of a load. `CORRUPT` and `MISSING` are facts about the record, `FAILED` one about the tier."""

    LOADED = "loaded"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


class StoreOutcome(enum.StrEnum):
    """What came of storing one block. Everything but the first two means: not resident, the suffix is dropped too."""

    STORED = "stored"
    PRESENT = "present"
    NO_PARENT = "no_parent"
    NO_ROOM = "no_room"
    TOO_LARGE = "too_large"
    REFUSED = "refused"
    FAILED = "failed"

    @property
    def resident(self) -> bool:
        return self in (StoreOutcome.STORED, StoreOutcome.PRESENT)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block on its way to a tier.

    `parent` is the hash of the block before it, or the chain's root for `depth` 0 (the first block). `namespace` is the
    32-byte digest of everything but tokens and tenant. `token_ids` are the block's own tokens, packed as unsigned 32-bit
    little endian (empty if unknown). `payload` must not change until the store has answered. `expires_us` is wall-clock
    time in microseconds since the epoch: from then on the block's priority is the ordinary one.
    """

    hash: bytes
    parent: bytes
    depth: int
    namespace: bytes
    payload: memoryview
    token_ids: bytes = b""
    priority: int = DEFAULT_PRIORITY
    expires_us: int = NEVER


SPILLED, EVICTED, CLEARED, CORRUPT = "spilled", "evicted", "cleared", "corrupt"
"""Why a block came or went."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """One block that came into the disk tier (`stored`) or left it; `reason` is one of spilled, evicted, cleared and corrupt.
    An empty hash means that changes are not told: the tier has been repaired or opened anew.
    """

    hash: bytes
    stored: bool
    reason: str
    parent: bytes = b""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tier that fails to take blocks: why it did not take the last ones, since when (microseconds since the epoch), and how
    many it has refused since then.
    """

    reason: str
    since_us: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """A tier's counters. The first four are facts about its contents, the others counts since it was opened here.

    `used_nbytes` is what the blocks cost the tier (page-rounded on disk) and never exceeds `capacity_nbytes`.
    `num_pinned` counts the blocks that pins keep; on disk those of all processes, also where they are not there yet.
    `payload_nbytes` is what the same blocks take on the device.
    """

    capacity_nbytes: int
    used_nbytes: int
    payload_nbytes: int
    num_blocks: int
    num_evictions: int = 0
    num_corrupt: int = 0
    num_stored: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_resets: int = 0
    num_pinned: int = 0
    num_retained: int = 0
