"""What the engine does while the device computes changes when things happen, never what comes out."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from tests.fakes import Collector, FakeRunner, FakeRunning, expected_tokens, make_core, request
from tests.tier_fakes import FakeDisk, TieredCore
from tests.unit.test_engine import collect, make_engine
from tieredkv.errors import DeviceLostError
from tieredkv.gate import Arrivals, CostGate
from tieredkv.types import FinishReason, Tier


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_with_and_without_overlap(overlap, seed):
    """Over tiers whose copies end at random moments, in a pool that is too small."""
    rng = random.Random(seed)
    tiered = TieredCore(num_slots=24, disk=FakeDisk(), num_blocks=20, max_model_len=96, async_scheduling=overlap)
    core = tiered.core
    shared = [rng.randrange(1000) for _ in range(40)]
    prompts = [
        shared[: rng.randrange(41)] + [rng.randrange(1000) for _ in range(rng.randrange(1, 30))] for _ in range(12)
    ]
    waiting = [request(f"r{i}", prompt, max_tokens=8) for i, prompt in enumerate(prompts)]
    collector = Collector(core)

    def submit() -> None:
        if waiting and rng.random() < 0.4:
            core.add(waiting.pop())

    core.meanwhile = submit
    for _ in range(3000):
        if not core.has_work and not waiting:
            break
        if not overlap or not core.has_work:
            submit()
        collector.step()
        tiered.clock.now_s += 0.001
        for _ in range(rng.randrange(3)):
            tiered.crank()
        core.check_integrity()
    for i, prompt in enumerate(prompts):
        assert collector.tokens[f"r{i}"] == expected_tokens(prompt, 8)
    tiered.settle()
    tiered.check_tiers()


def test_a_request_that_comes_during_a_step_is_in_the_next_one():
    core, runner = make_core()
    core.add(request("first", [1, 2, 3], max_tokens=3))
    core.meanwhile = lambda: core.add(request("second", [4, 5], max_tokens=3)) if len(runner.batches) == 1 else None
    core.step()
    core.step()
    assert [[name for name, *_ in batch] for batch in runner.batches] == [["first"], ["first", "second"]]


def test_nothing_happens_meanwhile_where_it_is_turned_off():
    core, _ = make_core(async_scheduling=False)
    core.meanwhile = lambda: pytest.fail("called")
    core.add(request("first", [1, 2, 3], max_tokens=3))
    Collector(core).run()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_fails_at_its_result_ends_its_requests_and_no_others(overlap):
    core, runner = make_core(async_scheduling=overlap, num_blocks=64)
    core.add(request("first", [1, 2, 3], max_tokens=3))
    runner.fail_next = RuntimeError("the device is lost")
    core.meanwhile = lambda: core.add(request("second", [4, 5], max_tokens=3))
    if not overlap:
        core.add(request("third", [9], max_tokens=1))
    collector = Collector(core)
    collector.step()
    assert collector.reasons["first"] is FinishReason.ERROR
    core.meanwhile = lambda: None
    collector.run()
    if overlap:
        assert collector.tokens["second"] == expected_tokens([4, 5], 3)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_lost_device_stops_the_engine(overlap):
    """A device that failed for good fails every later step too: an engine that went on would look alive."""
    engine, runner = make_engine(async_scheduling=overlap)
    runner.fail_next = DeviceLostError("cuda:0 is lost")

    async def main():
        first = engine.submit(request("first", [1, 2, 3], max_tokens=2))
        second = engine.submit(request("second", [1, 2, 4], max_tokens=2))
        engine.start()
        return await asyncio.gather(collect(first), collect(second))

    for _, reasons in asyncio.run(main()):
        assert reasons == [FinishReason.ERROR]
    assert "cuda:0 is lost" in engine.health()
    engine.close()


class SlowRunning(FakeRunning):
    """A result that comes when the test says so."""

    def __init__(self, inner: FakeRunning, go: threading.Semaphore) -> None:
        super().__init__(inner._tokens, inner._error)
        self._go = go

    def result(self):
        assert self._go.acquire(timeout=30)
        return super().result()


def slow_down(runner: FakeRunner) -> tuple[threading.Semaphore, threading.Semaphore]:
    """Make every result wait: `launched` is released at each launch, `go` lets one result through."""
    launched, go = threading.Semaphore(0), threading.Semaphore(0)
    launch = runner.launch

    def slowly(batch):
        inner = launch(batch)
        launched.release()
        return SlowRunning(inner, go)

    runner.launch = slowly
    return launched, go


def test_commands_of_other_kinds_wait_for_the_end_of_the_step_and_keep_their_order():
    """An abort that overtook its submission, or ran into a batch that is being computed, would be lost or do harm."""
    engine, runner = make_engine()
    launched, go = slow_down(runner)
    engine.start()
    seen = []

    async def main():
        first = engine.submit(request("first", [1, 2, 3], max_tokens=2))
        assert await asyncio.to_thread(launched.acquire, timeout=30)
        second = engine.submit(request("second", [4, 5], max_tokens=50))
        engine.abort("second")
        answer = engine.call(lambda core: seen.append(core.num_waiting))
        third = engine.submit(request("third", [6, 7], max_tokens=2))
        assert not answer.done()
        for _ in range(20):
            go.release()
        return await asyncio.gather(collect(first), collect(second), collect(third))

    first, second, third = asyncio.run(main())
    assert first[0] == expected_tokens([1, 2, 3], 2)
    assert second[1] == [FinishReason.ABORT]
    assert third[0] == expected_tokens([6, 7], 2)
    assert seen == [0]
    for _ in range(20):
        go.release()
    engine.close()


def test_a_thread_that_dies_answers_what_it_held():
    engine, runner = make_engine()
    launch = runner.launch
    futures, held = [], []

    class Dying(FakeRunning):
        def result(self):
            held.extend(engine._held)
            raise SystemExit("killed")

    def launch_and_call(batch):
        inner = launch(batch)
        futures.append(engine.call(lambda core: 42))
        return Dying(inner._tokens)

    runner.launch = launch_and_call

    async def main():
        stream = engine.submit(request("first", [1, 2, 3], max_tokens=2))
        engine.start()
        return await collect(stream)

    _, reasons = asyncio.run(main())
    assert reasons == [FinishReason.ERROR]
    assert len(held) == 1
    assert futures[0].result(timeout=30) == 42


def test_loads_that_queue_behind_each_other_are_not_counted_as_slow():
    """A hundred copies of 16 blocks, launched at once, one done every millisecond: 16 blocks a millisecond, not 0.3."""
    gate, arrivals = CostGate("auto", 16, 1000), Arrivals()
    for i in range(100):
        arrivals.add(16, started_s=5.0)
        gate.measure_load(Tier.HOST, *arrivals.take(5.0 + (i + 1) / 1000))
    assert gate.load_seconds(Tier.HOST, 16) == pytest.approx(0.001)
    # Nothing arrived: nothing is measured. Two that are noticed together share their time.
    assert arrivals.take(9.0) == (0, 0.0)
    arrivals.add(1, started_s=10.0)
    arrivals.add(3, started_s=10.5)
    assert arrivals.take(12.0) == (4, 2.0)
    # A tier that idled in between starts anew.
    arrivals.add(1, started_s=20.0)
    assert arrivals.take(21.0) == (1, 1.0)
