"""The exceptions that callers may catch.

TieredKVError
├── ConfigError            a bad or unknown setting; names key, value and source
├── UnsupportedModelError  a model that would be served wrongly; names the reason
├── RequestError           the request cannot be honoured (HTTP 4xx); names the parameter
├── CapacityError          no room now (HTTP 429 or 503); the same request may work later
├── StorageError           a lower tier failed; the cache turns it into a miss
├── AdminError             an operator's question was not answered; the command line prints why
├── DeviceLostError        the GPU computes nothing any more: the engine stops, only a new process helps
└── InvariantError         the program contradicts itself: a bug, never the caller's fault
"""

from __future__ import annotations


class TieredKVError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(TieredKVError):
    """A setting is unknown or has a bad value."""

    def __init__(self, message: str, *, key: str | None = None, source: str | None = None) -> None:
        prefix = f"{source}: " if source else ""
        super().__init__(f"{prefix}{key}: {message}" if key else f"{prefix}{message}")
        self.key = key
        self.source = source


class UnsupportedModelError(TieredKVError):
    """The model would be computed wrongly, so it is refused at load."""


class RequestError(TieredKVError):
    """The request cannot be honoured as it stands.

    `param` names the offending field, `status` is the HTTP status (400 unless told), `code` is OpenAI's error code.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class CapacityError(TieredKVError):
    """No room now. `status` is 429 (queue full) or 503 (draining, engine dead); `retry_after_s` is a hint in seconds."""

    def __init__(self, message: str, *, status: int = 429, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class StorageError(TieredKVError):
    """A tier below the device failed; the cache counts it and treats it as a miss."""


class AdminError(TieredKVError):
    """A server was not reached, or refused what an operator asked of it."""


class DeviceLostError(TieredKVError):
    """The device computes nothing any more, whatever it is asked: the engine stops, so that whoever watches it restarts it."""


class InvariantError(TieredKVError):
    """An invariant is broken. Never caught on a request's path; the engine fails the step."""
