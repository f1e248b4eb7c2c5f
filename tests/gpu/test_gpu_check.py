"""`make gpu-check` on a CPU, with small sizes: the same code from end to end, every line but those that are CUDA's own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "benchmarks" / "gpu_check"
# Every row of the table, as (part, words of its name).
ROWS = [
    ("kernels", "block_copy"),
    *[("kernels", name) for name in ("float32", "float16", "bfloat16")],
    *[("equivalence", f"float32 tokens: {name}") for name in ("sources", "device", "host", "disk", "cold = stock")],
    *[("equivalence", f"bfloat16 log-probabilities: {name}") for name in ("sources", "host", "disk", "device")],
    ("decode", "copy within the device"),
    *[("decode", f"{batch} x 20 tokens") for batch in (1, 2)],
    ("prefill", "matrix product"),
    *[("prefill", name) for name in ("20 tokens", "16 tokens over 16")],
    *[("copies", f"{way}, one large copy") for way in ("host to device", "device to host")],
    ("copies", "down and up again"),
    *[("copies", f"{way}, blocks") for way in ("host to device", "device to host")],
    *[
        ("copies", f"{way}, {what}")
        for way in ("host to device", "device to host")
        for what in ("blocks while decoding", "a decode step")
    ],
    *[("ttft", f"48 tokens, {tier}") for tier in ("cold", "device", "host", "disk")],
    *[("graphs", f"float32, batch {batch}: graphs = eager") for batch in (1, 2)],
    *[("graphs", f"bfloat16, batch {batch}") for batch in (1, 2)],
]
# Run when something fails; these have tests of their own.
COVERED_ELSEWHERE = {"wheels.py", "conductor.py", "report.py"}
FUNCTIONS_FOR_FAILURES = {"_short", "_usable"}
# Branches for lateness, for wrong results, for carried wheels, for a device that is gone.
BRANCHES_FOR_FAILURES = (
    "if context.late()",
    "if number > 1 and context.late()",
    "if now_s > end_s",
    "if wrong:",
    "if runner.replays == eager",
    "if answer.sources != expected",
    "if num_rows == 0",
    "if not run_part",
    "if chosen.wheels",
    "if (unknown",
)


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Rows and uncovered lines of one run."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("walk")
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\nsource = {SOURCE}\nparallel = true\npatch = subprocess\ndata_file = {folder / 'data'}\n", "utf-8"
    )
    coverage = [sys.executable, "-m", "coverage"]
    check = ["-m", "benchmarks.gpu_check", "--device", "cpu", "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*coverage, "run", f"--rcfile={settings}", *check, "--limit-s", "500"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
    )
    for arguments in (["combine", "-q"], ["json", "-q", "-o", str(folder / "lines.json")]):
        subprocess.run([*coverage, arguments[0], f"--rcfile={settings}", *arguments[1:]], cwd=ROOT, check=True)
    (results,) = folder.glob("*-gpu-cpu.json")
    lines = json.loads((folder / "lines.json").read_text())["files"]
    missing = {Path(name).name: set(found["missing_lines"]) for name, found in lines.items()}
    return done, json.loads(results.read_text()), missing


def test_every_part_passes_and_the_table_has_every_row(walked):
    done, document, _ = walked
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = document["rows"]
    assert not [row for row in rows if row["verdict"] in ("FAILED", "skipped")]
    assert len(rows) == len(ROWS)
    for row, (part, name) in zip(rows, ROWS, strict=True):
        assert row["part"] == part
        assert row["name"].startswith(name)
    assert document["machine"]["card"] == "cpu"
    last = done.stdout.rstrip().splitlines()[-len(rows) - 3 :]
    assert last[0].split() == ["part", "what", "measured", "target", "verdict"]


def test_every_line_is_walked_but_those_of_cuda(walked):
    """And those that run only when something fails."""
    _, _, missing = walked
    left = {}
    for name, lines in missing.items():
        if name in COVERED_ELSEWHERE:
            continue
        tree = ast.parse((SOURCE / name).read_text("utf-8"))
        excused = {line for node in ast.walk(tree) if _is_excused(node) for line in _lines(node)}
        if unexplained := sorted(lines - excused):
            left[name] = unexplained
    assert left == {}


def _lines(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)


def _is_excused(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name == "CudaDevice"
    if isinstance(node, ast.FunctionDef):
        return node.name in FUNCTIONS_FOR_FAILURES
    if isinstance(node, ast.If):
        return ast.unparse(node).startswith(BRANCHES_FOR_FAILURES)
    return isinstance(node, ast.ExceptHandler | ast.Raise)
