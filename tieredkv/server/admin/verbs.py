"""The verbs of the admin API: from a request to a call of `Admin`, and from its report to an answer.

Who may use a verb is decided before, by `access` and `operations`. Knows no key. Invariant: every verb that touches blocks,
pins or jobs passes on the scope of who asks.
"""

from __future__ import annotations

from starlette.responses import Response

from tieredkv.errors import RequestError
from tieredkv.reports import RemovalReport
from tieredkv.server.admin.bodies import (
    ClearBody,
    DemoteBody,
    EventQuery,
    FlushBody,
    LookupBody,
    PinBody,
    PrefixQuery,
    ResetQuery,
    SelectionBody,
    WarmBody,
    parse_since,
)
from tieredkv.server.admin.call import Call, RecordResponse, refusal
from tieredkv.server.errors import error_object
from tieredkv.server.sse import EventStream
from tieredkv.types import SHARED_OWNER, Tier
from tieredkv.warm_job import WarmPrompt


async def cache(call: Call) -> Response:
    return RecordResponse(await call.admin.cache())


async def prefixes(call: Call) -> Response:
    query = call.query(PrefixQuery)
    return RecordResponse(
        await call.admin.prefixes(
            limit=query.limit,
            cursor=query.cursor,
            tier=query.tier,
            pinned=query.pinned,
            tenant=query.tenant,
            query=query.q,
            scope=call.scope,
        )
    )


async def prefix(call: Call) -> Response:
    return RecordResponse(await call.admin.prefix(call.path_hash("prefix"), scope=call.scope))


async def block(call: Call) -> Response:
    return RecordResponse(await call.admin.block(call.path_hash("block"), scope=call.scope))


async def lookup(call: Call) -> Response:
    body = await call.read(LookupBody)
    tenant, _ = call.tenant(body)
    token_ids = await call.tokens(body)
    return RecordResponse(await call.admin.lookup(token_ids, tenant=tenant))


async def pin(call: Call) -> Response:
    body = await call.read(PinBody)
    prefix_id, token_ids = None, None
    if body.prefix is not None:
        if body.prompt is not None or body.messages is not None or body.tokens:
            raise RequestError("'prefix' stands in place of a prompt.", param="prefix")
        prefix_id = call.hash_of(body.prefix, "prefix")
        call.check_tenant(body.tenant)
        tenant, owner = b"", call.scope or SHARED_OWNER
    else:
        tenant, owner = call.tenant(body)
        token_ids = await call.tokens(body)
    report = await call.admin.pin(
        token_ids,
        prefix_id=prefix_id,
        tenant=tenant,
        owner=owner,
        tier=body.tier,
        ttl_s=body.ttl,
        name=body.name,
        warm=body.warm,
        scope=call.scope,
    )
    if report.outcome == "refused":
        return refusal(f"The pin was refused: {report.reason}.", status=409, code="pin_refused", pin=report)
    return RecordResponse(report, status_code=201)


async def pins(call: Call) -> Response:
    return RecordResponse({"pins": await call.admin.pins(scope=call.scope)})


async def get_pin(call: Call) -> Response:
    return RecordResponse(await call.admin.get_pin(call.request.path_params["id"], scope=call.scope))


async def unpin(call: Call) -> Response:
    return RecordResponse(await call.admin.unpin(call.request.path_params["id"], scope=call.scope))


async def warm(call: Call) -> Response:
    call.service.check_accepting()
    body = await call.read(WarmBody)
    prompts = []
    for index, entry in enumerate(body.prompts):
        call.check_model(entry.model)
        tenant, owner = call.tenant(entry)
        token_ids = await call.tokens(entry, f"prompts.{index}.")
        prompts.append(
            WarmPrompt(
                token_ids, name=entry.name, tenant=tenant, owner=owner, pin=entry.pin, ttl_s=entry.ttl, tier=entry.tier
            )
        )
    report = await call.admin.warm(prompts, name=body.name, owner=call.scope or SHARED_OWNER)
    return RecordResponse(report, status_code=202)


async def jobs(call: Call) -> Response:
    return RecordResponse({"jobs": await call.admin.jobs(scope=call.scope)})


async def job(call: Call) -> Response:
    return RecordResponse(await call.admin.job(call.request.path_params["id"], scope=call.scope))


async def cancel_job(call: Call) -> Response:
    return RecordResponse(await call.admin.cancel_job(call.request.path_params["id"], scope=call.scope))


async def clear(call: Call) -> Response:
    body = await call.read(ClearBody)
    prefix_id = _selected(call, body)
    tiers = None if body.tiers is None else set(body.tiers)
    return _removal(
        await call.admin.clear(tiers=tiers, prefix_id=prefix_id, tenant=call.scope or body.tenant, scope=call.scope)
    )


async def demote(call: Call) -> Response:
    body = await call.read(DemoteBody)
    prefix_id = _selected(call, body)
    tiers: set[Tier] = {Tier.DEVICE} if body.tiers is None else {*body.tiers}
    return _removal(
        await call.admin.demote(tiers=tiers, prefix_id=prefix_id, tenant=call.scope or body.tenant, scope=call.scope)
    )


def _selected(call: Call, body: SelectionBody) -> str | None:
    call.check_tenant(body.tenant)
    return None if body.prefix is None else call.hash_of(body.prefix, "prefix")


def _removal(report: RemovalReport) -> Response:
    """200, or 409 with the same fields beside the error: what is gone, and what stayed and why."""
    if report.complete:
        return RecordResponse(report)
    stayed = ", ".join(
        f"{each.tier}: {each.error or f'{each.in_use} in use, {each.pinned} pinned'}"
        for each in report.tiers
        if each.in_use or each.pinned or each.error
    )
    error = error_object(f"Not everything could be removed ({stayed}).", status=409, code="incomplete")
    return RecordResponse({"tiers": report.tiers, "complete": False} | error, status_code=409)


async def flush(call: Call) -> Response:
    body = await call.read(FlushBody, optional=True)
    report = await call.admin.flush(body.timeout)
    if report.saved:
        return RecordResponse(report)
    error = error_object(
        f"{report.num_unsaved_blocks} blocks could not be saved in time.", status=504, code="flush_timeout"
    )
    return RecordResponse({"saved": False, "num_unsaved_blocks": report.num_unsaved_blocks} | error, status_code=504)


async def verify(call: Call) -> Response:
    return RecordResponse(await call.admin.verify())


async def reset_prefix_cache(call: Call) -> Response:
    query = call.query(ResetQuery)
    report = await call.admin.clear(tiers=None if query.reset_external else {Tier.DEVICE})
    return Response() if report.complete else _removal(report)


async def events(call: Call) -> Response:
    """Start from `since` or, as browsers say it, `Last-Event-ID`; without them from a snapshot."""
    wanted, seen = call.query(EventQuery).since, call.request.headers.get("last-event-id")
    # Both are looked at: what is wrong is never passed over.
    ids = [parse_since(text) for text in (wanted, seen) if text is not None]
    since = ids[0] if ids else None
    if call.request.method == "HEAD":
        return Response(media_type=EventStream.media_type)
    return call.service.followers.follow(call.admin.events(since=since), since[0] if since else "")
