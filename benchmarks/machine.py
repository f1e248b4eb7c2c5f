"""What a result was measured on and with: read from the system, written into every result file."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, str]:
    """Processor, cores, memory, system, versions and time (UTC), for people and for comparing results later."""
    cpu = _cpuinfo("model name") or platform.processor() or platform.machine()
    family = "/".join(filter(None, (_cpuinfo("cpu family"), _cpuinfo("model"), _cpuinfo("stepping"))))
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu}, family/model/stepping {family}" if family else cpu,
        "cpu_features": " ".join(f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in _flags()),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{pages / 1024**3:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "tieredkv": _version("tieredkv"),
        "commit": _commit(),
    }


def lines(machine: Mapping[str, str]) -> list[str]:
    """A description as a result file begins with it."""
    return [f"{key:13} {value}" for key, value in machine.items()]


def _cpuinfo(key: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return ""


def _flags() -> set[str]:
    return set(_cpuinfo("flags").split())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The checked-out commit, with `+changes` when tracked files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit}+changes" if commit and git("status", "--porcelain", "-uno") else commit or "unknown"
    except OSError:
        return "unknown"
