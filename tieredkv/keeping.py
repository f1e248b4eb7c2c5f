"""Which copies of pinned blocks must stay where they are.

A pin names the lowest tier in which its blocks must stay. There a copy is kept *firmly*, and on disk as well if there is
one, because only the disk outlives the process. Until a block has got there, the best copy above is *lent* protection:

    wanted on disk, not there yet:   kept in the host tier if it is there, else on the device, and copied down soon
    wanted in the host tier:         kept on the device until it is in the host tier

The disk keeps its own count (`storage.index`), which holds for all processes; what is noted here of it is only whether a
block is there. Knows hashes and tiers; no pins as such, no sequences, no tensors. Used by the engine thread alone.

Invariants: no tier keeps more blocks than its limit, lent ones give way to firm ones; a tier keeps exactly what is noted
here as kept; the parent of a noted block was noted before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tieredkv.blocks import BlockPool
from tieredkv.errors import InvariantError
from tieredkv.tier_faces import HostTier
from tieredkv.types import Tier


class Keeps(Protocol):
    """A tier that can be told not to evict a block, whether it is there or not."""

    def keep(self, block_hash: bytes) -> None: ...

    def unkeep(self, block_hash: bytes) -> None: ...

    def is_kept(self, block_hash: bytes) -> bool: ...


class _Kept:
    """What one tier keeps: at most `limit` blocks, if all the firm ones together are no more than that."""

    def __init__(self, tier: Keeps | None, limit: int) -> None:
        self._tier = tier
        self.limit = limit
        self.firm: dict[bytes, None] = {}
        self.lent: dict[bytes, None] = {}

    def set(self, block_hash: bytes, *, firm: bool, lent: bool) -> None:
        """`firm` wins over `lent`; a block that cannot be lent protection any more is simply not kept."""
        if self._tier is None:
            return
        self.firm.pop(block_hash, None)
        if not lent or firm:
            self.lent.pop(block_hash, None)
        if firm:
            self.firm[block_hash] = None
            while self.lent and len(self.firm) + len(self.lent) > self.limit:
                self._tier.unkeep(self.lent.popitem()[0])
        elif lent and len(self.firm) + len(self.lent) < self.limit:
            self.lent.setdefault(block_hash)
        if block_hash in self.firm or block_hash in self.lent:
            self._tier.keep(block_hash)
        else:
            self._tier.unkeep(block_hash)


class _Noted:
    """One block that pins want: by how many in all, and by how many in which tier."""

    __slots__ = ("num_device", "num_host", "num_pins", "parent", "saved")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.num_pins = self.num_device = self.num_host = 0
        self.saved = False


class Keeper:
    """Counts pins per block and has the tiers keep what must stay. `device_limit` and `host_limit` are in blocks."""

    def __init__(self, pool: BlockPool, host: HostTier | None, *, has_disk: bool) -> None:
        self._pool = pool
        self._host = host
        self.has_disk = has_disk
        self.wanted: dict[bytes, None] = {}
        """Blocks on the device that a lower tier must get soon."""
        self._noted: dict[bytes, _Noted] = {}
        self._device = _Kept(pool, pool.num_usable)
        self._host_kept = _Kept(host if host is not None and host.keeps else None, host.num_slots if host else 0)

    def limit(self, *, device: int, host: int) -> None:
        """Most blocks that each tier keeps, lent ones included."""
        self._device.limit, self._host_kept.limit = device, host

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._noted

    def num_pins(self, block_hash: bytes) -> int:
        noted = self._noted.get(block_hash)
        return 0 if noted is None else noted.num_pins

    def is_saved(self, block_hash: bytes) -> bool:
        """Whether a noted block is on disk, as far as is known."""
        noted = self._noted.get(block_hash)
        return noted is not None and noted.saved

    def is_wanted_in(self, tier: Tier, block_hash: bytes) -> bool:
        """Whether a pin already claims a part of the tier's budget for this block."""
        noted = self._noted.get(block_hash)
        if noted is None:
            return False
        return {Tier.DEVICE: noted.num_device, Tier.HOST: noted.num_host, Tier.DISK: noted.num_pins}[tier] > 0

    def num_wanted_in(self, tier: Tier) -> int:
        """Blocks that claim a part of the tier's budget."""
        if tier is Tier.DISK:
            return len(self._noted) if self.has_disk else 0
        return len(self._device.firm if tier is Tier.DEVICE else self._host_kept.firm)

    @property
    def num_noted(self) -> int:
        """Blocks that pins want."""
        return len(self._noted)

    def add(self, hashes: Sequence[bytes], tier: Tier, num_firm: int) -> None:
        """One more pin on a prefix, head first, of which the first `num_firm` blocks stay in `tier`."""
        parent = None
        for i, block_hash in enumerate(hashes):
            noted = self._noted.setdefault(block_hash, _Noted(parent))
            noted.num_pins += 1
            noted.num_device += tier is Tier.DEVICE and i < num_firm
            noted.num_host += tier is Tier.HOST and i < num_firm
            parent = block_hash
            self._settle(block_hash, noted)

    def remove(self, hashes: Sequence[bytes], tier: Tier, num_firm: int) -> None:
        """One pin less, as it was added. What nothing keeps any more counts as used just now, the tail first to go."""
        for i, block_hash in reversed(list(enumerate(hashes))):
            noted = self._noted[block_hash]
            noted.num_pins -= 1
            noted.num_device -= tier is Tier.DEVICE and i < num_firm
            noted.num_host -= tier is Tier.HOST and i < num_firm
            if not noted.num_pins:
                del self._noted[block_hash]
            self._settle(block_hash, noted)

    def moved(self, block_hash: bytes) -> None:
        """A block has come to the device or the host tier, or has left one of them."""
        noted = self._noted.get(block_hash)
        if noted is not None:
            self._settle(block_hash, noted)

    def saved(self, block_hash: bytes) -> None:
        """A block is on disk."""
        noted = self._noted.get(block_hash)
        if noted is not None and not noted.saved:
            noted.saved = True
            self._settle(block_hash, noted)

    def lost(self, block_hash: bytes) -> None:
        """The disk does not hold a block, and so nothing behind it."""
        lost = {block_hash}
        for each, noted in self._noted.items():
            if each in lost or noted.parent in lost:
                lost.add(each)
                if noted.saved:
                    noted.saved = False
                    self._settle(each, noted)

    def _settle(self, block_hash: bytes, noted: _Noted) -> None:
        """Keep a block where it has to be kept, going by where it is."""
        pinned = noted.num_pins > 0
        on_device = self._pool.find(block_hash) is not None
        in_host = self._host is not None and block_hash in self._host
        unsaved = pinned and self.has_disk and not noted.saved
        self._host_kept.set(block_hash, firm=noted.num_host > 0, lent=unsaved and in_host)
        safe_in_host = in_host and self._host is not None and self._host.is_kept(block_hash)
        waits = (unsaved and not safe_in_host) or (noted.num_host > 0 and not in_host)
        self._device.set(block_hash, firm=noted.num_device > 0, lent=waits and on_device)
        if on_device and not in_host and (unsaved or noted.num_host > 0):
            self.wanted[block_hash] = None
        else:
            self.wanted.pop(block_hash, None)

    def check_integrity(self) -> None:
        """Compare with what the tiers keep. Raises `InvariantError`."""
        for name, kept, tier in (("device", self._device, self._pool), ("host", self._host_kept, self._host)):
            if len(kept.firm) + len(kept.lent) > max(kept.limit, len(kept.firm)) or kept.firm.keys() & kept.lent.keys():
                raise InvariantError(
                    f"{name}: {len(kept.firm)} + {len(kept.lent)} blocks are kept, {kept.limit} may be"
                )
            stray = [h for h in (*kept.firm, *kept.lent) if h not in self._noted or tier is None or not tier.is_kept(h)]
            if stray or (tier is not None and tier.num_kept_hashes != len(kept.firm) + len(kept.lent)):
                raise InvariantError(f"{name}: what is kept and what should be disagree")
        if any(h not in self._noted for h in self.wanted):
            raise InvariantError("a block is wanted that nothing pins")
