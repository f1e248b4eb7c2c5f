"""`/admin/openapi.json`: an OpenAPI 3.1 document of the admin API.

Made from the table of operations, the request models and the records of `tieredkv.reports`; nothing is described a second
time by hand. Knows no engine but its names and its vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from tieredkv import __version__
from tieredkv.reports import CacheEvent, EventGap, EventSnapshot
from tieredkv.server.admin.operations import OPERATIONS, RESET, Failure, Many, Operation

_REF = "#/components/schemas/{model}"
_REASONS = {
    400: "The request is not valid.",
    401: "The key is missing or wrong.",
    403: "Not from here, or not with this key.",
    404: "There is no such thing, or it is not yours.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too much at once; try again later.",
    503: "The server is stopping, or its engine has died.",
}
_NULL = {"type": "null"}
_DESCRIPTION = """Inspect, keep, warm and clear what the cache holds.

An administrator sees everything. A tenant, who sends one of the server's API keys, sees and changes only what is its own;
everything else is to it as if absent. Without an admin key the server answers on its own machine only, and there no key
is needed. Errors have the shape of OpenAI's API."""
_INFO = {
    "title": "TieredKV admin API",
    "version": __version__,
    "description": _DESCRIPTION,
    "license": {"name": "Apache-2.0"},
}


class _Schema(GenerateJsonSchema):
    """Answers always have all their fields; in requests null stands for a field that is left out."""

    def field_is_required(
        self,
        field: core_schema.ModelField | core_schema.DataclassField | core_schema.TypedDictField,
        total: bool,
    ) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if self.mode == "serialization":
            return made
        default = made.pop("default", None)
        notes = {key: made.pop(key) for key in ("description", "title") if key in made}
        if _NULL not in made.get("anyOf", ()):
            made = {"anyOf": [made, _NULL]}
        return made | notes | ({} if default in (None, []) else {"default": default})


def document(names: Sequence[str], vocab_size: int, *, with_reset: bool = True) -> dict[str, Any]:
    """The whole document, for a server of the models `names` with token ids below `vocab_size`."""
    operations = [*OPERATIONS, *([RESET] if with_reset else [])]
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
    schemas = _schemas(operations)
    for schema in schemas.values():
        fields = schema.get("properties", {})
        if "tokens" in fields:
            fields["tokens"]["anyOf"][0]["items"] |= {"minimum": 0, "maximum": vocab_size - 1}
        if "model" in fields and schema["title"].endswith(("Body", "Entry")):
            fields["model"] = {"enum": [*names, None], "description": "One of the served names."}
    return {
        "openapi": "3.1.0",
        "info": _INFO,
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An admin key, or a tenant's API key."}
            },
        },
        "security": [{"key": []}],
    }


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    wanted: list[tuple[Any, JsonSchemaMode, TypeAdapter[Any]]] = []
    records: dict[type, None] = dict.fromkeys((CacheEvent, EventSnapshot, EventGap))
    bodies: dict[type, None] = {}
    for operation in operations:
        answer = operation.answer.record if isinstance(operation.answer, Many) else operation.answer
        for failure in operation.failures.values():
            records |= dict.fromkeys(filter(None, (failure.beside, failure.inside and failure.inside[1])))
        if answer is not None:
            records[answer] = None
        if operation.body is not None:
            bodies[operation.body] = None
    wanted = [(record, "serialization", TypeAdapter(record)) for record in records]
    wanted += [(body, "validation", TypeAdapter(body)) for body in bodies]
    _, definitions = TypeAdapter.json_schemas(wanted, ref_template=_REF, schema_generator=_Schema)
    found: dict[str, Any] = definitions["$defs"]
    found["Error"] = _ERROR
    return found


_ERROR = {
    "title": "Error",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def _ref(kind: type | str) -> dict[str, Any]:
    return {"$ref": _REF.format(model=kind if isinstance(kind, str) else kind.__name__)}


_EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Where a reader can go on from, if from here."},
        "event": {"enum": ["snapshot", "stored", "removed", "gap", "error"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": [_ref(kind) for kind in (EventSnapshot, CacheEvent, EventGap, "Error")]},
        },
    },
    "required": ["event", "data"],
}


def _describe(operation: Operation) -> dict[str, Any]:
    who = "For administrators." if operation.admin_only else "For administrators and, within their own, tenants."
    result: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "description": who,
        "tags": ["admin"],
        "responses": _responses(operation),
    }
    parameters = [*_path_parameters(operation), *_query_parameters(operation)]
    if operation.is_stream:
        parameters.append(
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "As `since`, which wins over it.",
                "schema": parameters[-1]["schema"],
            }
        )
    if parameters:
        result["parameters"] = parameters
    if operation.body is not None:
        result["requestBody"] = {
            "required": not operation.body_optional,
            "content": {"application/json": {"schema": _ref(operation.body)}},
        }
    return result


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    if "{id}" not in operation.path:
        return []
    return [{"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    schema = operation.query.model_json_schema(ref_template=_REF)
    result = []
    for name, field in schema["properties"].items():
        description = field.pop("description", None)
        field.pop("title", None)
        if "anyOf" in field:
            # A parameter cannot be null, only left out.
            (real,) = (each for each in field.pop("anyOf") if each != _NULL)
            field |= real
        if field.get("default", 0) is None:
            del field["default"]
        result.append({"name": name, "in": "query", "description": description, "schema": field})
    return result


def _responses(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    good: dict[str, Any] = {"description": operation.summary}
    if operation.is_stream:
        good["content"] = {"text/event-stream": {"schema": _EVENT}}
        good["description"] = "Server-sent events; this is the schema of each."
    elif isinstance(answer, Many):
        many = {
            "type": "object",
            "properties": {answer.name: {"type": "array", "items": _ref(answer.record)}},
            "required": [answer.name],
        }
        good["content"] = {"application/json": {"schema": many}}
    elif answer is not None:
        good["content"] = {"application/json": {"schema": _ref(answer)}}
    errors = {401, 403, 503, *operation.errors}
    if operation.body is not None:
        errors |= {400, 404, 413, 415}
    result = {str(operation.status): good}
    for status in sorted(errors | operation.failures.keys()):
        failure = operation.failures.get(status)
        result[str(status)] = {
            "description": failure.description if failure else _REASONS[status],
            "content": {"application/json": {"schema": _failure(failure) if failure else _ref("Error")}},
        }
    return result


def _failure(failure: Failure) -> dict[str, Any]:
    parts = [_ref("Error")]
    if failure.beside is not None:
        parts.append(_ref(failure.beside))
    if failure.inside is not None:
        name, record = failure.inside
        inner = {"type": "object", "properties": {name: _ref(record)}, "required": [name]}
        parts.append({"type": "object", "properties": {"error": inner}, "required": ["error"]})
    return {"allOf": parts}
