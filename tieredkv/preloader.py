"""Preloading: the prompts of a plan computed straight into a store, without a server.

Knows the core and its tiers; no files, no text, no terminal. What is stored already is brought up, never computed. Blocks go
to disk while the next ones are computed, and at most `UNSAVED_NBYTES` of them wait: that is what a kill can cost.

Invariants: a block is computed at most once, as long as the store keeps it; no block leaves the pool before the store has it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tieredkv.config import Config
from tieredkv.core import EngineCore
from tieredkv.errors import StorageError, TieredKVError
from tieredkv.preload_plan import Entry
from tieredkv.reports import PinReport
from tieredkv.storage.session import budget_nbytes_for
from tieredkv.types import EngineOutput, EngineRequest, FinishReason, SamplingParams
from tieredkv.warm_job import WarmPrompt
from tieredkv.warming import pin

UNSAVED_NBYTES = 64 * 1024**2
MOST_AT_ONCE = 16
PATIENCE_S = 60.0
"""Longest time for lookups, restores and for a save that gets nowhere: nobody waits for an answer here."""
FULL_AFTER_S = 5.0
"""How long a store may refuse blocks before it counts as full."""
_POLL_S = 0.01
_SAVE_STEP_S = 1.0


def settings_for(config: Config) -> Config:
    """`config` as preloading needs it: whatever is stored is brought up, however long that takes."""
    return replace(
        config,
        tiers=replace(config.tiers, restore="always", restore_timeout=PATIENCE_S),
        scheduler=replace(config.scheduler, single_flight_timeout=PATIENCE_S * 60),
    )


@dataclass(slots=True)
class Progress:
    """So far: tokens of the plan's full blocks done and computed, blocks and payload bytes that the disk has taken."""

    num_tokens: int = 0
    num_tokens_done: int = 0
    num_tokens_computed: int = 0
    num_blocks_saved: int = 0
    nbytes_saved: int = 0
    seconds: float = 0.0


class Preloader:
    """Computes entries of a plan on a core with a disk tier, in the calling thread. `report` is called after each step."""

    def __init__(
        self, core: EngineCore, block_nbytes: int, report: Callable[[Progress], None] = lambda _: None
    ) -> None:
        """Raises `StorageError` if the store cannot be used."""
        tiers = core.tiers
        if tiers is None or tiers.disk is None:
            raise StorageError("there is no disk tier to preload into")
        if tiers.disk.fault is not None:
            raise StorageError(tiers.disk.fault)
        tiers.lookup_timeout_s = PATIENCE_S
        self.progress = Progress()
        self.problem: str | None = None
        self._core = core
        self._tiers = tiers
        self._block_nbytes = block_nbytes
        self._report = report
        self._began_s = time.monotonic()
        self._running: dict[str, Entry] = {}
        self._counter = itertools.count()
        self._most_unsaved = max(min(UNSAVED_NBYTES // block_nbytes, core.pool.num_usable // 4), 1)

    def pin(self, entries: Iterable[Entry]) -> list[PinReport]:
        """Pin prompts before they are computed. A pin without an end that is there already stays as it is; any other one with
        the same name begins anew.
        """
        wanted = [entry for entry in entries if entry.last_hash]
        if not wanted:
            return []
        self._settle_pins()
        known = {(report.prefix, report.name): report for report in self._core.pins.list()}
        reports = []
        for entry in wanted:
            before = known.get((entry.last_hash.hex(), entry.name))
            lasting = before is not None and before.expires_s is None and entry.ttl_s is None
            reports.append(before if before is not None and lasting else pin(self._core, entry.source.load()))
        self._settle_pins()
        return reports

    def look_again(self, reports: Sequence[PinReport]) -> list[PinReport]:
        """The pins as they stand now; a refused one as it was."""
        self._settle_pins()
        return [(report.id and self._core.pins.get(report.id)) or report for report in reports]

    def _settle_pins(self) -> None:
        """Wait until the store has answered everything about pins."""
        give_up_s = time.monotonic() + PATIENCE_S
        while self._core.pins.busy and time.monotonic() < give_up_s:
            self._core.cache.poll()
            self._core.pins.expire()
            self._core.wait(_POLL_S)

    def touch(self, entries: Iterable[Entry]) -> None:
        """Count stored prompts as used now, so that older blocks are evicted before them."""
        disk = self._tiers.disk
        for entry in entries:
            if entry.last_hash and disk is not None:
                disk.touch(entry.last_hash)

    def measured_room(self, capacity_nbytes: int) -> int:
        """How many blocks a store of this capacity holds if all are as large as those in it on average."""
        usage = self._tiers.disk.usage() if self._tiers.disk is not None else None
        if usage is None or not usage.num_blocks:
            return 0
        return max(budget_nbytes_for(capacity_nbytes), 0) * usage.num_blocks // max(usage.used_nbytes, 1)

    def run(self, entries: Sequence[Entry]) -> None:
        """Compute the entries in order and save everything. Stops early, with `problem` set, when the store takes no more."""
        self.progress.num_tokens += sum(entry.num_blocks for entry in entries) * self._core.block_size
        self._began_s = time.monotonic() - self.progress.seconds
        for entry in entries:
            self._make_room(entry)
            if self.problem is not None:
                break
            self._submit(entry, entry.source.load())
        self._drain()
        self._save()

    def _submit(self, entry: Entry, prompt: WarmPrompt) -> None:
        core, length = self._core, entry.num_blocks * self._core.block_size
        # One token behind the blocks: a request's last token is always computed, and none of a block is that the store has.
        token_ids = list(prompt.token_ids[: length + 1])
        if len(token_ids) == length:
            token_ids.append(token_ids[-1])
        if len(token_ids) >= core.max_model_len:
            del token_ids[length:]
        request_id = f"preload-{next(self._counter)}"
        request = EngineRequest(
            request_id,
            token_ids,
            SamplingParams(temperature=0.0, max_tokens=1),
            prompt.tenant,
            arrival_s=time.monotonic(),
            owner=prompt.owner,
            prefix_name=prompt.name,
        )
        try:
            core.add(request)
        except TieredKVError as error:
            entry.error = str(error)
            return
        self._running[request_id] = entry

    def _make_room(self, entry: Entry) -> None:
        """Step until another prompt can go in without an unsaved block having to go for it."""
        wanted = entry.num_blocks + 1
        while self._running and (
            len(self._running) >= MOST_AT_ONCE
            or sum(running.num_blocks + 1 for running in self._running.values()) + wanted
            > self._core.pool.num_usable // 2
        ):
            self._step()
        unsaved = self._tiers.spiller.num_unsaved
        if unsaved > self._most_unsaved or (unsaved and unsaved + wanted > self._core.pool.num_free):
            self._drain()
            self._save()

    def _drain(self) -> None:
        while self._core.has_work:
            self._step()

    def _step(self) -> None:
        for output in self._core.step():
            self._take(output)
        # Copies and the writer work while the next step computes.
        self._tiers.work_idle()
        if self._core.is_stalled:
            self._core.wait(_POLL_S)
        self._tell()

    def _take(self, output: EngineOutput) -> None:
        if output.finish_reason is None:
            return
        entry = self._running.pop(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            entry.error = output.error or "the engine failed"
            return
        block_size = self._core.block_size
        self.progress.num_tokens_done += entry.num_blocks * block_size
        self.progress.num_tokens_computed += output.sources.computed // block_size * block_size

    def _save(self) -> None:
        """Bring everything to the store; sets `problem` when that gets nowhere. Only while nothing runs."""
        spiller = self._tiers.spiller
        unsaved, refused = spiller.num_unsaved, spiller.counts.refused_by_disk
        progress_s = time.monotonic()
        while not self._core.flush(_SAVE_STEP_S):
            if spiller.num_unsaved < unsaved:
                unsaved, progress_s = spiller.num_unsaved, time.monotonic()
            # Refused blocks are sent again, with pauses, because a parent may have come too late or a fault be over.
            patience_s = FULL_AFTER_S if spiller.counts.refused_by_disk > refused else PATIENCE_S
            if time.monotonic() - progress_s > patience_s:
                fault = self._tiers.disk.fault if self._tiers.disk is not None else None
                self.problem = fault or f"the store takes no more: {spiller.num_unsaved} blocks are left"
                return
            self._core.wait(_POLL_S)
            self._tell()
        self._tell()

    def _tell(self) -> None:
        saved = self._tiers.spiller.counts.to_disk
        self.progress.num_blocks_saved = saved
        self.progress.nbytes_saved = saved * self._block_nbytes
        self.progress.seconds = time.monotonic() - self._began_s
        self._report(self.progress)
