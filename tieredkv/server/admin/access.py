"""Who may use the admin API, decided before any handler runs.

    --admin-key set    an admin key: administrator | a tenant's API key: that tenant | else 401
    no --admin-key     only peers on this machine, who address it as such and come through no proxy:
                       no key: administrator | a tenant's API key: that tenant | another key: 401
                       everybody else: 403

A tenant sees and changes only what is its own (`Identity.scope`). Whatever the key, a browser may not be used by another
site to change anything. Knows ASGI scopes and keys; no endpoint and no cache.

Invariants: keys are compared in constant time; a key that is sent and wrong is never ignored; what cannot be parsed is
refused. The page's static files hold nothing secret, so they need no key, only the right place.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import Scope

from tieredkv.errors import ConfigError, RequestError
from tieredkv.hashing import owner_label
from tieredkv.server.entrance import bearer, match_key

ROOT = "/admin"
UI = "/admin/ui"
RESET = "/reset_prefix_cache"
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_PROXY_HEADERS = frozenset({b"forwarded", b"via", b"x-real-ip"})
_PROXY_PREFIX = b"x-forwarded-"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. `scope` is None for an administrator, else the owner label of the tenant with `api_key`."""

    scope: str | None = None
    api_key: str | None = None


class Access:
    """Decides about requests to the admin API. Raises `ConfigError` for a key that would be both admin's and tenant's."""

    def __init__(self, admin_keys: Sequence[str], api_keys: Sequence[str]) -> None:
        if set(admin_keys) & set(api_keys):
            raise ConfigError("an admin key must not be one of the API keys", key="admin_key")
        self._num_admin = len(admin_keys)
        self._keys = [key.encode("utf-8") for key in (*admin_keys, *api_keys)]
        self._identities = [Identity() for _ in admin_keys] + [Identity(owner_label(key), key) for key in api_keys]

    def covers(self, path: str) -> bool:
        """Whether this access, and not that of the API keys, decides about `path`."""
        return path in (ROOT, RESET) or path.startswith(f"{ROOT}/")

    def admit(self, scope: Scope) -> Identity | None:
        """Who sent this request; None for the page's files, which are for everybody in the right place.

        Raises `RequestError`: 401 for a missing or wrong key, 403 for a wrong place.
        """
        path = scope["path"]
        if path in (ROOT, UI) or path.startswith(f"{UI}/"):
            self._check_place(scope)
            return None
        return self._identify(scope)

    def _check_place(self, scope: Scope) -> None:
        _check_same_site(scope)
        if not self._num_admin:
            problem = _remote(scope)
            if problem is not None:
                raise RequestError(
                    f"Without --admin-key the admin API answers on this machine only: {problem}.",
                    status=403,
                    code="forbidden",
                )

    def _identify(self, scope: Scope) -> Identity:
        given = _values(scope, b"authorization")
        identity = None
        if given:
            found = match_key(self._keys, bearer(given[0]) if len(given) == 1 else b"")
            if found is None:
                raise RequestError("Wrong API key.", status=401, code="invalid_api_key")
            identity = self._identities[found]
        self._check_place(scope)
        if identity is not None:
            return identity
        if self._num_admin:
            raise RequestError("The admin API needs a key.", status=401, code="invalid_api_key")
        return Identity()


def is_loopback(host: str) -> bool:
    """Whether an address (IPv4, IPv6, IPv4 mapped into IPv6) is one of this machine's own loopback addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _values(scope: Scope, *names: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name in names]


def _remote(scope: Scope) -> str | None:
    """Why a request does not count as coming from this machine, or None."""
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return "the request comes from another one"
    if any(name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIX) for name, _ in scope["headers"]):
        return "the request came through a proxy"
    # A page of another site whose name was made to point here still sends that name.
    hosts = _values(scope, b"host")
    authority = _authority(hosts[0].decode("latin-1"), "http") if len(hosts) == 1 else None
    if authority is None or not (authority[0] == "localhost" or is_loopback(authority[0])):
        return "the request names another host"
    return None


def _check_same_site(scope: Scope) -> None:
    """Raise `RequestError` (403) when a browser says that another site wants something changed."""
    if scope["method"] in _SAFE_METHODS:
        return
    hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
    same = all(site in (b"same-origin", b"none") for site in _values(scope, b"sec-fetch-site"))
    for origin in origins:
        scheme, _, rest = origin.decode("latin-1").partition("://")
        own = _authority(hosts[0].decode("latin-1"), scheme) if len(hosts) == 1 else None
        same = same and own is not None and _authority(rest, scheme) == own
    if not same:
        raise RequestError("Requests from pages of another site are refused.", status=403, code="forbidden")


def _authority(text: str, scheme: str) -> tuple[str, int] | None:
    """Host and port of `host[:port]`, None for anything else."""
    if not text or any(sign in text for sign in "/?#@\\ "):
        return None
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    default = _DEFAULT_PORTS.get(scheme)
    if not host or default is None:
        return None
    return host.rstrip("."), default if port is None else port
