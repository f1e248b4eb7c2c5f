"""Warming: what is asked for gets computed once, in the background, and jobs say truthfully how far they are."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fakes import request
from tests.unit.test_engine import collect, make_engine
from tieredkv.errors import CapacityError, RequestError
from tieredkv.types import Tier
from tieredkv.warm_job import DeferredPrompt, WarmPrompt
from tieredkv.warming import MAX_FINISHED_JOBS, MAX_OPEN_JOBS, Warming

BLOCK = 8


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7) % 1000 for i in range(length)]


@pytest.fixture
def engine():
    made, runner = make_engine(num_blocks=128)
    made.runner = runner
    made.start()
    yield made
    made.close()


async def finished(warming: Warming, job_id: str):
    """The job's report once it is over."""
    deadline = time.monotonic() + 20
    while (report := warming.get(job_id)).state in ("queued", "running"):
        assert time.monotonic() < deadline, report
        await asyncio.sleep(0.001)
    return report


async def sources_of(engine, request_id: str, prompt: list[int], tenant: bytes = b""):
    async for output in engine.submit(request(request_id, prompt, max_tokens=1, tenant=tenant)):
        sources = output.sources
    return sources


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3, 200])
def test_a_later_request_finds_every_full_block(engine, length):
    async def main():
        warming = Warming(engine)
        prompt = prompt_of(length)
        report = await finished(warming, warming.start([WarmPrompt(prompt)]).id)
        assert (report.state, report.num_prompts_done, report.error) == ("done", 1, None)
        assert report.num_tokens == report.num_tokens_done == length
        assert report.num_tokens_computed == length // BLOCK * BLOCK
        longer = [*prompt, 1, 2, 3]
        assert (await sources_of(engine, "later", longer)).device == length // BLOCK * BLOCK

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0, 1, 2, BLOCK])
def test_the_longest_prompts_are_computed_as_far_as_a_request_can(engine, cut):
    async def main():
        warming = Warming(engine)
        prompt = prompt_of(engine.max_model_len - cut)
        report = await finished(warming, warming.start([WarmPrompt(prompt)]).id)
        assert (report.state, report.num_prompts_failed, report.num_tokens_done) == ("done", 0, len(prompt))
        longest = prompt[: engine.max_model_len - 1]
        found = (await sources_of(engine, "later", longest)).device
        assert found == min(len(longest) // BLOCK * BLOCK, len(longest) - 1)
        pinned = await asyncio.wrap_future(engine.call(lambda core: core.pins.pin(prompt)))
        assert pinned.num_present == pinned.num_blocks
        assert pinned.num_missing == 0

    asyncio.run(main())


def test_what_is_resident_is_not_computed_again(engine):
    async def main():
        warming = Warming(engine)
        prompts = [WarmPrompt(prompt_of(6 * BLOCK, seed)) for seed in range(3)]
        await finished(warming, warming.start(prompts).id)
        computed = engine.runner.num_computed_tokens
        again = await finished(warming, warming.start(prompts).id)
        assert engine.runner.num_computed_tokens == computed
        assert (again.num_tokens_done, again.num_tokens_computed) == (3 * 6 * BLOCK, 0)
        # A longer one: only what is new.
        longer = [WarmPrompt([*prompts[0].token_ids, *prompt_of(2 * BLOCK, 9)])]
        more = await finished(warming, warming.start(longer).id)
        assert more.num_tokens_computed == 2 * BLOCK

    asyncio.run(main())


def test_shared_prefixes_are_computed_once_and_tenants_share_nothing(engine):
    async def main():
        warming = Warming(engine)
        head = prompt_of(10 * BLOCK)
        prompts = [WarmPrompt([*head, *prompt_of(BLOCK, seed)]) for seed in range(1, 5)]
        report = await finished(warming, warming.start(prompts).id)
        assert report.num_tokens_computed == 14 * BLOCK
        other = await finished(warming, warming.start([WarmPrompt(head, tenant=b"t" * 32)]).id)
        assert other.num_tokens_computed == 10 * BLOCK

    asyncio.run(main())


def test_a_bad_prompt_costs_only_itself(engine):
    def broken():
        raise RequestError("line 2 cannot be read")

    async def main():
        warming = Warming(engine)
        good = prompt_of(4 * BLOCK)
        prompts = [
            WarmPrompt([5000] * BLOCK),
            DeferredPrompt(False, broken),
            DeferredPrompt(False, lambda: WarmPrompt(good)),
            WarmPrompt(prompt_of(1000)),
        ]
        report = await finished(warming, warming.start(prompts).id)
        assert report.state == "done"
        assert (report.num_prompts_done, report.num_prompts_failed) == (4, 3)
        assert "3 prompts failed" in report.error
        assert (await sources_of(engine, "later", [*good, 1])).device == 4 * BLOCK
        failed = await finished(warming, warming.start([WarmPrompt([5000] * BLOCK)]).id)
        assert failed.state == "failed"

    asyncio.run(main())


def test_a_step_that_fails_costs_one_prompt(engine):
    async def main():
        warming = Warming(engine)
        engine.runner.fail_next = RuntimeError("the device is gone")
        report = await finished(warming, warming.start([WarmPrompt(prompt_of(16, s)) for s in range(3)]).id)
        assert (report.state, report.num_prompts_failed) == ("done", 1)
        assert "the device is gone" in report.error

    asyncio.run(main())


def test_cancelled_jobs_stop_and_leave_the_engine_clean(engine):
    async def main():
        warming = Warming(engine)
        job = warming.start([WarmPrompt(prompt_of(30 * BLOCK, seed)) for seed in range(50)])
        while warming.get(job.id).num_prompts_done < 2:
            await asyncio.sleep(0)
        report = warming.cancel(job.id)
        assert report.state == "cancelled"
        assert report.finished_s is not None
        done = warming.get(job.id).num_prompts_done
        await engine.wait_drained(5)
        assert warming.get(job.id).num_prompts_done == done < 50
        assert warming.cancel(job.id).state == "cancelled"
        # The next job is not disturbed.
        assert (await finished(warming, warming.start([WarmPrompt(prompt_of(16))]).id)).state == "done"
        await asyncio.wrap_future(engine.call(lambda core: core.check_integrity()))
        assert engine.num_unfinished == 0

    asyncio.run(main())


def test_jobs_take_turns(engine):
    async def main():
        warming = Warming(engine)
        long = warming.start([WarmPrompt(prompt_of(2 * BLOCK, seed)) for seed in range(200)])
        short = warming.start([WarmPrompt(prompt_of(2 * BLOCK, 999))], name="short")
        await finished(warming, short.id)
        assert warming.get(long.id).num_prompts_done < 10
        assert [job.name for job in warming.jobs()] == ["short", None]
        await warming.close()
        assert warming.get(long.id).state == "cancelled"
        with pytest.raises(CapacityError):
            warming.start([WarmPrompt([1])])

    asyncio.run(main())


def test_jobs_belong_to_their_owner(engine):
    async def main():
        warming = Warming(engine)
        mine = warming.start([WarmPrompt(prompt_of(BLOCK))], owner="abc")
        warming.start([WarmPrompt(prompt_of(BLOCK))], owner="def")
        assert [job.id for job in warming.jobs("abc")] == [mine.id]
        assert len(warming.jobs()) == 2
        for verb in (warming.get, warming.cancel):
            with pytest.raises(RequestError) as caught:
                verb(mine.id, "def")
            assert caught.value.status == 404
            assert verb(mine.id, "abc").id == mine.id
        await warming.close()

    asyncio.run(main())


def test_traffic_goes_first(engine):
    async def main():
        warming = Warming(engine)
        # More requests than run at once, so some wait; none may wait for the whole of a warming job.
        job = warming.start([WarmPrompt(prompt_of(200, seed)) for seed in range(100)])
        streams = [engine.submit(request(f"r{i}", [i] * 20, max_tokens=30)) for i in range(20)]
        await asyncio.gather(*map(collect, streams))
        assert warming.get(job.id).num_prompts_done < 50
        assert engine.runner.batches
        # Never more than one warming request in a step.
        for batch in engine.runner.batches:
            assert sum(name.startswith("job-") for name, _, _ in batch) <= 1
        assert (await finished(warming, job.id)).state == "done"

    asyncio.run(main())


def test_history_and_queue_are_bounded(engine):
    async def main():
        warming = Warming(engine)
        for seed in range(MAX_FINISHED_JOBS + 20):
            await finished(warming, warming.start([WarmPrompt([seed])]).id)
        assert len(warming.jobs()) <= MAX_FINISHED_JOBS + 1
        with pytest.raises(RequestError):
            warming.start([])
        for seed in range(MAX_OPEN_JOBS):
            warming.start([WarmPrompt(prompt_of(200, seed))])
        with pytest.raises(CapacityError) as caught:
            warming.start([WarmPrompt([1])])
        assert caught.value.status == 429
        await warming.close()

    asyncio.run(main())


def test_a_dead_engine_fails_the_job():
    engine, _ = make_engine()
    engine.start()

    async def main():
        warming = Warming(engine)
        job = warming.start([WarmPrompt(prompt_of(200, seed)) for seed in range(100)])
        await asyncio.to_thread(engine.close)
        report = await finished(warming, job.id)
        assert report.state == "failed"
        assert report.error

    asyncio.run(main())


def test_a_wanted_tier_counts_only_from_there_up(engine):
    async def main():
        warming = Warming(engine)
        prompt = WarmPrompt(prompt_of(4 * BLOCK), tier=Tier.DEVICE)
        first = await finished(warming, warming.start([prompt]).id)
        second = await finished(warming, warming.start([prompt]).id)
        assert (first.num_tokens_computed, second.num_tokens_computed) == (4 * BLOCK, 0)

    asyncio.run(main())


def test_pins_come_first_and_stay(engine):
    async def main():
        warming = Warming(engine)
        prompts = [WarmPrompt(prompt_of(3 * BLOCK, seed), name=f"p{seed}", pin=seed == 2) for seed in range(4)]
        job = warming.start(prompts)
        report = await finished(warming, job.id)
        assert (report.state, report.error) == ("done", None)
        order = [name for batch in engine.runner.batches for name, _, _ in batch]
        assert order == sorted(order, key=lambda name: int(name.rpartition("-")[2]))
        first = engine.runner.batches[0][0][0]
        assert first.endswith("-0")
        (pin,) = await asyncio.wrap_future(engine.call(lambda core: core.pins.list()))
        assert (pin.name, pin.outcome, pin.num_missing, pin.num_blocks) == ("p2", "accepted", 0, 3)
        # Churn through the whole pool: what is pinned stays.
        for seed in range(100, 180):
            await sources_of(engine, f"churn-{seed}", prompt_of(20 * BLOCK, seed))
        assert (await sources_of(engine, "pinned", [*prompts[2].token_ids, 1])).device == 3 * BLOCK
        assert (await sources_of(engine, "other", [*prompts[0].token_ids, 1])).device == 0

    asyncio.run(main())


def test_a_refused_pin_is_reported_and_the_prompt_computed_all_the_same(engine):
    async def main():
        warming = Warming(engine)
        # No disk tier to pin it in.
        prompt = WarmPrompt(prompt_of(3 * BLOCK), pin=True, tier=Tier.DISK)
        report = await finished(warming, warming.start([prompt, WarmPrompt(prompt_of(BLOCK, 1))]).id)
        assert (report.state, report.num_prompts_failed) == ("done", 1)
        assert "the pin was refused" in report.error
        assert (await sources_of(engine, "later", [*prompt.token_ids, 1])).device == 3 * BLOCK

    asyncio.run(main())


def test_a_time_to_live_without_a_pin_is_renewed_without_computing(engine):
    async def main():
        warming = Warming(engine)
        prompt = WarmPrompt(prompt_of(4 * BLOCK), ttl_s=60.0)
        first = await finished(warming, warming.start([prompt]).id)
        requests = len(engine.runner.batches)
        second = await finished(warming, warming.start([prompt]).id)
        assert (first.num_tokens_computed, second.num_tokens_computed) == (4 * BLOCK, 0)
        assert second.num_tokens_done == 4 * BLOCK
        assert len(engine.runner.batches) == requests + 1

    asyncio.run(main())


def test_a_full_queue_is_waited_for():
    engine, _ = make_engine(max_queue_size=2)

    async def main():
        streams = [engine.submit(request(f"r{i}", [i], max_tokens=20)) for i in range(10)]
        warming = Warming(engine)
        job = warming.start([WarmPrompt(prompt_of(3 * BLOCK))])
        engine.start()
        await asyncio.gather(*map(collect, streams))
        report = await finished(warming, job.id)
        assert (report.state, report.num_prompts_failed, report.num_tokens_computed) == ("done", 0, 3 * BLOCK)
        # Full for longer than anybody waits: the job goes on trying until it is cancelled.
        warming._engine = Full(engine)
        job = warming.start([WarmPrompt(prompt_of(3 * BLOCK, 1))])
        while warming._engine.num_refused < 2:
            await asyncio.sleep(0)
        assert warming.get(job.id).state == "running"
        warming.cancel(job.id)
        await warming.close()
        assert warming.get(job.id).state == "cancelled"

    asyncio.run(main())
    engine.close()


class Full:
    """An engine whose queue never takes one more."""

    def __init__(self, engine):
        self.num_refused = 0
        self.num_unfinished = 0
        self.max_model_len = engine.max_model_len
        self.call = engine.call

    def submit(self, _):
        self.num_refused += 1
        raise CapacityError("full")
