"""The stream of events: a snapshot first, ids to go on from, gaps, keep-alives, and readers that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import httpx
import pytest

from tests.server.conftest import running_server
from tests.server.fake_admin import EPOCH, FakeAdmin
from tests.server.fake_engine import FakeEngine
from tieredkv.errors import CapacityError
from tieredkv.reports import CacheEvent, EventGap, EventSnapshot
from tieredkv.server.admin.followers import MAX_STREAMS, Followers, encode
from tieredkv.types import Tier


@pytest.fixture(scope="module")
def _served():
    with running_server(FakeEngine(), FakeAdmin()) as server:
        yield server


@pytest.fixture
def served(_served):
    """A server whose streams have all ended by the end of the test."""
    _served.admin.reset()
    yield _served
    wait_until(_served, lambda: not len(_served.service.followers) and not _served.admin.readers)


def wait_until(server, predicate):
    """Until `predicate` holds on the server's loop."""

    async def wait():
        async with asyncio.timeout(20):
            while not predicate():
                await asyncio.sleep(0.001)

    asyncio.run_coroutine_threadsafe(wait(), server.loop).result(30)


def publish(server, *hashes):
    done = asyncio.Event()

    async def run():
        server.admin.publish("stored", "computed", list(hashes))
        done.set()

    asyncio.run_coroutine_threadsafe(run(), server.loop).result(20)


def parse(lines):
    """Events as (id, name, data) from the lines of a stream."""
    event = {}
    for line in lines:
        if not line:
            if event:
                yield event.get("id"), event.get("event"), json.loads(event["data"])
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value


@contextlib.contextmanager
def following(server, **settings):
    with httpx.stream("GET", f"{server.url}/admin/events", timeout=20, **settings) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        yield parse(response.iter_lines())


def test_a_snapshot_then_what_happens(served):
    chain = served.admin.hold([1] * 32)
    with following(served) as events:
        key, name, data = next(events)
        assert (key, name) == (f"{EPOCH}-1", "snapshot")
        assert data["hashes_by_tier"] == {"device": [h.hex() for h in chain.hashes]}
        publish(served, "aa")
        key, name, data = next(events)
        assert (key, name) == (f"{EPOCH}-2", "stored")
        assert (data["hashes"], data["sequence"], data["tier"], data["reason"]) == (["aa"], 2, "device", "computed")


@pytest.mark.parametrize("how", ["since", "last-event-id"])
def test_a_reader_goes_on_where_it_was(served, how):
    publish(served, "aa")
    publish(served, "bb")
    start = {"params": {"since": f"{EPOCH}-1"}} if how == "since" else {"headers": {"last-event-id": f"{EPOCH}-1"}}
    with following(served, **start) as events:
        publish(served, "cc")
        assert [next(events)[:2] for _ in range(2)] == [(f"{EPOCH}-2", "stored"), (f"{EPOCH}-3", "stored")]


def test_a_gap_is_announced_and_a_snapshot_follows(served):
    publish(served, "aa")
    for since in ("other-1", f"{EPOCH}-99"):
        with following(served, params={"since": since}) as events:
            (key, name, _), (snapshot, after, _) = next(events), next(events)
            # A reader that breaks off here has to ask for a snapshot again.
            assert (key, name) == (None, "gap")
            assert (snapshot, after) == (f"{EPOCH}-1", "snapshot")


@pytest.mark.parametrize("since", ["", "x", "1", "-1", "e-", "e--1", "e-1.5", "a b-1", "e-" + "9" * 19])
def test_what_is_no_id(served, since):
    for start in ({"params": {"since": since}}, {"headers": {"last-event-id": since}}):
        response = httpx.get(f"{served.url}/admin/events", **start)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "since"


def test_a_source_that_ends_ends_the_stream(served):
    with following(served) as events:
        next(events)
        served.loop.call_soon_threadsafe(served.admin.readers[0].put_nowait, None)
        assert list(events) == []


def test_readers_that_leave_are_forgotten(served):
    """`served` checks that nothing of them is left."""
    for _ in range(3):
        with following(served) as events:
            next(events)


def test_so_many_readers_and_no_more(served):
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(following(served)) for _ in range(MAX_STREAMS)]
        assert all(next(events) for events in readers)
        assert httpx.get(f"{served.url}/admin/events").status_code == 429
    wait_until(served, lambda: not len(served.service.followers))
    with following(served) as events:
        next(events)


def test_a_reader_that_does_not_read_holds_up_only_itself(served):
    """What it does not take stays with the source, which bounds it; the server's own buffers stay small."""
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /admin/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until(served, lambda: len(served.admin.readers) == 1)
        reader = served.admin.readers[0]
        for _ in range(200):
            publish(served, "ab" * 50_000)
        # The kernel took a few megabytes; the rest was never asked for.
        wait_until(served, lambda: reader.qsize() > 50)
        assert httpx.get(f"{served.url}/admin/cache").status_code == 200


def test_closing_ends_all_streams_and_starts_none():
    with running_server(FakeEngine(), FakeAdmin()) as server:
        with following(server) as events:
            next(events)
            server.loop.call_soon_threadsafe(server.service.followers.close)
            assert list(events) == []
        assert httpx.get(f"{server.url}/admin/events").status_code == 503


async def _collect(stream, num):
    """The first `num` parts that a stream sends, then the client goes."""
    sent, gone = [], asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if len(sent) == num:
                gone.set()

    await stream({"type": "http"}, receive, send)
    return sent


def test_comments_keep_a_quiet_connection():
    async def run():
        followers, closed = Followers(keep_alive_s=0.001), []

        async def silent():
            try:
                await asyncio.Event().wait()
                yield EventSnapshot(EPOCH, 0, {})
            finally:
                closed.append(True)

        sent = await _collect(followers.follow(silent(), ""), 3)
        assert sent[:3] == [b": keep-alive\n\n"] * 3
        assert (len(followers), closed) == (0, [True])

    asyncio.run(run())


def test_a_failing_source_says_so_in_the_stream(caplog):
    async def run():
        followers = Followers()

        async def failing():
            yield EventSnapshot(EPOCH, 0, {})
            raise CapacityError("the engine has stopped", status=503)

        sent = await _collect(followers.follow(failing(), ""), 99)
        name, data = sent[1].decode().splitlines()[:2]
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["message"] == "the engine has stopped"
        assert len(followers) == 0

    asyncio.run(run())


def test_only_what_one_can_go_on_from_has_an_id():
    part = EventSnapshot("e", 7, {Tier.DISK: ["ab"]}, part=0, num_parts=2)
    assert encode(part, "e").startswith(b"event: snapshot\n")
    assert encode(EventSnapshot("e", 7, {}, part=1, num_parts=2), "e").startswith(b"id: e-7\nevent: snapshot\n")
    assert encode(EventGap("e", 7, "slow"), "e").startswith(b"event: gap\n")
    assert encode(CacheEvent(8, "removed", Tier.HOST, "evicted", []), "e").startswith(b"id: e-8\nevent: removed\n")
