"""The real engine and admin on a tiny model behind a real server: all three tiers, two tenants, an administrator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import httpx

from tests.models_for_tests import VOCAB_SIZE, build
from tests.server.conftest import running_server
from tieredkv.admin import Admin
from tieredkv.config import Config
from tieredkv.engine import Engine
from tieredkv.hashing import owner_label
from tieredkv.warming import Warming

ADMIN, ALICE, BOB = "admin-key", "alice-key", "bob-key"
MODEL = "tiny"
__all__ = ["ADMIN", "ALICE", "BOB", "MODEL", "VOCAB_SIZE", "bearer", "owner_label", "real_server"]


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@contextlib.contextmanager
def real_server(folder, **settings):
    """A server with small tiers over a random model; yields what `running_server` yields and `say`, which sends a prompt."""
    settings = {
        "model": str(build("llama", folder / "model")),
        "served_model_name": [MODEL],
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
        "host_memory": "1MiB",
        "disk_path": str(folder / "store"),
        "disk_size": "16MiB",
        "max_model_len": 512,
        "restore": "always",
        "admin_key": [ADMIN],
        "api_key": [ALICE, BOB],
        **settings,
    }
    config = Config.load({"port": 0, **settings})
    engine = Engine.load(config)
    engine.start()
    warming = Warming(engine)
    try:
        with running_server(engine, Admin(engine, config, warming), **settings) as server:
            server.numbers = itertools.count()

            def say(key, token_ids):
                body = {"prompt": token_ids, "max_tokens": 1}
                answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(key), timeout=60)
                answer.raise_for_status()
                return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

            server.say = say
            try:
                yield server
            finally:
                asyncio.run_coroutine_threadsafe(warming.close(), server.loop).result(20)
    finally:
        engine.close()
