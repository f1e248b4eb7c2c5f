"""A real uvicorn on a free port of 127.0.0.1, in a thread, before a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import httpx
import openai
import pytest

from tests.server.fake_engine import FakeEngine
from tieredkv.config import Config
from tieredkv.server.app import build_app
from tieredkv.server.main import bind, make_server


@contextlib.contextmanager
def running_server(engine, **settings):
    """Serve `engine`; yields its base URL, the service and the loop."""
    config = Config.load({"port": 0, **settings})
    sock = bind(config.server.host, config.server.port)
    app, service = build_app(engine, config)
    started = threading.Event()
    server = make_server(app, config, started.set)
    loops, tasks = [], []

    async def main():
        loops.append(asyncio.get_running_loop())
        tasks.append(asyncio.current_task())
        await server.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    try:
        assert started.wait(20)
        host, port = sock.getsockname()
        yield SimpleNamespace(
            url=f"http://{host}:{port}", port=port, service=service, loop=loops[0], task=tasks[0], engine=engine
        )
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def _server():
    with running_server(FakeEngine(), max_body_size="64KiB") as server:
        yield server


@pytest.fixture
def server(_server):
    """The shared server, its engine as new; whatever a test leaves running fails the test."""
    _server.engine.reset()
    yield _server
    _server.engine.wait_for(lambda: not _server.engine.running)


@pytest.fixture
def engine(server):
    return server.engine


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client
