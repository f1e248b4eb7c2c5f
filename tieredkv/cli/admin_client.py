"""The admin API of a running server, over the standard library's HTTP client: one request a call, and the event stream.

Knows HTTP and JSON, and no terminal. Raises `AdminError`, whose message is fit for one line, for whatever is not an answer
to the question: no server, a refusal, something that is not this API.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tieredkv.errors import AdminError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
# Several times what the server lets pass before it sends a sign of life.
_SILENCE_S = 60.0
_MAX_ANSWER_NBYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event. `id` is None for what a reader cannot go on from."""

    id: str | None
    name: str
    data: Any


class AdminClient:
    """Talks to the server at `url` (http or https, with or without a path in front of `/admin`)."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AdminError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise AdminError(f"{url!r} is not the URL of a server, such as {DEFAULT_URL}")
        self._shown = f"{parts.scheme}://{parts.netloc}"
        self._is_https = parts.scheme == "https"
        self._host, self._port, self._path = host, port, parts.path.rstrip("/")
        self._headers = {"user-agent": "tieredkv", "accept": "application/json"}
        if key:
            if not key.isascii() or not key.isprintable():
                raise AdminError("the key has characters that a header cannot carry")
            self._headers["authorization"] = f"Bearer {key}"

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        also: tuple[int, ...] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[int, Any]:
        """Status and JSON of an answer to `path`, below `/admin`: a success, or one of the statuses `also`."""
        with self._request(method, path, body, query, timeout_s) as response:
            try:
                raw = response.read(_MAX_ANSWER_NBYTES)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from None
        answer = _decode(raw)
        if response.status // 100 == 2 or response.status in also:
            if not isinstance(answer, dict):
                raise AdminError(f"{self._shown} does not speak the admin API")
            return response.status, answer
        raise self._refusal(response.status, answer)

    def events(self, since: str | None = None) -> Iterator[ServerEvent]:
        """The events of the server, for as long as it sends some."""
        query = None if since is None else {"since": since}
        with self._request("GET", "/events", None, query, _SILENCE_S) as response:
            if response.status != 200:
                raise self._refusal(response.status, _decode(response.read(_MAX_ANSWER_NBYTES)))
            try:
                yield from _parse(response)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from None

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, Any] | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = f"{self._path}/admin{path}" + (f"?{urlencode(given)}" if given else "")
        headers, payload = self._headers, None
        if body is not None:
            payload = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
            headers = headers | {"content-type": "application/json"}
        connection = (
            http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=ssl.create_default_context())
            if self._is_https
            else http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        )
        with contextlib.closing(connection):
            try:
                connection.request(method, target, payload, headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                raise self._unreachable(error) from None
            with response:
                yield response

    def _unreachable(self, error: Exception) -> AdminError:
        if isinstance(error, TimeoutError):
            return AdminError(f"{self._shown} did not answer in time")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return AdminError(f"cannot talk to {self._shown}: {reason}")

    def _refusal(self, status: int, answer: Any) -> AdminError:
        try:
            message = answer["error"]["message"]
        except (TypeError, KeyError):
            return AdminError(f"{self._shown} answered {status} and does not speak the admin API")
        hint = " (--key or TIEREDKV_ADMIN_KEY gives one)" if status == 401 else ""
        return AdminError(f"{message}{hint}")


def segment(text: str) -> str:
    """`text` as one part of a path."""
    return quote(text, safe="") or "%20"


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _parse(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[ServerEvent]:
    """Server-sent events from the lines of a stream."""
    fields: dict[str, str] = {}
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        if "data" in fields:
            yield ServerEvent(fields.get("id"), fields.get("event", "message"), _decode(fields["data"].encode()))
        fields = {}
