"""A running engine saves what it computed when it has nothing else to do, also when nobody talks to it any more."""

from __future__ import annotations

import asyncio
import time

from tests.engine.truth import random_prompt
from tieredkv.config import Config
from tieredkv.engine import Engine
from tieredkv.types import EngineRequest, SamplingParams

PATIENCE_S = 10.0


def test_what_was_computed_reaches_the_disk_without_any_further_contact(folder, tmp_path):
    settings = {
        "model": str(folder("llama")),
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks_override": 24,
        "max_model_len": 256,
        "host_memory": "1MiB",
        "disk_path": str(tmp_path / "store"),
        "disk_size": "64MiB",
    }
    engine = Engine.load(Config.load(settings))
    engine.start()

    async def ask(seed: int) -> None:
        prompt = random_prompt(100, seed=seed)
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        async for _ in engine.submit(EngineRequest(f"r{seed}", prompt, sampling)):
            pass

    try:
        # Looked at from outside: whatever is asked of the engine would wake it.
        counts = engine._core.tiers.spiller.counts
        for number in range(1, 5):
            asyncio.run(ask(number))
            deadline_s = time.monotonic() + PATIENCE_S
            while counts.to_disk < 6 * number and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert counts.to_disk == 6 * number
    finally:
        engine.close(20)
