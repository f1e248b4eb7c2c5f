"""Pins come, go and run out while requests run, copies and the disk answer in any order, things break and the engine restarts.

What is pinned and was there once stays somewhere; a firm place stays that place; counts add up; answers are right.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes import expected_tokens, request
from tests.tier_fakes import FakeDisk, TieredCore
from tests.unit.test_tiers import prompt
from tieredkv.types import FinishReason, Retention, Tier

SYSTEM = prompt(24)
# Branches of one trunk of three blocks, and one that shares nothing; with all pinned every tier still has room.
PROMPTS = [SYSTEM, SYSTEM + prompt(16, seed=2), SYSTEM + prompt(24, seed=3), prompt(32, seed=4)]
NUM_STEPS = 40


class PinMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk: FakeDisk | None = FakeDisk()
        self.now_s = 100.0
        self.num_requests = 0
        self.broken: set[bytes] = set()
        # Blocks of pins that were seen: hash -> places that are firm.
        self.seen: dict[bytes, set[Tier]] = {}
        self.start()

    def start(self) -> None:
        self.tiered = TieredCore(num_blocks=40, num_slots=26, max_model_len=136, disk=self.disk)
        self.tiered.clock.now_s = self.now_s
        self.running: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}

    @property
    def pins(self):
        return self.tiered.core.pins

    def places(self, block_hash: bytes) -> set[Tier]:
        found = set()
        if self.tiered.core.pool.find(block_hash) is not None:
            found.add(Tier.DEVICE)
        if block_hash in self.tiered.host:
            found.add(Tier.HOST)
        if block_hash in self.disk.blocks:
            found.add(Tier.DISK)
        return found

    @rule(which=st.integers(0, 3), extra=st.integers(0, 3), ttl_s=st.sampled_from([None, 5.0, 50.0]))
    def submit(self, which, extra, ttl_s):
        tokens = [*PROMPTS[which], *prompt(5 * extra, seed=50 + extra)]
        self.add(tokens, () if ttl_s is None else (Retention(len(tokens), 60, ttl_s),))

    @rule(seed=st.integers(100, 200))
    def churn(self, seed):
        self.add(prompt(100, seed=seed), ())

    def add(self, tokens, retention) -> None:
        if len(self.running) < 3:
            name = f"r{self.num_requests}"
            self.num_requests += 1
            made = request(name, tokens, max_tokens=2)
            made.retention = retention
            self.tiered.core.add(made)
            self.running[name] = tokens, 2

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            for output in self.tiered.core.step():
                assert output.finish_reason is not FinishReason.ERROR, output.error
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    tokens, count = self.running.pop(output.request_id)
                    if output.finish_reason is FinishReason.LENGTH:
                        assert self.tokens[output.request_id] == expected_tokens(tokens, count)

    @rule()
    def idle(self):
        self.tiered.core.work_idle()

    @rule(data=st.data())
    def abort(self, data):
        if self.running:
            self.tiered.core.abort(data.draw(st.sampled_from(sorted(self.running))))

    @rule(data=st.data(), fail=st.sampled_from([False, False, False, True]))
    def copy(self, data, fail):
        launched = self.tiered.copies.launched
        if launched:
            index = data.draw(st.integers(0, len(launched) - 1))
            self.tiered.copies.complete(index, "broken" if fail else None)

    @rule(times=st.integers(1, 5))
    def answer(self, times):
        for _ in range(min(times, len(self.disk.pending))):
            self.disk.complete()

    @rule(accepts=st.booleans())
    def throttle(self, accepts):
        self.disk.accepts = accepts

    @rule(
        which=st.integers(0, 3),
        tier=st.sampled_from([None, *Tier]),
        ttl_s=st.sampled_from([None, 10.0, 100.0]),
        name=st.sampled_from([None, "x", "y"]),
    )
    def pin(self, which, tier, ttl_s, name):
        report = self.pins.pin(PROMPTS[which], tier=tier, ttl_s=ttl_s, name=name)
        assert report.outcome == "accepted"
        assert report.num_present + report.num_loading + report.num_missing == report.num_blocks

    @rule(data=st.data())
    def unpin(self, data):
        reports = self.pins.list()
        if reports:
            report = data.draw(st.sampled_from(reports))
            assert self.pins.unpin(report.id) is not None
            assert self.pins.unpin(report.id) is None

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0, 200.0]))
    def pass_time(self, seconds):
        self.now_s += seconds
        self.tiered.clock.now_s = self.now_s
        self.pins.expire()

    @precondition(lambda self: self.disk.blocks)
    @rule(data=st.data())
    def damage(self, data):
        victim = data.draw(st.sampled_from(sorted(self.disk.blocks)))
        before = set(self.disk.blocks)
        self.disk.remove(victim, "corrupt")
        self.broken |= before - set(self.disk.blocks)

    @rule()
    def clear_device(self):
        self.tiered.core.clear()
        # Forgetting on purpose takes along what no pin keeps on the device.
        self.broken |= {h for h in self.seen if not self.places(h)}

    @rule()
    def restart(self):
        while self.disk.pending:
            self.disk.complete()
        self.tiered.core.pins.expire()
        kept = {r.id for r in self.pins.list()}
        while self.disk.pending:
            self.disk.complete()
        self.seen = {h: set() for h in self.seen if h in self.disk.blocks}
        self.start()
        assert {r.id for r in self.pins.list()} == kept

    @invariant()
    def agrees(self):
        core = self.tiered.core
        core.check_integrity()
        self.tiered.check_tiers()
        pinned: dict[bytes, set[Tier]] = {}
        for pin in self.pins._pins.values():
            for block_hash in pin.record.hashes:
                pinned.setdefault(block_hash, set()).add(pin.record.tier)
        for block_hash, firm in list(self.seen.items()):
            if block_hash not in pinned:
                del self.seen[block_hash]
                continue
            places = self.places(block_hash)
            assert places or block_hash in self.broken, "a pinned block is nowhere any more"
            assert (firm & pinned[block_hash]) <= places, "a pinned block has left the tier that it was pinned in"
        for block_hash, tiers in pinned.items():
            places = self.places(block_hash)
            if places:
                self.seen[block_hash] = (self.seen.get(block_hash, set()) | places) & tiers & {Tier.DEVICE, Tier.HOST}
        self.broken &= {h for h in self.seen if not self.places(h)}
        assert set(core.pins.by_block()) == set(pinned)

    def teardown(self) -> None:
        self.disk.accepts = True
        for _ in range(1000):
            if not self.tiered.core.has_work:
                break
            self.step(1)
            while self.tiered.crank():
                pass
            self.tiered.clock.now_s += 0.1
        assert not self.running
        self.tiered.settle()
        for report in self.pins.list():
            self.pins.unpin(report.id)
        self.tiered.settle()
        self.tiered.core.check_integrity()
        assert self.disk.pin_records == {}
        assert self.tiered.core.pool.num_kept_hashes == self.tiered.host.num_kept_hashes == 0


PinMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=NUM_STEPS, deadline=None)
TestPinMachine = PinMachine.TestCase
