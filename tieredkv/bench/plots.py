"""Pictures of results, with matplotlib, which is an extra (`pip install "tieredkv[plot]"`) and loaded only here.

Knows the data that `simulate` and `serve` report, nothing of how it came about. Colours per tier are the same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tieredkv.bench.answer import SOURCES
from tieredkv.bench.serve import Run, Served
from tieredkv.bench.simulate import UNLIMITED, Outcome
from tieredkv.bench.traces import Workload
from tieredkv.errors import ConfigError

TIER_COLORS = {"device": "#2a7de1", "host": "#17a67a", "disk": "#e08a1e", "computed": "#9aa3ad"}


def new_figure(rows: int, width: float = 9.0, height: float = 4.5) -> tuple[Any, Any]:
    """A figure with `rows` axes, drawn without a display. Raises `ConfigError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('needs matplotlib: pip install "tieredkv[plot]"', key="plot") from None
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def check_place(path: Path) -> None:
    """Raise `ConfigError` where no picture can be written to `path`, before anything is measured for it."""
    figure, _ = new_figure(1)
    kinds = figure.canvas.get_supported_filetypes()
    ending = path.suffix.removeprefix(".").lower()
    if ending and ending not in kinds:
        raise ConfigError(f"must end in one of {', '.join(sorted(kinds))}", key="plot", source=str(path))
    if path.is_dir() or not path.name:
        raise ConfigError("is a directory", key="plot", source=str(path))
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {str(path.parent)!r}", key="plot", source=str(path))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("may not be written", key="plot", source=str(path))


def write_figure(figure: Any, path: Path) -> None:
    """Write it as what the name's ending says. Raises `ConfigError` for an unknown ending or a place that refuses it."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be written: {error}", key="plot", source=str(path)) from error


def plot_simulation(path: Path, workload: Workload, outcomes: Sequence[Outcome]) -> None:
    """Hit rate by capacity, one line per policy; with tiers, what each of them contributes."""
    figure, (axes,) = new_figure(1)
    finite = [o.blocks for o in outcomes if o.blocks != UNLIMITED]
    most = max([*finite, workload.num_unique])
    num_blocks = max(workload.num_blocks, 1)
    for policy in dict.fromkeys(o.policy for o in outcomes):
        points = sorted((min(o.blocks, most), o.num_hits / num_blocks) for o in outcomes if o.policy == policy)
        axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    tiered = sorted((o for o in outcomes if len(o.hits) > 1), key=lambda o: o.blocks)
    if tiered:
        base = [0.0] * len(tiered)
        positions = [min(o.blocks, most) for o in tiered]
        for tier in tiered[0].hits:
            top = [b + sum(o.hits[tier]) / num_blocks for b, o in zip(base, tiered, strict=True)]
            axes.fill_between(positions, base, top, alpha=0.35, label=tier.value, color=TIER_COLORS[tier.value])
            base = top
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"device capacity in blocks of {workload.block_size} tokens (rightmost: no limit)")
    axes.set_ylabel("hit rate in blocks")
    axes.set_title(f"{workload.source}: {len(workload.requests):,} requests, {workload.num_tokens:,} prompt tokens")
    axes.grid(True, alpha=0.3)
    axes.legend()
    write_figure(figure, path)


def plot_run(path: Path, found: Run) -> None:
    """TTFT of each request by the tier that its prompt came from, and prompt tokens by source over time."""
    figure, (above, below) = new_figure(2, height=3.6)
    good = sorted((s for s in found.served if s.result.ok and s.result.event_times_s), key=_first_token_s)
    for source in SOURCES:
        mine = [s for s in good if s.source == source]
        if mine:
            times, ttfts = [_first_token_s(s) for s in mine], [1000 * s.result.ttft_s for s in mine]
            above.scatter(times, ttfts, s=14, color=TIER_COLORS[source], label=f"{source} ({len(mine)})")
    above.set_ylabel("TTFT in ms")
    above.set_yscale("log")
    above.set_title("each request, by the slowest tier that its prompt came from")
    if good:
        above.legend()
        edges = [_first_token_s(s) for s in good]
        sums: dict[str, list[int]] = {source: [] for source in SOURCES}
        for source, running in sums.items():
            for served in good:
                running.append((running[-1] if running else 0) + served.tokens_by_source[source])
        colors = [TIER_COLORS[source] for source in SOURCES]
        below.stackplot(edges, *sums.values(), labels=SOURCES, colors=colors, alpha=0.8)
        below.legend(loc="upper left")
    below.set_ylabel("prompt tokens so far")
    below.set_xlabel("seconds from the start to the first token")
    write_figure(figure, path)


def _first_token_s(served: Served) -> float:
    """When its prompt was done. Requests may all be sent at once, so that the time of sending would tell nothing."""
    return served.sent_s + served.result.ttft_s
