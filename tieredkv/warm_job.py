"""What is to be warmed, and how far a job of warming is. Plain state: knows no loop and no engine.

Invariant: a job ends once, in one of done, cancelled and failed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tieredkv.reports import JobReport
from tieredkv.types import SHARED_OWNER, Tier


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A prompt to compute. `tenant` seeds its hash chain, `owner` is who it belongs to.

    With `pin` its blocks are pinned for `ttl_s` seconds (None: until unpinned) and keep at least `tier`; without, `ttl_s` is
    how long they are retained before others. `tier` None is content with any tier.
    """

    token_ids: Sequence[int]
    name: str | None = None
    tenant: bytes = b""
    owner: str = SHARED_OWNER
    pin: bool = False
    ttl_s: float | None = None
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class DeferredPrompt:
    """A prompt that is made when its turn comes: `load` runs in a thread and may raise `TieredKVError`. `number` is its line in
    the file that it comes from, 0 without one.
    """

    pin: bool
    load: Callable[[], WarmPrompt]
    number: int = 0


@dataclass(slots=True, eq=False)
class WarmJob:
    """One job: its prompts to come, and how far it is. `end` is its only way out of `is_open`."""

    id: str
    kind: str
    name: str | None
    owner: str
    prompts: deque[WarmPrompt | DeferredPrompt]
    num_prompts: int
    num_tokens: int
    created_s: float
    state: str = "queued"
    num_prompts_done: int = 0
    num_prompts_failed: int = 0
    num_tokens_done: int = 0
    num_tokens_computed: int = 0
    finished_s: float | None = None
    error: str | None = None
    on_end: Callable[[], None] | None = field(default=None, repr=False)
    """Called once, when the job ends before its prompts do; set while one of them is computed."""

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "running")

    def report(self) -> JobReport:
        return JobReport(
            id=self.id,
            kind=self.kind,
            name=self.name,
            state=self.state,
            num_prompts=self.num_prompts,
            num_prompts_done=self.num_prompts_done,
            num_tokens=self.num_tokens,
            num_tokens_done=self.num_tokens_done,
            num_tokens_computed=self.num_tokens_computed,
            created_s=self.created_s,
            finished_s=self.finished_s,
            error=self._error_text(),
            num_prompts_failed=self.num_prompts_failed,
        )

    def note_failure(self, error: Exception) -> None:
        self.num_prompts_failed += 1
        self.error = self.error or str(error)

    def end(self, state: str, error: str | None = None) -> None:
        if self.is_open:
            self.state = state
            self.error = error or self.error
            self.finished_s = time.time()
            self.prompts.clear()
            if self.on_end is not None:
                self.on_end()

    def _error_text(self) -> str | None:
        if self.num_prompts_failed > 1:
            return f"{self.num_prompts_failed} prompts failed; the first: {self.error}"
        return self.error
