"""The small endpoints: models, tokenize, detokenize, health, version, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from tieredkv import __version__
from tieredkv.errors import CapacityError, RequestError
from tieredkv.server.errors import JSONResponse
from tieredkv.server.prompts import encode_messages, encode_prompts, parse_messages
from tieredkv.server.protocol import DetokenizeBody, TokenizeBody
from tieredkv.server.service import RETRY_AFTER_DRAIN_S, Service, get_service


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tieredkv",
        "root": service.engine.model_name,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    service = get_service(request)
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.names]})


async def get_model(request: Request) -> Response:
    """`GET /v1/models/{id}`."""
    service = get_service(request)
    name = service.check_model(request.path_params["model"], default=False)
    return JSONResponse(_model(service, name))


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`."""
    service = get_service(request)
    body = await service.read(request, TokenizeBody)
    service.check_model(body.model)
    tokenizer = service.engine.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Either 'prompt' or 'messages' is needed.", param="prompt")
    if body.prompt == "":
        token_ids: list[int] = []
    elif body.prompt is not None:
        prompts = await encode_prompts(tokenizer, [body.prompt], add_special_tokens=body.add_special_tokens)
        token_ids = prompts[0].token_ids
    else:
        prompt = await encode_messages(
            tokenizer,
            parse_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        token_ids = prompt.token_ids
    names = [tokenizer.token_text(t) for t in token_ids] if body.return_token_strs else None
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
    )


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`."""
    service = get_service(request)
    body = await service.read(request, DetokenizeBody)
    service.check_model(body.model)
    limit = service.engine.vocab_size
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < limit):
        raise RequestError(f"'tokens' must be in [0, {limit}).", param="tokens")
    text = await asyncio.to_thread(service.engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


async def health(request: Request) -> Response:
    """`GET /health`: 200, with an empty body while all is well and `warnings` otherwise, or 503 with the reason."""
    reason = get_service(request).health()
    if reason is not None:
        raise CapacityError(f"Not healthy: {reason}.", status=503, retry_after_s=RETRY_AFTER_DRAIN_S)
    warnings = get_service(request).engine.warnings()
    return JSONResponse({"warnings": warnings}) if warnings else Response()


async def version(request: Request) -> Response:
    """`GET /version`."""
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """`GET /metrics`, in Prometheus' text format."""
    return Response(
        generate_latest(get_service(request).engine.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
    )
