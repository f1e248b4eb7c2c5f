"""The image's health check, run against a server: healthy while requests are answered, unhealthy otherwise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _check(port: int) -> bool:
    found = re.search(r"^HEALTHCHECK [^\[]*(\[.*\])$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    program, *arguments = json.loads(found[1])
    assert program == "python"
    command = [sys.executable, *(argument.replace(":8000/", f":{port}/") for argument in arguments)]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def test_the_health_check_tells_a_server_that_answers_from_one_that_does_not(server):
    assert _check(server.port)
    server.service.draining = True
    try:
        assert not _check(server.port)
    finally:
        server.service.draining = False
    assert not _check(1)
