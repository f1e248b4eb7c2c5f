"""The reports of the admin API for people: lists and tables on a terminal, from the JSON that the server sent.

Knows rich and the reports' field names, and no HTTP. Everything fits a terminal of 80 columns: what has a long id is a list
of records, the id first, alone on its line, since an id that is broken in two cannot be copied; other texts go on in
the next line. Invariant: no control character of what the server sent, names and words of prompts among it, reaches the
terminal.
"""

from __future__ import annotations

import datetime
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tieredkv.config import format_size

Report = Mapping[str, Any]
_NOTHING = "-"
_SHORT_HASH = 16
_INDENT = "  "
_WIDTH = 1000


def make_console() -> Console:
    """Where everything goes; too wide for rich to break a line, because that is done here."""
    return Console(width=_WIDTH, soft_wrap=True)


def show_cache(console: Console, report: Report) -> None:
    """`GET /admin/cache`."""
    _facts(
        console,
        model=report["model"],
        namespace=report["namespace"][:_SHORT_HASH],
        blocks=f"{report['block_size']} tokens, {format_size(report['block_nbytes'])}; the smallest hit has "
        f"{report['min_hit_tokens']} tokens",
        up=_duration(report["uptime_s"]),
        requests=f"{report['num_requests_running']:,} running, {report['num_requests_waiting']:,} waiting, "
        f"{report['num_requests_restoring']:,} restoring",
        saved=f"{report['seconds_saved']:,.1f} s of prefill for {report['seconds_spent']:,.1f} s of loading",
        computed=f"{report['computed_tokens']:,} tokens",
        pins=f"{report['num_pins']:,}",
        unsaved=f"{report['num_unsaved_blocks']:,} blocks",
        gate=f"{report['gate']['policy']}: {report['gate']['verdict']}",
    )
    print()
    tiers = [tier for tier in report["tiers"] if tier["enabled"]]
    rows = [
        ("used", *(format_size(tier["used_nbytes"]) for tier in tiers)),
        ("of", *(format_size(tier["capacity_nbytes"]) for tier in tiers)),
        *(
            (label, *(f"{tier[f'num_{key}']:,}" for tier in tiers))
            for label, key in (
                ("blocks", "blocks"),
                ("pinned", "pinned_blocks"),
                ("retained", "retained_blocks"),
                ("came down", "spilled_blocks"),
                ("went up", "restored_blocks"),
                ("evicted", "evictions"),
                ("dropped", "dropped_blocks"),
                ("corrupt", "corrupt_blocks"),
            )
        ),
        ("hit tokens", *(f"{tier['hit_tokens']:,}" for tier in tiers)),
        ("read at", *(_rate(tier["read_nbytes_per_s"]) for tier in tiers)),
        ("written at", *(_rate(tier["write_nbytes_per_s"]) for tier in tiers)),
    ]
    _table(console, ("", *(f">{tier['tier']}" for tier in tiers)), rows)
    for tier in report["tiers"]:
        if not tier["enabled"]:
            _paragraph(console, f"{tier['tier']}: off")
        if tier["fault"]:
            _paragraph(console, f"{tier['tier']}: {tier['fault']}")
        if tier["refusal"]:
            since, count = _time(tier["refusing_since_s"]), tier["num_refused_blocks"]
            _paragraph(
                console, f"{tier['tier']}: takes no blocks since {since}, {count:,} were refused: {tier['refusal']}"
            )
    if report["jobs"]:
        print()
        show_jobs(console, report["jobs"])


def show_prefixes(console: Console, page: Report) -> None:
    """`GET /admin/cache/prefixes`."""
    for prefix in page["prefixes"]:
        _record(
            console,
            prefix["id"],
            prefix["tenant"],
            prefix["name"],
            f"{prefix['num_tokens']:,} tokens",
            f"{prefix['num_blocks']:,} blocks",
            _places(prefix["blocks_by_tier"]),
            format_size(prefix["nbytes"]),
            f"{prefix['num_hits']:,} hits",
            f"used {_ago(prefix['last_use_s'])}",
            "pinned" if prefix["pins"] else "",
            text=_words(prefix),
        )
    total = "" if page["num_total"] is None else f" of {page['num_total']:,}"
    print(f"{len(page['prefixes']):,}{total} branches")
    if page["next_cursor"] is not None:
        print(f"more: --cursor {page['next_cursor']}")


def show_prefix(console: Console, detail: Report) -> None:
    """`GET /admin/cache/prefixes/{id}`."""
    prefix = detail["prefix"]
    _facts(
        console,
        id=prefix["id"],
        parent=prefix["parent"] or _NOTHING,
        tenant=prefix["tenant"],
        name=prefix["name"] or _NOTHING,
        tokens=f"{prefix['num_tokens']:,} from the start, {prefix['num_own_tokens']:,} of its own",
        where=_places(prefix["blocks_by_tier"]),
        pins=", ".join(prefix["pins"]) or _NOTHING,
        hits=f"{prefix['num_hits']:,}, the last {_ago(prefix['last_use_s'])}",
        text=_words(prefix) or _NOTHING,
    )
    print("\nblocks:")
    for block in detail["blocks"]:
        _record(
            console,
            block["hash"],
            f"depth {block['depth']:,}",
            _places(block["tiers"]),
            f"{block['ref_count']:,} in use",
            f"{block['num_pins']:,} pins",
            f"{block['num_hits']:,} hits",
            f"used {_ago(block['last_use_s'])}",
        )


def show_block(console: Console, block: Report) -> None:
    """`GET /admin/cache/blocks/{hash}`."""
    _facts(
        console,
        hash=block["hash"],
        parent=block["parent"],
        tenant=block["tenant"],
        depth=f"{block['depth']:,}",
        tokens=f"{block['num_tokens']:,}",
        where=_places(block["tiers"]),
        size=format_size(block["nbytes"]),
        in_use=f"{block['ref_count']:,}",
        pins=f"{block['num_pins']:,}",
        hits=f"{block['num_hits']:,}, the last {_ago(block['last_use_s'])}",
        kept_until=_time(block["expires_s"]),
    )


def show_lookup(console: Console, report: Report) -> None:
    """`POST /admin/cache/lookup`."""
    _facts(
        console,
        tokens=f"{report['num_tokens']:,} in {report['num_blocks']:,} full blocks",
        found=", ".join(f"{report[f'{tier}_tokens']:,} {tier}" for tier in ("device", "host", "disk")),
        to_compute=f"{report['computed_tokens']:,}",
        restore=_seconds(report["restore_seconds"]),
        compute=_seconds(report["compute_seconds"]),
        saved=_seconds(report["saved_seconds"]),
    )
    rows = [(f"{span['start']:,}", f"{span['end']:,}", span["where"]) for span in report["spans"]]
    _table(console, (">from token", ">to", "where"), rows)


def show_pins(console: Console, pins: Sequence[Report]) -> None:
    """`GET /admin/pins`."""
    for pin in pins:
        _record(
            console,
            pin["id"],
            pin["tenant"],
            pin["name"],
            pin["tier"],
            pin["outcome"],
            f"{pin['num_pinned_tokens']:,} of {pin['num_tokens']:,} tokens",
            f"blocks: {pin['num_present']:,} present, {pin['num_loading']:,} loading, {pin['num_missing']:,} missing",
            f"until {_time(pin['expires_s'])}" if pin["expires_s"] is not None else "",
            f"job {pin['job']}" if pin["job"] else "",
        )
    if not pins:
        print("no pins")


def show_jobs(console: Console, jobs: Sequence[Report]) -> None:
    """`GET /admin/jobs`."""
    for job in jobs:
        _record(
            console,
            job["id"],
            job["kind"],
            job["name"],
            job["state"],
            f"{job['num_prompts_done']:,} of {job['num_prompts']:,} prompts",
            f"{job['num_tokens_done']:,} of {job['num_tokens']:,} tokens",
            f"{job['num_tokens_computed']:,} computed",
            text=job["error"] or "",
        )
    if not jobs:
        print("no jobs")


def show_removal(console: Console, report: Report, done: str) -> None:
    """What `demote` or `clear` did; `done` is the word for it."""
    rows = [
        (tier["tier"], f"{tier['removed']:,}", f"{tier['in_use']:,}", f"{tier['pinned']:,}") for tier in report["tiers"]
    ]
    _table(console, ("tier", f">{done}", ">in use, stayed", ">pinned, stayed"), rows)
    for tier in report["tiers"]:
        if tier["error"]:
            _paragraph(console, f"{tier['tier']}: {tier['error']}")


def show_verification(console: Console, report: Report) -> None:
    """`POST /admin/cache/verify`."""
    print(f"{report['num_checked']:,} blocks checked: {'all is well' if report['ok'] else 'something is wrong'}")
    for each in report["findings"]:
        _paragraph(console, f"{each['tier']}: {each['text']}{' (repaired)' if each['repaired'] else ''}")


def show_event(console: Console, name: str, data: Report) -> None:
    """One event, as one line."""
    if name == "snapshot":
        counts = ", ".join(f"{tier} {len(hashes):,}" for tier, hashes in data["hashes_by_tier"].items())
        more = "" if data["part"] == data["num_parts"] - 1 else " ..."
        line = f"{data['sequence']:>8}  snapshot  {counts or 'nothing'}{more}"
    elif name == "gap":
        line = f"{data['sequence']:>8}  gap       {data['reason']}"
    elif name in ("stored", "removed"):
        first = f"{data['hashes'][0][:_SHORT_HASH]} " if data["hashes"] else ""
        more = f"and {len(data['hashes']) - 1:,} more" if len(data["hashes"]) > 1 else ""
        line = f"{data['sequence']:>8}  {name:<8}  {data['tier']:<6}  {data['reason']:<9}  {first}{more}"
    else:
        line = f"{name}: {data}"
    console.print(_text(line.rstrip()), soft_wrap=True)


def _text(content: str) -> Text:
    """`content` as it is: no markup, and nothing that steers a terminal."""
    return Text("".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in content))


def _facts(console: Console, **facts: str) -> None:
    width = max(len(name) for name in facts) + 2
    for name, value in facts.items():
        _paragraph(console, f"{name.replace('_', ' '):<{width}}{value}", indent=" " * width)


def _record(console: Console, key: str, *facts: str | None, text: str = "") -> None:
    """An entry of a list: its id, then its facts, as many in a line as fit, then a text."""
    console.print(_text(key))
    lines: list[str] = []
    for fact in filter(None, facts):
        if lines and len(lines[-1]) + 2 * len(_INDENT) + len(fact) <= _columns():
            lines[-1] += _INDENT + fact
        else:
            lines.append(fact)
    for line in filter(None, (*lines, text)):
        _paragraph(console, _INDENT + line, indent=2 * _INDENT)


def _paragraph(console: Console, content: str, indent: str = _INDENT) -> None:
    """A text of any length, broken between words."""
    lines = textwrap.wrap(
        _text(content).plain,
        _columns(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    for line in lines:
        console.print(Text(line))


def _columns() -> int:
    """The terminal's width, 80 where there is none."""
    return shutil.get_terminal_size().columns


def _table(console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; a head that starts with `>` stands over numbers. What the server sent is never taken for markup."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def _places(by_tier: Mapping[str, Any]) -> str:
    return ", ".join(f"{tier} {value}" for tier, value in by_tier.items() if value) or _NOTHING


def _words(prefix: Report) -> str:
    first, last = prefix["first_words"], prefix["last_words"]
    return " ... ".join(words for words in (first, last) if words)


def _rate(nbytes_per_s: float | None) -> str:
    return "" if nbytes_per_s is None else f"{format_size(nbytes_per_s)}/s"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.3f} s"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    passed = max(datetime.datetime.now().timestamp() - seconds, 0.0)
    return f"{_duration(passed)} ago"
