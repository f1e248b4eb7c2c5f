"""What `tieredkv preload` says to people: its report as lines of text. Knows the report's keys, not how it came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tieredkv.config import format_size


def show(result: Mapping[str, Any]) -> None:
    """Print a report."""
    if "log" in result:
        log = result["log"]
        print(f"{log['num_requests']:,} requests with {log['num_tokens']:,} prompt tokens")
        if log["num_skipped"]:
            print(f"  skipped    {log['num_skipped']:,} lines; the first: {log['first_problem']}")
        print(f"  chosen     {log['num_prefixes']:,} prefixes of {log['num_chosen_blocks']:,} blocks", end="")
        print(f" (of {log['num_unique_blocks']:,}), {format_size(log['nbytes'])}")
        print(f"  hit rate   {log['hit_rate']:.1%} of this log's tokens")
        if log["held_out_hit_rate"] is not None:
            print(f"  expected   {log['held_out_hit_rate']:.1%}: the earlier half's choice, tried on the later half")
    if "prompts" not in result:
        return
    print(f"{result['prompts']:,} prompts with {result['prompt_tokens']:,} tokens")
    if result["prompts_below_a_block"]:
        print(f"  too short  {result['prompts_below_a_block']:,} prompts have not one block of {result['block_size']}")
    print(f"  shared     {result['shared_tokens']:,} tokens with other prompts")
    print(f"  stored     {result['stored_blocks']:,} of {result['blocks']:,} blocks before")
    print(f"  to compute {result['new_tokens']:,} tokens, {format_size(result['new_nbytes'])}")
    for line in result.get("lines", ()):
        name = f" {line['name']}" if line["name"] else ""
        print(
            f"  line {line['line']}{name}: {line['tokens']:,} tokens, {line['stored_tokens']:,} stored, "
            f"{line['shared_tokens']:,} shared, {line['new_tokens']:,} to compute"
        )
    if "computed_tokens" in result:
        print(
            f"  computed   {result['computed_tokens']:,} tokens in {result['seconds']:.1f} s "
            f"({result['tokens_per_s']:,.0f} tokens/s)"
        )
        print(f"  saved      {result['saved_blocks']:,} blocks, {format_size(result['saved_nbytes'])}")
        for pin in result["pins"]:
            why = f" ({pin['reason']})" if pin["reason"] else ""
            print(f"  pin        {pin['name'] or pin['id']}: {pin['outcome']}{why}")
    _complain(result.get("not_stored", ()), result.get("problem"))


def _complain(lacking: Sequence[Mapping[str, Any]], problem: str | None) -> None:
    if problem:
        print(f"  problem    {problem}")
    for line in lacking:
        name = f" {line['name']}" if line["name"] else ""
        why = f": {line['reason']}" if line["reason"] else ""
        print(
            f"  not stored line {line['line']}{name}: {line['stored_tokens']:,} of {line['tokens']:,} tokens are{why}"
        )
