"""`tieredkv inspect DIR` and `tieredkv verify DIR`: look into a store of the disk tier, and audit it.

Both work beside servers that use the store. Neither loads a model or torch.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tieredkv.checkpoint import default_store
from tieredkv.config import format_size

if TYPE_CHECKING:
    from tieredkv.storage.audit import Inspection, NamespaceSummary
    from tieredkv.storage.disk import DiskStore

EXIT_PROBLEMS = 1

Directory = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Directory of the store, as --disk-path names it. Default: that of `serve`."),
]


def inspect_store(
    directory: Directory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Show what a store of the disk tier holds: models, blocks, tokens, bytes, chains, pins."""
    store = _open(directory, readonly=True)
    try:
        found = store.inspect()
    finally:
        store.close()
    if as_json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _show(found)
    return 0


def verify_store(
    directory: Directory = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is bad and write the index anew.")] = False,
) -> int:
    """Audit every record of a store and everything the index says about it. Exit code 1 if something is wrong and stays so."""
    store = _open(directory, readonly=not repair)
    columns = (TextColumn("Checking blocks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("verify", total=None)
            report = store.verify(
                repair=repair, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
    finally:
        store.close()
    for problem in report.problems:
        print(problem)
    if report.num_problems > len(report.problems):
        print(f"... and {report.num_problems - len(report.problems)} more")
    checked = f"{report.num_blocks:,} blocks, {format_size(report.num_bytes_checked)} checked"
    if report.ok:
        print(f"{checked}: all is well")
        return 0
    if report.repaired:
        print(f"{checked}: {report.num_problems:,} problems mended, {report.num_removed:,} blocks removed")
        return 0
    print(f"{checked}: {report.num_problems:,} problems; --repair removes what is bad")
    return EXIT_PROBLEMS


def _open(directory: Path | None, *, readonly: bool) -> DiskStore:
    # LMDB and numpy load here, so that `--help` stays quick.
    from tieredkv.storage.disk import DiskStore

    return DiskStore.open(directory or default_store(), readonly=readonly)


def _as_json(found: Inspection) -> dict[str, Any]:
    document = dataclasses.asdict(found)
    for summary, space in zip(document["namespaces"], found.namespaces, strict=True):
        summary["digest"] = space.digest.hex()
        summary["description"] = _description(space)
        summary["depths"] = {str(power): count for power, count in sorted(space.depths.items())}
    return document


def _description(space: NamespaceSummary) -> Any:
    try:
        return json.loads(space.description) if space.description else None
    except ValueError:
        return space.description


def _show(found: Inspection) -> None:
    share = found.used_nbytes / found.capacity_nbytes if found.capacity_nbytes else 0.0
    print(found.directory)
    _lines(
        blocks=f"{found.num_blocks:,}",
        used=f"{format_size(found.used_nbytes)} of {format_size(found.capacity_nbytes)} ({share:.0%})",
        file=format_size(found.file_nbytes),
    )
    for space in sorted(found.namespaces, key=lambda s: -s.last_use_us):
        about = _description(space)
        known = isinstance(about, dict) and "model" in about
        print(f"\n{about['model']} ({about['dtype']})" if known else "\nunknown model")
        _lines(
            namespace=space.digest.hex()[:16],
            blocks=f"{space.num_blocks:,}",
            tokens=f"{space.num_tokens:,}",
            size=format_size(space.payload_nbytes),
            prefixes=f"{space.num_chains:,} (of {space.num_roots:,} tenants and salts)",
            pinned=f"{space.num_pinned:,}",
            last_used=datetime.datetime.fromtimestamp(space.last_use_us / 1e6).isoformat(" ", "seconds"),
        )


def _lines(**facts: str) -> None:
    for name, value in facts.items():
        print(f"  {name.replace('_', ' '):<10} {value}")
