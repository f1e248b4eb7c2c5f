"""The verbs of the admin API over a running engine: inspect, pin, warm, demote, clear, flush, verify, follow.

Everything here runs on the asyncio loop; what touches blocks is sent to the engine thread, what touches LMDB to a storage
thread. Knows no HTTP: `scope` is None for an administrator, or the owner label of a tenant, to whom everything of other
owners is as if it did not exist.

Invariant: no verb waits without bound, and none holds up the engine for longer than a step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

from tieredkv.config import Config
from tieredkv.errors import CapacityError
from tieredkv.reports import (
    BlockReport,
    CacheEvent,
    CacheReport,
    EventGap,
    EventSnapshot,
    FlushReport,
    JobReport,
    LookupReport,
    PinReport,
    PrefixDetail,
    PrefixPage,
    RemovalReport,
    VerifyReport,
)
from tieredkv.types import Tier

if TYPE_CHECKING:
    from tieredkv.engine import Engine
    from tieredkv.warming import Warming, WarmPrompt


def _not_yet() -> CapacityError:
    return CapacityError("this verb is not served yet", status=503)


class Admin:
    """The admin verbs of one engine. `warming` is None where no prompts can be warmed."""

    def __init__(self, engine: Engine, config: Config, warming: Warming | None) -> None:
        self._engine = engine
        self._config = config
        self._warming = warming

    async def cache(self) -> CacheReport:
        """All tiers, the gate, requests, pins and jobs now."""
        raise _not_yet()

    async def prefixes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        tier: Tier | None = None,
        pinned: bool | None = None,
        tenant: str | None = None,
        query: str | None = None,
        scope: str | None = None,
    ) -> PrefixPage:
        """One page of the branches of the prefix tree. Raises `RequestError` for a bad cursor or limit."""
        raise _not_yet()

    async def prefix(self, prefix_id: str, *, scope: str | None = None) -> PrefixDetail:
        """One branch and its blocks. Raises `RequestError` with status 404."""
        raise _not_yet()

    async def block(self, block_hash: str, *, scope: str | None = None) -> BlockReport:
        """One block. Raises `RequestError` with status 404."""
        raise _not_yet()

    async def lookup(self, token_ids: list[int], *, tenant: bytes) -> LookupReport:
        """What a request with these prompt tokens would find; changes nothing."""
        raise _not_yet()

    async def pin(
        self,
        token_ids: list[int] | None,
        *,
        prefix_id: str | None = None,
        tenant: bytes,
        owner: str,
        tier: Tier | None,
        ttl_s: float | None,
        name: str | None,
        warm: bool = True,
        scope: str | None = None,
    ) -> PinReport:
        """Pin the full blocks of a prompt, or a branch with all before it; with `warm` missing blocks are computed."""
        raise _not_yet()

    async def pins(self, *, scope: str | None = None) -> list[PinReport]:
        """All pins, the newest first."""
        raise _not_yet()

    async def get_pin(self, pin_id: str, *, scope: str | None = None) -> PinReport:
        """One pin. Raises `RequestError` with status 404."""
        raise _not_yet()

    async def unpin(self, pin_id: str, *, scope: str | None = None) -> PinReport:
        """Take a pin away; returns what it was. Raises `RequestError` with status 404."""
        raise _not_yet()

    async def warm(self, prompts: list[WarmPrompt], *, name: str | None, owner: str) -> JobReport:
        """Start to compute prompts in the background."""
        raise _not_yet()

    async def jobs(self, *, scope: str | None = None) -> list[JobReport]:
        raise _not_yet()

    async def job(self, job_id: str, *, scope: str | None = None) -> JobReport:
        """One job. Raises `RequestError` with status 404."""
        raise _not_yet()

    async def cancel_job(self, job_id: str, *, scope: str | None = None) -> JobReport:
        """Cancel a job that is not over. Raises `RequestError` with status 404."""
        raise _not_yet()

    async def demote(
        self,
        *,
        tiers: Collection[Tier],
        prefix_id: str | None = None,
        tenant: str | None = None,
        scope: str | None = None,
    ) -> RemovalReport:
        """Move blocks from the named tiers to the next lower one."""
        raise _not_yet()

    async def clear(
        self,
        *,
        tiers: Collection[Tier] | None,
        prefix_id: str | None = None,
        tenant: str | None = None,
        scope: str | None = None,
    ) -> RemovalReport:
        """Remove blocks from the named tiers, all of them if None."""
        raise _not_yet()

    async def flush(self, timeout_s: float) -> FlushReport:
        """Save everything that a restart would lose, within `timeout_s` seconds."""
        raise _not_yet()

    async def verify(self) -> VerifyReport:
        """Check the blocks of every tier."""
        raise _not_yet()

    async def events(
        self, *, since: tuple[str, int] | None = None
    ) -> AsyncIterator[CacheEvent | EventSnapshot | EventGap]:
        """Changes of the tiers from (epoch, sequence) `since` on, or from a snapshot."""
        raise _not_yet()
        yield EventGap("", 0, "")
