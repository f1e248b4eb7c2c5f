"""The engine thread and its streams: every stream ends exactly once, whatever happens to the thread or the reader."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from tests.fakes import FakeRunner, expected_tokens, make_core, request
from tieredkv.engine import Engine, fan_out
from tieredkv.errors import CapacityError, RequestError
from tieredkv.layout import KVLayout
from tieredkv.types import FinishReason, SamplingParams


def make_engine(**settings) -> tuple[Engine, FakeRunner]:
    from tieredkv.config import Config

    core, runner = make_core(**settings)
    known = {"block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    config = Config.load(known | {k: v for k, v in settings.items() if k == "max_queue_size"})
    runner.loaded = SimpleNamespace(
        name="fake",
        tokenizer=None,
        vocab_size=core.vocab_size,
        eos_token_ids=frozenset(),
        layout=KVLayout(1, 1, 8, 8, "float32"),
        device="cpu",
    )
    return Engine(core, runner, config), runner


@pytest.fixture
def engine():
    made, runner = make_engine()
    made.runner = runner
    made.start()
    yield made
    made.close()


async def collect(stream) -> tuple[list[int], list[FinishReason]]:
    tokens, reasons = [], []
    async for output in stream:
        tokens += output.new_token_ids
        reasons += [output.finish_reason] if output.finish_reason else []
    return tokens, reasons


def test_many_streams_at_once(engine):
    async def main():
        streams = [engine.submit(request(f"r{i}", [i] * (i + 1), max_tokens=20)) for i in range(20)]
        return await asyncio.gather(*map(collect, streams))

    for i, (tokens, reasons) in enumerate(asyncio.run(main())):
        assert tokens == expected_tokens([i] * (i + 1), 20)
        assert reasons == [FinishReason.LENGTH]
    assert engine.num_unfinished == 0
    assert engine.health() is None


def test_abort_ends_a_stream_and_frees_its_blocks(engine):
    async def main():
        stream = engine.submit(request("a", [1, 2, 3], max_tokens=200))
        seen = 0
        async for output in stream:
            seen += 1
            if seen == 3:
                stream.abort()
            last = output
        return last.finish_reason

    assert asyncio.run(main()) is FinishReason.ABORT
    assert engine.call(lambda core: core.pool.num_free == core.pool.num_usable).result(5)
    engine.call(lambda core: core.check_integrity()).result(5)


def test_a_vanished_loop_does_not_disturb_the_engine(engine):
    async def leave():
        stream = engine.submit(request("gone", [1], max_tokens=200))
        await anext(stream)

    asyncio.run(leave())

    async def stay():
        return await collect(engine.submit(request("here", [2], max_tokens=5)))

    assert asyncio.run(stay())[0] == expected_tokens([2], 5)


def test_what_can_never_run_is_refused_at_once(engine):
    async def main():
        with pytest.raises(RequestError):
            engine.submit(request("x", [1] * 300))
        engine.submit(request("twice", [1], max_tokens=100))
        with pytest.raises(RequestError):
            engine.submit(request("twice", [1]))

    asyncio.run(main())


def test_a_full_queue_is_refused():
    engine, _ = make_engine(max_queue_size=2)

    async def main():
        # The thread is not running, so nothing leaves the queue: two may wait behind the eight that could run.
        streams = [engine.submit(request(f"r{i}", [i], max_tokens=2)) for i in range(10)]
        with pytest.raises(CapacityError) as caught:
            engine.submit(request("one more", [1]))
        assert caught.value.status == 429
        engine.start()
        await asyncio.gather(*map(collect, streams))
        assert (await collect(engine.submit(request("later", [1], max_tokens=2))))[1] == [FinishReason.LENGTH]

    asyncio.run(main())
    engine.close()


def test_the_bound_on_the_queue_counts_those_that_wait_behind_those_that_run():
    engine, _ = make_engine(max_queue_size=1)
    engine.start()

    async def main():
        running = [engine.submit(request(f"r{i}", [i], max_tokens=200)) for i in range(8)]
        for stream in running:
            await anext(stream)
        waiting = engine.submit(request("waits", [1]))
        with pytest.raises(CapacityError):
            engine.submit(request("one more", [1]))
        for stream in running:
            stream.abort()
        await asyncio.gather(*map(collect, [*running, waiting]))

    asyncio.run(main())
    engine.close()


def test_draining_finishes_what_runs_and_refuses_what_comes(engine):
    async def main():
        stream = engine.submit(request("a", [1], max_tokens=30))
        engine.begin_drain()
        with pytest.raises(CapacityError) as caught:
            engine.submit(request("b", [1]))
        assert caught.value.status == 503
        tokens, drained = await asyncio.gather(collect(stream), engine.wait_drained(10))
        assert tokens[1] == [FinishReason.LENGTH]
        assert drained

    asyncio.run(main())


def test_waiting_for_a_drain_is_bounded():
    engine, _ = make_engine()

    async def main():
        stream = engine.submit(request("a", [1]))
        assert not await engine.wait_drained(0.05)
        engine.start()
        engine.close()
        return await collect(stream)

    assert asyncio.run(main())[1][-1] in (FinishReason.ERROR, FinishReason.LENGTH)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(engine, caplog):
    async def main():
        engine.runner.fail_next = RuntimeError("injected")
        with caplog.at_level(logging.CRITICAL):
            first = await collect(engine.submit(request("a", [1])))
        return first, await collect(engine.submit(request("b", [1])))

    first, second = asyncio.run(main())
    assert first == ([], [FinishReason.ERROR])
    assert second[0] == expected_tokens([1], 4)
    assert engine.health() is None


def test_a_dead_thread_ends_all_streams_and_shows_in_health(engine, caplog):
    class Fatal(BaseException):
        pass

    async def main():
        stream = engine.submit(request("a", [1], max_tokens=200))
        await anext(stream)
        engine.runner.fail_next = Fatal("power cut")
        _, reasons = await collect(stream)
        with pytest.raises(CapacityError) as caught:
            engine.submit(request("b", [1]))
        assert caught.value.status == 503
        return reasons

    with caplog.at_level(logging.CRITICAL):
        assert asyncio.run(main()) == [FinishReason.ERROR]
    assert "power cut" in engine.health()
    with pytest.raises(CapacityError):
        engine.call(lambda core: 1).result(5)


def test_calls_run_on_the_engine_thread_and_carry_their_errors(engine):
    assert engine.call(lambda core: core.pool.num_usable).result(5) == 63
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda core: 1 // 0).result(5)


def test_fan_out_gives_each_answer_its_own_seed():
    parts = fan_out("r", SamplingParams(n=3, seed=7))
    assert [name for name, _ in parts] == ["r-0", "r-1", "r-2"]
    assert [p.seed for _, p in parts] == [7, 8, 9]
    assert all(p.n == 1 for _, p in parts)
    assert [p.seed for _, p in fan_out("r", SamplingParams(n=3, seed=-1))] == [2**64 - 1, 0, 1]
    assert fan_out("r", SamplingParams()) == [("r", SamplingParams())]
