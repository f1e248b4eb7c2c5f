"""What the server needs of an engine, as protocols: `tieredkv.engine.Engine` satisfies them, and so does a test's fake.

Knows no torch and no HTTP. Nothing else of the engine is used by this package.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from prometheus_client import CollectorRegistry

from tieredkv.tokenizer import Tokenizer
from tieredkv.types import EngineOutput, EngineRequest


class OutputStream(Protocol):
    """The outputs of one submitted request, in order; it ends after the one with a finish reason."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    def abort(self) -> None:
        """Stop the request; harmless when it has already ended."""


class Metrics(Protocol):
    """Holds the registry that `/metrics` shows."""

    @property
    def registry(self) -> CollectorRegistry: ...


class Engine(Protocol):
    """A loaded model with its queue. All of it may be called from the event loop."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def num_unfinished(self) -> int: ...

    def submit(self, request: EngineRequest) -> OutputStream: ...

    def check(self, request: EngineRequest) -> None: ...

    def begin_drain(self) -> None: ...

    async def wait_drained(self, timeout_s: float) -> bool: ...

    def abort_all(self) -> None: ...

    def health(self) -> str | None: ...

    def warnings(self) -> list[str]: ...
