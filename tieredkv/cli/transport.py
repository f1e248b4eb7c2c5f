"""`tieredkv export` and `tieredkv import`: move prefixes between machines as one file.

Both work beside servers that use the store. Neither loads a model or torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tieredkv.checkpoint import default_store
from tieredkv.config import format_size, parse_size
from tieredkv.errors import ConfigError
from tieredkv.layout import DTYPE_NBYTES

if TYPE_CHECKING:
    from tieredkv.storage.disk import DiskStore
    from tieredkv.transport import Progress as Report

EXIT_INCOMPLETE = 1
DEFAULT_SIZE_NBYTES = 10 * 1024**3
EXPORT_HELP = """Write prefixes of a store to one file, for `tieredkv import` on another machine.

[bold]Examples[/bold]

  tieredkv export --disk-path /nvme/kv --out prefixes.tkv --pinned
  tieredkv export --out prefixes.tkv --name support-bot --name tools

The file holds what prompts were made of, so only its owner can read it.
"""
IMPORT_HELP = """Put the prefixes of a file that `tieredkv export` wrote into a store.

Everything is verified on the way in. From a file that is damaged or cut short, what lies before the damage is imported.
Exit code 1 if not all that the file was to hold is in the store at the end.
"""
Directory = Annotated[
    Path | None, typer.Option("--disk-path", metavar="DIR", help="Directory of the store. Default: that of `serve`.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def export_prefixes(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
    disk_path: Directory = None,
    name: Annotated[list[str] | None, typer.Option("--name", help="Prefixes called so; may be repeated.")] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option("--prefix", metavar="HASH", help="Prefix that ends with this block; may be repeated."),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="All pinned prefixes.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All prefixes of a model.")] = False,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="HEX", help="Which model, where the store holds several.")
    ] = None,
    compress: Annotated[bool, typer.Option("--compress", help="Compress the blocks, lossless.")] = False,
    as_json: Json = False,
) -> int:
    """The command `export`."""
    if everything == bool(name or prefix or pinned):
        raise ConfigError("choose with --name, --prefix and --pinned, or take --all", key="export")
    from tieredkv import transport
    from tieredkv.storage.codec import RawCodec, ZstdCodec

    with _opened(disk_path, readonly=True) as store:
        digest, description = transport.find_namespace(store, namespace)
        about = _parsed(description)
        ends: set[bytes] | None = None if everything else set()
        if ends is not None:
            for wanted in name or ():
                found = transport.find_named(store, digest, wanted)
                if not found:
                    raise ConfigError(f"no prefix in the store is called {wanted!r}", key="name")
                ends |= found
            ends.update(transport.find_prefix(store, digest, wanted) for wanted in prefix or ())
            if pinned:
                ends |= transport.find_pinned(store, digest)
        dtype = about.get("dtype") if isinstance(about, dict) else None
        with _bar("Exporting blocks") as progress:
            report = transport.export_prefixes(
                store,
                out,
                digest,
                ends,
                codec=ZstdCodec(DTYPE_NBYTES.get(str(dtype), 1)) if compress else RawCodec(),
                about=about,
                progress=progress,
            )
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print(f"{out}: {report.num_blocks:,} blocks, {report.num_tokens:,} tokens, {format_size(report.nbytes)}")
        if report.num_gone:
            print(f"  {report.num_gone:,} blocks left the store in the meantime")
    return 0


def import_prefixes(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `tieredkv export` wrote.")],
    disk_path: Directory = None,
    disk_size: Annotated[
        str | None,
        typer.Option("--disk-size", metavar="SIZE", help="Hard cap on a store that is new. Default: 10 GiB."),
    ] = None,
    any_model: Annotated[bool, typer.Option("--any-model", help="Also blocks of a model new to the store.")] = False,
    as_json: Json = False,
) -> int:
    """The command `import`."""
    try:
        size_nbytes = DEFAULT_SIZE_NBYTES if disk_size is None else parse_size(disk_size)
    except ValueError as error:
        raise ConfigError(f"{error}, got {disk_size!r}", key="disk_size") from None
    if not file.is_file():
        raise ConfigError("there is no such file", key="import", source=str(file))
    from tieredkv import transport

    with _opened(disk_path, size_nbytes=size_nbytes) as store, _bar("Importing blocks") as progress:
        report = transport.import_prefixes(store, file, any_model=any_model, progress=progress)
    complete = report.problem is None
    if as_json:
        print(json.dumps(dataclasses.asdict(report) | {"complete": complete}, indent=2))
    else:
        print(f"{report.num_verified:,} of {report.num_announced:,} blocks verified")
        print(f"  imported   {report.num_imported:,}")
        print(f"  present    {report.num_present:,} before")
        if report.problem is not None:
            print(f"  incomplete {report.problem}")
            print(f"  kept       {report.num_kept:,} blocks, each with all before it")
    return 0 if complete else EXIT_INCOMPLETE


@contextlib.contextmanager
def _opened(directory: Path | None, *, readonly: bool = False, size_nbytes: int = 0) -> Iterator[DiskStore]:
    """The store; with `size_nbytes` one of that size is made where there is none."""
    from tieredkv.storage.disk import DiskStore
    from tieredkv.storage.medium import DATA

    path = (directory or default_store()).expanduser()
    is_new = not (path / DATA).exists()
    store = DiskStore.open(path, size_nbytes if is_new and not readonly else None, readonly=readonly)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _bar(text: str) -> Iterator[Report]:
    console = Console(stderr=True)
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _parsed(description: str) -> Any:
    try:
        return json.loads(description) if description else None
    except ValueError:
        return description
