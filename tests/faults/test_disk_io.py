"""Every I/O operation of the disk tier fails, in every way it can; nothing raises, nothing lies, everything resumes."""

from __future__ import annotations

import errno

import lmdb
import pytest

from tests.storage.chains import assert_sound, chain, hashes, load, name, pin
from tests.storage.faulty import OPERATIONS, FaultyMedium
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.tier import LoadOutcome, StoreOutcome

CAPACITY = 1 << 20
ERRORS = {
    "EIO": OSError(errno.EIO, "Input/output error"),
    "ENOSPC": OSError(errno.ENOSPC, "No space left on device"),
    "EROFS": OSError(errno.EROFS, "Read-only file system"),
    "map full": lmdb.MapFullError("mdb_put"),
    "map resized": lmdb.MapResizedError("mdb_txn_begin"),
    "readers full": lmdb.ReadersFullError("mdb_txn_begin"),
    "panic": lmdb.PanicError("mdb_txn_begin"),
    "damaged": lmdb.CorruptedError("mdb_get"),
}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def medium():
    return FaultyMedium()


@pytest.fixture
def store(tmp_path, medium):
    store = DiskStore.open(tmp_path / "store", CAPACITY, medium=medium)
    store._env._clock = store_clock = Clock()
    store.put(chain("full", 22))
    store.put(chain("a", 6))
    assert store.sync()
    store_clock.now_s += 10
    yield store
    medium.heal()
    store.close()


def exercise(store: DiskStore, turn: object) -> bool:
    """A bit of everything; whatever it answers must be true. Whether anything was answered other than as usual."""
    found = store.longest_prefix(hashes("a", 6))
    outcomes = [load(store, h) for h in hashes("a", 6)]
    stored = store.put(chain(("new", turn), 3))
    for block, outcome in zip(chain(("new", turn), 3), stored, strict=True):
        if outcome is StoreOutcome.STORED:
            assert load(store, block.hash) in (LoadOutcome.LOADED, LoadOutcome.FAILED, LoadOutcome.MISSING)
        else:
            assert load(store, block.hash) in (LoadOutcome.MISSING, LoadOutcome.FAILED)
    store.touch([name("a", 5)])
    held = store.pin(pin("p", hashes("a", 6)))
    dropped = store.unpin(pin("p", ()).id)
    seen = store.pins()
    store.remove([name(("new", turn), 0)])
    store.clear(root=name("no such", 0))
    store.describe_namespace(name("namespace", turn), "{}")
    store.maintain(idle=True)
    store.usage()
    usual = found == 6 and set(outcomes) == {LoadOutcome.LOADED}
    return not usual or set(stored) != {StoreOutcome.STORED} or held is None or not dropped or seen is None


CASES = [
    (operation, error)
    for operation in OPERATIONS
    for error in ERRORS
    if error.startswith("E") or operation not in ("stat", "sync", "write_file", "remove_file")
]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("operation", "error"), CASES)
def test_a_failing_operation_is_a_miss_shows_and_passes(store, medium, operation, error, after):
    medium.fail(operation, ERRORS[error], after=after)
    before = store.usage(cached=True)
    disturbed = exercise(store, 1)
    after_usage = store.usage(cached=True)
    visible = store.fault is not None or any(
        getattr(after_usage, n) > getattr(before, n) for n in ("num_failed", "num_refused", "num_corrupt", "num_resets")
    )
    if medium.hits[operation] and disturbed:
        assert visible, "a fault that nobody can see"
    assert store.file_nbytes <= CAPACITY
    # The fault goes; within a second or two everything works again.
    medium.heal()
    for _ in range(3):
        store._env._clock.now_s += 2
        store.maintain(idle=True)
    assert store.fault is None
    assert set(store.put(chain("after", 4))) == {StoreOutcome.STORED}
    assert [load(store, h) for h in hashes("after", 4)] == [LoadOutcome.LOADED] * 4
    assert not exercise(store, 2) or name("a", 5) not in store
    assert_sound(store)


@pytest.mark.parametrize("operation", ["put", "delete", "commit", "begin"])
def test_a_write_that_fails_halfway_leaves_nothing(store, medium, operation):
    before = {h for h in [*hashes("a", 6), *hashes("full", 22)] if h in store}
    for after in range(12):
        medium.fail(operation, OSError(errno.EIO, "Input/output error"), after=after)
        store.put(chain(("half", after), 1))
        medium.heal()
        assert_sound(store)
        if name(("half", after), 0) in store:
            break
        assert {h for h in [*hashes("a", 6), *hashes("full", 22)] if h in store} == before
    else:
        assert operation in ("begin", "commit")


def test_a_full_disk_evicts_and_retries_once_then_drops_the_suffix(store, medium):
    medium.fail("commit", OSError(errno.ENOSPC, "No space left on device"))
    outcomes = store.put(chain("b", 5))
    assert outcomes == [StoreOutcome.NO_ROOM] * 5
    # The first try, the eviction, and no endless loop.
    assert medium.hits["commit"] <= 3
    assert "no space" in store.fault
    assert store.longest_prefix(hashes("b", 5)) == 0
    assert store.longest_prefix(hashes("a", 6)) == 6
    medium.heal()
    store.maintain(idle=False)
    assert store.fault is None
    assert set(store.put(chain("b", 5))) == {StoreOutcome.STORED}


def test_a_store_that_fails_to_take_blocks_says_so_until_it_takes_some(store, medium):
    assert store.refusal is None
    medium.fail("put", OSError(errno.ENOSPC, "No space left on device"))
    assert set(store.put(chain("b", 5))) == {StoreOutcome.NO_ROOM}
    first = store.refusal
    assert "no space" in first.reason
    assert first.num_blocks == 5
    # What is written to find out whether the fault has gone is small, and succeeds: blocks are still refused.
    medium.fail("put", OSError(errno.ENOSPC, "No space left on device"), after=2)
    store.maintain(idle=False)
    assert (store.fault, store.refusal) == (None, first)
    medium.heal()
    medium.fail("commit", OSError(errno.EIO, "Input/output error"))
    store.put(chain("c", 3))
    assert (store.refusal.num_blocks, store.refusal.since_us) == (8, first.since_us)
    assert "Input/output error" in store.refusal.reason
    medium.heal()
    store.maintain(idle=False)
    assert (store.fault, store.refusal.num_blocks) == (None, 8)
    assert set(store.put(chain("b", 5))) == {StoreOutcome.STORED}
    assert store.refusal is None
    # A block that is there already, or has no parent, tells nothing about the store.
    medium.fail("put", OSError(errno.ENOSPC, "No space left on device"))
    assert set(store.put([*chain("b", 5), *chain("d", 3, start=2)])) == {StoreOutcome.PRESENT, StoreOutcome.NO_PARENT}
    assert store.refusal is None


def test_a_map_that_is_full_once_makes_room_and_goes_on(store, medium):
    hits = []

    def full_once(txn, key, value, db):
        hits.append(key)
        if len(hits) == 1:
            raise lmdb.MapFullError("mdb_put")
        type(medium).__mro__[1].put(medium, txn, key, value, db)

    medium.faults["put"] = full_once
    assert set(store.put(chain("b", 5))) == {StoreOutcome.STORED}
    assert store.usage().num_evictions > 0
    medium.heal()
    assert_sound(store)


def test_a_sync_that_fails_leaves_the_store_marked(store, medium):
    store.put(chain("b", 1))
    medium.fail("sync", OSError(errno.EIO, "Input/output error"))
    assert not store.sync()
    store.maintain(idle=True)
    assert (store.directory / "unsynced").exists()
    assert store.fault is not None
    medium.heal()
    store.maintain(idle=True)
    assert not (store.directory / "unsynced").exists()
    assert store.fault is None


def test_a_block_the_device_cannot_read_is_not_asked_for_again(store, medium):
    medium.fail("read", OSError(errno.EIO, "Input/output error"))
    assert load(store, name("a", 2)) is LoadOutcome.FAILED
    assert load(store, name("a", 2)) is LoadOutcome.MISSING
    assert medium.hits["read"] == 1
    assert store.longest_prefix(hashes("a", 6)) == 2
    medium.heal()
    store.maintain(idle=False)
    assert store.longest_prefix(hashes("a", 6)) == 2
    assert set(store.put(chain("a", 6, start=2))) == {StoreOutcome.STORED}
    assert_sound(store)


def test_a_short_read_is_corrupt(store, medium):
    def short(source, target):
        target[: len(target) // 2] = source[: len(source) // 2]

    medium.faults["read"] = short
    assert load(store, name("a", 3)) is LoadOutcome.CORRUPT
    medium.heal()
    assert store.longest_prefix(hashes("a", 6)) == 3
    assert store.usage().num_corrupt == 1


def test_a_bit_that_flips_on_the_way_is_corrupt(store, medium):
    def flip(source, target):
        target[:] = source
        target[1234] ^= 4

    medium.faults["read"] = flip
    assert load(store, name("a", 5)) is LoadOutcome.CORRUPT
    medium.heal()
    store.maintain(idle=False)
    assert_sound(store)
