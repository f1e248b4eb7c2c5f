"""A model made of arithmetic, for tests of everything above the numbers.

`FakeRunner` keeps one (token, position) pair per slot, writes it where the batch says, and derives the next token from
what it reads back through the block tables. Whoever hands a sequence a wrong, stale or unwritten block changes its
tokens, so comparing with `expected_tokens` checks every decision of cache and scheduler.
"""

from __future__ import annotations

import hashlib

import numpy as np

from tieredkv.batch import Batch, SampledToken
from tieredkv.config import Config
from tieredkv.core import EngineCore
from tieredkv.errors import InvariantError
from tieredkv.metrics import EngineMetrics
from tieredkv.types import EngineRequest, FinishReason, SamplingParams

VOCAB_SIZE = 1000


def next_token(token_ids) -> int:
    digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def expected_tokens(prompt, num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunning:
    def __init__(self, tokens: list[SampledToken], error: Exception | None = None) -> None:
        self._tokens = tokens
        self._error = error

    def result(self) -> list[SampledToken]:
        if self._error is not None:
            raise self._error
        return self._tokens


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.slots = np.full((num_blocks * block_size, 2), -1, dtype=np.int64)
        self.num_computed_tokens = 0
        self.batches: list[list[tuple[str, int, int]]] = []
        self.fail_next: Exception | None = None

    def launch(self, batch: Batch) -> FakeRunning:
        """Writes and reads at once, as the device does by its own order; tokens and failures show with the result."""
        try:
            return FakeRunning(self._compute(batch))
        except InvariantError:
            raise
        except Exception as error:
            return FakeRunning([], error)

    def _compute(self, batch: Batch) -> list[SampledToken]:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        nowhere = batch.slots < self.block_size
        if len(set(batch.slots[~nowhere].tolist())) != (~nowhere).sum():
            raise InvariantError("two tokens share a slot")
        if not set(np.flatnonzero(nowhere).tolist()) <= set(batch.logits_indices.tolist()):
            raise InvariantError("a token is neither written nor asked about")
        self.batches.append([(p.sequence.request_id, p.start, p.num_new) for p in batch.scheduled])
        self.num_computed_tokens += batch.num_tokens
        self.slots[batch.slots, 0] = batch.token_ids
        self.slots[batch.slots, 1] = batch.positions
        tokens = []
        for i, part in enumerate(batch.scheduled):
            length = int(batch.context_lens[i])
            rows = batch.block_tables[i].astype(np.int64)[:, None] * self.block_size + np.arange(self.block_size)
            context = self.slots[rows.reshape(-1)[:length]]
            if context[:, 1].tolist() != list(range(length)):
                raise InvariantError(f"{part.sequence} reads positions {context[:, 1].tolist()}")
            if part.samples:
                tokens.append(SampledToken(next_token(context[:, 0])))
        return tokens


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_core(
    num_blocks: int = 64,
    block_size: int = 8,
    max_model_len: int = 256,
    clock=None,
    namespace: bytes = b"n" * 32,
    make_tiers=None,
    on_runner=lambda runner: None,
    **settings,
) -> tuple[EngineCore, FakeRunner]:
    clock = clock or ManualClock()
    defaults = {"block_size": block_size, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    config = Config.load(defaults | settings)
    runner = FakeRunner(num_blocks, block_size)
    on_runner(runner)
    core = EngineCore(
        runner,
        config,
        namespace=namespace,
        max_model_len=min(max_model_len, (num_blocks - 1) * block_size),
        vocab_size=VOCAB_SIZE,
        metrics=EngineMetrics("fake"),
        clock=clock,
        wall_clock_us=lambda: int(clock() * 1e6),
        block_nbytes=runner.slots.nbytes // num_blocks,
        make_tiers=make_tiers,
    )
    return core, runner


def request(request_id: str, prompt, max_tokens: int = 4, tenant: bytes = b"", **sampling) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
    return EngineRequest(request_id, list(prompt), params, tenant)


class Collector:
    """Runs a core and sorts its outputs by request."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.sources = {}

    def step(self) -> None:
        for output in self.core.step():
            assert output.request_id not in self.reasons, "an output after the last one"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.sources[output.request_id] = output.sources
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def run(self, max_steps: int = 10_000) -> Collector:
        for _ in range(max_steps):
            if not self.core.has_work:
                self.core.check_integrity()
                return self
            self.step()
        raise AssertionError("the core does not come to an end")
