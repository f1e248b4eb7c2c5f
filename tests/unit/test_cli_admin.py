"""`tieredkv admin`: what is asked of the server, what is shown, exit codes, and one line for every mistake."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.conftest import running_server
from tests.server.fake_admin import EPOCH, FakeAdmin
from tests.server.fake_engine import FakeEngine
from tieredkv.cli import admin as commands
from tieredkv.cli.admin_client import AdminClient
from tieredkv.cli.main import main
from tieredkv.errors import AdminError
from tieredkv.types import Tier

KEY = "admin-key"
TOKENS = list(range(40))


@pytest.fixture(scope="module")
def _served():
    with running_server(FakeEngine(), FakeAdmin(), admin_key=[KEY]) as server:
        yield server


@pytest.fixture
def admin(_served):
    _served.admin.reset()
    return _served.admin


@pytest.fixture
def url(_served):
    return _served.url


@pytest.fixture
def run(url, admin, capsys, monkeypatch):
    """The command line against the server, as (exit code, output, complaint)."""
    monkeypatch.setenv("TIEREDKV_ADMIN_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments, url=url):
        code = main(["admin", *map(str, arguments), "--url", url])
        out, err = capsys.readouterr()
        assert code != 2 or (len(err.splitlines()) == 1 and err.startswith("tieredkv: error: ")), err
        return code, out, err

    return run


def ask(run, *arguments):
    """The JSON of a command that succeeds."""
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_every_command_shows_a_table_and_json(run, admin):
    chain = admin.hold(TOKENS, name="system prompt")
    pin = ask(run, "pin", "--tokens", ",".join(map(str, TOKENS)))["id"]
    expected = {
        ("cache",): "host pays from 16 tokens",
        ("prefixes",): "system prompt",
        ("prefix", chain.id): chain.hashes[0].hex(),
        ("block", chain.id): chain.hashes[0].hex(),
        ("lookup", "--tokens", ",".join(map(str, TOKENS))): "32 device",
        ("pins",): pin,
        ("jobs",): "no jobs",
        ("verify",): "all is well",
        ("flush",): "all is saved",
        ("demote",): "demoted",
        ("clear", "--yes"): "removed",
        ("unpin", pin): pin,
    }
    for arguments, told in expected.items():
        if arguments[0] in ("demote", "clear"):
            admin.hold(TOKENS)
        code, out, err = run(*arguments)
        assert (code, err) == (0, ""), arguments
        assert told in out, arguments
        if arguments[0] != "unpin":
            assert isinstance(ask(run, *arguments), dict)


def test_everything_fits_80_columns_and_ids_stay_whole(run, admin, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    chain = admin.hold(TOKENS, name="the system prompt of an assistant that answers at length " * 3)
    pin = ask(run, "pin", "--prefix", chain.id, "--name", "a name " * 20, "--ttl", "1h")["id"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}')
    (job,) = ask(run, "warm", tmp_path / "prompts.jsonl", "--name", "j" * 60)["jobs"]
    for arguments, ids in {
        ("cache",): (),
        ("prefixes",): (chain.id,),
        ("prefix", chain.id): (chain.id, pin, *(block.hex() for block in chain.hashes)),
        ("block", chain.id): (chain.id,),
        ("lookup", "--prompt", "x" * 30): (),
        ("pins",): (pin,),
        ("jobs",): (job["id"],),
        ("verify",): (),
        ("demote",): (),
    }.items():
        code, out, _ = run(*arguments)
        assert code == 0, arguments
        assert [line for line in out.splitlines() if len(line) > 80] == [], arguments
        for wanted in ids:
            assert wanted in out, arguments


def test_prompts_from_everywhere(run, admin, tmp_path, monkeypatch):
    text, messages = tmp_path / "prompt.txt", tmp_path / "messages.json"
    text.write_text("héllo")
    messages.write_text('[{"role": "user", "content": "hi"}]')
    counts = {
        ("--prompt", "hello"): 5,
        ("--file", text): 6,
        ("--messages", messages): 4,
        ("--tokens", "1, 2,3"): 3,
    }
    for arguments, num in counts.items():
        assert ask(run, "lookup", *arguments)["num_tokens"] == num
    done = subprocess.run(
        [sys.executable, "-c", "from tieredkv.cli.admin_input import _read; from pathlib import Path; print(_read(Path('-')))"],
        input="from a pipe", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "from a pipe\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("lookup",),
        ("lookup", "--prompt", "x", "--tokens", "1"),
        ("lookup", "--tokens", "1,x"),
        ("lookup", "--tokens", ""),
        ("lookup", "--file", "/nowhere"),
        ("lookup", "--messages", "/nowhere"),
        ("lookup", "--prompt", ""),
        ("lookup", "--prompt", "x", "--tenant", "nobody"),
        ("pin", "--prefix", "ab" * 32, "--prompt", "x"),
        ("pin", "--prefix", "ab" * 32),
        ("pin", "--tokens", "1", "--tier", "hbm"),
        ("pin", "--prompt", "x" * 40, "--ttl", "soon"),
        ("pin", "--prompt", "too short"),
        ("prefix", "nothing"),
        ("prefix", "../../health"),
        ("prefix", ""),
        ("block", "x y"),
        ("unpin", "nothing"),
        ("cancel", "nothing"),
        ("prefixes", "--limit", "0"),
        ("prefixes", "--cursor", "x"),
        ("demote", "--tier", "disk"),
        ("warm", "/nowhere"),
        ("flush", "--timeout", "-1"),
        ("events", "--since", "x"),
        ("bogus",),
        ("cache", "--key", "wrong"),
        ("cache", "--key", "sp\nlit"),
        ("clear",),
    ],
)
def test_mistakes_are_one_line_and_two(run, arguments):
    """`run` checks that there is one line."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_the_key_is_the_servers_variable(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TIEREDKV_ADMIN_KEY", f"{KEY}, another")
    assert run("cache")[0] == 0
    monkeypatch.delenv("TIEREDKV_ADMIN_KEY")
    code, _, err = run("cache")
    assert code == 2
    assert "TIEREDKV_ADMIN_KEY" in err
    assert run("cache", "--key", KEY)[0] == 0
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv("TIEREDKV_ADMIN_KEY_FILE", str(tmp_path / "key"))
    assert run("cache")[0] == 0
    monkeypatch.setenv("TIEREDKV_ADMIN_KEY_FILE", str(tmp_path / "nothing"))
    assert run("cache")[0] == 2


def test_pins(run, admin):
    made = ask(run, "pin", "--tokens", "1," * 31 + "1", "--tier", "disk", "--ttl", "7d", "--name", "n", "--no-warm")
    assert made["outcome"] == "accepted"
    assert admin.calls[-1] | {"owner": None} == {
        "verb": "pin", "tier": Tier.DISK, "ttl_s": 604800, "name": "n", "warm": False, "owner": None,
    }  # fmt: skip
    chain = admin.hold(TOKENS)
    assert ask(run, "pin", "--prefix", chain.id, "--ttl", "90")["prefix"] == chain.id
    assert admin.calls[-1]["ttl_s"] == 90
    admin.pin_budget = 1
    code, _, err = run("pin", "--prefix", chain.id)
    assert code == 2
    assert "budget" in err


def test_filters(run, admin):
    chain = admin.hold(TOKENS, name="a")
    admin.hold(list(range(100, 140)), name="b")
    run("pin", "--prefix", chain.id)
    for arguments, num in (
        ((), 2), (("--pinned",), 1), (("--not-pinned",), 1), (("--search", "b"), 1), (("--tier", "disk"), 0),
        (("--tenant", "nobody"), 0), (("--limit", 1), 2),
    ):  # fmt: skip
        assert ask(run, "prefixes", *arguments)["num_total"] == num
    _, out, _ = run("prefixes", "--limit", 1)
    assert "more: --cursor 1" in out


def test_clearing_asks_first(run, admin, monkeypatch):
    admin.hold(TOKENS)
    code, _, err = run("clear", "--tier", "device")
    assert code == 2
    assert "all blocks from device" in err
    assert "--yes" in err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer, code in ((False, 130), (True, 0)):
        asked = []

        def confirm(question, abort, answer=answer, asked=asked):
            asked.append(question)
            if not answer:
                raise commands.typer.Abort

        monkeypatch.setattr(commands.typer, "confirm", confirm)
        assert run("clear", "--tier", "device", "--tenant", "shared")[0] == code
        assert asked == ["Remove all blocks of tenant shared from device?"]
        assert len(admin.chains) == int(not answer)


def test_what_is_not_all_done_is_one(run, admin):
    admin.hold(TOKENS)
    admin.busy_blocks = 2
    for verb in (("clear", "--yes"), ("demote",)):
        code, out, _ = run(*verb)
        assert code == 1
        assert "in use" in out
    admin.unsaved = 3
    code, out, _ = run("flush")
    assert (code, out) == (1, "3 blocks are not saved\n")


def test_warm(run, admin, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "pin": true, "ttl": "1h", "tier": "disk"}\n\n{"tokens": [1, 2]}\n')
    (job,) = ask(run, "warm", file, "--name", "n")["jobs"]
    first, second = admin.calls[-1]["prompts"]
    assert (first.pin, first.ttl_s, first.tier, first.token_ids) == (True, 3600, Tier.DISK, [*b"hello"])
    assert (second.pin, second.token_ids) == (False, [1, 2])
    assert job["name"] == "n"
    code, out, _ = run("cancel", job["id"])
    assert code == 0
    assert "cancelled" in out
    file.write_text('{"prompt": 5}\n')
    assert "prompts.jsonl" in run("warm", file)[2]
    file.write_text("\n")
    assert run("warm", file)[0] == 2


def test_warm_can_wait(run, admin, tmp_path, monkeypatch):
    from dataclasses import replace

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [1, 2]}\n')
    for state, code in (("done", 0), ("failed", 1), ("cancelled", 1)):

        def end(seconds, state=state):
            for key, job in admin.all_jobs.items():
                admin.all_jobs[key] = replace(job, state=state)

        monkeypatch.setattr(commands.time, "sleep", end)
        assert run("warm", file, "--wait")[0] == code


def test_events(run, admin):
    admin.hold(TOKENS)
    code, out, _ = run("events", "--limit", 1)
    assert (code, out.split()) == (0, ["1", "snapshot", "device", "2"])
    first = json.loads(run("events", "--limit", 1, "--json", "--since", f"{EPOCH}-0")[1])
    assert (first["id"], first["event"], first["data"]["sequence"]) == (f"{EPOCH}-1", "stored", 1)
    _, out, _ = run("events", "--limit", 1, "--since", "other-1")
    assert "gap" in out


def test_what_prompts_say_does_not_steer_the_terminal(run, admin):
    admin.hold(TOKENS, name="\x1b]0;title\x07\x1b[2J [bold]x[/bold]")
    _, out, _ = run("prefixes")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]x[/bold]" in out


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://[::1", "http://host:port", "http://u:p@host", "::"])
def test_what_is_no_url(url):
    with pytest.raises(AdminError):
        AdminClient(url)


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_argument_breaks_the_client(url, key):
    """A client comes out, or an error of one kind."""
    with contextlib.suppress(AdminError):
        AdminClient(url, key)


def test_a_server_that_is_none(run):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    code, _, err = run("cache", url=f"http://127.0.0.1:{port}")
    assert code == 2
    assert f"127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n[]", b"HTTP/1.1 502 Bad\r\n\r\n<html>",
        b'HTTP/1.1 200 OK\r\n\r\n{"model": 5}', b'HTTP/1.1 500 X\r\n\r\n{"error": "text"}',
        b"HTTP/1.1 200 OK\r\n" + b"a" * 70000,
    ],
)  # fmt: skip
def test_something_else_listens_there(run, answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        code, _, _ = run("cache", url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(20)
    assert code == 2


def test_a_path_in_front(run, url):
    """A proxy's prefix is kept; here it leads nowhere."""
    assert run("cache", url=f"{url}/")[0] == 0
    assert run("cache", url=f"{url}/prefix")[0] == 2


def test_nothing_heavy_is_loaded():
    code = (
        "import sys; from tieredkv.cli.main import main; main(['admin', 'cache', '--url', 'http://127.0.0.1:9']); "
        "print({'torch', 'transformers', 'starlette', 'uvicorn', 'numpy', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
