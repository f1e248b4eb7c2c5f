"""The host arena: slots belong to whoever holds them, eviction goes leaf by leaf, nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.storage.chains import hashes, name, payload_of
from tieredkv.errors import InvariantError, StorageError
from tieredkv.storage.host import HostArena
from tieredkv.storage.memory import REGISTER_CHUNK_NBYTES, PinnedMemory, PlainMemory
from tieredkv.storage.slots import Lease, Reservation
from tieredkv.types import DEFAULT_PRIORITY

NBYTES = 5000
SLOT_NBYTES = 8192


def make_arena(num_slots: int = 4) -> HostArena:
    return HostArena(NBYTES, num_slots * SLOT_NBYTES)


def store(
    arena: HostArena, block_hash: bytes, parent: bytes, depth: int, *, priority: int = DEFAULT_PRIORITY, **more
) -> bool:
    arena.priority = lambda _: priority
    reservation = arena.begin(block_hash, parent, depth, **more)
    if reservation is None:
        return False
    reservation.view[:] = payload_of(block_hash, NBYTES)
    reservation.commit().release()
    return True


def store_chain(arena: HostArena, key: object, length: int, **more) -> int:
    names = hashes(key, length)
    return sum(store(arena, h, names[d - 1] if d else name("root", 0), d, **more) for d, h in enumerate(names))


def test_bytes_come_back():
    arena = make_arena()
    store_chain(arena, "a", 3)
    for block_hash in hashes("a", 3):
        with arena.lease(block_hash) as lease:
            assert lease.view == payload_of(block_hash, NBYTES)
            assert lease.hash == block_hash
    arena.check_integrity(num_leases=0, num_reservations=0)
    assert arena.lease(name("b", 0)) is None
    arena.close()


def test_the_tail_goes_before_the_head():
    arena = make_arena(4)
    store_chain(arena, "a", 4)
    for i in range(4):
        assert arena.longest_prefix(hashes("a", 4)) == 4 - i
        store(arena, name("x", i), name("elsewhere", i), 7)
    assert arena.usage().num_evictions == 4


def test_a_touched_prefix_stays():
    arena = make_arena(6)
    store_chain(arena, "a", 3)
    store_chain(arena, "b", 3)
    arena.touch(hashes("a", 3))
    store_chain(arena, "c", 3)
    assert arena.longest_prefix(hashes("a", 3)) == 3
    assert arena.longest_prefix(hashes("b", 3)) == 0


def test_a_parent_inherits_the_use_of_a_removed_child():
    arena = make_arena(4)
    store_chain(arena, "a", 2)
    store_chain(arena, "b", 1)
    arena.touch(hashes("a", 2)[1:])
    arena.remove(name("a", 1))
    store_chain(arena, "c", 3)
    assert name("a", 0) in arena
    assert name("b", 0) not in arena


def test_low_priorities_go_first_and_blocks_are_as_old_as_they_are_once_they_are_ordinary_again():
    arena = make_arena(5)
    store(arena, name("lent", 0), b"", 0)
    arena.retain(name("lent", 0), 90)
    store(arena, name("precious", 0), b"", 0, priority=90)
    store(arena, name("plain", 0), b"", 0)
    store(arena, name("cheap", 0), b"", 0, priority=1)
    store(arena, name("soon dear", 0), b"", 0)
    arena.retain(name("soon dear", 0), 1)
    for block_hash in (name("lent", 0), name("soon dear", 0)):
        arena.retain(block_hash, DEFAULT_PRIORITY)
    for i, gone in enumerate(("cheap", "lent", "plain", "soon dear")):
        assert name(gone, 0) in arena
        store(arena, name("new", i), b"", 0, priority=80)
        assert name(gone, 0) not in arena
    assert name("precious", 0) in arena
    arena.check_integrity(num_leases=0, num_reservations=0)


def test_kept_blocks_stay_until_they_are_not_kept():
    arena = make_arena(4)
    arena.keep(name("a", 1))
    store_chain(arena, "a", 2)
    store_chain(arena, "b", 2)
    arena.keep(name("b", 1))
    assert arena.num_kept == 2
    assert arena.begin(name("c", 0), b"", 0) is None
    arena.unkeep(name("a", 1))
    store_chain(arena, "c", 2)
    assert arena.longest_prefix(hashes("a", 2)) == 0
    assert arena.longest_prefix(hashes("b", 2)) == 2
    assert arena.remove(name("b", 1))
    assert arena.num_kept == 0
    arena.check_integrity(num_leases=0, num_reservations=0)


def test_more_than_the_limit_is_not_retained():
    arena = make_arena(6)
    arena.retained_limit = 2
    for i in range(4):
        store(arena, name("dear", i), b"", 0, priority=60)
    assert arena.num_retained == 2
    arena.retain(name("dear", 0), 70)
    assert arena.num_retained == 2
    for i in range(4):
        store(arena, name("plain", i), b"", 0)
    assert [name("dear", i) in arena for i in range(4)] == [True, False, False, True]
    arena.check_integrity(num_leases=0, num_reservations=0)


def test_what_is_protected_or_a_parent_is_not_evicted():
    arena = make_arena(4)
    store_chain(arena, "a", 3)
    store(arena, name("b", 0), b"", 0)
    assert arena.begin(name("c", 0), b"", 0, protect={name("a", 2), name("b", 0)}) is None
    reservation = arena.begin(name("a", 3), name("a", 2), 3)
    assert name("b", 0) not in arena
    reservation.abort()
    assert arena.longest_prefix(hashes("a", 4)) == 3
    arena.check_integrity(num_leases=0, num_reservations=0)


def test_leased_slots_are_never_reused():
    arena = make_arena(4)
    store_chain(arena, "a", 4)
    leases = [arena.lease(h) for h in hashes("a", 4)]
    assert arena.begin(name("b", 0), b"", 0) is None
    assert arena.clear() == (4, 4)
    assert arena.longest_prefix(hashes("a", 4)) == 0
    assert [bytes(lease.view) for lease in leases] == [payload_of(h, NBYTES) for h in hashes("a", 4)]
    with pytest.raises(InvariantError, match="in use"):
        arena.close()
    leases[0].release()
    assert store(arena, name("a", 0), b"", 0)
    with pytest.raises(InvariantError, match="twice"):
        leases[0].release()
    for lease in leases[1:]:
        lease.release()
    arena.check_integrity(num_leases=0, num_reservations=0)
    assert arena.num_free == 3


def test_a_slot_being_filled_is_nobodys_yet():
    arena = make_arena(4)
    reservation = arena.begin(name("a", 0), b"", 0)
    assert name("a", 0) not in arena
    assert arena.lease(name("a", 0)) is None
    assert arena.begin(name("a", 0), b"", 0) is None
    assert not arena.remove(name("a", 0))
    with pytest.raises(InvariantError):
        arena.check_integrity(num_reservations=0)
    reservation.abort()
    with pytest.raises(InvariantError):
        reservation.commit()
    assert arena.num_free == 4


def test_without_capacity_blocks_only_pass_through():
    arena = HostArena(NBYTES, 0, staging_slots=3)
    assert (arena.num_slots, arena.keeps) == (3, False)
    gone = []
    arena.on_evict = gone.append
    reservation = arena.begin(name("a", 0), b"", 0)
    lease = reservation.commit()
    assert name("a", 0) in arena
    lease.release()
    assert name("a", 0) not in arena
    assert gone == [name("a", 0)]
    assert arena.num_free == 3


def test_the_size_is_exact_and_slots_are_page_aligned():
    arena = make_arena(5)
    assert arena.usage().capacity_nbytes == 5 * SLOT_NBYTES
    assert arena.address % 4096 == 0
    assert arena.slot_view(4).nbytes == NBYTES
    with pytest.raises(StorageError):
        HostArena(0, 100)
    with pytest.raises(StorageError):
        PlainMemory(1 << 62)


def test_the_tensor_shares_the_slots():
    torch = pytest.importorskip("torch")
    arena = make_arena(4)
    store_chain(arena, "a", 1)
    with arena.lease(name("a", 0)) as lease:
        tensor = arena.tensor()
        assert tensor.shape == (4, NBYTES)
        assert tensor.dtype == torch.uint8
        assert tensor[lease.slot].numpy().tobytes() == payload_of(name("a", 0), NBYTES)


class FakeRuntime:
    """Registers memory as CUDA does: a chunk at a time, and only so much of it."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.regions: dict[int, int] = {}

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802 - CUDA's name
        if sum(self.regions.values()) + nbytes > self.limit_nbytes:
            raise RuntimeError("cudaErrorMemoryAllocation")
        self.regions[address] = nbytes

    def hostUnregister(self, address: int) -> None:  # noqa: N802 - CUDA's name
        del self.regions[address]


def test_pinned_memory_is_registered_by_chunks_of_whole_slots():
    runtime = FakeRuntime(1 << 40)
    granule = 3 * 4096 * 1000
    nbytes = 200 * granule
    memory = PinnedMemory(nbytes, granule, runtime=runtime)
    assert sum(runtime.regions.values()) == nbytes
    assert len(runtime.regions) > 1
    for address, size in runtime.regions.items():
        assert (address - memory.address) % granule == 0
        assert size <= REGISTER_CHUNK_NBYTES
    memory.close()
    assert not runtime.regions


def test_pinning_that_fails_leaves_nothing_behind():
    runtime = FakeRuntime(REGISTER_CHUNK_NBYTES + 5)
    with pytest.raises(StorageError, match="cannot be pinned"):
        PinnedMemory(3 * REGISTER_CHUNK_NBYTES, 1 << 20, runtime=runtime)
    assert not runtime.regions


# -- any order of calls ----------------------------------------------------------------------------------------------------

NUM_SLOTS = 6
KEYS = {name(c, d): (name(c, d - 1) if d else name("root", 0), d) for c in "abcd" for d in range(4)}
keys = st.sampled_from(list(KEYS))


class ArenaMachine(RuleBasedStateMachine):
    """Holders hold on to their slots for as long as they like; whatever else happens, they find their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = make_arena(NUM_SLOTS)
        self.ready: dict[bytes, bytes] = {}
        self.reservations: list[Reservation] = []
        self.leases: list[tuple[Lease, bytes]] = []
        self.evicted: list[bytes] = []
        self.arena.on_evict = self.evicted.append
        self.uses: dict[bytes, int] = {}
        self.count = 0

    def use(self, block_hash: bytes) -> None:
        self.count += 1
        self.uses[block_hash] = self.count

    @rule(block_hash=keys)
    def begin(self, block_hash):
        parent, depth = KEYS[block_hash]
        known = block_hash in self.ready or any(r.hash == block_hash for r in self.reservations)
        full = self.arena.num_free == 0
        held = {lease.hash for lease, _ in self.leases}
        filling = {KEYS[r.hash][0] for r in self.reservations}
        leaves = [
            h for h in self.ready if h not in held | filling | {parent} and h not in {KEYS[c][0] for c in self.ready}
        ]
        self.evicted.clear()
        reservation = self.arena.begin(block_hash, parent, depth)
        assert (reservation is None) == (known or (full and not leaves))
        if reservation is not None:
            assert self.evicted == ([min(leaves, key=self.uses.__getitem__)] if full else [])
            for gone in self.evicted:
                self.forget(gone)
            self.reservations.append(reservation)

    def forget(self, block_hash: bytes) -> None:
        del self.ready[block_hash]
        parent = KEYS[block_hash][0]
        if parent in self.uses:
            self.uses[parent] = max(self.uses[parent], self.uses[block_hash])

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), commit=st.booleans(), keep=st.booleans())
    def finish(self, data, commit, keep):
        reservation = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        block_hash = reservation.hash
        reservation.view[:] = payload_of(block_hash, NBYTES)
        if not commit:
            reservation.abort()
            return
        lease = reservation.commit()
        self.ready[block_hash] = payload_of(block_hash, NBYTES)
        self.use(block_hash)
        self.leases.append((lease, self.ready[block_hash]))
        if not keep:
            self.leases.pop()[0].release()

    @rule(block_hash=keys)
    def lease(self, block_hash):
        lease = self.arena.lease(block_hash)
        assert (lease is not None) == (block_hash in self.ready)
        if lease is not None:
            self.leases.append((lease, self.ready[block_hash]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease, expected = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert lease.view == expected
        lease.release()

    @rule(chain=st.sampled_from("abcd"), length=st.integers(1, 4))
    def touch(self, chain, length):
        known = [h for h in hashes(chain, length) if h in self.ready or any(r.hash == h for r in self.reservations)]
        self.arena.touch(hashes(chain, length))
        for block_hash in reversed(known):
            self.use(block_hash)

    @rule(block_hash=keys)
    def remove(self, block_hash):
        assert self.arena.remove(block_hash) == (block_hash in self.ready)
        if block_hash in self.ready:
            self.forget(block_hash)

    @invariant()
    def agrees(self):
        self.arena.check_integrity(num_leases=len(self.leases), num_reservations=len(self.reservations))
        assert {h for h in KEYS if h in self.arena} == set(self.ready)
        assert all(lease.view == expected for lease, expected in self.leases)
        assert self.arena.usage().num_blocks == len(self.ready)


ArenaMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
