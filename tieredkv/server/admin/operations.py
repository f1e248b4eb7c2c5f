"""The admin API as a table: method, path, handler, who may use it, what it takes and what it answers.

The routes and the OpenAPI document are both made from it, so that neither can say what the other does not. Knows no key and
no schema.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from starlette.responses import Response

from tieredkv import reports
from tieredkv.server.admin import bodies, verbs
from tieredkv.server.admin.call import Call
from tieredkv.server.protocol import Body

Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Many:
    """An answer `{name: [records]}`."""

    name: str
    record: type


@dataclass(frozen=True, slots=True)
class Failure:
    """An error answer with more than the error: `inside` the error object under a name, or `beside` it as further fields."""

    description: str
    inside: tuple[str, type] | None = None
    beside: type | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. `answer` is a record, None for an empty body; `errors` are statuses beyond those that all have."""

    method: str
    path: str
    handler: Handler
    summary: str
    answer: type | Many | None
    status: int = 200
    body: type[Body] | None = None
    body_optional: bool = False
    query: type[bodies.Query] | None = None
    admin_only: bool = False
    is_stream: bool = False
    errors: tuple[int, ...] = ()
    failures: Mapping[int, Failure] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.handler.__name__


_INCOMPLETE = {
    409: Failure("Not everything could be removed: what is in use or pinned stays.", beside=reports.RemovalReport)
}
_RESET_INCOMPLETE = {409: Failure("Blocks in use or pinned stay.", beside=reports.RemovalReport)}
_NOT_SAVED = {504: Failure("Some blocks could not be saved in time.", beside=reports.FlushReport)}
_PIN_REFUSED = {409: Failure("The pin was refused: it would not fit the budget.", inside=("pin", reports.PinReport))}

OPERATIONS = (
    Operation(
        "GET",
        "/admin/cache",
        verbs.cache,
        "Tiers, gate, requests, pins and jobs now.",
        reports.CacheReport,
        admin_only=True,
    ),
    Operation(
        "GET",
        "/admin/cache/prefixes",
        verbs.prefixes,
        "Branches of the prefix tree, a page at a time.",
        reports.PrefixPage,
        query=bodies.PrefixQuery,
        errors=(400,),
    ),
    Operation(
        "GET",
        "/admin/cache/prefixes/{id}",
        verbs.prefix,
        "A branch and its blocks.",
        reports.PrefixDetail,
        errors=(404,),
    ),
    Operation("GET", "/admin/cache/blocks/{id}", verbs.block, "A block.", reports.BlockReport, errors=(404,)),
    Operation(
        "POST",
        "/admin/cache/lookup",
        verbs.lookup,
        "What a request with this prompt would find, restore, compute and save.",
        reports.LookupReport,
        body=bodies.LookupBody,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/admin/cache/warm",
        verbs.warm,
        "Compute prompts in the background.",
        reports.JobReport,
        status=202,
        body=bodies.WarmBody,
        errors=(404, 429),
    ),
    Operation(
        "POST",
        "/admin/cache/demote",
        verbs.demote,
        "Move blocks to the next lower tier.",
        reports.RemovalReport,
        body=bodies.DemoteBody,
        errors=(404,),
        failures=_INCOMPLETE,
    ),
    Operation(
        "POST",
        "/admin/cache/clear",
        verbs.clear,
        "Remove blocks.",
        reports.RemovalReport,
        body=bodies.ClearBody,
        errors=(404,),
        failures=_INCOMPLETE,
    ),
    Operation(
        "POST",
        "/admin/cache/flush",
        verbs.flush,
        "Save what a restart would lose.",
        reports.FlushReport,
        body=bodies.FlushBody,
        body_optional=True,
        admin_only=True,
        failures=_NOT_SAVED,
    ),
    Operation(
        "POST",
        "/admin/cache/verify",
        verbs.verify,
        "Check the blocks of every tier.",
        reports.VerifyReport,
        admin_only=True,
    ),
    Operation("GET", "/admin/pins", verbs.pins, "All pins.", Many("pins", reports.PinReport)),
    Operation(
        "POST",
        "/admin/pins",
        verbs.pin,
        "Keep a prompt's blocks, or a branch with everything before it.",
        reports.PinReport,
        status=201,
        body=bodies.PinBody,
        errors=(404, 429),
        failures=_PIN_REFUSED,
    ),
    Operation("GET", "/admin/pins/{id}", verbs.get_pin, "A pin.", reports.PinReport, errors=(404,)),
    Operation("DELETE", "/admin/pins/{id}", verbs.unpin, "Take a pin away.", reports.PinReport, errors=(404,)),
    Operation("GET", "/admin/jobs", verbs.jobs, "Warming jobs, the newest first.", Many("jobs", reports.JobReport)),
    Operation("GET", "/admin/jobs/{id}", verbs.job, "A job.", reports.JobReport, errors=(404,)),
    Operation("DELETE", "/admin/jobs/{id}", verbs.cancel_job, "Cancel a job.", reports.JobReport, errors=(404,)),
    Operation(
        "GET",
        "/admin/events",
        verbs.events,
        "What the tiers gain and lose, as server-sent events.",
        None,
        query=bodies.EventQuery,
        admin_only=True,
        is_stream=True,
        errors=(400, 429),
    ),
)
RESET = Operation(
    "POST",
    "/reset_prefix_cache",
    verbs.reset_prefix_cache,
    "Clear the device, as vLLM does.",
    None,
    query=bodies.ResetQuery,
    admin_only=True,
    errors=(400,),
    failures=_RESET_INCOMPLETE,
)
