"""Real damage to the store's files and values, while it is open and while it is not."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.storage.chains import BLOCK_NBYTES, assert_sound, chain, hashes, load, name
from tieredkv.errors import StorageError
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.record import HEADER_NBYTES
from tieredkv.storage.rows import Row
from tieredkv.storage.tier import LoadOutcome, StoreOutcome

CAPACITY = 2 << 20
ROOT = Path(__file__).resolve().parents[2]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store(tmp_path):
    store = DiskStore.open(tmp_path / "store", CAPACITY)
    store._env._clock = Clock()
    store.put(chain("a", 6))
    store.put(chain("b", 6))
    yield store
    store.close()


@contextlib.contextmanager
def tampering(store: DiskStore, database: str):
    """A transaction behind the store's back. Yields a dict of the rows; what is changed in it is written."""
    handle = store._env._handle
    with handle.env.begin(write=True) as txn:
        db = handle.dbs[database]
        with txn.cursor(db=db) as cursor:
            before = {bytes(k): bytes(v) for k, v in cursor}
        rows = dict(before)
        yield rows
        for key in before.keys() | rows.keys():
            if key not in rows:
                txn.delete(key, db=db)
            elif rows[key] != before.get(key):
                txn.put(key, rows[key], db=db)


def flip_bit(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 16]) + value[at + 1 :]


@pytest.mark.parametrize("at", [0, 5, 20, 40, 70, 100, 130, 140, HEADER_NBYTES, HEADER_NBYTES + 9999, -1])
def test_a_flipped_bit_in_a_record(store, at):
    with tampering(store, "blocks") as rows:
        value = rows[name("a", 3)]
        rows[name("a", 3)] = flip_bit(value, at % len(value))
    assert not store.verify().ok
    assert [load(store, h) for h in hashes("a", 6)] == [LoadOutcome.LOADED] * 3 + [LoadOutcome.CORRUPT] + [
        LoadOutcome.LOADED
    ] * 2
    assert store.longest_prefix(hashes("a", 6)) == 3
    assert store.usage().num_corrupt == 1
    store.maintain(idle=False)
    assert_sound(store)
    assert store.longest_prefix(hashes("a", 6)) == 3
    assert set(store.put(chain("a", 6, start=3))) == {StoreOutcome.STORED}
    assert load(store, name("a", 3)) is LoadOutcome.LOADED


@pytest.mark.parametrize("length", [0, 7, HEADER_NBYTES - 1, HEADER_NBYTES, 10_000, HEADER_NBYTES + BLOCK_NBYTES - 1])
def test_a_truncated_record(store, length):
    with tampering(store, "blocks") as rows:
        rows[name("a", 5)] = rows[name("a", 5)][:length]
    assert load(store, name("a", 5)) is LoadOutcome.CORRUPT
    store.maintain(idle=False)
    assert store.longest_prefix(hashes("a", 6)) == 5
    assert_sound(store)


def test_two_swapped_records(store):
    with tampering(store, "blocks") as rows:
        rows[name("a", 2)], rows[name("b", 2)] = rows[name("b", 2)], rows[name("a", 2)]
    assert [load(store, name(c, 2)) for c in "ab"] == [LoadOutcome.CORRUPT] * 2
    store.maintain(idle=False)
    assert [store.longest_prefix(hashes(c, 6)) for c in "ab"] == [2, 2]
    assert_sound(store)


def test_verify_finds_and_repairs_every_kind_of_damage(store):
    def lone_row(rows):
        del rows[name("a", 5)]

    def wrong_children(rows):
        row = Row.unpack(rows[name("a", 1)])
        row.num_children = 7
        rows[name("a", 1)] = row.pack()

    def orphan(rows):
        row = Row.unpack(rows[name("b", 0)])
        row.parent, row.depth = name("nowhere", 0), 3
        rows[name("b", 0)] = row.pack()

    def garbage(rows):
        rows[name("a", 4)] = b"too short"

    def one_gone(rows):
        rows.pop(next(iter(rows)))

    def one_more(rows):
        rows[b"\x01" + bytes(9) + name("a", 0)] = b""

    def pin_of_nothing(rows):
        rows[name("nowhere", 0)] = b"\1\0\0\0"

    def counters(rows):
        rows[b"state"] = flip_bit(rows[b"state"], 0)

    damages = [
        ("blocks", lone_row),
        ("meta", wrong_children),
        ("meta", orphan),
        ("meta", garbage),
        ("recency", one_gone),
        ("recency", one_more),
        ("pins", pin_of_nothing),
        ("info", counters),
    ]
    for database, damage in damages:
        with tampering(store, database) as rows:
            damage(rows)
        seen = []
        report = store.verify(progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert not report.ok, damage.__name__
        assert report.problems
        assert seen[-1][0] == seen[-1][1]
        assert store.verify(repair=True).repaired
        assert_sound(store)
        store.put(chain("a", 6))
        store.put(chain("b", 6))
        assert_sound(store)


@pytest.mark.parametrize("damage", ["children", "garbage", "state"])
def test_contradicting_rows_are_rebuilt_in_passing(store, damage):
    if damage == "state":
        with tampering(store, "info") as rows:
            rows[b"state"] = b"?"
    else:
        with tampering(store, "meta") as rows:
            for block_hash in hashes("a", 6):
                row = Row.unpack(rows[block_hash])
                row.num_children = 0
                rows[block_hash] = row.pack() if damage == "children" else b"?"
    for number in range(4):
        store.put(chain(number, 20))
        store.remove([name("a", 0)])
        store.clear(root=name("no such", 0))
        store.touch([name("a", 3)])
        assert load(store, name("b", 0)) in (LoadOutcome.LOADED, LoadOutcome.MISSING)
    store.maintain(idle=False)
    assert set(store.put(chain("c", 3))) == {StoreOutcome.STORED}
    assert store.fault is None
    assert_sound(store)


def test_counters_that_cannot_be_read_are_counted_anew_at_opening(store):
    with tampering(store, "info") as rows:
        rows[b"state"] = b"?"
    store.close()
    again = DiskStore.open(store.directory, CAPACITY)
    assert again.usage().num_blocks == 12
    assert_sound(again)
    again.close()


# -- files -----------------------------------------------------------------------------------------------------------------


def recovers(store: DiskStore) -> None:
    """After at most a second the store is in use again, empty or not."""
    store._env._clock.now_s += 2
    store.maintain(idle=True)
    assert store.fault is None
    assert set(store.put(chain("after", 3))) == {StoreOutcome.STORED}
    assert_sound(store)


def misses(store: DiskStore) -> None:
    assert load(store, name("a", 0)) is LoadOutcome.FAILED
    assert store.longest_prefix(hashes("a", 6)) == 0
    assert store.put(chain("c", 2)) == [StoreOutcome.FAILED] * 2
    store.touch([name("a", 0)])
    store.maintain(idle=True)
    assert store.fault is not None
    assert store.usage().num_failed > 0


def test_the_directory_is_removed_and_comes_back(store):
    moved = store.directory.with_name("moved")
    store.directory.rename(moved)
    misses(store)
    store._env._clock.now_s += 2
    misses(store)
    moved.rename(store.directory)
    recovers(store)
    assert store.longest_prefix(hashes("a", 6)) == 6


def test_the_directory_is_deleted_and_made_anew(store):
    shutil.rmtree(store.directory)
    misses(store)
    store.directory.mkdir()
    recovers(store)
    assert store.longest_prefix(hashes("a", 6)) == 0


def test_the_file_is_replaced(store, tmp_path):
    other = DiskStore.open(tmp_path / "other", CAPACITY)
    other.put(chain("x", 3))
    other.close()
    os.replace(tmp_path / "other" / "data.mdb", store.directory / "data.mdb")
    os.unlink(store.directory / "lock.mdb")
    assert load(store, name("a", 0)) is LoadOutcome.FAILED
    recovers(store)
    assert store.longest_prefix(hashes("x", 3)) == 3


@pytest.mark.parametrize("nbytes", [0, 4096, 8192, 100_000])
def test_the_file_is_cut_short_while_open(store, nbytes):
    os.truncate(store.directory / "data.mdb", nbytes)
    assert load(store, name("a", 0)) is LoadOutcome.FAILED
    assert store.longest_prefix(hashes("a", 6)) == 0
    assert "cut short" in store.fault
    recovers(store)
    assert store.usage().num_resets == 1


@pytest.mark.parametrize("nbytes", [0, 4096, 8192, 100_000])
def test_the_file_is_cut_short_while_closed(store, nbytes):
    store.close()
    os.truncate(store.directory / "data.mdb", nbytes)
    again = DiskStore.open(store.directory, CAPACITY)
    assert again.longest_prefix(hashes("a", 6)) == 0
    assert set(again.put(chain("a", 6))) == {StoreOutcome.STORED}
    assert_sound(again)
    again.close()


def test_the_head_of_the_file_is_overwritten(store):
    store.close()
    with open(store.directory / "data.mdb", "r+b") as file:
        file.write(os.urandom(8192))
    again = DiskStore.open(store.directory, CAPACITY)
    assert again.usage().num_resets == 1
    assert set(again.put(chain("a", 6))) == {StoreOutcome.STORED}
    again.close()


def test_a_read_only_folder_is_refused_at_opening_with_a_reason(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    with pytest.raises(StorageError, match="cannot be opened"):
        DiskStore.open(folder, CAPACITY)


def test_flipped_bits_in_the_pages_of_payloads_never_change_a_byte(store):
    """What is in the file outside LMDB's trees; see the documentation for the trees themselves."""
    store.close()
    path = store.directory / "data.mdb"
    data = bytearray(path.read_bytes())
    rng = random.Random(0)
    for block in chain("a", 6):
        at = data.find(bytes(block.payload[:64]))
        assert at > 0
        at += rng.randrange(BLOCK_NBYTES)
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    again = DiskStore.open(store.directory, CAPACITY)
    outcomes = [load(again, h) for h in hashes("a", 6)]
    # Freed pages may hold a stale copy: then the flip hit that one.
    assert set(outcomes) <= {LoadOutcome.CORRUPT, LoadOutcome.LOADED}
    assert LoadOutcome.CORRUPT in outcomes
    assert again.usage().num_corrupt == outcomes.count(LoadOutcome.CORRUPT)
    again.maintain(idle=False)
    assert_sound(again)
    again.close()
