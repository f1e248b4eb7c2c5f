"""What the disk tier promises a single user: prefixes, order of eviction, pins, clearing, files."""

from __future__ import annotations

import logging
import os
import stat

import lmdb
import pytest

from tests.storage.chains import (
    BLOCK_NBYTES,
    NAMESPACE,
    ROOT,
    TOKENS,
    assert_sound,
    chain,
    hashes,
    load,
    name,
    payload_of,
    pin,
    record,
    resident,
)
from tieredkv.errors import ConfigError, StorageError
from tieredkv.storage.autocodec import make_codec
from tieredkv.storage.codec import ZstdCodec
from tieredkv.storage.directory import UNSYNCED
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.index import PIN_KEY
from tieredkv.storage.tier import NEVER, LoadOutcome, StoreOutcome

CAPACITY = 1 << 20
NUM_FIT = 30
"""Blocks of BLOCK_NBYTES that the cap has room for."""


class Clock:
    def __init__(self) -> None:
        self.now_us = 1_000_000

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    store = DiskStore.open(tmp_path / "store", CAPACITY, clock_us=clock)
    yield store
    store.close()


def test_blocks_come_back_bit_for_bit_after_reopening(tmp_path):
    with_codecs = {"raw": chain("raw", 3), "zstd": chain("zstd", 3), "auto": chain("auto", 12)}
    for codec, records in with_codecs.items():
        store = DiskStore.open(tmp_path, CAPACITY, codec=make_codec(codec, 2, tmp_path))
        assert set(store.put(records)) == {StoreOutcome.STORED}
        store.close()
    store = DiskStore.open(tmp_path, CAPACITY)
    for key, records in with_codecs.items():
        assert store.longest_prefix(hashes(key, 20)) == len(records)
        assert {load(store, r.hash) for r in records} == {LoadOutcome.LOADED}
    assert_sound(store)
    store.close()


def test_tokens_are_compared_when_given(store):
    store.put(chain("a", 1))
    target = memoryview(bytearray(BLOCK_NBYTES))
    assert store.load(name("a", 0), NAMESPACE, target, token_ids=TOKENS) is LoadOutcome.LOADED
    assert store.load(name("a", 0), NAMESPACE, target, token_ids=bytes(64)) is LoadOutcome.CORRUPT


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16])
def test_the_longest_prefix_is_found_wherever_it_ends(store, length):
    store.put(chain("a", length))
    for asked in range(20):
        assert store.longest_prefix(hashes("a", asked)) == min(asked, length)
    for start in range(length):
        assert store.longest_prefix(hashes("a", 20)[start:]) == length - start


def test_a_block_without_its_parent_is_refused(store):
    assert store.put(chain("a", 3, start=1)) == [StoreOutcome.NO_PARENT] * 2
    assert store.put(chain("a", 1)) == [StoreOutcome.STORED]
    assert store.put(chain("a", 3)) == [StoreOutcome.PRESENT, StoreOutcome.STORED, StoreOutcome.STORED]
    wrong_depth = record(name("x", 0), name("a", 0), 5)
    wrong_namespace = record(name("y", 0), name("a", 0), 1, namespace=name("other", 0))
    assert store.put([wrong_depth, wrong_namespace]) == [StoreOutcome.REFUSED] * 2
    assert_sound(store)


def test_a_batch_may_come_in_any_order(store):
    records = chain("a", 9)
    assert store.put(records[::-1]) == [StoreOutcome.STORED] * 9
    assert_sound(store)


def test_the_least_recent_leaf_goes_first_and_a_parent_inherits(store):
    for key in "abc":
        store.put(chain(key, 10))
    store.touch([name("a", 9)])
    store.put(chain("d", 6))
    # b was the least recent: its tail went, a's did not although a was stored earlier.
    assert store.longest_prefix(hashes("a", 10)) == 10
    assert 0 < store.longest_prefix(hashes("b", 10)) < 10
    assert store.longest_prefix(hashes("d", 10)) == 6
    # Filling up shows that a's inner blocks have inherited the touch: c goes before a.
    store.put(chain("e", 6))
    assert store.longest_prefix(hashes("a", 10)) == 10
    assert store.longest_prefix(hashes("c", 10)) < 10
    assert_sound(store)


def test_a_parent_inherits_the_use_of_a_removed_child(store):
    store.put(chain("a", 2))
    store.put(chain("b", 1))
    store.touch([name("a", 1)])
    store.remove([name("a", 1)])
    store.put(chain("c", NUM_FIT - 1))
    assert store.longest_prefix(hashes("a", 1)) == 1
    assert store.longest_prefix(hashes("b", 1)) == 0


def test_low_priorities_go_first_and_expired_ones_are_ordinary_again(store, clock):
    store.put(chain("precious", 10, priority=90))
    store.put(chain("lent", 10, priority=90, expires_us=clock.now_us + 5))
    store.put(chain("plain", 10))
    store.put(chain("more", 7))
    kinds = ("precious", "lent", "plain", "more")
    assert [store.longest_prefix(hashes(k, 10)) for k in kinds] == [10, 10, 3, 7]
    clock.now_us += 1000
    store.put(chain("last", 10))
    assert [store.longest_prefix(hashes(k, 10)) for k in kinds] == [10, 0, 3, 7]
    store.put(chain("very last", 5))
    assert [store.longest_prefix(hashes(k, 10)) for k in kinds] == [10, 0, 0, 5]
    assert_sound(store)


def test_the_priority_of_a_stored_prefix_can_be_changed(store, clock):
    store.put(chain("dear", 10))
    store.put(chain("plain", 10))
    store.retain([(name("dear", 9), 60, clock.now_us + 1000), (name("unknown", 0), 60, NEVER)])
    store.put(chain("more", NUM_FIT - 10))
    assert store.longest_prefix(hashes("dear", 10)) == 10
    assert store.longest_prefix(hashes("plain", 10)) == 0
    clock.now_us += 1000
    store.put(chain("last", 10))
    assert store.longest_prefix(hashes("dear", 10)) == 0
    assert_sound(store)


def test_pinned_blocks_and_what_carries_them_stay(store):
    store.put(chain("a", 5))
    pinned = hashes("a", 4)
    assert store.pin(pin("one", pinned)) == 4
    assert store.pin(pin("two", pinned[:2])) == 2
    assert store.usage().num_pinned == 4
    for i in range(4):
        store.put(chain(f"filler{i}", 20))
    assert store.longest_prefix(hashes("a", 5)) == 4
    cleared = store.clear()
    assert cleared.num_kept == 4
    assert store.longest_prefix(hashes("a", 5)) == 4
    assert_sound(store)
    assert store.unpin(pin("one", pinned).id)
    assert store.clear().num_removed == 2
    assert store.longest_prefix(hashes("a", 5)) == 2
    assert store.unpin(pin("two", ()).id)
    assert store.unpin(pin("two", ()).id), "what is not there can be taken away"
    assert store.clear().num_removed == 2
    usage = store.usage()
    assert usage.num_blocks == usage.used_nbytes == usage.num_pinned == 0


def test_a_pin_waits_for_blocks_that_are_not_there_yet(store):
    assert store.pin(pin("early", hashes("a", 5))) == 0
    store.put(chain("a", 3))
    for i in range(4):
        store.put(chain(f"filler{i}", 20))
    assert store.longest_prefix(hashes("a", 5)) == 3
    store.put(chain("a", 5, start=3))
    for i in range(4):
        store.put(chain(f"more{i}", 20))
    assert store.longest_prefix(hashes("a", 5)) == 5
    assert_sound(store)
    # What is deleted by hand and stored again is pinned again.
    store.remove([name("a", 2)])
    store.put(chain("a", 5, start=2))
    for i in range(4):
        store.put(chain(f"again{i}", 20))
    assert store.longest_prefix(hashes("a", 5)) == 5
    assert_sound(store)


def test_pins_survive_and_expire_while_the_store_is_closed(tmp_path, clock):
    folder = tmp_path / "other"
    store = DiskStore.open(folder, CAPACITY, clock_us=clock)
    store.put(chain("a", 5))
    store.put(chain("b", 5))
    kept, lent = pin("kept", hashes("a", 5)), pin("lent", hashes("b", 5), expires_us=clock.now_us + 100)
    store.pin(kept)
    store.pin(lent)
    store.close()
    clock.now_us += 50
    store = DiskStore.open(folder, CAPACITY, clock_us=clock)
    assert set(store.pins().records) == {kept, lent}
    assert store.pins().num_resident == {kept.id: 5, lent.id: 5}
    store.close()
    clock.now_us += 50
    store = DiskStore.open(folder, CAPACITY, clock_us=clock)
    assert store.pins().records == (kept,)
    for i in range(4):
        store.put(chain(f"filler{i}", 20))
    assert store.longest_prefix(hashes("a", 5)) == 5
    assert store.longest_prefix(hashes("b", 5)) == 0
    assert_sound(store)
    store.close()


def test_a_pin_is_replaced_in_one_step(store, clock):
    store.put(chain("a", 4))
    store.put(chain("b", 4))
    store.pin(pin("p", hashes("a", 4), expires_us=clock.now_us + 10))
    assert store.pin(pin("p", hashes("b", 3))) == 3
    clock.now_us += 100
    store.maintain(idle=False)
    assert [record.hashes for record in store.pins().records] == [tuple(hashes("b", 3))]
    assert store.clear().num_kept == 3
    assert_sound(store)


def test_pins_must_not_take_the_room_that_the_store_works_in(store):
    many = [name("far", i) for i in range(10_000)]
    assert store.pin(pin("huge", many)) is None
    assert store.pins().records == ()
    assert store.usage().num_pinned == 0
    assert store.fault is None


def test_wrong_counts_of_pins_are_found_and_mended(store):
    store.put(chain("a", 5))
    store.pin(pin("p", hashes("a", 5)))
    with store._env.writing() as txn:
        txn.raw.delete(name("a", 4), db=txn.dbs["pins"])
        txn.raw.put(name("b", 0), (1).to_bytes(4, "little"), db=txn.dbs["pins"])
        txn.raw.put(PIN_KEY + b"12345678", b"nonsense", db=txn.dbs["info"])
    report = store.verify()
    assert report.num_problems >= 3
    assert store.verify(repair=True).repaired
    assert_sound(store)
    assert len(store.pins().records) == 1
    assert store.clear().num_kept == 5


def test_nothing_is_evicted_for_its_own_child(store):
    outcomes = store.put(chain("long", 60))
    kept = outcomes.count(StoreOutcome.STORED)
    assert outcomes == [StoreOutcome.STORED] * kept + outcomes[kept:]
    assert {StoreOutcome.NO_ROOM, StoreOutcome.NO_PARENT} >= set(outcomes[kept:])
    assert store.longest_prefix(hashes("long", 60)) == kept == NUM_FIT
    assert store.put(chain("long", 60, start=kept)) == [StoreOutcome.NO_ROOM] + [StoreOutcome.NO_PARENT] * (59 - kept)
    assert_sound(store)


def test_what_is_protected_is_not_evicted(store):
    store.put(chain("waiting", 5))
    for i in range(3):
        store.put(chain(i, 25), protect={name("waiting", 4)})
    assert store.longest_prefix(hashes("waiting", 5)) == 5
    assert store.put(chain("big", NUM_FIT), protect={name("waiting", 4)}).count(StoreOutcome.STORED) == NUM_FIT - 5


def test_a_block_beyond_the_cap_is_refused(store):
    store.put(chain("a", 3))
    assert store.put(chain("huge", 1, nbytes=CAPACITY)) == [StoreOutcome.TOO_LARGE]
    assert store.longest_prefix(hashes("a", 3)) == 3


def test_removing_takes_the_descendants_along(store):
    store.put(chain("a", 6))
    branch = record(name("branch", 2), name("a", 1), 2)
    store.put([branch, *chain("b", 2)])
    assert store.remove([name("a", 2), name("nowhere", 0)]) == 4
    assert resident(store, [*hashes("a", 6), branch.hash, *hashes("b", 2)]) == {
        *hashes("a", 2),
        branch.hash,
        *hashes("b", 2),
    }
    assert store.remove([name("a", 0)]) == 3
    assert_sound(store)


def test_clearing_by_namespace_and_root(store):
    other = name("other namespace", 0)
    store.put(chain("a", 3))
    store.put(chain("b", 3, root=name("tenant", 0)))
    store.put(chain("c", 3, namespace=other))
    assert store.clear(root=name("tenant", 0)).num_removed == 3
    assert store.clear(namespace=other).num_removed == 3
    assert store.longest_prefix(hashes("a", 3)) == 3
    assert store.clear(namespace=other, root=ROOT).num_removed == 0
    assert store.clear().num_removed == 3
    assert_sound(store)


def test_one_namespace_never_hits_another(store):
    store.put(chain("a", 1))
    assert load(store, name("a", 0), namespace=name("other", 0)) is LoadOutcome.CORRUPT


def test_inspect_tells_what_is_there(store):
    store.put(chain("a", 5))
    store.put([record(name("branch", 2), name("a", 1), 2)])
    store.put(chain("b", 2, root=name("tenant", 0)))
    store.pin(pin("p", [name("b", 1)]))
    store.describe_namespace(NAMESPACE, '{"model": "toy"}')
    found = store.inspect()
    (space,) = found.namespaces
    assert (space.digest, space.description) == (NAMESPACE, '{"model": "toy"}')
    assert (space.num_blocks, space.num_chains, space.num_roots, space.num_pinned) == (8, 3, 2, 1)
    assert space.payload_nbytes == 8 * BLOCK_NBYTES
    assert space.num_tokens == 8 * 16
    assert sum(space.depths.values()) == 8
    assert space.depths[0] == 2
    assert found.used_nbytes == space.cost_nbytes == store.usage().used_nbytes


def test_a_clock_set_back_does_not_turn_the_order_round(store, clock):
    store.put(chain("old", 14))
    clock.now_us = 5
    store.put(chain("new", 16))
    store.put(chain("more", 10))
    assert store.longest_prefix(hashes("new", 16)) == 16
    assert store.longest_prefix(hashes("old", 16)) < 16


# -- files -----------------------------------------------------------------------------------------------------------------


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_files_are_for_their_owner_only(tmp_path):
    old = os.umask(0)
    try:
        store = DiskStore.open(tmp_path / "a" / "store", CAPACITY)
    finally:
        os.umask(old)
    store.put(chain("a", 2))
    assert mode(store.directory) == 0o700
    assert {mode(p) for p in store.directory.iterdir()} == {0o600}
    store.close()


def test_a_folder_with_other_things_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "notes.txt").write_text("mine")
    DiskStore.open(tmp_path, CAPACITY).close()
    assert mode(tmp_path) == 0o755


def test_all_files_together_stay_within_the_capacity(store):
    for i in range(8):
        store.put(chain(i, 20))
    assert sum(p.stat().st_size for p in store.directory.iterdir()) <= CAPACITY


def test_a_store_of_another_format_is_refused_and_left_alone(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 1))
    store.close()
    mark = tmp_path / "tieredkv.lock"
    mark.write_text(mark.read_text().replace("1", "7"))
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StorageError, match=r"format 7.*choose another folder"):
        DiskStore.open(tmp_path, CAPACITY)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_format_number_inside_the_file_counts_too(tmp_path):
    DiskStore.open(tmp_path, CAPACITY).close()
    with lmdb.open(str(tmp_path), max_dbs=5) as env:
        info = env.open_db(b"info", create=False)
        with env.begin(write=True) as txn:
            txn.put(b"format", (9).to_bytes(4, "little"), db=info)
    with pytest.raises(StorageError, match="format 9"):
        DiskStore.open(tmp_path, CAPACITY)


def test_another_programs_files_are_refused_and_left_alone(tmp_path):
    with lmdb.open(str(tmp_path / "lmdb")) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.mdb").write_bytes(b"not LMDB at all" * 1000)
    for folder in ("lmdb", "other"):
        before = (tmp_path / folder / "data.mdb").read_bytes()
        for _ in range(2):
            with pytest.raises(StorageError, match="choose another folder"):
                DiskStore.open(tmp_path / folder, CAPACITY)
        assert (tmp_path / folder / "data.mdb").read_bytes() == before


def test_a_crash_of_the_machine_empties_the_store(tmp_path, caplog):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 3))
    assert (tmp_path / UNSYNCED).exists()
    store.close()
    assert not (tmp_path / UNSYNCED).exists()
    store = DiskStore.open(tmp_path, CAPACITY)
    assert store.longest_prefix(hashes("a", 3)) == 3
    store.put(chain("b", 3))
    (tmp_path / UNSYNCED).write_text("the boot before this one")
    store._env._unsynced = False  # so that closing does not sync: the machine has stopped
    store.close()
    with caplog.at_level(logging.WARNING):
        store = DiskStore.open(tmp_path, CAPACITY)
    assert "starts empty" in caplog.text
    assert (store.usage().num_blocks, store.usage().num_resets) == (0, 1)
    assert set(store.put(chain("a", 3))) == {StoreOutcome.STORED}
    assert_sound(store)
    store.close()


def test_a_store_that_was_synced_survives_a_crash(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 3))
    assert store.sync()
    assert not (tmp_path / UNSYNCED).exists()
    store.touch([name("a", 2)])
    assert (tmp_path / UNSYNCED).exists()
    store.maintain(idle=True)
    assert not (tmp_path / UNSYNCED).exists()
    store.close()


def test_opening_for_reading_changes_nothing(tmp_path):
    with pytest.raises(StorageError, match="holds no store"):
        DiskStore.open(tmp_path / "none", readonly=True)
    with pytest.raises(StorageError, match="holds no store"):
        DiskStore.open(tmp_path / "none2")
    assert not (tmp_path / "none").exists()
    store = DiskStore.open(tmp_path / "store", CAPACITY)
    store.put(chain("a", 3))
    store.close()
    before = (tmp_path / "store" / "data.mdb").read_bytes()
    reader = DiskStore.open(tmp_path / "store", readonly=True)
    assert reader.usage().capacity_nbytes == CAPACITY
    assert load(reader, name("a", 2)) is LoadOutcome.LOADED
    assert reader.put(chain("b", 1)) == [StoreOutcome.FAILED]
    assert reader.verify().ok
    reader.maintain(idle=True)
    reader.close()
    assert (tmp_path / "store" / "data.mdb").read_bytes() == before


def test_one_process_opens_a_store_once(store):
    with pytest.raises(StorageError, match="already open in this process"):
        DiskStore.open(store.directory, CAPACITY)


def test_after_closing_everything_fails_softly(store):
    store.put(chain("a", 1))
    store.close()
    store.close()
    assert store.longest_prefix(hashes("a", 1)) == 0
    assert load(store, name("a", 0)) is LoadOutcome.FAILED
    assert store.put(chain("b", 1)) == [StoreOutcome.FAILED]
    store.maintain(idle=True)
    assert store.usage().num_blocks == 1


def test_a_lower_capacity_trims_a_higher_one_gives_room(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 30))
    store.close()
    store = DiskStore.open(tmp_path, CAPACITY // 2)
    store.maintain(idle=True)
    assert_sound(store)
    assert 0 < store.longest_prefix(hashes("a", 30)) < 20
    store.close()
    store = DiskStore.open(tmp_path, 4 * CAPACITY)
    assert set(store.put(chain("b", 100))) == {StoreOutcome.STORED}
    assert_sound(store)
    store.close()


def test_a_useless_capacity_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="disk_size"):
        DiskStore.open(tmp_path, 1000)


def test_compressed_blocks_cost_less(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY, codec=ZstdCodec(2))
    assert store.put(chain("a", 40)).count(StoreOutcome.STORED) > NUM_FIT
    assert store.usage().payload_nbytes > store.usage().used_nbytes
    assert load(store, name("a", 30)) is LoadOutcome.LOADED
    assert payload_of(name("a", 30)) != payload_of(name("a", 31))
    assert_sound(store)
    store.close()
