"""What all endpoints share: the engine, the served names, and the order in which a request to generate is handled.

Knows no wire format. Invariant: between the creation of a `Generation` and the code that is bound to close it there is
no await, so a cancelled handler cannot leave a sequence running.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tieredkv.config import Config
from tieredkv.errors import CapacityError, RequestError
from tieredkv.hashing import owner_label, tenant_salt
from tieredkv.server.admin.followers import Followers
from tieredkv.server.body import read_json
from tieredkv.server.breakpoints import parse_wishes
from tieredkv.server.errors import JSONResponse
from tieredkv.server.face import Engine
from tieredkv.server.generation import Generation
from tieredkv.server.prompts import Prompt
from tieredkv.server.protocol import Body, GenerateBody, parse, parse_logit_bias
from tieredkv.server.sse import EventStream, until_disconnect
from tieredkv.server.writer import Writer
from tieredkv.types import Retention, SamplingParams

if TYPE_CHECKING:
    from tieredkv.admin import Admin

BodyT = TypeVar("BodyT", bound=Body)
RETRY_AFTER_DRAIN_S = 10


class Service:
    """The state of the application. `draining` is set once, when the process was told to stop. `admin` is None where there is
    no admin API.
    """

    def __init__(self, engine: Engine, config: Config, admin: Admin | None = None) -> None:
        self.engine = engine
        self.admin = admin
        self.api_keys = config.server.api_key
        self.followers = Followers()
        self.names = config.model.served_model_name or (engine.model_name,)
        self.created = int(time.time())
        self.draining = False
        self._max_body_nbytes = config.server.max_body_size

    def health(self) -> str | None:
        """None while requests are served, else the reason why not."""
        return "the server is shutting down" if self.draining else self.engine.health()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; what runs goes on."""
        self.draining = True
        self.engine.begin_drain()

    def check_accepting(self) -> None:
        """Raise `CapacityError` (503) while draining or when the engine has died."""
        reason = self.health()
        if reason is not None:
            raise CapacityError(f"Not accepting requests: {reason}.", status=503, retry_after_s=RETRY_AFTER_DRAIN_S)

    def check_model(self, name: str | None, *, default: bool = True) -> str:
        """The name to answer with; no name means the first one where `default` is set.

        Raises `RequestError` (404) for a model that is not served here.
        """
        if not name and default:
            return self.names[0]
        if name is None or name not in self.names:
            raise RequestError(
                f"The model '{(name or '')[:200]}' does not exist; this server has {', '.join(self.names)}.",
                param="model",
                status=404,
                code="model_not_found",
            )
        return name

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The body of `request`, checked. Raises `RequestError`."""
        return parse(kind, await read_json(request, self._max_body_nbytes))

    def sampling(self, body: GenerateBody, num_prompt: int, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The sampling parameters for a prompt of `num_prompt` tokens; a given `max_tokens` wins over the one here,
        which is cut to what fits.
        """
        room = max(self.engine.max_model_len - num_prompt, 1)
        return SamplingParams(
            n=body.n,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=body.seed,
            max_tokens=min(max_tokens, room) if body.max_tokens is None else body.max_tokens,
            min_tokens=body.min_tokens,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=parse_logit_bias(body.logit_bias),
            logprobs=logprobs,
            skip_special_tokens=body.skip_special_tokens,
        )

    def start(
        self,
        request: Request,
        body: GenerateBody,
        prefix: str,
        prompts: Sequence[Prompt],
        samplings: list[SamplingParams],
    ) -> tuple[str, Generation]:
        """Submit everything; returns the answer's id and the running generation, which the caller has to close."""
        self.check_accepting()
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        tenant = tenant_salt(api_key=request.state.api_key, cache_salt=body.cache_salt)
        owner = owner_label(request.state.api_key)
        wishes = parse_wishes(body.cache_control, body.prompt_cache_retention)
        prompts = [_retained(prompt, wishes) for prompt in prompts] if wishes else prompts
        generation = Generation(
            self.engine, request_id, prompts, samplings, tenant, owner=owner, prefix_name=body.prompt_cache_key
        )
        return request_id, generation

    async def respond(
        self, request: Request, body: GenerateBody, generation: Generation, make_writer: Callable[[], Writer]
    ) -> Response:
        """Stream the answer or wait for it; a client that goes away ends the generation."""
        try:
            writer = make_writer()
            if not body.stream:
                return JSONResponse(await until_disconnect(request.receive, writer.answer()))
            stream = EventStream(writer.events(), generation.close)
        except BaseException:
            generation.close()
            raise
        return stream


def _retained(prompt: Prompt, wishes: Sequence[tuple[int, float]]) -> Prompt:
    """The same with wishes, priority and seconds, for all of it."""
    more = (Retention(len(prompt.token_ids), priority, ttl_s) for priority, ttl_s in wishes)
    return replace(prompt, retention=(*prompt.retention, *more))


def get_service(request: Request) -> Service:
    """The service of the application that handles `request`."""
    service = request.app.state.service
    if not isinstance(service, Service):
        raise TypeError("the application has no service")
    return service
