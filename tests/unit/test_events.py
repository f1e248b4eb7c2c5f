"""The event log: numbers without gaps, a bounded ring, and a truth that can be replayed.

The property that matters: whoever takes a snapshot at any moment and applies all later events knows exactly what every tier
holds, whatever was evicted, cleared, corrupt, late or failed.
"""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes import VOCAB_SIZE, request
from tests.tier_fakes import FakeDisk, TieredCore
from tieredkv import clearing, inspection
from tieredkv.events import BREAK, EventLog
from tieredkv.types import Tier


def name(i: int) -> bytes:
    return i.to_bytes(32, "big")


def read_all(log: EventLog, after: int = 0) -> list:
    log.publish()
    return [log.read(number) for number in range(after + 1, log.published + 1)]


def test_numbers_have_no_gaps_and_changes_keep_their_order():
    log = EventLog()
    for i in range(10):
        log.stored(Tier.DEVICE, "computed", name(i), name(i - 1) if i else b"root", 8)
        log.removed(Tier.HOST, "evicted", name(100 + i))
        log.publish()
    events = read_all(log)
    assert [event.sequence for event in events] == list(range(1, 21))
    assert [event.hashes for event in events] == [[name(h)] for i in range(10) for h in (i, 100 + i)]


def test_a_chain_is_one_event_and_two_chains_are_two():
    log = EventLog()
    for chain in (0, 50):
        parent = b"root"
        for i in range(chain, chain + 5):
            log.stored(Tier.DEVICE, "computed", name(i), parent, 8)
            parent = name(i)
    first, second = read_all(log)
    assert first.hashes == [name(i) for i in range(5)]
    assert second.hashes == [name(i) for i in range(50, 55)]
    report = first.report()
    assert (report.parent, report.num_tokens) == (b"root".hex(), 40)


def test_what_is_published_does_not_change_any_more():
    log = EventLog()
    log.removed(Tier.DISK, "evicted", name(1))
    log.publish()
    seen = log.read(1)
    log.removed(Tier.DISK, "evicted", name(2))
    log.publish()
    assert seen.hashes == [name(1)]
    assert log.read(2).hashes == [name(2)]


def test_the_ring_is_bounded_and_a_slow_reader_finds_out():
    log = EventLog(num_kept=4)
    for i in range(10):
        log.removed(Tier.DEVICE, "evicted", name(i))
        log.publish()
    assert [log.read(number) is not None for number in range(1, 11)] == [False] * 6 + [True] * 4
    assert log.has_all_after(6)
    assert log.has_all_after(10)
    assert not log.has_all_after(5)
    assert not log.has_all_after(11)
    assert not log.has_all_after(-1)


def test_epochs_differ():
    assert EventLog().epoch != EventLog().epoch


def test_listeners_hear_of_publications_only_while_they_listen():
    log, heard = EventLog(), []
    stop = log.listen(lambda: heard.append(log.published))
    log.publish()
    log.removed(Tier.DEVICE, "evicted", name(1))
    log.publish()
    stop()
    log.removed(Tier.DEVICE, "evicted", name(2))
    log.publish()
    assert heard == [1]


def test_a_block_event_costs_little():
    """Far more than it takes, far less than would be felt: a step of the engine is milliseconds."""
    log, names = EventLog(), [name(i) for i in range(20_000)]
    began_s = time.thread_time()
    for block_hash in names:
        log.removed(Tier.DEVICE, "evicted", block_hash)
    assert (time.thread_time() - began_s) / len(names) < 20e-6


class Replaying(RuleBasedStateMachine):
    """Tiers under the test's hand, and a reader that joins at random moments."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FakeDisk(capacity=40)
        self.tiered = TieredCore(num_blocks=24, num_slots=12, disk=self.disk)
        self.core = self.tiered.core
        self.log = self.core.events
        self.number = 0
        self.join()

    @rule()
    def join(self) -> None:
        snapshot = self.core.branches.snapshot()
        self.last = snapshot.sequence
        self.known = {
            tier: {h for h, node in snapshot.nodes.items() if node.is_in(tier)} for tier in (Tier.DEVICE, Tier.HOST)
        }
        # The disk is looked at later than the number was taken: some of its events are seen twice.
        self.known[Tier.DISK] = set(self.disk.blocks)

    @rule(length=st.integers(4, 120), seed=st.integers(0, 5), tokens=st.integers(1, 12))
    def send(self, length: int, seed: int, tokens: int) -> None:
        self.number += 1
        prompt = [(seed * 7919 + i * 31) % VOCAB_SIZE for i in range(length)]
        self.core.add(request(f"r{self.number}", prompt, max_tokens=tokens))

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.core.step() if self.core.has_work else self.core.work_idle()

    @precondition(lambda self: self.tiered.copies.launched)
    @rule(data=st.data(), fails=st.booleans())
    def copy(self, data, fails: bool) -> None:
        index = data.draw(st.integers(0, len(self.tiered.copies.launched) - 1))
        self.tiered.copies.complete(index, error="broken" if fails else None)

    @precondition(lambda self: self.disk.pending)
    @rule(fails=st.booleans())
    def answer(self, fails: bool) -> None:
        self.disk.complete(0, fail=fails)

    @precondition(lambda self: self.disk.blocks)
    @rule(data=st.data(), reason=st.sampled_from(["evicted", "corrupt"]))
    def lose_on_disk(self, data, reason: str) -> None:
        self.disk.remove(data.draw(st.sampled_from(sorted(self.disk.blocks))), reason)

    @rule(tiers=st.sets(st.sampled_from([Tier.DEVICE, Tier.HOST]), min_size=1), share=st.integers(1, 3))
    def clear(self, tiers: set[Tier], share: int) -> None:
        nodes = sorted(self.core.branches.snapshot().nodes.values(), key=lambda node: -node.depth)
        chosen = [node.hash for node in nodes][::share]
        clearing.bar(self.core, chosen, tiers)
        clearing.remove(self.core, chosen, tiers)

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def demote(self, tier: Tier) -> None:
        nodes = sorted(self.core.branches.snapshot().nodes.values(), key=lambda node: -node.depth)
        clearing.demote(self.core, [node.hash for node in nodes], tier, set(self.disk.blocks), set())

    @rule()
    def clear_device(self) -> None:
        self.core.clear()

    @rule()
    def wait(self) -> None:
        self.tiered.clock.now_s += 1.0

    @invariant()
    def replayed_events_are_the_truth(self) -> None:
        self.log.publish()
        while self.last < self.log.published:
            event = self.log.read(self.last + 1)
            self.last += 1
            assert event.sequence == self.last
            assert event.kind != BREAK
            if event.kind == "stored":
                self.known[event.tier] |= set(event.hashes)
            else:
                self.known[event.tier] -= set(event.hashes)
        pool, host = self.core.pool, self.tiered.host
        assert self.known[Tier.DEVICE] == {h for h in map(pool.hash_of, range(pool.num_blocks)) if h is not None}
        assert self.known[Tier.HOST] == {s.hash for s in host._slots if s.hash in host}
        if not self.disk._answers:
            assert self.known[Tier.DISK] == set(self.disk.blocks)
        inspection.check_branches(self.core)

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.core.has_work and not self.core.work_idle() and not self.disk.pending:
                break
            if self.core.has_work:
                self.core.step()
            self.tiered.crank()
            self.tiered.clock.now_s += 0.05
        self.replayed_events_are_the_truth()
        self.core.check_integrity()
        self.tiered.check_tiers()


Replaying.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReplaying = Replaying.TestCase
