"""Packages that a GPU machine without a network may lack, as wheels to carry there.

    python -m benchmarks.gpu_check.wheels [--out .gpu-wheels] [--python 3.12]

collects them, with pip, on a machine with a network; `use(folder)` installs them into a folder of their own at the other
end and puts it on the path. Everything else that the check needs comes with an image that has torch, transformers and
CuPy. Knows no torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# What the tiers and metrics import; each is a single wheel without needs of its own.
PACKAGES = ("lmdb>=1.6,<4", "zstandard>=0.23,<1", "xxhash>=3.4,<5", "prometheus-client>=0.21,<1")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
DEFAULT_FOLDER = ".gpu-wheels"


def collect(folder: Path, python: str, machine: str = "x86_64") -> list[str]:
    """Download one wheel of each of `PACKAGES` for Linux and `python`; returns their names. Raises `CalledProcessError`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_{machine}")]
    which = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    _pip("download", "--no-deps", *which, "--dest", str(folder), *PACKAGES)
    return sorted(path.name for path in folder.glob("*.whl"))


def use(folder: Path, target: Path) -> None:
    """Install the wheels in `folder` into `target`, first on the path of this process and of those it starts.

    Raises `FileNotFoundError` when there are none and `CalledProcessError` when pip refuses them.
    """
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise FileNotFoundError(f"no wheels in {folder}")
    _pip("install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(target), *wheels)
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    # What pip says goes where people read, not where results are.
    subprocess.run(command, check=True, stdout=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_FOLDER), help="folder for the wheels")
    parser.add_argument("--python", default="3.12", help="the Python there")
    parsed = parser.parse_args(arguments)
    for name in collect(parsed.out, parsed.python):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
