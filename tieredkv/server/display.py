"""What the serving process shows on a terminal: loading progress, then one table. Knows rich, and nothing of HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tieredkv import __version__
from tieredkv.config import format_size

if TYPE_CHECKING:
    from tieredkv.engine import Engine


class LoadProgress:
    """Shows the stages of loading: a bar on a terminal, one plain line per stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._task: TaskID | None = None
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, stage: str, fraction: float) -> None:
        """`stage` is under way, `fraction` (0 to 1) of it done."""
        if self._bar is None:
            if stage != self._stage:
                self._console.print(stage, markup=False, highlight=False)
        elif self._task is None:
            self._task = self._bar.add_task(stage, total=1.0)
            self._bar.update(self._task, completed=fraction)
        else:
            self._bar.update(self._task, description=stage, completed=fraction)
        self._stage = stage


def _url(address: Sequence[Any]) -> str:
    host, port = address[0], address[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_summary(
    console: Console, engine: Engine, names: Sequence[str], address: Sequence[Any], admin_address: Sequence[Any]
) -> None:
    """The start-up table. The addresses are those of the sockets for requests and for the admin API."""
    block_size = engine.config.cache.block_size
    pool_nbytes = engine.num_blocks * engine.layout.block_nbytes
    table = Table(title=f"TieredKV {__version__}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in (
        ("model", ", ".join(names)),
        ("dtype", engine.dtype),
        ("device", engine.device),
        ("longest request", f"{engine.max_model_len:,} tokens"),
        ("KV blocks", f"{engine.num_blocks:,} of {block_size} tokens"),
        ("tokens that fit", f"{(engine.num_blocks - 1) * block_size:,}"),
        ("pool", format_size(pool_nbytes)),
        *((f"{tier} tier", text) for tier, text in engine.describe_tiers()),
        ("admin", f"{_url(admin_address)}/admin/ui"),
        ("address", _url(address)),
    ):
        table.add_row(name, value)
    # A reader of the other end of a closed pipe is no reason not to serve.
    with contextlib.suppress(BrokenPipeError):
        console.print(table)
