"""One reader of the event log: a snapshot to start from, then every event in order; a gap is told, and a new snapshot follows.

Runs on the asyncio loop. Knows the log, the registry of near blocks and the store's listing; no HTTP. Invariant: whoever
applies what is yielded, in order, knows what every tier holds after the last event that they have seen; on disk, as far as
this process has changed it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial

from tieredkv.branches import Node
from tieredkv.errors import CapacityError, StorageError
from tieredkv.events import BREAK, EventLog
from tieredkv.reach import Reach
from tieredkv.reports import CacheEvent, EventGap, EventSnapshot
from tieredkv.storage.disk import DiskStore
from tieredkv.types import Tier

PART_HASHES = 4096
"""Hashes per part of a snapshot."""


async def follow(
    reach: Reach, since: tuple[str, int] | None
) -> AsyncGenerator[CacheEvent | EventSnapshot | EventGap, None]:
    """Events after (epoch, sequence) `since` if they are all kept, else a gap, a snapshot and what follows it; endless."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        # A loop that has closed took its reader along.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(changed.set)

    log, stop = await reach.call(lambda core: (core.events, core.events.listen(wake)))
    try:
        last: int | None = None
        if since is not None:
            if since[0] != log.epoch:
                yield EventGap(log.epoch, log.published, "the events asked for are of another run of the server")
            elif not log.has_all_after(since[1]):
                yield EventGap(log.epoch, log.published, "the events asked for are not kept any more")
            else:
                last = since[1]
        while True:
            if last is None:
                async for part in _snapshot(reach):
                    yield part
                    last = part.sequence
                continue
            changed.clear()
            event = _next(log, last)
            if isinstance(event, CacheEvent):
                last = event.sequence
                yield event
            elif event is not None:
                last = None
                yield event
            else:
                await changed.wait()
    finally:
        stop()


def _next(log: EventLog, last: int) -> CacheEvent | EventGap | None:
    """The event after number `last`, None if there is none yet."""
    if last >= log.published:
        return None
    entry = log.read(last + 1)
    if entry is None:
        return EventGap(log.epoch, log.published, "the reader was too slow")
    if entry.kind == BREAK:
        return EventGap(log.epoch, entry.sequence, f"{entry.tier.value}: {entry.reason}")
    return entry.report()


async def _snapshot(reach: Reach) -> AsyncIterator[EventSnapshot]:
    """What the tiers hold, in parts; the last one is that with `part == num_parts - 1`."""
    snapshot, epoch, namespace = await reach.call(
        lambda core: (core.branches.snapshot(), core.events.epoch, core.namespace)
    )
    number, complete = 0, True

    def part(hashes_by_tier: dict[Tier, list[str]], *, last: bool) -> EventSnapshot:
        num_parts = number + (1 if last else 2)
        return EventSnapshot(epoch, snapshot.sequence, hashes_by_tier, number, num_parts, complete)

    for some in _near_parts(list(snapshot.nodes.values())):
        yield part(some, last=False)
        number += 1
        # Leave the loop to others: a part takes milliseconds.
        await asyncio.sleep(0)
    start: bytes | None = b""
    pending: list[str] = []
    while start is not None:
        if pending:
            yield part({Tier.DISK: pending}, last=False)
            number += 1
        try:
            found = await reach.on_disk(partial(_disk_part, namespace=namespace, start=start))
        except (StorageError, CapacityError):
            found, complete = None, False
        pending, start = found if found is not None else ([], None)
    yield part({Tier.DISK: pending}, last=True)


def _near_parts(nodes: list[Node]) -> Iterator[dict[Tier, list[str]]]:
    for at in range(0, len(nodes), PART_HASHES):
        some = nodes[at : at + PART_HASHES]
        yield {tier: [n.hash.hex() for n in some if n.is_in(tier)] for tier in (Tier.DEVICE, Tier.HOST)}


def _disk_part(store: DiskStore, *, namespace: bytes, start: bytes) -> tuple[list[str], bytes | None]:
    """Some of the blocks from hash `start` on, and where to go on, None at the end."""
    hashes: list[str] = []
    with store.listing(namespace) as listing:
        for number, (block_hash, num_children) in enumerate(listing.scan(start)):
            if number >= PART_HASHES:
                return hashes, block_hash
            if num_children is not None:
                hashes.append(block_hash.hex())
    return hashes, None
