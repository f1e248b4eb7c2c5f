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
from tieredkv.server.app import build_admin_app, build_app
from tieredkv.server.main import bind, make_server


@contextlib.contextmanager
def running_server(engine, admin=None, **settings):
    """Serve `engine`, with `admin` also the admin API, wherever `admin_port` moves it; yields URLs, service and loop."""
    config = Config.load({"port": 0, **settings})
    sock = admin_sock = bind(config.server.host, config.server.port)
    app, service = build_app(engine, config, admin)
    started = threading.Semaphore(0)
    pairs = [(make_server(app, config, started.release), sock)]
    if config.admin.admin_port is not None:
        admin_sock = bind(config.server.host, config.admin.admin_port, "admin_port")
        pairs.append((make_server(build_admin_app(service, config), config, started.release), admin_sock))
    loops, tasks = [], []

    async def main():
        loops.append(asyncio.get_running_loop())
        tasks.append(asyncio.current_task())
        # `task` is then the only one of the server's own, unless there are two servers.
        (first, *more) = [server.serve(sockets=[sock]) for server, sock in pairs]
        async with asyncio.TaskGroup() as group:
            for each in more:
                group.create_task(each)
            await first

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    try:
        assert all(started.acquire(timeout=20) for _ in pairs)
        host, port = sock.getsockname()
        yield SimpleNamespace(
            url=f"http://{host}:{port}", port=port, service=service, loop=loops[0], task=tasks[0], engine=engine,
            admin=admin, admin_url=f"http://{host}:{admin_sock.getsockname()[1]}",
        )  # fmt: skip
    finally:
        if loops:
            loops[0].call_soon_threadsafe(service.followers.close)
        for server, _ in pairs:
            server.should_exit = True
        thread.join(20)
        sock.close()
        admin_sock.close()
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
