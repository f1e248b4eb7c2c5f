"""The load client against a small fake server that speaks server-sent events; how results are judged; server processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import FIGURES, Contender, as_text, collect
from benchmarks.load import run_load
from benchmarks.peer_table import HIGHER, LOWER, PeerTable, absolute, compare
from benchmarks.servers import Server, ServerError, http_get
from tieredkv.bench.answer import SOURCES, read_event
from tieredkv.bench.client import CHAT, Cut, LoadError, StreamResult, request_stream
from tieredkv.bench.serve import Served

# What the parts of an event are called.
NAMES = (
    *("choices", "text", "delta", "content", "finish_reason", "error", "usage", "prompt_tokens", "completion_tokens"),
    *("prompt_tokens_details", "cached_tokens", "tieredkv", *(f"{source}_tokens" for source in SOURCES)),
)
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


class FakeServer:
    """Answers every POST with the pieces that `reply` makes of the request's body; an Event among them is waited for.

    `hung_up` counts the connections that the client closed before the answer was complete.
    """

    def __init__(self, reply: Callable[[dict[str, Any]], list[bytes | asyncio.Event]]) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.hung_up = 0
        self.all_closed = asyncio.Event()
        self.url = ""
        self._open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        self.all_closed.clear()
        gone: asyncio.Future[bytes] | None = None
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-length"))
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self.heads.append(head)
            gone = asyncio.ensure_future(reader.read())
            for piece in self.reply(self.bodies[-1]):
                if isinstance(piece, asyncio.Event):
                    waited = asyncio.ensure_future(piece.wait())
                    await asyncio.wait({gone, waited}, return_when=asyncio.FIRST_COMPLETED)
                    waited.cancel()
                else:
                    writer.write(piece)
                    await writer.drain()
                if gone.done():
                    self.hung_up += 1
                    break
        except (OSError, asyncio.IncompleteReadError):
            self.hung_up += 1
        finally:
            if gone is not None:
                gone.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await gone
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self._open -= 1
            if self._open == 0:
                self.all_closed.set()


@asynccontextmanager
async def serving(reply: Callable[[dict[str, Any]], list[bytes | asyncio.Event]]) -> AsyncIterator[FakeServer]:
    fake = FakeServer(reply)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield fake


def head(*, status: str = "200 OK", chunked: bool = True) -> bytes:
    framing = "transfer-encoding: chunked\r\n" if chunked else ""
    return f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\n{framing}\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


ANSWER = [
    token("Once"),
    token(" upon"),
    token(" a"),
    token(" time", "length"),
    event({"choices": [], "usage": USAGE}),
    event(b"[DONE]"),
]


def ask(
    reply: Callable[[dict[str, Any]], list[bytes | asyncio.Event]], **options: Any
) -> tuple[StreamResult, FakeServer]:
    async def main() -> tuple[StreamResult, FakeServer]:
        async with serving(reply) as fake:
            result = await request_stream(fake.url, {"prompt": [1, 2, 3], "max_tokens": 4}, timeout_s=20, **options)
            await fake.all_closed.wait()
            return result, fake

    return asyncio.run(main())


def wire(*, chunked: bool, piece_size: int) -> list[bytes | asyncio.Event]:
    body = b"".join(chunk(e) for e in ANSWER) + b"0\r\n\r\n" if chunked else b"".join(ANSWER)
    whole = head(chunked=chunked) + body
    return [whole[i : i + piece_size] for i in range(0, len(whole), piece_size)]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("piece_size", [1, 7, 4096])
def test_a_stream_reads_the_same_however_it_is_cut_into_pieces(chunked: bool, piece_size: int) -> None:
    result, _ = ask(lambda _: wire(chunked=chunked, piece_size=piece_size))
    assert result.ok
    assert result.text == "Once upon a time"
    assert result.usage == USAGE
    assert result.tokens == 4
    assert result.finish_reason == "length"
    assert len(result.event_times_s) == 4
    assert result.event_times_s == sorted(result.event_times_s)


def test_events_and_chunks_need_not_share_borders() -> None:
    stream = b"".join(ANSWER)
    chunks = [chunk(stream[i : i + 11]) for i in range(0, len(stream), 11)]
    result, _ = ask(lambda _: [head(), *chunks, b"0\r\n\r\n"])
    assert result.ok
    assert result.text == "Once upon a time"


def test_the_request_asks_for_a_stream_with_usage() -> None:
    result, fake = ask(lambda _: wire(chunked=True, piece_size=4096), path=CHAT, headers={"Authorization": "Bearer k"})
    assert result.ok
    assert fake.bodies == [
        {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    ]
    assert fake.heads[0].startswith(f"POST {CHAT} HTTP/1.1\r\n")
    assert "Authorization: Bearer k" in fake.heads[0]


def test_the_first_event_with_choices_stops_the_ttft_clock() -> None:
    async def main() -> tuple[StreamResult, float]:
        gate = asyncio.Event()
        opened_s = 0.0

        def reply(_: dict[str, Any]) -> list[bytes | asyncio.Event]:
            usage_only = chunk(event({"choices": [], "usage": None}))
            return [head(), usage_only, gate, *[chunk(e) for e in ANSWER], b"0\r\n\r\n"]

        async with serving(reply) as fake:
            request = asyncio.ensure_future(request_stream(fake.url, {"max_tokens": 4}, timeout_s=20))
            while not fake.bodies:
                await asyncio.sleep(0)
            opened_s = asyncio.get_running_loop().time()
            gate.set()
            return await request, opened_s

    result, opened_s = asyncio.run(main())
    assert result.started_s + result.ttft_s >= opened_s


def test_chat_deltas_are_text() -> None:
    events = [
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}),
        event(b"[DONE]"),
    ]
    result, _ = ask(lambda _: [head(chunked=False), *events])
    assert result.ok
    assert (result.text, result.finish_reason, result.tokens) == ("Hi", "stop", 2)


def test_an_error_status_is_reported_with_its_body() -> None:
    result, _ = ask(lambda _: [head(status="429 Too Many Requests", chunked=False), b'{"error": {"message": "full"}}'])
    assert result.status == 429
    assert not result.ok
    assert "full" in (result.error or "")
    with pytest.raises(LoadError, match="429"):
        result.require_ok()


def test_an_error_inside_the_stream_is_a_failure() -> None:
    result, _ = ask(lambda _: [head(chunked=False), ANSWER[0], event({"error": {"message": "boom"}}), event(b"[DONE]")])
    assert not result.ok
    assert "boom" in (result.error or "")


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_a_stream_that_ends_early_is_a_failure_with_what_came(num_events: int) -> None:
    result, _ = ask(lambda _: [head(), *[chunk(e) for e in ANSWER[:num_events]]])
    assert not result.ok
    assert not result.cut
    assert len(result.event_times_s) == num_events
    assert "ended early" in (result.error or "")


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 2",
        head() + b"zz\r\n",
        head() + b"-6\r\n",
        head(status="302 Found", chunked=False),
        head(chunked=False) + b"data: " + b"[" * 100_000 + b"\n\ndata: [DONE]\n\n",
    ],
)
def test_whatever_comes_back_is_a_result(bad: bytes) -> None:
    result, _ = ask(lambda _: [bad])
    assert not result.ok
    assert result.error


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(ANYTHING)
def test_an_event_of_any_shape_gives_counts_and_text_or_an_error(value: Any) -> None:
    for message in (value, {"choices": value}, {"choices": [value]}, {"choices": [{"text": "a"}], "usage": value}):
        said = read_event(json.dumps(message).encode())
        served = Served(0, 0.0, StreamResult(usage=said.usage, text=said.text))
        tokens = served.tokens_by_source
        assert all(type(count) is int and count >= 0 for count in (*tokens.values(), served.cached_tokens))
        assert served.cached_tokens <= served.num_prompt_tokens
        assert isinstance(said.text, str)
        assert said.error is None or (said.error.isprintable() and not said.has_token)


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_closes_the_connection_where_planned(reset: bool) -> None:
    never = asyncio.Event

    def reply(_: dict[str, Any]) -> list[bytes | asyncio.Event]:
        return [head(), chunk(ANSWER[0]), chunk(ANSWER[1]), never()]

    result, fake = ask(reply, cut=Cut(after_events=2, reset=reset))
    assert result.cut
    assert not result.ok
    assert result.error is None
    assert result.text == "Once upon"
    assert fake.hung_up == 1


def test_a_cut_by_time_needs_no_event() -> None:
    result, fake = ask(lambda _: [asyncio.Event()], cut=Cut(after_s=0.0))
    assert result.cut
    assert result.event_times_s == []
    assert fake.hung_up == 1


def test_a_silent_server_runs_into_the_deadline() -> None:
    async def main() -> StreamResult:
        async with serving(lambda _: [asyncio.Event()]) as fake:
            result = await request_stream(fake.url, {}, timeout_s=0.05)
            await fake.all_closed.wait()
            return result

    result = asyncio.run(main())
    assert "no end within" in (result.error or "")


def test_a_name_that_cannot_be_one_is_a_result() -> None:
    assert "cannot connect" in (asyncio.run(request_stream("http://" + "a" * 70 + ".com", {})).error or "")


def test_a_refused_connection_is_a_result() -> None:
    async def main() -> StreamResult:
        async with serving(lambda _: []) as fake:
            url = fake.url
        return await request_stream(url, {}, timeout_s=5)

    assert "cannot connect" in (asyncio.run(main()).error or "")


@pytest.mark.parametrize("url", ["http://192.168.0.1:80", "https://example.com", "ftp://localhost"])
def test_load_stays_on_this_machine(url: str) -> None:
    with pytest.raises(ValueError, match=r"this machine only|must be a URL"):
        run_load(url, bodies=[{}], streams=1, seconds=0.1)


@pytest.mark.parametrize("url", ["ftp://localhost", "127.0.0.1:8000", "http://", "", "http://a b", "http://a/\nX: y"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be a URL"):
        asyncio.run(request_stream(url, {}))


@contextlib.contextmanager
def serving_in_thread(reply: Callable[[dict[str, Any]], list[bytes | asyncio.Event]]) -> Iterator[FakeServer]:
    """`serving` on a loop of its own, for `run_load`, which runs its own loop."""
    started: list[FakeServer] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(reply) as fake:
            started.append(fake)
            ready.set()
            await stop.wait()
            if fake.bodies:
                await fake.all_closed.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait(10)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def counting_reply(body: dict[str, Any]) -> list[bytes | asyncio.Event]:
    """As many tokens as asked for, each naming the prompt, so that answers can be told apart."""
    tokens = [chunk(token(f"{body['prompt']} ")) for _ in range(body["max_tokens"])]
    return [head(), *tokens, chunk(event(b"[DONE]")), b"0\r\n\r\n"]


def test_a_load_run_completes_what_it_does_not_cut() -> None:
    bodies = [{"prompt": str(i), "max_tokens": 2 + i} for i in range(5)]
    with serving_in_thread(counting_reply) as fake:
        report = run_load(fake.url, bodies=bodies, streams=8, seconds=30, seed=1, max_requests=200)
    assert len(report.requests) == 200
    assert report.failed == []
    assert len(report.completed) + len(report.cut) == 200
    planned = [r for r in report.requests if r.planned_cut is not None]
    assert 40 <= len(planned) <= 95
    for request in report.requests:
        body = bodies[request.body_index]
        whole = f"{body['prompt']} " * int(str(body["max_tokens"]))
        if request.planned_cut is None:
            assert request.result.text == whole
            assert request.result.tokens == body["max_tokens"]
        else:
            assert whole.startswith(request.result.text)
    assert "completed" in report.summary()


def test_a_load_run_plans_the_same_for_the_same_seed() -> None:
    bodies = [{"prompt": str(i), "max_tokens": 8} for i in range(5)]
    plans = []
    for _ in range(2):
        with serving_in_thread(counting_reply) as fake:
            report = run_load(fake.url, bodies=bodies, streams=1, seconds=30, seed=7, max_requests=30)
        plans.append([(r.body_index, r.planned_cut) for r in report.requests])
    assert plans[0] == plans[1]


def test_a_load_run_ends_in_time_and_reports_failures() -> None:
    with serving_in_thread(lambda _: [head(status="503 Service Unavailable", chunked=False), b"draining"]) as fake:
        report = run_load(fake.url, bodies=[{"prompt": "x", "max_tokens": 4}], streams=2, seconds=0.2, abort_fraction=0)
    assert report.duration_s < 10
    assert report.failed
    assert len(report.failed) == len(report.requests)
    assert report.failed[0].result.status == 503


def contender(name: str, **values: float) -> Contender:
    made = Contender(Server(name, [name]), version="1")
    for key, samples in made.samples.items():
        samples.append(values.get(key, 100.0))
    return made


def test_a_ratio_is_judged_in_the_direction_of_its_figure() -> None:
    fast = contender("tieredkv", ttft_cold_ms=90, ttft_warm_ms=79, itl_ms=100, tokens_per_s=110)
    slow = contender("tieredkv", ttft_cold_ms=110, ttft_warm_ms=81, itl_ms=101, tokens_per_s=90)
    peer = contender("vllm")
    judged = {name: collect([own, peer], [])["ratios"] for name, own in (("fast", fast), ("slow", slow))}
    wanted = [figure.key for figure in FIGURES if figure.limit is not None]
    assert all(judged["fast"][key]["reached"] for key in wanted)
    assert not any(judged["slow"][key]["reached"] for key in wanted)


def test_the_table_names_every_figure_and_server() -> None:
    result = collect([contender("tieredkv", step8_ms=20.5), contender("vllm")], [{"step_ms": 20.1, "model_ms": 20.0}])
    text = as_text(json.loads(json.dumps(result)))
    for word in ("tieredkv", "vllm", *(figure.label for figure in FIGURES)):
        assert word in text
    assert "HTTP and scheduling add 0.50 ms" in text


def test_rows_of_the_peers_are_judged_in_their_direction() -> None:
    assert compare("TTFT", "ms", 90, "vllm", 100, LOWER, 0.9).reached
    assert not compare("TTFT", "ms", 91, "vllm", 100, LOWER, 0.9).reached
    assert compare("output", "tok/s", 125, "vllm", 100, HIGHER, 1.25).reached
    assert not compare("output", "tok/s", 124, "vllm", 100, HIGHER, 1.25).reached
    assert not absolute("memory", "MiB", 601, LOWER, 600).reached


def test_a_part_measured_again_replaces_its_rows_and_no_others(tmp_path) -> None:
    stem = tmp_path / "2026-01-02-peers"
    table = PeerTable({"cpu": "one"})
    table.take_parts(stem)
    table.add("latency", "aaa", [compare("TTFT", "ms", 50, "vllm", 100, LOWER, 0.9)])
    table.add("footprint", "aaa", [absolute("memory", "MiB", 700, LOWER, 600)])
    table.save(stem)
    again = PeerTable({"cpu": "one"})
    again.take_parts(stem)
    assert again == table
    again.add("footprint", "bbb", [absolute("memory", "MiB", 500, LOWER, 600)])
    again.save(stem)
    parts = json.loads(stem.with_suffix(".json").read_text())["parts"]
    assert parts["latency"] == table.parts["latency"]
    assert [row["ours"] for row in parts["footprint"]["rows"]] == [500]
    lines = stem.with_suffix(".txt").read_text().splitlines()
    assert [line.split()[-1] for line in lines[-4:]] == ["(aaa)", "reached", "(bbb)", "reached"]
    assert table.as_text().splitlines()[-1].endswith("at most 600: missed")


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_runs_between_enter_and_exit_and_can_be_paused() -> None:
    with Server("fake", [sys.executable, "-c", HEALTHY, "{port}"], start_timeout_s=30) as server:
        server.pause()
        with pytest.raises(OSError):
            http_get(f"{server.url}/health", timeout_s=0.1)
        server.resume()
        assert http_get(f"{server.url}/health")[0] == 200
    with pytest.raises(OSError):
        http_get(f"{server.url}/health", timeout_s=5)


def test_a_server_that_does_not_come_up_is_an_error_with_its_log() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(ServerError, match="no such model"):
        Server("fake", command, start_timeout_s=30).__enter__()
    with pytest.raises(ServerError, match="cannot be started"):
        Server("fake", ["/nonexistent/server"]).__enter__()
