"""Plain data that crosses module borders. Knows no torch, no HTTP, no tier.

Invariants: `TokenSources.total` of a request equals its number of prompt tokens once it has been admitted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tieredkv.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
# vLLM's bound: below it, sampling is greedy in all but name, and float32 has no room left to divide by it.
LEAST_TEMPERATURE = 1e-5
# The owner of what was computed for requests without an API key.
SHARED_OWNER = "shared"
# Eviction priorities run from 0, the first to go, to 100.
DEFAULT_PRIORITY = 35
RETAINED_PRIORITY = 60
MAX_PRIORITY = 100


class FinishReason(enum.StrEnum):
    """Why a request ended. The first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Tier(enum.StrEnum):
    """Where a block lies, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; the same names and defaults as vLLM's class.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 keep all tokens. `logprobs` is the number of alternatives to
    report beside the sampled token (None: no log-probabilities, 0: the sampled token only), taken from the model's
    raw distribution, before penalties and temperature. With a `seed`, a request draws the same tokens whatever it shares
    a batch with.

    Raises `RequestError`, naming the field, when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check("n", 1 <= self.n <= 128, "must be between 1 and 128")
        self._check("temperature", 0.0 <= self.temperature <= 100.0, "must be between 0 and 100")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1")
        self._check("top_k", self.top_k >= -1, "must be -1 or 0 (off), or a positive integer")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "must be between 0 and 1")
        self._check("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "must fit in 64 bits")
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        self._check("min_tokens", self.min_tokens >= 0, "must be at least 0")
        self._check(
            "min_tokens",
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "must not be greater than max_tokens",
        )
        self._check("stop", len(self.stop) <= MAX_STOP_STRINGS, f"may hold at most {MAX_STOP_STRINGS} strings")
        self._check(
            "stop_token_ids",
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"may hold at most {MAX_STOP_TOKEN_IDS} ids",
        )
        self._check("stop", all(self.stop), "must not hold an empty string")
        self._check("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "must be between 0.01 and 100")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be between -2 and 2")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be between -2 and 2")
        self._check("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"may name at most {MAX_LOGIT_BIAS} tokens")
        self._check(
            "logit_bias", all(-100.0 <= v <= 100.0 for v in self.logit_bias.values()), "values must be in [-100, 100]"
        )
        self._check(
            "logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"must be in [0, {MAX_LOGPROBS}]"
        )

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            shown = repr(getattr(self, name))
            raise RequestError(f"{name} {rule}, got {shown if len(shown) < 100 else shown[:100] + '...'}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def needs_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(**(values | changes))


@dataclass(slots=True)
class TokenSources:
    """Where a request's prompt tokens came from, in tokens. The four add up to the prompt's length after admission."""

    device: int = 0
    host: int = 0
    disk: int = 0
    computed: int = 0

    @classmethod
    def of_prompt(cls, tiers: Iterable[Tier], block_size: int, num_tokens: int) -> TokenSources:
        """A prompt of `num_tokens` whose leading blocks lie in `tiers`. Its last token is computed in any case."""
        sources = cls(computed=num_tokens)
        for tier in tiers:
            count = min(block_size, sources.computed - 1)
            setattr(sources, tier.value, getattr(sources, tier.value) + count)
            sources.computed -= count
        return sources

    def add(self, other: TokenSources) -> None:
        self.device += other.device
        self.host += other.host
        self.disk += other.disk
        self.computed += other.computed

    @property
    def cached(self) -> int:
        return self.device + self.host + self.disk

    @property
    def total(self) -> int:
        return self.cached + self.computed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position (natural log): the sampled token's, its rank (1 = most likely), and the best ones."""

    token_id: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish to keep the first `num_tokens` of a prompt longer than others: `priority` is 0 to 100, above `DEFAULT_PRIORITY`
    is retained, below it goes first. It holds for `ttl_s` seconds from each use of the blocks and is never a promise.
    """

    num_tokens: int
    priority: int
    ttl_s: float


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate (`n` > 1 is fanned out before it gets here).

    `prompt_token_ids` is not empty. `tenant` seeds the hash chain (see `hashing.tenant_salt`); requests of different
    tenants never share a block. `owner` is the tenant's public label (see `hashing.owner_label`), `prefix_name` what the
    client calls the prompt. `eos_token_ids` end generation unless `sampling.ignore_eos`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    tenant: bytes = b""
    eos_token_ids: frozenset[int] = frozenset()
    arrival_s: float = 0.0
    owner: str = SHARED_OWNER
    prefix_name: str | None = None
    retention: tuple[Retention, ...] = ()


@dataclass(slots=True)
class EngineOutput:
    """What one step brought to one request.

    `new_token_ids` are in order; `logprobs` is parallel to them when the request asked for it. With `finish_reason` set
    this is the request's last output; STOP means that the last token is an end-of-sequence or stop token, which belongs
    to the count of tokens but not to the text, and `stop_reason` is its id when it is one of `stop_token_ids`.
    `sources` is the same object in every output of a request.
    """

    request_id: str
    new_token_ids: list[int]
    sources: TokenSources
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
