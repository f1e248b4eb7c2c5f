"""What `pip install .` puts on a machine: one top-level name, with both subpackages in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy, so that neither build leftovers get in nor new ones stay.
    tree = folder / "tree"
    names = ["tieredkv", "kernels", "storage", "pyproject.toml", "README.md", "LICENSE"]
    tree.mkdir()
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(folder),
        str(tree),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_only_top_level_name_is_ours(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"tieredkv"}


def test_the_wheel_holds_every_module(wheel):
    packed = {name for name in wheel.namelist() if name.endswith(".py")}
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "tieredkv").rglob("*.py") if not p.is_relative_to("kernels")}
    for folder in ("kernels", "storage"):
        expected = {e for e in expected if not e.startswith(f"tieredkv/{folder}/")}
        expected |= {f"tieredkv/{folder}/{p.name}" for p in (ROOT / folder).glob("*.py")}
        assert any(name.startswith(f"tieredkv/{folder}/") for name in packed), folder
    assert packed == expected
    assert "tieredkv/py.typed" in wheel.namelist()


def test_the_wheel_holds_the_admin_page(wheel):
    page = Path("tieredkv/server/admin/ui")
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / page).rglob("*") if p.is_file()}
    assert f"{page}/index.html" in expected
    assert {name for name in wheel.namelist() if name.startswith(f"{page}/")} == expected


def test_the_subpackages_import():
    code = "import importlib.util as u; print(all(u.find_spec(f'tieredkv.{n}') for n in ('kernels', 'storage')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "True"
