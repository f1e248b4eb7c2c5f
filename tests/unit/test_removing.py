"""Clearing and demoting while copies, reads and writes are under way, each of which happens when the test lets it.

The properties: what an answer counts as gone is gone and does not come back by itself; what stayed is counted; nothing is
lost by demoting.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fakes import VOCAB_SIZE, Collector, request
from tests.tier_fakes import FakeDisk, TieredCore
from tieredkv import inspection, removing, upkeep
from tieredkv.errors import RequestError, StorageError
from tieredkv.hashing import extend_chain, root_hash
from tieredkv.prefix_tree import PrefixTree
from tieredkv.removing import Removal, Selection
from tieredkv.types import Tier

ALL = Selection(None, None, None)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * 31) % VOCAB_SIZE for i in range(length)]


def chain(token_ids, tenant: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root_hash(b"n" * 32, tenant), token_ids, 8, len(token_ids) // 8)
    return hashes


class Cranked:
    """The functions that `Removal` reaches the engine with. Between any two of them the engine goes on, and whatever is under
    way happens or does not, as the dice say.
    """

    def __init__(self, tiered: TieredCore, seed: int = 0, cranks: int = 4) -> None:
        self.tiered = tiered
        self.core = tiered.core
        self.outputs = Collector(tiered.core)
        self.dice = random.Random(seed)
        self.cranks = cranks

    def go_on(self) -> None:
        for _ in range(self.dice.randint(0, self.cranks)):
            if self.core.has_work:
                self.outputs.step()
            else:
                self.core.work_idle()
            if self.dice.random() < 0.7:
                self.tiered.crank()

    async def call(self, function):
        self.go_on()
        return function(self.core)

    async def look(self, function):
        self.go_on()
        view = inspection.take_view(self.core)
        disk = self.tiered.disk
        return function(PrefixTree(view, Stored(disk) if disk is not None else None))

    async def change(self, function, timeout_s):
        disk = self.tiered.disk
        if disk is None:
            return None
        future = disk.change(function)
        for _ in range(1000):
            if future.done():
                return future.result()
            self.go_on()
            self.tiered.crank()
        raise StorageError("the disk does not answer")

    def clear(self, tiers, selection=ALL):
        return asyncio.run(Removal(self).clear(tiers, selection))

    def demote(self, tiers, selection=ALL):
        return asyncio.run(Removal(self).demote(tiers, selection))

    def rest(self) -> None:
        """Let everything that is under way come to its end."""
        for _ in range(3000):
            if self.core.has_work:
                self.outputs.step()
            elif not self.core.work_idle() and not self.tiered.copies.launched:
                break
            self.tiered.crank()
        self.core.check_integrity()
        self.tiered.check_tiers()
        inspection.check_branches(self.core)

    def where(self, block_hash: bytes) -> set[Tier]:
        found = set()
        if self.core.pool.find(block_hash) is not None:
            found.add(Tier.DEVICE)
        if block_hash in self.tiered.host:
            found.add(Tier.HOST)
        if self.tiered.disk is not None and block_hash in self.tiered.disk.blocks:
            found.add(Tier.DISK)
        return found


class Stored:
    """The fake disk as a listing: which blocks it holds, and no rows."""

    num_blocks = 0

    def __init__(self, disk: FakeDisk) -> None:
        self._disk = disk

    def __contains__(self, block_hash) -> bool:
        return block_hash in self._disk.blocks

    def row(self, block_hash) -> None:
        return None

    def label(self, kind, block_hash) -> None:
        return None

    def labels(self, kind) -> dict:
        return {}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(removing, "_LOOK_AGAIN_S", 0)


def serve(cranked: Cranked, *requests) -> None:
    for each in requests:
        cranked.core.add(each)
    for _ in range(1000):
        if not cranked.core.has_work:
            return
        cranked.outputs.step()
        cranked.tiered.crank()
    raise AssertionError("the core does not come to an end")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("with_disk", [False, True])
def test_what_is_cleared_everywhere_never_comes_back(seed, with_disk):
    tiered = TieredCore(num_blocks=40, num_slots=16, disk=FakeDisk() if with_disk else None)
    cranked = Cranked(tiered, seed)
    # Some of it saved, some of it on its way when the clear comes.
    serve(cranked, *(request(f"r{i}", prompt(60, i)) for i in range(4)))
    cranked.go_on()
    known = set(cranked.core.branches.snapshot().nodes)
    report = cranked.clear(set(Tier))
    assert report.complete, report
    assert [part.tier for part in report.tiers] == list(Tier)
    gone = [block_hash for block_hash in known if not cranked.where(block_hash)]
    assert set(gone) == known
    cranked.rest()
    assert not any(map(cranked.where, known))
    assert not tiered.tiers.spiller.num_unsaved


@pytest.mark.parametrize("seed", range(30))
def test_reads_under_way_do_not_bring_back_what_was_cleared(seed):
    disk = FakeDisk()
    first = Cranked(TieredCore(disk=disk))
    serve(first, request("a", prompt(100)))
    first.tiered.settle()
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=16, disk=disk), seed)
    cranked.core.add(request("b", prompt(100)))
    for _ in range(seed % 7):
        cranked.outputs.step()
        if disk.pending:
            disk.complete()
    cranked.core.abort("b")
    report = cranked.clear(set(Tier))
    assert report.complete
    cranked.rest()
    assert not disk.blocks
    assert not any(map(cranked.where, chain(prompt(100))))


@pytest.mark.parametrize("seed", range(20))
def test_what_requests_use_stays_and_is_counted(seed):
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=16, disk=FakeDisk()), seed, cranks=1)
    serve(cranked, request("old", prompt(60, 2)))
    cranked.core.add(request("busy", prompt(60), max_tokens=150))
    while not cranked.core.scheduler.running:
        cranked.outputs.step()
        cranked.tiered.crank()
    report = cranked.clear({Tier.DEVICE})
    (device,) = report.tiers
    assert not report.complete
    assert device.in_use >= 7
    assert device.removed == 7
    assert all(Tier.DEVICE in cranked.where(h) for h in chain(prompt(60)))
    cranked.rest()


def test_the_disk_alone_can_be_cleared_and_stays_clear_until_somebody_uses_the_blocks_again():
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=16, disk=FakeDisk()))
    serve(cranked, request("a", prompt(60)))
    cranked.tiered.settle()
    names = chain(prompt(60))
    report = cranked.clear({Tier.DISK})
    assert report.complete
    cranked.rest()
    assert [cranked.where(h) for h in names] == [{Tier.DEVICE, Tier.HOST}] * 7
    serve(cranked, request("b", prompt(64)))
    cranked.tiered.settle()
    assert all(Tier.DISK in cranked.where(h) for h in chain(prompt(64)))


@pytest.mark.parametrize("seed", range(20))
def test_what_a_request_computes_behind_cleared_blocks_is_saved_with_them_or_not_at_all(seed):
    """A request goes on while what it has computed is cleared below: the rest waits for the same user, it is not stuck."""
    disk = FakeDisk()
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=32, disk=disk), seed, cranks=2)
    cranked.core.add(request("busy", prompt(60), max_tokens=80))
    for _ in range(3 + seed):
        cranked.outputs.step()
        cranked.core.tiers.work_idle()
        cranked.tiered.crank()
    cranked.clear({Tier.DISK, Tier.HOST})
    serve(cranked)
    cranked.tiered.settle()
    assert not cranked.tiered.tiers.spiller.num_unsaved
    everything = prompt(60) + cranked.outputs.tokens["busy"]
    serve(cranked, request("again", [*everything[:136], 1, 2, 3]))
    cranked.tiered.settle()
    assert not cranked.tiered.tiers.spiller.num_unsaved
    assert all(h in disk.blocks for h in chain(everything[:136]))
    cranked.tiered.check_tiers()


def test_a_prefix_goes_with_everything_behind_it_and_nothing_else():
    cranked = Cranked(TieredCore(num_blocks=60, num_slots=32, disk=FakeDisk()))
    shared, left, right = prompt(40), prompt(24, 2), prompt(24, 3)
    serve(cranked, request("l", shared + left))
    serve(cranked, request("r", shared + right))
    serve(cranked, request("other", prompt(60, 4)))
    cranked.tiered.settle()
    trunk, others = chain(shared), chain(prompt(60, 4))
    branch = chain(shared + right)[5:]
    report = cranked.clear(set(Tier), Selection(chain(shared + right)[-1], None, None))
    assert report.complete
    assert not any(map(cranked.where, branch))
    assert all(cranked.where(h) == set(Tier) for h in (*trunk, *chain(shared + left), *others))
    report = cranked.clear(set(Tier), Selection(trunk[2], None, None))
    assert report.complete
    assert not any(map(cranked.where, (*trunk, *chain(shared + left))))
    assert all(map(cranked.where, others))


def test_an_owner_reaches_only_its_own_blocks():
    cranked = Cranked(TieredCore(num_blocks=60, num_slots=32))
    for owner, salt in (("one", b"1" * 32), ("one", b"2" * 32), ("two", b"3" * 32)):
        each = request(f"{owner}-{salt[:1]}", prompt(40), tenant=salt)
        each.owner = owner
        serve(cranked, each)
    cranked.tiered.settle()
    mine = [*chain(prompt(40), b"1" * 32), *chain(prompt(40), b"2" * 32)]
    others = chain(prompt(40), b"3" * 32)
    with pytest.raises(RequestError) as refused:
        cranked.clear(set(Tier), Selection(others[-1], None, "one"))
    assert refused.value.status == 404
    assert cranked.clear(set(Tier), Selection(None, "two", "one")).tiers[0].removed == 0
    assert all(map(cranked.where, [*mine, *others]))
    assert cranked.clear(set(Tier), Selection(None, "one", None)).complete
    assert not any(map(cranked.where, mine))
    assert all(map(cranked.where, others))
    assert cranked.clear(set(Tier), Selection(None, None, "two")).complete
    assert not any(map(cranked.where, others))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tiers", [{Tier.DEVICE}, {Tier.HOST}, {Tier.DEVICE, Tier.HOST}])
def test_demoting_loses_nothing(tiers, seed):
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=16, disk=FakeDisk()), seed)
    serve(cranked, *(request(f"r{i}", prompt(60, i)) for i in range(2)))
    cranked.go_on()
    known = set(cranked.core.branches.snapshot().nodes)
    report = cranked.demote(tiers)
    assert report.complete, report
    for block_hash in known:
        assert cranked.where(block_hash)
        assert not cranked.where(block_hash) & tiers
    cranked.rest()


def test_demoting_without_a_tier_below_says_so():
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=16))
    serve(cranked, request("a", prompt(40)))
    report = cranked.demote({Tier.HOST})
    assert not report.complete
    assert "no tier below" in report.tiers[0].error


def test_a_disk_that_does_not_answer_is_no_complete_clear(monkeypatch):
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=16, disk=FakeDisk()))
    serve(cranked, request("a", prompt(40)))
    cranked.tiered.settle()

    async def down(function, timeout_s):
        raise StorageError("gone")

    cranked.change = down
    report = cranked.clear(set(Tier))
    assert not report.complete
    assert report.tiers[-1].error == "gone"
    assert report.tiers[0].removed == report.tiers[1].removed == 5


def test_what_the_disk_refused_is_offered_again_as_soon_as_somebody_waits_for_it():
    disk = FakeDisk(capacity=0)
    cranked = Cranked(TieredCore(num_blocks=40, num_slots=16, disk=disk))
    serve(cranked, request("a", prompt(60)))
    cranked.rest()
    assert cranked.core.tiers.spiller.num_unsaved
    disk.capacity = 1000
    cranked.rest()
    # The clock stands still, so the pause after the refusal lasts.
    assert not disk.blocks
    upkeep.try_again(cranked.core)
    cranked.rest()
    assert not cranked.core.tiers.spiller.num_unsaved
    assert len(disk.blocks) == 7


class Traffic(Cranked):
    """Requests come and go without end: at each look one more has left blocks in the host tier, and the disk, in answering for
    one batch a look, is always behind.
    """

    num_looks = 0

    def go_on(self) -> None:
        pass

    async def look(self, function):
        self.num_looks += 1
        assert self.num_looks < 100, "only an end of the traffic would end this"
        self.core.add(request(f"t{self.num_looks}", prompt(30, self.num_looks)))
        pending, copies = self.tiered.disk.pending, self.tiered.copies
        while self.core.has_work:
            self.outputs.step()
            while copies.launched:
                copies.complete()
            for i in [i for i, job in enumerate(pending) if job[0] == "lookup"][::-1]:
                self.tiered.disk.complete(i)
        self.core.work_idle()
        while copies.launched:
            copies.complete()
        if pending:
            self.tiered.disk.complete()
        return await super().look(function)


@pytest.mark.parametrize("tiers", [{Tier.DEVICE}, {Tier.HOST}, {Tier.DEVICE, Tier.HOST}])
def test_a_demotion_ends_although_traffic_does_not(tiers, monkeypatch):
    monkeypatch.setattr(removing, "DEMOTE_TIMEOUT_S", 1e9)
    cranked = Traffic(TieredCore(num_blocks=200, num_slots=100, disk=FakeDisk()))
    serve(cranked, request("old", prompt(60, 999)))
    report = cranked.demote(tiers)
    assert report.complete
    assert not any(cranked.where(h) & tiers for h in chain(prompt(60, 999)))
