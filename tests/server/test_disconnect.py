"""A client that goes away ends its sequences at once; a drained server finishes what runs and refuses the rest."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine
from tieredkv.server.sse import until_disconnect


def send_and_read(server, body, *, until: bytes | None) -> socket.socket:
    """Send a completion request over a raw socket and read until `until` has come."""
    payload = json.dumps(body).encode()
    raw = socket.create_connection(("127.0.0.1", server.port), 20)
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(payload), payload)
    )
    got = b""
    while until is not None and until not in got:
        part = raw.recv(65536)
        assert part, got
        got += part
    return raw


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize(
    ("streaming", "hold_after", "until"), [(True, 4, b'"l"'), (True, 0, b"200 OK"), (False, 4, None)]
)
def test_a_disconnect_aborts_all_sequences(server, engine, caplog, choices, streaming, hold_after, until):
    engine.hold_after = hold_after
    raw = send_and_read(server, {"prompt": "x", "stream": streaming, "n": choices}, until=until)
    engine.wait_for(lambda: len(engine.submitted) == choices)
    raw.close()
    engine.wait_for(lambda: not engine.running)
    assert sorted(engine.aborted) == sorted(r.request_id for r in engine.submitted)
    _wait_until_idle(server)
    assert not caplog.records


def test_a_finished_request_aborts_nothing(http, engine):
    for streaming in (False, True):
        http.post("/v1/completions", json={"prompt": ["x", "y"], "n": 2, "stream": streaming})
    assert not engine.aborted


def test_a_refused_choice_takes_the_others_along(http, engine):
    """The queue fills up in the middle of a fan-out."""
    engine.hold_after = 0
    submit = engine.submit

    def filling(request):
        engine.full = len(engine.submitted) == 2
        return submit(request)

    engine.submit = filling
    try:
        assert http.post("/v1/completions", json={"prompt": "x", "n": 4}).status_code == 429
    finally:
        del engine.submit
    assert len(engine.aborted) == 2


def test_no_task_is_left_behind(server, engine, http):
    http.get("/health")
    engine.hold_after = 3
    sockets = [send_and_read(server, {"prompt": "x", "stream": True, "n": 3}, until=b'"e"') for _ in range(8)]
    for raw in sockets:
        raw.close()
    engine.wait_for(lambda: not engine.running)
    engine.hold_after = None
    http.post("/v1/completions", json={"prompt": ["x", "y"], "stream": True})
    _wait_until_idle(server)


def _wait_until_idle(server) -> None:
    """Until the loop has no tasks but the server's own."""

    async def others_done():
        own = {asyncio.current_task(), server.task}
        while others := asyncio.all_tasks() - own:
            await asyncio.wait(others, timeout=20)

    asyncio.run_coroutine_threadsafe(others_done(), server.loop).result(20)


def test_until_disconnect_cancels_the_work_when_it_is_cancelled_itself():
    async def main():
        cancelled = []

        async def work():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        async def receive():
            await asyncio.Event().wait()

        task = asyncio.create_task(until_disconnect(receive, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled == [True]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.fixture
def own_server():
    with running_server(FakeEngine()) as server:
        yield server


def test_draining_refuses_new_requests(own_server):
    own_server.service.begin_drain()
    with httpx.Client(base_url=own_server.url) as http:
        for response in (http.get("/health"), http.post("/v1/completions", json={"prompt": "x"})):
            assert response.status_code == 503
            assert response.headers["retry-after"]
        assert http.get("/v1/models").status_code == 200
        assert http.get("/metrics").status_code == 200


@pytest.mark.parametrize("streaming", [False, True])
def test_a_request_cut_by_the_shutdown_says_so(own_server, streaming):
    engine = own_server.engine
    engine.hold_after = 2

    async def main():
        async with httpx.AsyncClient(base_url=own_server.url, timeout=20) as http:
            body = {"prompt": "x", "stream": streaming}
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.to_thread(engine.wait_for, lambda: engine.running)
            own_server.loop.call_soon_threadsafe(engine.abort_all)
            return await request

    response = asyncio.run(main())
    if streaming:
        *_, error, done, _ = response.text.split("\n\n")
        assert done == "data: [DONE]"
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
    else:
        assert response.status_code == 503
