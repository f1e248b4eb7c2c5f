"""What admin requests may say: bodies and query parameters, with their types, bounds and descriptions.

The same models check requests and describe them in the OpenAPI document. As in the rest of the server, types are strict,
null means the default, and unknown fields are ignored. Knows no engine; `prompts` turns texts into token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic import model_validator as _model_validator
from pydantic.config import JsonDict, JsonValue

from tieredkv.errors import RequestError
from tieredkv.prompt_file import MAX_NAME_CHARS, MAX_TTL_S, parse_ttl
from tieredkv.server.prompts import ROLES
from tieredkv.server.protocol import Body
from tieredkv.types import Tier

MAX_LIMIT = 1000
MAX_WARM_PROMPTS = 1024
MAX_FLUSH_S = 600.0
DEFAULT_FLUSH_S = 30.0
_SINCE = re.compile(r"([0-9A-Za-z_.]{1,64})-([0-9]{1,18})")
QueryT = TypeVar("QueryT", bound="Query")


def parse_since(text: str) -> tuple[str, int]:
    """Epoch and sequence number from the id of an event. Raises `RequestError`."""
    found = _SINCE.fullmatch(text)
    if found is None:
        raise RequestError("'since' must be the id of an event: EPOCH-SEQUENCE.", param="since")
    return found[1], int(found[2])


def _drop_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _tier(value: Any) -> Any:
    # A strict enum field refuses its own values' texts.
    return Tier(value) if isinstance(value, str) and value in Tier.__members__.values() else value


def _upper(tier: Tier) -> Tier:
    if tier is Tier.DISK:
        raise ValueError("there is no tier below the disk")
    return tier


TierField = Annotated[Tier, BeforeValidator(_tier)]
UpperTierField = Annotated[
    TierField, AfterValidator(_upper), WithJsonSchema({"enum": [tier for tier in Tier if tier is not Tier.DISK]})
]
Ttl = Annotated[
    float,
    BeforeValidator(parse_ttl),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TTL_S},
                {"type": "string", "pattern": "^[1-9][0-9]{0,2}[smhd]?$"},
            ]
        }
    ),
]
TokenIds = Annotated[list[int], FailFast(), Field(min_length=1)]
_NOT_NULL: JsonDict = {"not": {"type": "null"}}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Messages = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": sorted(ROLES)},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]},
                },
                "required": ["role", "content"],
            },
        }
    ),
]


def _only_one_of(*names: str) -> list[JsonValue]:
    """Schemas for each of `names` being there and the others missing or null."""
    return [
        {"required": [name], "properties": {each: {"type": "null"} if each != name else _NOT_NULL for each in names}}
        for name in names
    ]


class PromptBody(Body):
    """A prompt, in exactly one of three ways."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _only_one_of("prompt", "messages", "tokens")})

    prompt: str | None = Field(None, description="Text, as in `/v1/completions`.", min_length=1)
    messages: Messages = Field(None, description="Messages, as in `/v1/chat/completions`.")
    tokens: TokenIds = Field(default_factory=list, description="Token ids.")
    cache_salt: str | None = Field(None, description="The `cache_salt` of the requests meant.", min_length=1)
    tenant: str | None = Field(
        None, description="For administrators: the tenant whose requests are meant, where the server has API keys."
    )
    add_special_tokens: bool = Field(True, description="For `prompt`: let the tokenizer add its special tokens.")


class LookupBody(PromptBody):
    """`POST /admin/cache/lookup`: messages are those of a whole request."""

    add_generation_prompt: bool = Field(
        True, description="For `messages`: end with the opening of an assistant message."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="For `messages`: variables of the template.")


class PinBody(PromptBody):
    """`POST /admin/pins`: a prompt, or the id of a branch in `prefix`. Messages stand for what all chats that start with them
    have in common.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": _only_one_of("prompt", "messages", "tokens", "prefix")})

    prefix: str | None = Field(None, description="Id of a branch: it is pinned with everything before it.")
    tier: TierField | None = Field(None, description="The lowest tier in which the blocks must stay.")
    ttl: Ttl | None = Field(None, description="Seconds, or `5m`, `1h`, `7d`; without it the pin stays until deleted.")
    name: str | None = Field(None, max_length=MAX_NAME_CHARS)
    warm: bool = Field(True, description="Compute blocks that are missing.")


class WarmEntry(PromptBody):
    """One prompt to warm. Messages stand for what all chats that start with them have in common."""

    _nulls = _model_validator(mode="before")(_drop_nulls)

    name: str | None = Field(None, max_length=MAX_NAME_CHARS)
    pin: bool = Field(False, description="Pin it as well.")
    tier: TierField | None = Field(None, description="The lowest tier in which the blocks must be.")
    ttl: Ttl | None = Field(None, description="How long it is pinned, or retained before others without `pin`.")


class WarmBody(Body):
    """`POST /admin/cache/warm`."""

    prompts: Annotated[list[WarmEntry], FailFast()] = Field(min_length=1, max_length=MAX_WARM_PROMPTS)
    name: str | None = Field(None, max_length=MAX_NAME_CHARS)


class SelectionBody(Body):
    """Which blocks are meant."""

    tenant: str | None = Field(None, description="Only blocks of this tenant. A tenant's key always means its own.")
    prefix: str | None = Field(None, description="Only this branch and what continues it.")


class ClearBody(SelectionBody):
    """`POST /admin/cache/clear`. Without `tiers` all of them are cleared."""

    tiers: list[TierField] | None = Field(None, min_length=1, max_length=8)


class DemoteBody(SelectionBody):
    """`POST /admin/cache/demote`. Without `tiers` the device is meant; below the disk there is nothing."""

    tiers: list[UpperTierField] | None = Field(None, min_length=1, max_length=8)


class FlushBody(Body):
    """`POST /admin/cache/flush`."""

    timeout: float = Field(
        DEFAULT_FLUSH_S, ge=0, le=MAX_FLUSH_S, allow_inf_nan=False, description="Longest wait in seconds."
    )


class Query(BaseModel):
    """Base of query parameters: texts that are taken for what they say. The last of several values counts."""

    model_config = ConfigDict(extra="ignore")


def _whole(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise ValueError("must be a whole number")
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("true", "false"):
            raise ValueError("must be true or false")
        return value == "true"
    return value


class PrefixQuery(Query):
    """Filters of `GET /admin/cache/prefixes`."""

    limit: Annotated[int, BeforeValidator(_whole)] = Field(
        50, ge=1, le=MAX_LIMIT, description="Branches in one answer."
    )
    cursor: str | None = Field(None, description="`next_cursor` of the answer before.", max_length=1000)
    tier: Tier | None = Field(None, description="Branches with blocks in this tier.")
    pinned: Annotated[bool | None, BeforeValidator(_flag)] = Field(None, description="Pinned branches, or the others.")
    tenant: str | None = Field(None, description="Branches of this tenant.", max_length=1000)
    q: str | None = Field(None, description="Search in names, ids and, where it is shown, text.", max_length=1000)


class EventQuery(Query):
    """Where `GET /admin/events` starts."""

    since: str | None = Field(
        None,
        description="Id of the last event seen; without it a snapshot comes first.",
        json_schema_extra={"pattern": f"^{_SINCE.pattern}$"},
    )


class ResetQuery(Query):
    """`POST /reset_prefix_cache`, as vLLM has it."""

    reset_external: Annotated[bool, BeforeValidator(_flag)] = Field(
        False, description="Clear the tiers below the device as well."
    )


def parse_query(kind: type[QueryT], given: Mapping[str, str]) -> QueryT:
    """Query parameters as a `kind`. Raises `RequestError` that names the first wrong one."""
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"Invalid value for '{param}': {first['msg']}.", param=param) from None
