"""The block pool against a plain model, and the order in which it forgets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tieredkv.blocks import NULL_BLOCK, BlockPool
from tieredkv.errors import InvariantError


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def chain(pool: BlockPool, first: int, length: int) -> list[int]:
    ids = pool.take(length)
    for i, block_id in enumerate(ids):
        pool.commit(block_id, digest(first + i))
    return ids


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert NULL_BLOCK not in pool.take(3)
    with pytest.raises(InvariantError):
        pool.take(1)


def test_a_prefix_shrinks_from_its_end():
    pool = BlockPool(9)
    pool.release(chain(pool, 0, 8))
    for left in range(7, -1, -1):
        (taken,) = pool.take(1)
        assert [pool.find(digest(i)) is not None for i in range(8)] == [i < left for i in range(8)]
        pool.commit(taken, digest(100 + left))
    assert pool.num_evicted == 8


def test_blocks_without_a_hash_go_before_findable_ones():
    pool = BlockPool(5)
    findable = chain(pool, 0, 2)
    plain = pool.take(2)
    pool.release(findable)
    pool.release(plain)
    assert set(pool.take(2)) == set(plain)
    assert pool.find(digest(0)) == findable[0]


def test_the_least_recently_used_chain_goes_first():
    pool = BlockPool(5)
    old, young = chain(pool, 0, 2), chain(pool, 10, 2)
    pool.release(old)
    pool.release(young)
    for block_id in old:
        pool.acquire(block_id)
    pool.release(old)
    pool.take(2)
    assert pool.find(digest(0)) is not None
    assert pool.find(digest(10)) is None


def test_the_first_writer_of_a_hash_keeps_it():
    pool = BlockPool(4)
    first, second = pool.take(2)
    assert pool.commit(first, digest(1)) == first
    assert pool.commit(second, digest(1)) == first
    assert pool.find(digest(1)) == first
    assert pool.hash_of(second) is None
    pool.check_integrity([first, second])


def test_eviction_is_announced_while_the_bytes_are_intact():
    seen = []
    pool = BlockPool(
        3, on_evict=lambda block_hash, block_id: seen.append((block_hash, pool.find(block_hash), block_id))
    )
    (block_id,) = chain(pool, 7, 1)
    pool.release([block_id])
    pool.take(2)
    assert seen == [(digest(7), block_id, block_id)]


def test_misuse_is_an_invariant_error():
    pool = BlockPool(4)
    committed, free = pool.take(2)
    pool.commit(committed, digest(1))
    pool.release([free])
    for misuse in (
        lambda: pool.release([free]),
        lambda: pool.acquire(NULL_BLOCK),
        lambda: pool.commit(free, digest(3)),
        lambda: pool.commit(committed, digest(2)),
        lambda: pool.take(3),
    ):
        with pytest.raises(InvariantError):
            misuse()
    pool.check_integrity([committed])


def test_kept_blocks_are_never_taken_until_they_are_given_up():
    pool = BlockPool(9)
    pool.keep(digest(1))
    pool.release(chain(pool, 0, 4))
    pool.keep(digest(0))
    assert (pool.num_free, pool.num_kept) == (6, 2)
    pool.take(6)
    with pytest.raises(InvariantError):
        pool.take(1)
    assert [pool.find(digest(i)) is not None for i in range(4)] == [True, True, False, False]
    with pytest.raises(InvariantError):
        pool.forget(pool.find(digest(0)))
    for i in (1, 0):
        pool.unkeep(digest(i))
    pool.take(1)
    assert [pool.find(digest(i)) is not None for i in range(2)] == [True, False]


def test_a_held_block_that_is_kept_meanwhile_does_not_go_back_to_its_place():
    pool = BlockPool(5)
    (block_id,) = ids = chain(pool, 0, 1)
    pool.release(ids)
    holds = pool.hold(ids)
    pool.keep(digest(0))
    pool.end_hold(holds)
    assert list(pool.coldest()) == []
    pool.take(3)
    assert pool.find(digest(0)) == block_id
    pool.check_integrity()


def test_low_priorities_are_taken_first_and_a_lowered_chain_shrinks_from_its_end():
    pool = BlockPool(13)
    for first, priority in ((0, 60), (10, 5), (20, 35)):
        for i in range(4):
            pool.prioritize(digest(first + i), priority)
        pool.release(chain(pool, first, 4))
    for i in range(4):
        pool.prioritize(digest(i), 35)
    # What was lowered counts as older than what was ordinary all along.
    order = [pool.hash_of(block_id) for block_id in pool.coldest()]
    assert order == [digest(i) for i in (13, 12, 11, 10, 3, 2, 1, 0, 23, 22, 21, 20)]


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, commit and release chains; a dict of owners and a dict of contents say what must be findable."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.owned: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.held: list = []
        self.kept: set[bytes] = set()
        self.pool.retained_limit = 4

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(1, self.pool.num_free))
        ids = self.pool.take(count)
        used = {b for chain in self.owned for b in chain}
        assert not used & set(ids)
        for block_id in ids:
            self.content.pop(block_id, None)
        self.owned.append(ids)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), number=st.integers(0, 15))
    def commit(self, data, number):
        owned = [b for c in self.owned for b in c]
        if not owned:
            return
        block_id = data.draw(st.sampled_from(owned))
        if block_id in self.content:
            return
        holder = self.pool.commit(block_id, digest(number))
        known = {h: b for b, h in self.content.items()}
        assert holder == known.get(digest(number), block_id)
        self.content.setdefault(holder, digest(number))

    @rule(number=st.integers(0, 15))
    def share(self, number):
        block_id = self.pool.find(digest(number))
        known = {h: b for b, h in self.content.items()}
        assert block_id == known.get(digest(number))
        if block_id is not None:
            self.pool.acquire(block_id)
            self.owned.append([block_id])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        held = [ids for _, ids in self.held]
        releasable = [i for i, c in enumerate(self.owned) if not any(c is ids for ids in held)]
        if releasable:
            self.pool.release(self.owned.pop(data.draw(st.sampled_from(releasable))))

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def hold(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.content)), unique=True))
        self.held.append((self.pool.hold(ids), ids))
        self.owned.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_hold(self, data):
        holds, ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.end_hold(holds)
        self.owned = [c for c in self.owned if c is not ids]

    @rule(number=st.integers(0, 15))
    def keep(self, number):
        self.pool.keep(digest(number))
        self.kept.add(digest(number))

    @rule(number=st.integers(0, 15))
    def unkeep(self, number):
        self.pool.unkeep(digest(number))
        self.kept.discard(digest(number))

    @rule(number=st.integers(0, 15), priority=st.sampled_from([0, 35, 60, 100]))
    def prioritize(self, number, priority):
        self.pool.prioritize(digest(number), priority)
        assert self.pool.priorities.get(digest(number), 35) == priority

    @rule()
    def reading_does_not_count_as_use(self):
        order = list(self.pool.coldest())
        holds = self.pool.hold(order)
        assert list(self.pool.coldest()) == []
        self.pool.end_hold(list(reversed(holds)))
        assert list(self.pool.coldest()) == order

    @rule()
    def forget_the_coldest(self):
        block_id = next(self.pool.coldest(), None)
        if block_id is not None:
            self.pool.forget(block_id)
            del self.content[block_id]

    @rule()
    def clear(self):
        used = {b for c in self.owned for b in c}
        removed, in_use = self.pool.clear()
        assert removed == sum(b not in used and h not in self.kept for b, h in self.content.items())
        self.content = {b: h for b, h in self.content.items() if b in used or h in self.kept}
        assert in_use == len(self.content)

    @invariant()
    def agrees(self):
        self.pool.check_integrity(b for c in self.owned for b in c)
        used = {b for c in self.owned for b in c}
        kept = {b for b, h in self.content.items() if h in self.kept}
        assert self.pool.num_free == self.pool.num_usable - len(used | kept)
        assert self.pool.num_kept == len(kept)
        assert not kept & set(self.pool.coldest())
        assert self.pool.num_committed == len(self.content)
        for block_id, block_hash in self.content.items():
            assert self.pool.find(block_hash) == block_id


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
