"""The engine without a server around it, as a yardstick: what does one step cost when nobody serves it?

Job: load `tieredkv.LLM`, then answer on 127.0.0.1: `GET /health`, and `POST /run` with `{"prompts": [...], "max_tokens"}`,
which generates for all prompts at once and returns the median milliseconds of the steps that decoded all of them: the
whole step, and the model's share of it (forward pass and sampling). While a run goes on, this process does nothing else.

`python -m benchmarks.inprocess --port N [--dtype bfloat16]` is started by `bench_serving`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

from benchmarks.servers import MODEL_NAME
from tieredkv.runtime import maybe_reexec


class StepTimer:
    """Wraps an engine's `step` and its runner's `launch`, and keeps the times of steps that decoded `num_sequences`."""

    def __init__(self, core: Any, runner: Any) -> None:
        self.num_sequences = 0
        self.step_s: list[float] = []
        self.model_s: list[float] = []
        self._launch: Callable[[Any], Any] = runner.launch
        self._step: Callable[[], list[Any]] = core.step
        runner.launch = self._timed_launch
        core.step = self._timed_step
        self._last: tuple[float, bool] = (0.0, False)

    def _timed_launch(self, batch: Any) -> Any:
        """Waits for the result at once, so that the time is the model's alone."""
        began_s = time.perf_counter()
        tokens = self._launch(batch).result()
        took_s = time.perf_counter() - began_s
        self._last = took_s, len(batch.token_ids) == len(tokens) == self.num_sequences
        return SimpleNamespace(result=lambda: tokens)

    def _timed_step(self) -> list[Any]:
        began_s = time.perf_counter()
        outputs = self._step()
        took_s = time.perf_counter() - began_s
        model_s, counts = self._last
        if counts:
            self.step_s.append(took_s)
            self.model_s.append(model_s)
        self._last = (0.0, False)
        return outputs


def main() -> None:
    """Load the model, then serve runs until the process is ended."""
    # The server replaces itself once by a process with a better allocator and OpenMP runtime; so does this.
    maybe_reexec(sys.argv)
    parser = argparse.ArgumentParser(description="The engine without a server around it.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()

    from tieredkv.llm import LLM
    from tieredkv.types import SamplingParams

    llm = LLM(MODEL_NAME, dtype=options.dtype, kv_cache_memory="512MiB")
    timer = StepTimer(llm.core, llm.core._runner)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            timer.num_sequences = len(body["prompts"])
            timer.step_s.clear()
            timer.model_s.clear()
            llm.generate(
                body["prompts"], SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=True)
            )
            self._answer(
                {
                    "num_steps": len(timer.step_s),
                    "step_ms": 1000 * statistics.median(timer.step_s),
                    "model_ms": 1000 * statistics.median(timer.model_s),
                }
            )

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def _answer(self, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with HTTPServer(("127.0.0.1", options.port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
