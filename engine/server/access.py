"""Who may ask: the keys that clients show, and the names of the server that they ask for."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers

from engine.server.errors import ApiError, printable

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/", "/health")
"""Those that need no key."""
WRONG_KEY = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
LET_IN = "let_in"
"""In the state of a request that needed a key, where there are any, and had a right one."""
SHOWN_CHARACTERS = 80
HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]*)?")


def is_local(host: str) -> bool:
    """Whether a server that is bound to it can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def allowed_hosts(bound: str, given: Sequence[str]) -> frozenset[str] | None:
    """The names that a server bound to `bound` answers to; None for any."""
    if is_local(bound):
        return frozenset(map(plain_host, (*LOCAL_NAMES, bound, *given)))
    return frozenset(map(plain_host, (bound, *given))) if given else None


def plain_host(field: str) -> str:
    """The name in a `Host` field, without port and brackets, so that equal ones are equal text; empty for none."""
    field = field.strip().lower()
    match = HOST.fullmatch(field)
    name = (match["address"] or match["name"]) if match else field  # an IPv6 address without brackets, or nothing
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.removesuffix(".") if match else ""


def check_host(headers: Headers, hosts: Collection[str] | None) -> None:
    """Raises ApiError for a request to another name: a page whose name leads here must not speak for its visitor."""
    if hosts is None:
        return
    given = headers.getlist("host")
    if len(given) != 1 or plain_host(given[0]) not in hosts:
        shown = printable(", ".join(given))[:SHOWN_CHARACTERS]
        message = f"this server does not answer to the host {shown!r}; use its own name, or start it with --allowed-host"
        raise ApiError(421, message, code="wrong_host")


def check_key(headers: Headers, path: str, keys: Sequence[bytes]) -> str:
    """A name for whose request it is, the same for all clients of one key. Raises ApiError without a right key.

    With one key or none it is empty. Every key is compared, each in a time that does not depend on where they differ.
    """
    if not keys or path in OPEN_PATHS:
        return ""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in keys]
    if not any(matches) or scheme.lower() != "bearer":
        raise ApiError(401, WRONG_KEY, code="invalid_api_key")
    return f"key {matches.index(True)}" if len(keys) > 1 else ""
