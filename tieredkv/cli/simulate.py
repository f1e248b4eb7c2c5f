"""`tieredkv simulate TRACE`: how much a cache of a given size would save on a given workload.

Turns flags into a call of `bench.simulate` and its outcomes into a table or JSON. Knows no policy and no tier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tieredkv.config import BLOCK_SIZES, format_size, parse_size
from tieredkv.errors import ConfigError

if TYPE_CHECKING:
    from tieredkv.request_log import Encode

HELP = """Replay a trace or a request log through the cache's own code, without a model: hit rates by capacity and policy.

TRACE holds JSON lines: a timed trace (input_length, hash_ids), or OpenAI-style request bodies as `tieredkv preload
--from-log` reads them, which need --model for their tokens.

[bold]Examples[/bold]

  tieredkv simulate trace.jsonl                                          a table over capacities and policies
  tieredkv simulate trace.jsonl --policy lru --blocks 10000,inf --json
  tieredkv simulate requests.jsonl --model ./Llama-3.1-8B --blocks 20GiB --prefill-rate 8000
  tieredkv simulate trace.jsonl --policy lru --blocks 1000 --host-blocks 10000 --disk-blocks 100000

A capacity is a number of blocks, or a size such as 20GiB where the model (or --kv-bytes-per-token) is known, or inf.
"""


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines: a timed trace or a request log.")],
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies, comma-separated: lru (this product's own code), fifo, lfu, sieve, s3fifo, "
            "optimal (perfect foresight). Default: all; lru alone with tiers."
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(help="Capacities of the device pool, comma-separated. Default: 1,000 to 100,000, and inf."),
    ] = None,
    host_blocks: Annotated[str, typer.Option(help="Capacity of a host tier below it.")] = "0",
    disk_blocks: Annotated[str, typer.Option(help="Capacity of a disk tier below that.")] = "0",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a timed trace's blocks.")] = 512,
    block_size: Annotated[int, typer.Option(help="Tokens per block for a request log.")] = 16,
    model: Annotated[str | None, typer.Option(help="Model: its KV size per token, and its tokenizer for logs.")] = None,
    kv_bytes_per_token: Annotated[int | None, typer.Option(min=1, help="Instead of what the model says.")] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(min=1e-9, help="Prompt tokens per second that the engine computes: gives the time saved."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture: hit rate by capacity.")] = None,
) -> int:
    from rich.console import Console

    from tieredkv.bench import simulate as simulation
    from tieredkv.bench.traces import is_timed_trace, read_workload

    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}", key="block_size")
    console = Console(stderr=True)
    folder = _folder_of(model) if model is not None else None
    token_nbytes = kv_bytes_per_token or (_kv_nbytes_per_token(folder) if folder is not None else None)
    is_trace = is_timed_trace(trace)
    with console.status(f"Reading {trace.name}"):
        encode = _encode_with(folder) if folder is not None and not is_trace else None
        workload = read_workload(trace, block_tokens if is_trace else block_size, encode)
    block_nbytes = token_nbytes * workload.block_size if token_nbytes is not None else None
    capacities = (
        [_capacity("blocks", text, block_nbytes) for text in blocks.split(",")]
        if blocks is not None
        else list(simulation.DEFAULT_CAPACITIES)
    )
    host = _capacity("host_blocks", host_blocks, block_nbytes)
    disk = _capacity("disk_blocks", disk_blocks, block_nbytes)
    default = ("lru",) if host or disk else simulation.DEFAULT_POLICIES
    policies = [name.strip().lower().replace("-", "") for name in policy.split(",")] if policy is not None else default
    if plot is not None:
        from tieredkv.bench.plots import check_place, plot_simulation

        check_place(plot)

    with console.status("") as status:
        outcomes = simulation.simulate(
            workload,
            policies,
            capacities,
            host_blocks=host,
            disk_blocks=disk,
            progress=lambda text: status.update(f"Simulating {text}"),
        )
    rows = [_row(outcome, workload, block_nbytes, prefill_rate) for outcome in outcomes]
    if as_json:
        print(json.dumps({"workload": _about(workload), "results": rows}, indent=2))
    else:
        _print_table(workload, rows)
    if plot is not None:
        plot_simulation(plot, workload, outcomes)
    return 0


def _capacity(key: str, text: str, block_nbytes: int | None) -> float:
    """Blocks; a size in bytes is turned into whole blocks."""
    text = text.strip().lower()
    if text in ("inf", "infinite", "unlimited"):
        return float("inf")
    if text.isascii() and text.isdigit():
        # More digits than any number of blocks has would not fit a float.
        return int(text) if len(text) <= 15 else float("inf")
    try:
        nbytes = parse_size(text)
    except ValueError:
        raise ConfigError(f"must be a number of blocks, a size such as 20GiB, or inf, got {text!r}", key=key) from None
    if block_nbytes is None:
        raise ConfigError("a size needs --model or --kv-bytes-per-token", key=key)
    return nbytes // block_nbytes


def _folder_of(model: str) -> Path:
    from tieredkv import checkpoint, gguf

    return checkpoint.resolve(model, gguf.convert, lambda *_: None).folder


def _kv_nbytes_per_token(folder: Path) -> int:
    """Two vectors per layer and KV head, two bytes a number, as the model's config says."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        return int(2 * 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or num_heads) * head_dim)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"does not tell the size of its KV ({error}): give --kv-bytes-per-token", key="model"
        ) from error


def _encode_with(folder: Path) -> Encode:
    from tieredkv.server.warm import encode_logged
    from tieredkv.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder, None)
    return lambda body: encode_logged(tokenizer, body)


def _about(workload: Any) -> dict[str, Any]:
    return {
        "source": workload.source,
        "requests": len(workload.requests),
        "block_size": workload.block_size,
        "blocks": workload.num_blocks,
        "unique_blocks": workload.num_unique,
        "prompt_tokens": workload.num_tokens,
        "skipped_lines": len(workload.problems),
    }


def _row(outcome: Any, workload: Any, block_nbytes: int | None, prefill_rate: float | None) -> dict[str, Any]:
    hit_tokens = outcome.hit_tokens(workload)
    row: dict[str, Any] = {
        "policy": outcome.policy,
        "blocks": _finite(outcome.blocks),
        "hit_rate": outcome.num_hits / max(workload.num_blocks, 1),
        "token_hit_rate": hit_tokens / max(workload.num_tokens, 1),
        "hit_tokens": hit_tokens,
    }
    if block_nbytes is not None:
        row["nbytes"] = _finite(outcome.blocks * block_nbytes)
    if prefill_rate is not None:
        row["saved_s"] = hit_tokens / prefill_rate
        row["prefill_s"] = workload.num_tokens / prefill_rate
    if len(outcome.hits) > 1:
        row["host_blocks"], row["disk_blocks"] = _finite(outcome.host_blocks), _finite(outcome.disk_blocks)
        row["hit_rate_by_tier"] = {
            tier.value: sum(hits) / max(workload.num_blocks, 1) for tier, hits in outcome.hits.items()
        }
        moved = {"spilled": outcome.num_spilled, "stored": outcome.num_stored, "restored": outcome.num_restored}
        row["moved_blocks"] = moved
        if block_nbytes is not None:
            row["moved_nbytes"] = {verb: count * block_nbytes for verb, count in moved.items()}
    return row


def _finite(value: float) -> int | None:
    """As JSON knows no infinity: None stands for no limit."""
    return None if value == float("inf") else int(value)


def _print_table(workload: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    about = _about(workload)
    # Not the table's title: that would be folded to the table's width.
    console = Console(highlight=False)
    console.print(f"{about['source']}", markup=False)
    console.print(
        f"{about['requests']:,} requests, {about['blocks']:,} blocks of {about['block_size']} tokens, "
        f"{about['unique_blocks']:,} different ones"
    )
    if workload.problems:
        console.print(
            f"{about['skipped_lines']:,} lines without a prompt; the first: {workload.problems[0]}", markup=False
        )
    if "prefill_s" in rows[0]:
        console.print(f"prefill without a cache: {rows[0]['prefill_s']:,.0f} s")
    table = Table(padding=(0, 1, 0, 0))
    tiered = "hit_rate_by_tier" in rows[0]
    what = ["device", "host", "disk", "spilled", "stored", "restored"] if tiered else ["tokens saved"]
    columns = ["policy", "blocks", "size", "hit rate", *what, "prefill saved"]
    shown = [c for c in columns if not (c == "size" and "nbytes" not in rows[0])]
    shown = [c for c in shown if not (c == "prefill saved" and "saved_s" not in rows[0])]
    for column in shown:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=" " not in column)
    for row in rows:
        cells = {
            "policy": row["policy"],
            "blocks": "no limit" if row["blocks"] is None else f"{row['blocks']:,}",
            "size": "" if row.get("nbytes") is None else format_size(row["nbytes"]),
            "hit rate": f"{row['hit_rate']:.3f}",
            "tokens saved": f"{row['hit_tokens']:,}",
            "prefill saved": f"{row.get('saved_s', 0):,.0f} s",
        }
        if tiered:
            cells |= {tier: f"{rate:.3f}" for tier, rate in row["hit_rate_by_tier"].items()}
            moved = row.get("moved_nbytes")
            cells |= {
                verb: format_size(value) if moved else f"{value:,}"
                for verb, value in (moved or row["moved_blocks"]).items()
            }
        table.add_row(*(cells[column] for column in shown))
    console.print(table)
