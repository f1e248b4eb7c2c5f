"""`tieredkv bench serve` and `tieredkv bench tiers`: flags in, tables, JSON and pictures out.

The measuring lies in `tieredkv.bench`; nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tieredkv.config import Config, format_size, parse_size
from tieredkv.errors import ConfigError
from tieredkv.runtime import free_memory_nbytes, maybe_reexec

app = typer.Typer(
    name="bench",
    help="Measure a server under load, or the tiers of this machine.",
    rich_markup_mode="rich",
    no_args_is_help=True,
)

SERVE_HELP = """Send load to any OpenAI-style server and report latency, throughput and cache hits.

[bold]Examples[/bold]

  tieredkv bench serve --dataset sharegpt --repeat 2         a first pass, and what the cache brings in a second one
  tieredkv bench serve --dataset prefix-repetition --prefix-len 1024 --num-prefixes 4 --request-rate 5
  tieredkv bench serve --dataset timed-trace --dataset-path trace.jsonl --speedup 10 --plot ttft.png
  tieredkv bench serve --base-url http://other:8000 --model their-model --backend openai-chat
"""
TIERS_HELP = """Measure every hop between the tiers on this machine, and from how many tokens on each tier pays.

Run it with nothing else on the machine. Loads come from the page cache: a disk that is read cold may be slower.
"""


@app.command("serve", help=SERVE_HELP)
def serve(
    base_url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Name to ask for; default: the first one that the server has.")
    ] = None,
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    dataset: Annotated[
        str,
        typer.Option(help="random, sharegpt, prefix-repetition, long-doc-qa, multi-turn, custom or timed-trace."),
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="File for custom and timed-trace; sharegpt has one of its own.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests per pass, at most.")] = 100,
    repeat: Annotated[int, typer.Option(min=1, help="Passes over the same requests.")] = 1,
    request_rate: Annotated[
        float, typer.Option(min=1e-6, help="Requests per second, at random times; default: all at once.")
    ] = float("inf"),
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Words of a prompt, or of what follows its prefix.")] = 512,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer. Default: 64; the file's for sharegpt.")
    ] = None,
    prefix_len: Annotated[int, typer.Option(min=1, help="Words of a shared prefix or a document.")] = 512,
    num_prefixes: Annotated[int, typer.Option(min=1, help="Shared prefixes or documents.")] = 4,
    num_turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 4,
    trace_block_tokens: Annotated[int, typer.Option(min=1, help="Words that stand for one block of a trace.")] = 16,
    speedup: Annotated[float, typer.Option(min=1e-6, help="How much faster than it was to replay a trace.")] = 1.0,
    max_input_len: Annotated[
        int | None, typer.Option(min=1, help="Cut longer prompts of a file to so many words.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exactly the given length.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Longest time for one request in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture: TTFT by source, and tokens by source over time.")
    ] = None,
) -> int:
    from tieredkv.bench import datasets
    from tieredkv.bench import serve as load
    from tieredkv.bench.client import parse_address

    if backend not in ("openai", "openai-chat"):
        raise ConfigError(f"must be openai or openai-chat, got {backend!r}", key="backend")
    try:
        parse_address(base_url)
    except ValueError as error:
        raise ConfigError(str(error), key="base_url") from None
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("must be printable ASCII", key="api_key")
    if plot is not None:
        from tieredkv.bench.plots import check_place

        check_place(plot)
    sessions = datasets.build(
        datasets.DatasetOptions(
            dataset=dataset,
            path=dataset_path,
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len or (0 if dataset == "sharegpt" else 64),
            prefix_len=prefix_len,
            num_prefixes=num_prefixes,
            num_turns=num_turns,
            trace_block_tokens=trace_block_tokens,
            speedup=speedup,
            max_input_len=max_input_len,
            seed=seed,
        )
    )
    target = load.Target(
        base_url, model or _first_model(base_url, api_key), backend, api_key, ignore_eos, temperature, timeout
    )
    pace = load.Pace(request_rate, max_concurrency, seed)
    found = _run(target, sessions, pace, repeat)
    passes = load.summarize(found)
    if as_json:
        about = {"base_url": base_url, "model": target.model, "backend": backend, "dataset": dataset, "seed": seed}
        print(json.dumps({**about, "passes": passes}, indent=2))
    else:
        _print_passes(passes)
    if plot is not None:
        from tieredkv.bench.plots import plot_run

        plot_run(plot, found)
    return 0 if all(p["completed"] and not p["failed"] for p in passes) else 1


def _run(target: Any, sessions: Sequence[Any], pace: Any, repeat: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tieredkv.bench import serve as load

    total = sum(len(session.turns) for session in sessions)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        names = [f"pass {i + 1}" if repeat > 1 else "requests" for i in range(repeat)]
        # The clock of a pass starts with it, not with the first one.
        tasks = [bars.add_task(name, total=total, start=i == 0) for i, name in enumerate(names)]

        def advance(index: int) -> None:
            bars.update(tasks[index], advance=1)
            if index + 1 < repeat and bars.tasks[index].finished:
                bars.start_task(tasks[index + 1])

        return asyncio.run(load.run(target, sessions, pace, repeat=repeat, progress=advance))


def _first_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server names. Raises `ConfigError` where it does not answer as an OpenAI-style server does."""
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{base_url.rstrip('/')}/v1/models")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            name = json.load(response)["data"][0]["id"]
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(f"/v1/models answers {error.code}", key="base_url", source=base_url) from None
    # The last one: brackets nested deep enough exhaust the parser's stack.
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot be asked for its models: {why}", key="base_url", source=base_url) from None
    if not isinstance(name, str) or not name:
        raise ConfigError("names no model: give --model", key="base_url", source=base_url)
    return name


def _print_passes(passes: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for each in passes:
        table.add_column(f"pass {each['pass']}", justify="right")
    if len(passes) > 1:
        table.add_column("last / first", justify="right")
    for label, values, digits in _lines(passes):
        shown = ["" if value is None else f"{value:,.{digits}f}" for value in values]
        if len(passes) > 1:
            first, last = values[0], values[-1]
            shown.append("" if not first or last is None else f"{last / first:.2f}")
        table.add_row(label, *shown)
    console = Console()
    console.print(table)
    for each in passes:
        for error in each["errors"]:
            console.print(f"pass {each['pass']}: {error}", markup=False)


def _lines(passes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[float | None], int]]:
    lines: list[tuple[str, list[float | None], int]] = [
        (label, [each[key] for each in passes], digits)
        for label, key, digits in (
            ("requests completed", "completed", 0),
            ("requests failed", "failed", 0),
            ("seconds", "duration_s", 1),
            ("requests/s", "requests_per_s", 2),
            ("output tokens/s", "output_tokens_per_s", 1),
            ("total tokens/s", "total_tokens_per_s", 1),
            ("prompt tokens", "prompt_tokens", 0),
        )
    ]
    lines.append(("hit rate, % of prompt tokens", [100 * each["hit_rate"] for each in passes], 1))
    lines += [
        (
            f"tokens {source if source == 'computed' else f'from {source}'}",
            [each["tokens_by_source"][source] for each in passes],
            0,
        )
        for source in ("device", "host", "disk", "computed")
    ]
    lines += [
        (f"{label}, {figure}, ms", [each[key].get(figure) for each in passes], 1)
        for key, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "end to end"))
        for figure in ("mean", "p50", "p90", "p99")
    ]
    return lines


@app.command("tiers", help=TIERS_HELP)
def tiers(
    model: Annotated[str | None, typer.Argument(help="Model whose prefill the tiers have to beat.")] = None,
    disk_path: Annotated[
        Path | None, typer.Option(help="Directory on the disk to measure; default: that of temporary files.")
    ] = None,
    block_size: Annotated[
        list[int] | None, typer.Option(help="Tokens per block; may be repeated. Default: 16, 32, 64.")
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompts that the model computes.")] = 1024,
    total: Annotated[str, typer.Option(help="Bytes to move per measurement.")] = "256MiB",
    dtype: Annotated[str, typer.Option(help="Precision of the model.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs: auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    sizes = block_size or [16, 32, 64]
    try:
        total_nbytes = parse_size(total)
    except ValueError as error:
        raise ConfigError(f"{error}, got {total!r}", key="total") from None
    if total_nbytes < 1024**2:
        raise ConfigError(f"must be at least 1MiB, got {total!r}", key="total")
    # The copies' source and target lie in memory at the same time.
    if 2 * total_nbytes > free_memory_nbytes():
        raise ConfigError(f"must be at most half of the free memory, got {total!r}", key="total")
    if disk_path is not None and not disk_path.is_dir():
        raise ConfigError("is no directory", key="disk_path", source=str(disk_path))
    given = {"model": model, "dtype": dtype, "device": device, "host_memory": 0, "enable_prefix_caching": False}
    configs = [Config.load({**given, "block_size": size}, source="command line") for size in sizes]
    maybe_reexec(sys.argv)

    from rich.console import Console

    from tieredkv.bench import tiers as measuring

    with Console(stderr=True).status("Computing prompts") as status:
        rate, token_nbytes, num_tokens, name = measuring.measure_prefill(configs[0], prompt_len)
        hops: dict[int, list[measuring.Hop]] = {}
        for size in sizes:
            status.update(f"Moving blocks of {size} tokens")
            nbytes = token_nbytes * size
            hops[size] = measuring.measure_copies(nbytes, total_nbytes)
            for codec in measuring.CODECS:
                hops[size] += measuring.measure_disk(nbytes, total_nbytes, codec, disk_path)
        status.update("Looking up")
        lookup_s = measuring.measure_lookup(sizes[0], disk_path)
    result: dict[str, Any] = {
        "model": name,
        "kv_nbytes_per_token": token_nbytes,
        "prefill_tokens": num_tokens,
        "prefill_tokens_per_s": rate,
        "lookup_s": lookup_s,
        "lookup_tokens": measuring.LOOKUP_TOKENS,
        "hops": [
            {
                "hop": h.name,
                "block_size": size,
                "block_nbytes": h.block_nbytes,
                "nbytes_per_s": h.nbytes_per_s,
                "latency_s": h.latency_s,
            }
            for size in sizes
            for h in hops[size]
        ],
        "pays_from_tokens": [
            {"tier": tier, "block_size": size, "tokens": measuring.pays_from_tokens(token_nbytes, size, way, rate)}
            for size in sizes
            for tier, way in _ways(hops[size])
        ],
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print_tiers(result)
    return 0


def _ways(hops: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """What a block of each tier goes through on its way to the device."""
    by_name = {hop.name: hop for hop in hops}
    up = by_name["host to device"]
    return [("host", [up])] + [
        (name.removeprefix("disk to host, ") + " on disk", [hop, up])
        for name, hop in by_name.items()
        if name.startswith("disk to host")
    ]


def _print_tiers(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Hops", title_justify="left")
    for column in ("hop", "block", "size", "rate", "one block"):
        table.add_column(column, justify="left" if column == "hop" else "right")
    for hop in result["hops"]:
        table.add_row(
            hop["hop"],
            str(hop["block_size"]),
            format_size(hop["block_nbytes"]),
            f"{hop['nbytes_per_s'] / 1e9:.2f} GB/s",
            f"{1e6 * hop['latency_s']:.0f} us",
        )
    console.print(table)
    rate, nbytes = result["prefill_tokens_per_s"], result["kv_nbytes_per_token"]
    console.print(
        f"{result['model']} computes {rate:,.0f} tokens/s ({result['prefill_tokens']} at once), "
        f"{format_size(nbytes)} of KV a token: a tier has to bring more than {rate * nbytes / 1e6:,.1f} MB/s."
    )
    console.print(
        f"Finding the stored prefix of {result['lookup_tokens']:,} tokens takes {1e6 * result['lookup_s']:.0f} us."
    )
    for each in result["pays_from_tokens"]:
        verdict = "never pays" if each["tokens"] is None else f"pays from {each['tokens']:,} tokens on"
        console.print(f"  blocks of {each['block_size']:>3} tokens, {each['tier']}: {verdict}")
