"""What holds for every tier below the device, whatever it is made of. Subclass `TierConformance` for a new one."""

from __future__ import annotations

import pytest

from tests.storage.chains import BLOCK_NBYTES, NAMESPACE, hashes, name, payload_of, record
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.host import HostArena
from tieredkv.storage.tier import BlockRecord, LoadOutcome, TierUsage

ROOM = 30
"""Blocks that each tier under test has room for, about."""


class TierConformance:
    """A tier keeps blocks under their hashes. Subclasses say how; see the methods that raise."""

    @pytest.fixture
    def tier(self, tmp_path):
        raise NotImplementedError

    def store(self, tier, block: BlockRecord) -> bool:
        raise NotImplementedError

    def load(self, tier, block_hash: bytes) -> bytes | None:
        raise NotImplementedError

    def usage(self, tier) -> TierUsage:
        return tier.usage()

    def fill(self, tier, key: object, length: int) -> int:
        stored = 0
        for depth, block_hash in enumerate(hashes(key, length)):
            parent = name(key, depth - 1) if depth else name("root", 0)
            stored += self.store(tier, record(block_hash, parent, depth))
        return stored

    def test_an_empty_tier_holds_nothing(self, tier):
        assert tier.longest_prefix([]) == 0
        assert tier.longest_prefix(hashes("a", 5)) == 0
        assert self.load(tier, name("a", 0)) is None
        assert self.usage(tier).num_blocks == self.usage(tier).used_nbytes == 0

    def test_what_is_stored_is_loaded_bit_for_bit(self, tier):
        assert self.fill(tier, "a", 5) == 5
        assert [self.load(tier, h) for h in hashes("a", 5)] == [payload_of(h) for h in hashes("a", 5)]
        assert self.load(tier, name("b", 0)) is None

    def test_a_prefix_is_counted_from_its_head(self, tier):
        self.fill(tier, "a", 6)
        for asked in range(9):
            assert tier.longest_prefix(hashes("a", asked)) == min(asked, 6)
        assert tier.longest_prefix([name("x", 0), *hashes("a", 6)]) == 0

    def test_looking_changes_nothing(self, tier):
        self.fill(tier, "old", 10)
        self.fill(tier, "new", ROOM - 10)
        for _ in range(3):
            tier.longest_prefix(hashes("old", 10))
            assert name("old", 9) in tier or tier.longest_prefix(hashes("old", 10)) < 10
        self.fill(tier, "more", 5)
        assert tier.longest_prefix(hashes("new", ROOM - 10)) == ROOM - 10
        assert tier.longest_prefix(hashes("old", 10)) < 10

    def test_the_cap_holds_and_prefixes_lose_their_tails(self, tier):
        for number in range(12):
            assert self.fill(tier, number, 8) == 8
            usage = self.usage(tier)
            assert usage.used_nbytes <= usage.capacity_nbytes
            for key in range(number + 1):
                found = tier.longest_prefix(hashes(key, 8))
                assert not any(h in tier for h in hashes(key, 8)[found:]), "a block whose head is gone"
        assert self.usage(tier).num_evictions > 0
        assert tier.longest_prefix(hashes(11, 8)) == 8

    def test_a_touched_prefix_outlives_the_others(self, tier):
        self.fill(tier, "a", 8)
        self.fill(tier, "b", 8)
        tier.touch(hashes("a", 8))
        self.fill(tier, "c", ROOM - 10)
        assert tier.longest_prefix(hashes("a", 8)) == 8
        assert tier.longest_prefix(hashes("b", 8)) < 8

    def test_clearing_empties_it(self, tier):
        self.fill(tier, "a", 8)
        tier.clear()
        assert tier.longest_prefix(hashes("a", 8)) == 0
        assert self.usage(tier).num_blocks == 0
        assert self.fill(tier, "a", 8) == 8


class TestDiskConformance(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path):
        store = DiskStore.open(tmp_path, 1 << 20)
        yield store
        assert store.verify().ok
        store.close()

    def store(self, tier, block):
        return tier.put([block])[0].resident

    def load(self, tier, block_hash):
        target = memoryview(bytearray(BLOCK_NBYTES))
        outcome = tier.load(block_hash, NAMESPACE, target)
        return bytes(target) if outcome is LoadOutcome.LOADED else None


class TestHostConformance(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path):
        arena = HostArena(BLOCK_NBYTES, ROOM * 20_480)
        yield arena
        arena.check_integrity(num_leases=0, num_reservations=0)
        arena.close()

    def store(self, tier, block):
        reservation = tier.begin(block.hash, block.parent, block.depth)
        if reservation is None:
            return False
        reservation.view[:] = block.payload
        reservation.commit().release()
        return True

    def load(self, tier, block_hash):
        lease = tier.lease(block_hash)
        if lease is None:
            return None
        with lease:
            return bytes(lease.view)
