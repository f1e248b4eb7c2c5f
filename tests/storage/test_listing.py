"""Looking at a store, following its changes, labelling its chains, clearing parts of it, and auditing it in use."""

from __future__ import annotations

import random
import threading

import pytest

from tests.storage.chains import NAMESPACE, ROOT, assert_sound, chain, hashes, load, name, pin
from tieredkv.errors import StorageError
from tieredkv.storage import labels
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.tier import LoadOutcome, StoreOutcome
from tieredkv.storage.workers import StorageWorkers

CAPACITY = 2 << 20
OTHER = b"o" * 32


@pytest.fixture
def store(tmp_path):
    opened = DiskStore.open(tmp_path / "store", CAPACITY)
    yield opened
    opened.close()


def content(store: DiskStore, namespace: bytes = NAMESPACE) -> set[bytes]:
    with store.listing(namespace) as listing:
        return {key for key, num_children in listing.scan() if num_children is not None}


def damage(store: DiskStore, block_hash: bytes) -> None:
    """Flip a bit of a record, so that its next load finds it out."""
    with store._env.writing() as txn:
        record = bytearray(store._medium.get(txn.raw, block_hash, txn.dbs["blocks"]))
        record[-1] ^= 1
        store._medium.put(txn.raw, block_hash, bytes(record), txn.dbs["blocks"])


# -- looking -----------------------------------------------------------------------------------------------------------


def test_a_listing_shows_one_namespace_in_the_order_of_hashes(store):
    store.put(chain("a", 5))
    store.put(chain("b", 3, root=OTHER, namespace=OTHER))
    with store.listing(NAMESPACE) as listing:
        rows = list(listing.scan())
        assert [key for key, _ in rows] == sorted([*hashes("a", 5), *hashes("b", 3)])
        assert {key: number for key, number in rows if number is not None} == {
            h: int(h != name("a", 4)) for h in hashes("a", 5)
        }
        middle = sorted(hashes("a", 5))[2]
        assert next(iter(listing.scan(middle)))[0] == middle
        assert listing.row(name("a", 2)).depth == 2
        assert listing.row(name("b", 0)) is None
        assert listing.num_blocks == 8


def test_a_condemned_block_is_not_listed(store):
    store.put(chain("a", 3))
    damage(store, name("a", 1))
    assert load(store, name("a", 1)) is LoadOutcome.CORRUPT
    assert content(store) == {name("a", 0), name("a", 2)}
    store.maintain(idle=False)
    assert content(store) == {name("a", 0)}


def test_the_store_keeps_its_id(tmp_path):
    first = DiskStore.open(tmp_path, CAPACITY)
    store_id = first.store_id
    first.close()
    again = DiskStore.open(tmp_path)
    assert again.store_id == store_id
    again.close()
    assert len(bytes.fromhex(store_id)) == 16


# -- labels ------------------------------------------------------------------------------------------------------------


def test_labels_are_kept_beside_their_blocks(tmp_path):
    store = DiskStore.open(tmp_path, CAPACITY)
    store.put(chain("a", 2))
    assert store.label({("root", ROOT): "somebody", ("name", name("a", 1)): "Grüße"})
    assert store.label({("root", ROOT): "somebody else"})
    store.close()
    again = DiskStore.open(tmp_path)
    with again.listing(NAMESPACE) as listing:
        assert listing.label("root", ROOT) == "somebody else"
        assert listing.label("name", name("a", 1)) == "Grüße"
        assert listing.label("name", ROOT) is None
        assert listing.labels("root") == {ROOT: "somebody else"}
    again.close()


def test_labels_of_what_has_gone_are_swept_and_others_are_not(store, monkeypatch):
    monkeypatch.setattr(labels, "LEAST_BEFORE_SWEEP", 10)
    store._labels._most_new = 10
    store.put(chain("a", 2))
    store.label({("root", ROOT): "somebody", ("name", name("a", 1)): "mine"})
    for i in range(200):
        store.label({("root", name("gone", i)): "x"})
    with store.listing(NAMESPACE) as listing:
        left = listing.labels("root")
        assert left[ROOT] == "somebody"
        assert listing.label("name", name("a", 1)) == "mine"
        assert name("gone", 199) in left, "its blocks may be on their way"
        assert len(left) < 50
    assert_sound(store)


# -- changes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_changes_retold_in_order_are_the_content(store, seed):
    store.follow()
    dice, known, names = random.Random(seed), set(), []
    reasons = set()
    for i in range(25):
        deed = dice.random()
        if deed < 0.6:
            length = dice.randint(1, 25)
            store.put(chain(f"{seed}-{i}", length))
            names += hashes(f"{seed}-{i}", length)
        elif deed < 0.7:
            store.remove([dice.choice(names or [ROOT])])
        elif deed < 0.8:
            victims = [h for h in names if h in store]
            if victims:
                victim = dice.choice(victims)
                damage(store, victim)
                load(store, victim)
                store.maintain(idle=False)
        elif deed < 0.85:
            store.clear(below=[dice.choice(names or [ROOT])])
        else:
            store.touch(dice.choices(names or [ROOT], k=3))
        for change in store.take_changes():
            assert change.hash
            reasons.add(change.reason)
            if change.stored:
                assert change.hash not in known
                known.add(change.hash)
            else:
                assert change.hash in known
                known.remove(change.hash)
        assert known == content(store)
    assert {"spilled", "evicted"} <= reasons
    assert not store.has_changes


def test_nothing_is_kept_for_nobody(store):
    store.put(chain("a", 3))
    assert not store.has_changes
    assert store.take_changes() == []


def test_what_cannot_be_told_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("tieredkv.storage.session.MAX_CHANGES", 10)
    store = DiskStore.open(tmp_path / "store", CAPACITY)
    store.follow()
    store.put(chain("a", 20))
    change, *_ = store.take_changes()
    assert not change.hash
    (tmp_path / "store" / "data.mdb").unlink()
    assert name("a", 0) not in store
    store.maintain(idle=False)
    assert [c.reason for c in store.take_changes() if not c.hash] == ["the store was opened anew"]
    store.close()


# -- clearing ----------------------------------------------------------------------------------------------------------


def test_clear_by_roots_and_below_a_block(store):
    store.put(chain("a", 4))
    store.put(chain("b", 4, root=name("tenant", 1)))
    store.put(chain("c", 4, root=name("tenant", 2)))
    assert store.clear(roots=[name("tenant", 1), name("tenant", 3)]).num_removed == 4
    assert store.clear(roots=[]).num_removed == 0
    assert store.clear(below=[name("a", 2)]).num_removed == 2
    assert store.clear(below=[name("a", 3)]).num_removed == 0
    assert content(store) == {*hashes("a", 2), *hashes("c", 4)}
    assert_sound(store)


def test_what_a_pin_keeps_is_counted_and_what_lies_behind_it_goes(store):
    store.put(chain("a", 6))
    store.pin(pin("p", hashes("a", 3)))
    cleared = store.clear(below=[name("a", 0)])
    assert (cleared.num_removed, cleared.num_kept, cleared.num_failed, cleared.error) == (3, 3, 0, None)
    assert content(store) == set(hashes("a", 3))


def test_a_clear_that_cannot_write_says_so(tmp_path):
    store = DiskStore.open(tmp_path / "store", CAPACITY)
    store.put(chain("a", 3))
    (tmp_path / "store" / "data.mdb").unlink()
    cleared = store.clear()
    assert cleared.num_removed == 0
    assert cleared.error
    store.close()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_store_is_found_again_whatever_its_last_transaction_gave_back(tmp_path):
    """LMDB counts pages at the end of the file that a transaction took and gave back, and never writes them."""
    for seed in range(20):
        dice, names = random.Random(seed), []
        store = DiskStore.open(tmp_path / str(seed), CAPACITY)
        for i in range(30):
            deed = dice.random()
            if deed < 0.4:
                length = dice.randint(1, 12)
                store.put(chain(f"{seed}-{i}", length, nbytes=128))
                names += hashes(f"{seed}-{i}", length)
            elif deed < 0.6:
                store.clear()
            elif names:
                store.touch(dice.choices(names, k=5))
        store.put(chain("kept", 1, nbytes=128))
        expected = content(store)
        store.clear(below=[name("kept", 0)])
        store.close()
        again = DiskStore.open(tmp_path / str(seed))
        assert content(again) == expected - {name("kept", 0)}
        assert again.usage().num_resets == 0
        again.close()


# -- auditing in use ---------------------------------------------------------------------------------------------------


def test_a_check_keeps_no_writer_out(store):
    store.put(chain("a", 40))
    started, go_on, outcomes = threading.Event(), threading.Event(), []

    def stop() -> bool:
        started.set()
        assert go_on.wait(20)
        return False

    checking = threading.Thread(target=lambda: outcomes.append(store.check(stop)))
    checking.start()
    assert started.wait(20)
    # The audit stands still in its middle.
    assert store.put(chain("b", 2)) == [StoreOutcome.STORED] * 2
    go_on.set()
    checking.join(20)
    assert outcomes[0].ok, outcomes[0].problems
    assert outcomes[0].num_blocks == 42


def test_a_check_can_be_stopped(store):
    store.put(chain("a", 40))
    report = store.check(lambda: True)
    assert report.stopped
    assert not report.ok
    assert report.num_blocks < 40
    store.stopping = True
    assert store.check(lambda: False).stopped


def test_what_a_check_finds_is_gone_at_once(store):
    store.put(chain("a", 5))
    damage(store, name("a", 2))
    report = store.check(lambda: False)
    assert not report.ok
    assert name("a", 2) not in store
    store.maintain(idle=False)
    assert content(store) == set(hashes("a", 2))
    assert store.check(lambda: False).ok


# -- the threads -------------------------------------------------------------------------------------------------------


def test_a_long_question_keeps_nobody_waiting_but_its_asker(store):
    workers = StorageWorkers(store)
    asked, answer = threading.Event(), threading.Event()

    def long() -> str:
        asked.set()
        assert answer.wait(20)
        return "at last"

    slow = workers.ask(long)
    assert asked.wait(20)
    assert workers.ask(lambda: "quick").result(20) == "quick"
    assert workers.change(lambda: store.put(chain("a", 2))).result(20) == [StoreOutcome.STORED] * 2
    assert workers.health() == []
    answer.set()
    assert slow.result(20) == "at last"
    assert workers.close(20)


def test_what_a_question_raises_is_its_askers(store):
    workers = StorageWorkers(store, start=False)
    future = workers.ask(lambda: 1 // 0)
    assert workers.run_asks()
    assert isinstance(future.exception(1), ZeroDivisionError)
    assert workers.health() == []
    workers.close(1)


def test_questions_that_nobody_answered_fail_when_the_workers_close(store):
    workers = StorageWorkers(store, start=False)
    futures = [workers.ask(lambda: 1), workers.change(lambda: 1)]
    workers.close(0.1)
    for future in futures:
        assert isinstance(future.exception(1), StorageError)
    assert workers.ask(lambda: 1) is None


def test_a_change_comes_after_what_was_queued_before_it(store):
    workers = StorageWorkers(store, start=False)
    workers.put(chain("a", 3))
    cleared = workers.change(lambda: store.clear())
    while workers.run_writes():
        pass
    assert cleared.result(1).num_removed == 3
    assert content(store) == set()
    workers.close(1)
