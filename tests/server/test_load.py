"""Many concurrent streams, a third of them cut off by the client at random: all others finish right, and nothing leaks.

The model is tiny and computes in fp32, so every answer has one right text: what the same prompt gets alone.
"""

from __future__ import annotations

import asyncio
import gc
import random

import psutil
import pytest

from benchmarks.load import run_load
from tests.models_for_tests import build
from tests.server.conftest import running_server
from tieredkv.config import Config
from tieredkv.engine import Engine

NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def real_server(tmp_path_factory):
    model = build("llama", tmp_path_factory.mktemp("models") / "tiny-llama")
    settings = {
        "model": str(model),
        "served_model_name": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "num_gpu_blocks_override": 120,
        "max_model_len": 512,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 256,
    }
    engine = Engine.load(Config.load(settings))
    engine.start()
    with running_server(engine, served_model_name="tiny") as server:
        yield server
    engine.close()


def bodies() -> list[dict]:
    rng = random.Random(1)
    shared = [rng.randrange(5, 256) for _ in range(64)]
    made = []
    for i in range(NUM_PROMPTS):
        own = [rng.randrange(5, 256) for _ in range(rng.randrange(4, 60))]
        made.append(
            {
                "model": "tiny",
                "prompt": (shared if i % 2 else []) + own,
                "max_tokens": rng.randrange(8, 64),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return made


def answers_alone(url: str, requests: list[dict]) -> list[str]:
    answers = []
    for body in requests:
        report = run_load(url, bodies=[body], streams=1, abort_fraction=0.0, max_requests=1)
        (done,) = report.completed
        answers.append(done.result.text)
    return answers


async def count_tasks() -> int:
    """Tasks of the server's loop once connections have closed; polls, because closing takes a turn or two of the loop."""
    count = 0
    for _ in range(500):
        await asyncio.sleep(0.01)
        count = len(asyncio.all_tasks())
        if count <= 4:
            break
    return count


def check_load(server, seconds: float) -> None:
    requests = bodies()
    expected = answers_alone(server.url, requests)
    run_load(server.url, bodies=requests, streams=64, seconds=min(seconds, 3), abort_fraction=1 / 3, seed=7)
    gc.collect()
    rss_before = psutil.Process().memory_info().rss
    report = run_load(server.url, bodies=requests, streams=64, seconds=seconds, abort_fraction=1 / 3, seed=8)
    assert not report.failed
    assert report.cut
    assert len(report.completed) > len(report.cut)
    for request in report.completed:
        assert request.result.text == expected[request.body_index]
    engine = server.engine
    drained = asyncio.run_coroutine_threadsafe(engine.wait_drained(20), server.loop).result(30)
    assert drained
    assert engine.call(lambda core: core.pool.num_free).result(10) == engine.num_blocks - 1
    engine.call(lambda core: core.check_integrity()).result(10)
    assert not engine.call(lambda core: core.has_work).result(10)
    assert asyncio.run_coroutine_threadsafe(count_tasks(), server.loop).result(30) <= 4
    gc.collect()
    grown = psutil.Process().memory_info().rss - rss_before
    assert grown < 64 * 2**20, f"memory grew by {grown / 2**20:.0f} MiB over {len(report.requests)} requests"


def test_load(real_server):
    check_load(real_server, seconds=5)


@pytest.mark.soak
def test_load_for_a_minute(real_server):
    check_load(real_server, seconds=60)
