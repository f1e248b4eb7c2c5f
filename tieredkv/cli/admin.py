"""`tieredkv admin ...`: the admin API of a running server on the command line.

Tables for people, `--json` for scripts: the server's own answer. Exit code 0 when all of it was done, 1 when a part was not
(something in use stayed, not everything was saved, a pin was clipped, a check found something), 2 when the server was not
reached or refused. Loads neither a model nor torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from tieredkv.cli import admin_tables as tables
from tieredkv.cli.admin_client import DEFAULT_URL, AdminClient, segment
from tieredkv.cli.admin_input import (
    MessagesFile,
    Prompt,
    PromptText,
    Salt,
    Tokens,
    Ttl,
    prompt_field,
    prompts_of,
    ttl_value,
)
from tieredkv.config import Config
from tieredkv.errors import AdminError
from tieredkv.types import Tier

EXIT_INCOMPLETE = 1
KEY_VARIABLE = "TIEREDKV_ADMIN_KEY"
MAX_WARM_PROMPTS = 1024
_POLL_S = 0.5
_SLOW_S = 3600.0

app = typer.Typer(
    name="admin",
    help="Look into the cache of a running server: inspect, keep, warm, clear.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

Url = Annotated[str, typer.Option("--url", metavar="URL", help="The server, or its admin port.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="TEXT",
        help=f"An admin key, or a tenant's API key. Default: {KEY_VARIABLE}, or the file that {KEY_VARIABLE}_FILE "
        "names. On the server's own machine none is needed unless "
        "it has an admin key.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Tiers = Annotated[list[Tier] | None, typer.Option("--tier", help="Only this tier; may be repeated.")]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="LABEL", help="The tenant that is meant.")]


@app.command("cache")
def cache(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """Tiers, gate, requests, pins and jobs now."""
    _, report = _client(url, key).ask("GET", "/cache")
    return _show(report, as_json, tables.show_cache)


@app.command("prefixes")
def prefixes(
    limit: Annotated[int, typer.Option(help="Branches to show.", min=1, max=1000)] = 50,
    cursor: Annotated[str | None, typer.Option(help="Go on after an earlier answer.")] = None,
    tier: Annotated[Tier | None, typer.Option(help="Branches with blocks in this tier.")] = None,
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--not-pinned", help="Only pinned branches, or others.")
    ] = None,
    tenant: Tenant = None,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Look in names and ids, and in shown text.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """The branches of the prefix tree."""
    query = {
        "limit": limit,
        "cursor": cursor,
        "tier": tier,
        "pinned": None if pinned is None else str(pinned).lower(),
        "tenant": tenant,
        "q": search,
    }
    _, page = _client(url, key).ask("GET", "/cache/prefixes", query=query)
    return _show(page, as_json, tables.show_prefixes)


@app.command("prefix")
def prefix(prefix_id: str, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """A branch and its blocks."""
    _, detail = _client(url, key).ask("GET", f"/cache/prefixes/{segment(prefix_id)}")
    return _show(detail, as_json, tables.show_prefix)


@app.command("block")
def block(block_hash: str, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """A block."""
    _, report = _client(url, key).ask("GET", f"/cache/blocks/{segment(block_hash)}")
    return _show(report, as_json, tables.show_block)


@app.command("lookup")
def lookup(
    prompt: Prompt = None,
    file: PromptText = None,
    messages: MessagesFile = None,
    tokens: Tokens = None,
    cache_salt: Salt = None,
    tenant: Tenant = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """What a request with this prompt would find, restore, compute and save."""
    body = prompt_field(prompt, file, messages, tokens) | {"cache_salt": cache_salt, "tenant": tenant}
    _, report = _client(url, key).ask("POST", "/cache/lookup", body)
    return _show(report, as_json, tables.show_lookup)


@app.command("pin")
def pin(
    prompt: Prompt = None,
    file: PromptText = None,
    messages: MessagesFile = None,
    tokens: Tokens = None,
    prefix_id: Annotated[
        str | None, typer.Option("--prefix", metavar="ID", help="A branch instead of a prompt.")
    ] = None,
    tier: Annotated[Tier | None, typer.Option(help="The lowest tier in which the blocks must stay.")] = None,
    ttl: Ttl = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="What to call it.")] = None,
    warm: Annotated[bool, typer.Option("--warm/--no-warm", help="Compute blocks that are missing.")] = True,
    cache_salt: Salt = None,
    tenant: Tenant = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Keep a prompt's blocks, or a branch with everything before it."""
    body: dict[str, Any] = {} if prefix_id is None else {"prefix": prefix_id}
    body |= prompt_field(prompt, file, messages, tokens, needed=prefix_id is None)
    body |= {
        "tier": tier,
        "ttl": ttl_value(ttl),
        "name": name,
        "warm": warm,
        "cache_salt": cache_salt,
        "tenant": tenant,
    }
    _, report = _client(url, key).ask("POST", "/pins", body)
    _show(report, as_json, lambda console, made: tables.show_pins(console, [made]))
    if report["outcome"] == "accepted":
        return 0
    print(f"tieredkv: {report['outcome']}: {report['reason']}", file=sys.stderr)
    return EXIT_INCOMPLETE


@app.command("pins")
def pins(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """All pins."""
    _, answer = _client(url, key).ask("GET", "/pins")
    return _show(answer, as_json, lambda console, found: tables.show_pins(console, found["pins"]))


@app.command("unpin")
def unpin(pin_id: str, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """Take a pin away."""
    _, report = _client(url, key).ask("DELETE", f"/pins/{segment(pin_id)}")
    return _show(report, as_json, lambda console, gone: tables.show_pins(console, [gone]))


@app.command("warm")
def warm(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL file of prompts, as `tieredkv preload` takes it.")
    ],
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="What to call the job.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is done.")] = False,
    tenant: Tenant = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Compute the prompts of a file in the background."""
    client = _client(url, key)
    entries = prompts_of(file, tenant)
    started = [
        client.ask("POST", "/cache/warm", {"prompts": entries[at : at + MAX_WARM_PROMPTS], "name": name})[1]
        for at in range(0, len(entries), MAX_WARM_PROMPTS)
    ]
    ended = [_wait(client, job) for job in started] if wait else started
    _show({"jobs": ended}, as_json, lambda console, answer: tables.show_jobs(console, answer["jobs"]))
    return (
        0
        if all(job["state"] in ("queued", "running", "done") and not job["error"] for job in ended)
        else EXIT_INCOMPLETE
    )


@app.command("jobs")
def jobs(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """Warming jobs, the newest first."""
    _, answer = _client(url, key).ask("GET", "/jobs")
    return _show(answer, as_json, lambda console, found: tables.show_jobs(console, found["jobs"]))


@app.command("cancel")
def cancel(job_id: str, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """Cancel a job; what it has computed stays."""
    _, report = _client(url, key).ask("DELETE", f"/jobs/{segment(job_id)}")
    return _show(report, as_json, lambda console, job: tables.show_jobs(console, [job]))


@app.command("demote")
def demote(
    tier: Tiers = None,
    tenant: Tenant = None,
    prefix_id: Annotated[str | None, typer.Option("--prefix", metavar="ID", help="Only this branch.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Move blocks to the next lower tier; without --tier those of the device."""
    body = {"tiers": tier, "tenant": tenant, "prefix": prefix_id}
    answer = _client(url, key).ask("POST", "/cache/demote", body, also=(409,), timeout_s=_SLOW_S)
    return _show_removal(*answer, as_json, "demoted")


@app.command("clear")
def clear(
    tier: Tiers = None,
    tenant: Tenant = None,
    prefix_id: Annotated[str | None, typer.Option("--prefix", metavar="ID", help="Only this branch.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Remove blocks; without --tier from all tiers, disk included."""
    client = _client(url, key)
    if not yes:
        what = f"the branch {prefix_id}" if prefix_id else f"all blocks of tenant {tenant}" if tenant else "all blocks"
        where = ", ".join(tier) if tier else "all tiers"
        if not sys.stdin.isatty():
            raise AdminError(f"this would remove {what} from {where}: confirm it with --yes")
        typer.confirm(f"Remove {what} from {where}?", abort=True)
    body = {"tiers": tier, "tenant": tenant, "prefix": prefix_id}
    return _show_removal(*client.ask("POST", "/cache/clear", body, also=(409,), timeout_s=_SLOW_S), as_json, "removed")


@app.command("flush")
def flush(
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait.", min=0, max=600)] = 30.0,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Save what a restart would lose."""
    client = _client(url, key)
    _, report = client.ask("POST", "/cache/flush", {"timeout": timeout}, also=(504,), timeout_s=timeout + 30)
    num_unsaved = report["num_unsaved_blocks"]
    _show(
        report,
        as_json,
        lambda *_: print("all is saved" if report["saved"] else f"{num_unsaved:,} blocks are not saved"),
    )
    return 0 if report["saved"] else EXIT_INCOMPLETE


@app.command("verify")
def verify(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> int:
    """Check the blocks of every tier."""
    _, report = _client(url, key).ask("POST", "/cache/verify", timeout_s=_SLOW_S)
    _show(report, as_json, tables.show_verification)
    return 0 if report["ok"] else EXIT_INCOMPLETE


@app.command("events")
def events(
    since: Annotated[
        str | None, typer.Option(metavar="ID", help="Id of the last event seen; default: a snapshot.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Stop after so many.", min=1)] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Follow what the tiers gain and lose."""
    console = tables.make_console()
    for index, event in enumerate(_client(url, key).events(since), 1):
        if as_json:
            print(json.dumps({"id": event.id, "event": event.name, "data": event.data}), flush=True)
        else:
            tables.show_event(console, event.name, event.data)
        if index == limit:
            return 0
    return 0


def _client(url: str, key: str | None) -> AdminClient:
    if key is None:
        # As the server reads it. It may have several keys, any of which will do.
        named = {name: os.environ[name] for name in (KEY_VARIABLE, f"{KEY_VARIABLE}_FILE") if os.environ.get(name)}
        key = next(iter(Config.load(environ=named).admin.admin_key), None)
    return AdminClient(url, key)


def _show(report: Any, as_json: bool, show: Callable[[Console, Any], None]) -> int:
    if as_json:
        print(json.dumps(report, indent=2))
        return 0
    try:
        show(tables.make_console(), report)
    except (KeyError, TypeError, AttributeError) as error:
        raise AdminError(f"the server's answer is not understood ({error!r}); is it another version?") from None
    return 0


def _show_removal(status: int, report: Any, as_json: bool, done: str) -> int:
    _show(report, as_json, lambda console, removal: tables.show_removal(console, removal, done))
    return 0 if status == 200 else EXIT_INCOMPLETE


def _wait(client: AdminClient, job: Mapping[str, Any]) -> Mapping[str, Any]:
    columns = (TextColumn("Warming"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warm", total=job["num_tokens"])
        while job["state"] in ("queued", "running"):
            time.sleep(_POLL_S)
            _, job = client.ask("GET", f"/jobs/{segment(job['id'])}")
            bar.update(task, completed=job["num_tokens_done"], total=job["num_tokens"])
    return job
