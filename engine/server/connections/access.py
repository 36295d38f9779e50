"""Access control: the API keys that clients send, and the host names that requests may use."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping, Sequence

from starlette.datastructures import Headers

from engine.server.connections.hosts import is_local, plain_host
from engine.server.errors import ApiError, printable

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/", "/health")
"""Paths that need no key."""
WRONG_KEY = "the API key is missing or wrong; send it as: Authorization: Bearer KEY (or x-api-key: KEY)"
LET_IN = "let_in"
"""Name in a request's state, set if the path is not open and the key check has passed."""
SHOWN_CHARACTERS = 80


def allowed_hosts(bound: str, given: Sequence[str]) -> frozenset[str] | None:
    """Return the host names that a server bound to `bound` answers to; None for any."""
    if is_local(bound):
        return frozenset(map(plain_host, (*LOCAL_NAMES, bound, *given)))
    return frozenset(map(plain_host, (bound, *given))) if given else None


def check_host(headers: Headers, hosts: Collection[str] | None) -> None:
    """Raise ApiError for a request to another host name.

    A web page whose domain resolves to this server (DNS rebinding) must not act for its visitor.
    """
    if hosts is None:
        return
    given = headers.getlist("host")
    if len(given) != 1 or plain_host(given[0]) not in hosts:
        shown = printable(", ".join(given))[:SHOWN_CHARACTERS]
        message = f"this server does not answer to the host {shown!r}; use its own name, or start it with --allowed-host"
        raise ApiError(421, message, code="wrong_host")


def namespaces(keys: Sequence[str], secret: bytes) -> dict[bytes, str]:
    """Return the namespace of each key: the same one for the same key and secret, which does not tell the key."""
    return {key.encode(): hmac.digest(secret, key.encode(), "sha256").hex() for key in keys}


def check_key(headers: Headers, path: str, keys: Mapping[bytes, str]) -> str:
    """Return the namespace of the key that a request was sent with, empty if there are no keys or the path is open.

    keys: the namespaces by key. The header Authorization decides where it is sent, and x-api-key where it is not. Raises
    ApiError without a right key. Every key is compared, each in constant time.
    """
    if not keys or path in OPEN_PATHS:
        return ""
    scheme, given = "bearer", headers.get("x-api-key", "")
    if "authorization" in headers:
        scheme, _, given = headers["authorization"].partition(" ")
    found = [name for key, name in keys.items() if hmac.compare_digest(given.encode("latin-1"), key)]
    if not found or scheme.lower() != "bearer":
        raise ApiError(401, WRONG_KEY, code="invalid_api_key")
    return found[0]
