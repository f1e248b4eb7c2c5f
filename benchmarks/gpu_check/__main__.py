"""Run all parts of the check, print a table, write it and its JSON. Exit status 1 when a result is wrong."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.conductor import Conductor
from benchmarks.gpu_check.report import Row, as_json, failed, table
from benchmarks.gpu_check.sizes import PARTS

ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, as on a CPU: seconds instead of minutes")
    parser.add_argument("--limit-s", type=float, default=450.0, help="parts that are not done by then are skipped")
    parser.add_argument("--out", type=Path, help="folder for the results; default: $OUT, or benchmarks/results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install into a temporary folder and use")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"which parts; default: {' '.join(PARTS)}")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.parts) - set(PARTS):
        parser.error(f"unknown part {sorted(unknown)[0]!r}; known are {', '.join(PARTS)}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    out = chosen.out or Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    out.mkdir(parents=True, exist_ok=True)
    # Triton decides at import whether it interprets.
    os.environ["TRITON_INTERPRET"] = "1" if chosen.device == "cpu" else "0"
    command = [sys.executable, "-m", "benchmarks.gpu_check.worker", "--device", chosen.device]
    if chosen.small or chosen.device == "cpu":
        command.append("--small")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        if chosen.wheels is not None:
            wheels.use(chosen.wheels, Path(folder) / "site")
        parts = chosen.parts or PARTS
        conductor = Conductor(command, parts, chosen.limit_s, cwd=ROOT, report=show)
        conductor.run()
    write(out, conductor)
    return int(failed(conductor.rows))


def show(row: Row) -> None:
    """Progress, for whoever watches."""
    print(f"{row.part}: {row.name}: {row.value} [{row.verdict}]", file=sys.stderr, flush=True)


def write(out: Path, conductor: Conductor) -> None:
    """Print the table and, if there was a device, write it and its JSON to `out`."""
    machine = conductor.machine
    card = re.sub(r"[^a-z0-9]+", "-", str(machine.get("card", "unknown")).lower()).strip("-")
    name = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-gpu-{card}"
    facts = "\n".join(f"{key}: {value}" for key, value in machine.items())
    seconds = ", ".join(f"{part} {value} s" for part, value in conductor.seconds.items())
    text = f"{facts}\n{seconds}\n\n{table(conductor.rows)}\n"
    document = {"machine": machine, "seconds": conductor.seconds, "rows": as_json(conductor.rows)}
    if machine:
        (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
