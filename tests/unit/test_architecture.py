"""Imports go downwards only, and what must be light is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROWS = {
    9: ["cli", "server", "bench", "__main__"],
    8: [
        "engine",
        "llm",
        "build",
        "admin",
        "reach",
        "inspection",
        "clearing",
        "removing",
        "upkeep",
        "event_feed",
        "warming",
        "warm_job",
        "residency",
        "preload_plan",
        "preloader",
        "prompt_file",
        "request_log",
        "prefix_file",
        "transport",
    ],
    7: ["core"],
    6: ["model_runner", "pool_plan"],
    5: [
        "attention",
        "fused",
        "linear",
        "norm",
        "sampler",
        "tokenizer",
        "models",
        "lean",
        "support",
        "checkpoint",
        "gguf",
        "gguf_tokenizer",
        "cuda_graphs",
        "kernel_step",
        "staging",
    ],
    4: [
        "scheduler",
        "cache",
        "batch",
        "tiers",
        "spill",
        "restore",
        "gate",
        "tier_report",
        "disk_tier",
        "keeping",
        "pins",
        "retention",
        "pin_budget",
        "stored_pins",
        "branches",
        "events",
        "prefix_tree",
    ],
    3: ["blocks", "free_list", "sequence", "pool", "transfer", "tier_faces", "cuda_runtime", "cuda_transfer"],
    2: ["kernels", "storage"],
    1: ["config", "layout", "hashing", "metrics", "runtime"],
    0: ["types", "errors", "reports"],
}
ROW_OF = {name: row for row, names in ROWS.items() for name in names}
# Libraries that belong to some rows only.
CONFINED = {
    "starlette": {9},
    "uvicorn": {9},
    "typer": {9},
    "rich": {9},
    "transformers": {5, 6},
    "lmdb": {2},
    "zstandard": {2},
    "triton": {2},
    "llvmlite": {2},
    "cupy": {2, 3},
}
TORCH_FREE = [
    "types",
    "errors",
    "config",
    "hashing",
    "layout",
    "metrics",
    "blocks",
    "sequence",
    "scheduler",
    "cache",
    "batch",
]


def source_files() -> list[Path]:
    return [
        p for folder in ("tieredkv", "kernels", "storage") for p in (ROOT / folder).rglob("*.py") if "/." not in str(p)
    ]


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return Path(parts[1]).stem if parts[0] == "tieredkv" else parts[0]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_has_a_row():
    units = {unit_of(p) for p in source_files()} - {"__init__"}
    assert units <= set(ROW_OF), f"modules without a row: {units - set(ROW_OF)}"


def test_the_page_shows_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert {name for name in ROW_OF if not re.search(rf"\b{name}\b", page)} <= {"__main__"}


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downwards(path):
    unit = unit_of(path)
    if unit == "__init__":
        return
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top in CONFINED:
            assert ROW_OF[unit] in CONFINED[top], f"{unit} imports {name}"
        if top == "tieredkv" and rest:
            target = rest.split(".")[0]
            if target in ROW_OF and target != unit:
                # Modules of one row may use each other, but kernels and storage may not.
                assert ROW_OF[target] <= ROW_OF[unit], f"{unit} (row {ROW_OF[unit]}) imports {target}"
                assert {unit, target} != {"kernels", "storage"}


def test_what_must_be_light_loads_no_torch():
    modules = ", ".join(f"tieredkv.{name}" for name in TORCH_FREE)
    heavy = "('torch', 'transformers', 'cupy', 'triton')"
    code = f"import sys, tieredkv, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_kernels_and_storage_shadow_no_other_package():
    for name in ("kernels", "storage"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "tieredkv" / name).is_symlink()
        assert (ROOT / "tieredkv" / name).resolve() == ROOT / name
