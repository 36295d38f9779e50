"""Names and addresses of hosts, as clients and listening sockets write them."""

from __future__ import annotations

import ipaddress
import re

HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]*)?")


def is_local(host: str) -> bool:
    """Return whether a server bound to `host` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def plain_host(field: str) -> str:
    """Return the name in a `Host` field in a normal form, without port and brackets; empty if there is none."""
    field = field.strip().lower()
    match = HOST.fullmatch(field)
    name = (match["address"] or match["name"]) if match else field  # an IPv6 address without brackets, or not a name
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.removesuffix(".") if match else ""
