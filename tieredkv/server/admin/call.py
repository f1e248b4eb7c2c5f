"""One admin request on its way: who asks, what it says, and for whom.

Turns prompts into token ids and tenants into salts, for every verb in the same way. Knows the service's face; no verb.
Raises `RequestError`. Invariant: a tenant's request never yields another tenant's salt.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tieredkv.errors import RequestError
from tieredkv.hashing import owner_label, tenant_salt
from tieredkv.server.admin.access import Identity
from tieredkv.server.admin.bodies import LookupBody, PromptBody, Query, parse_query
from tieredkv.server.errors import error_object
from tieredkv.server.prompts import encode_beginning, encode_messages, encode_prompts, parse_messages
from tieredkv.server.protocol import Body, parse
from tieredkv.server.service import Service, get_service
from tieredkv.types import SHARED_OWNER

if TYPE_CHECKING:
    from tieredkv.admin import Admin

BodyT = TypeVar("BodyT", bound=Body)
QueryT = TypeVar("QueryT", bound=Query)
_HASH = re.compile(r"[0-9a-f]{64}")


class RecordResponse(Response):
    """A record of `tieredkv.reports`, or a mapping that holds some, as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        # Tiers are keys of mappings.
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def refusal(message: str, *, status: int, code: str, **details: Any) -> Response:
    """An error answer whose error object has further fields."""
    body = error_object(message, status=status, code=code)
    body["error"].update(details)
    return RecordResponse(body, status_code=status)


@dataclass(frozen=True, slots=True)
class Call:
    """One admin request. `scope` is None for an administrator, else the label of the tenant who asks."""

    request: Request
    service: Service
    identity: Identity

    @classmethod
    def of(cls, request: Request) -> Call:
        """Raises `TypeError` when nobody has decided about the request, which no configuration leads to."""
        identity = request.scope.get("state", {}).get("identity")
        if not isinstance(identity, Identity):
            raise TypeError("an admin request came past the gate")
        return cls(request, get_service(request), identity)

    @property
    def admin(self) -> Admin:
        admin = self.service.admin
        if admin is None:
            raise TypeError("the service has no admin")
        return admin

    @property
    def scope(self) -> str | None:
        return self.identity.scope

    async def read(self, kind: type[BodyT], *, optional: bool = False) -> BodyT:
        """The body, checked. With `optional` a request without any body has an empty one."""
        headers = self.request.headers
        # A body of unknown length is announced by its coding.
        no_body = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        if optional and no_body and "content-type" not in headers:
            return parse(kind, {})
        body = await self.service.read(self.request, kind)
        self.check_model(body.model)
        return body

    def check_model(self, name: str | None) -> None:
        """Raise `RequestError` (404) unless `name` is None or served here; an empty name is no name of a model."""
        if name is not None:
            self.service.check_model(name, default=False)

    def query(self, kind: type[QueryT]) -> QueryT:
        return parse_query(kind, self.request.query_params)

    def hash_of(self, text: str, what: str) -> str:
        """An id that is a block's hash. Raises `RequestError` (404) for what cannot be one."""
        found = text.lower()
        if not _HASH.fullmatch(found):
            raise RequestError(f"There is no {what} {text[:64]!r}.", param=what, status=404, code="not_found")
        return found

    def path_hash(self, what: str) -> str:
        return self.hash_of(self.request.path_params["id"], what)

    def check_tenant(self, label: str | None) -> None:
        """Raise `RequestError` (404) when a tenant names another one, who is to it as if absent."""
        if self.scope is not None and label not in (None, self.scope):
            raise _no_tenant(str(label))

    def tenant(self, body: PromptBody) -> tuple[bytes, str]:
        """The salt and the label of whose requests `body` means."""
        self.check_tenant(body.tenant)
        key = self.identity.api_key
        if self.scope is None:
            by_label: dict[str, str | None] = {owner_label(key): key for key in self.service.api_keys}
            by_label = by_label or {SHARED_OWNER: None}
            label = body.tenant
            if label is None:
                if len(by_label) > 1:
                    raise RequestError(
                        "'tenant' is needed: each API key has a cache of its own. There are "
                        f"{', '.join(sorted(by_label))}.",
                        param="tenant",
                    )
                (label,) = by_label
            if label not in by_label:
                raise _no_tenant(label)
            key = by_label[label]
        return tenant_salt(api_key=key, cache_salt=body.cache_salt), owner_label(key)

    async def tokens(self, body: PromptBody, where: str = "") -> list[int]:
        """The token ids of the prompt in `body`, which stands at `where` in the request."""
        ways = {"prompt": body.prompt, "messages": body.messages, "tokens": body.tokens or None}
        if sum(value is not None for value in ways.values()) != 1:
            raise RequestError("Exactly one of 'prompt', 'messages' and 'tokens' is needed.", param=f"{where}prompt")
        # Short texts are encoded right here: let others have the loop before the next one.
        await asyncio.sleep(0)
        if body.prompt is not None:
            tokenizer = self.service.engine.tokenizer
            (prompt,) = await encode_prompts(tokenizer, [body.prompt], add_special_tokens=body.add_special_tokens)
            token_ids, param = prompt.token_ids, "prompt"
        elif body.messages is not None:
            token_ids, param = await self._encode(body), "messages"
        else:
            token_ids, param = body.tokens, "tokens"
        self._check_tokens(token_ids, where + param)
        return token_ids

    async def _encode(self, body: PromptBody) -> list[int]:
        tokenizer, messages = self.service.engine.tokenizer, parse_messages(body.messages)
        if not isinstance(body, LookupBody):
            return await asyncio.to_thread(encode_beginning, tokenizer, messages)
        prompt = await encode_messages(
            tokenizer,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
        )
        return prompt.token_ids

    def _check_tokens(self, token_ids: list[int], param: str) -> None:
        engine = self.service.engine
        if not (min(token_ids) >= 0 and max(token_ids) < engine.vocab_size):
            raise RequestError(f"'{param}' must hold token ids in [0, {engine.vocab_size}).", param=param)
        if len(token_ids) > engine.max_model_len:
            raise RequestError(
                f"'{param}' has {len(token_ids)} tokens; the longest request has {engine.max_model_len}.",
                param=param,
                code="context_length_exceeded",
            )


def _no_tenant(label: str) -> RequestError:
    return RequestError(f"There is no tenant {label[:64]!r}.", param="tenant", status=404, code="not_found")
