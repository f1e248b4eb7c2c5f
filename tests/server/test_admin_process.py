"""The admin API of a serving process: its own port, its place in the start-up table, its end; and the command line to it."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.models_for_tests import build
from tests.server.test_process import ROOT, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tieredkv", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_port_of_its_own_and_a_quick_end(model):
    with serving(model, "--admin-port", "0", "--admin-key", "k") as process:
        url = re.search(r"admin +.*?(http://\S+)/admin/ui", process.table)[1]
        assert url != process.url
        key = {"authorization": "Bearer k"}
        assert httpx.get(f"{url}/admin/cache", headers=key).json()["num_pins"] == 0
        assert httpx.get(f"{url}/admin/cache").status_code == 401
        assert httpx.get(f"{process.url}/admin/cache", headers=key).status_code == 404
        assert httpx.get(f"{process.url}/health").status_code == 200
        done = command("admin", "pin", "--prompt", "one two three four five " * 20, "--url", url, "--key", "k")
        assert (done.returncode, done.stderr) == (0, "")
        assert "accepted" in done.stdout
        # An open stream of events does not hold up the end.
        with httpx.stream("GET", f"{url}/admin/events", headers=key, timeout=60) as events:
            lines = events.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            for _ in lines:
                pass
        assert process.popen.wait(60) == 0
        process.stop()
        assert all("graceful" not in line and "Traceback" not in line for line in process.errors)


def test_what_cannot_be_served_is_one_line(model):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        taken = sock.getsockname()[1]
        for flags, told in (
            (("--port", 0, "--admin-port", taken), "admin_port: cannot listen on 127.0.0.1"),
            (("--port", 0, "--admin-key", "a", "--api-key", "a"), "admin_key"),
        ):
            done = command("serve", model, *flags)
            assert done.returncode == 2
            (line,) = done.stderr.splitlines()
            assert told in line
