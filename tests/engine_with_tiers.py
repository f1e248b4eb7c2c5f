"""A running engine over the arithmetic model with real tiers: arena, copy thread, storage threads, a store on disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from tests.fakes import FakeRunner, make_core
from tests.server.fake_engine import ByteTokenizer
from tieredkv.config import Config
from tieredkv.disk_tier import ThreadedDisk
from tieredkv.engine import Engine
from tieredkv.layout import KVLayout
from tieredkv.storage.disk import DiskStore, wall_clock_us
from tieredkv.storage.host import HostArena
from tieredkv.storage.workers import StorageWorkers
from tieredkv.tiers import Tiers
from tieredkv.transfer import ThreadCopyEngine

NAMESPACE = b"n" * 32
BLOCK_SIZE = 8


@contextlib.contextmanager
def running_engine(
    disk_path=None, *, num_blocks=64, num_slots: int | None = 64, disk_nbytes=8 << 20, medium=None, **settings
) -> Iterator[Engine]:
    """`num_slots` None turns the tiers off, 0 the host tier alone."""
    made: dict = {}

    def make_tiers(pool, gate, wake):
        runner: FakeRunner = made["runner"]
        blocks = runner.slots.view(np.uint8).reshape(runner.num_blocks, -1)
        host = HostArena(blocks.shape[1], (num_slots or 0) * 4096, staging_slots=8)
        disk = None
        if disk_path is not None:

            def open_store() -> StorageWorkers:
                store = DiskStore.open(disk_path, disk_nbytes, medium=medium)
                workers = StorageWorkers(store, on_result=wake)
                workers.call(lambda: store.describe_namespace(NAMESPACE, json.dumps({})))
                return workers

            disk = ThreadedDisk(open_store, NAMESPACE, 5.0)
        return Tiers(
            pool, ThreadCopyEngine(blocks, wake), host, disk, gate, block_nbytes=blocks.shape[1], timeout_s=5.0
        )

    import time

    core, runner = make_core(
        num_blocks=num_blocks,
        clock=time.monotonic,
        namespace=NAMESPACE,
        make_tiers=None if num_slots is None else make_tiers,
        on_runner=lambda runner: made.update(runner=runner),
        **settings,
    )
    core.pins._clock_us = wall_clock_us
    runner.loaded = SimpleNamespace(
        name="fake",
        tokenizer=ByteTokenizer(),
        vocab_size=core.vocab_size,
        eos_token_ids=frozenset(),
        layout=KVLayout(1, 1, 8, 8, "float32"),
        device="cpu",
    )
    engine = Engine(core, runner, Config.load({"block_size": BLOCK_SIZE}))
    engine.start()
    try:
        yield engine
    finally:
        engine.close(5.0)
