"""What of an HTTP request tells who made it up: its Host, its Origin and its path. No I/O.

A browser sends what any page asks it to, from within the network that its user is in. Two headers
give such a page away, and no page can set them: `Host` is the name that it was reached by, which a
page may have had lead here (DNS rebinding), and `Origin` is where it comes from. A path is plain if
nobody on its way can read another one in it. Shared by all that speak HTTP here; O(length).
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from transfer_engine.rpc.address import is_loopback

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["host_in", "is_number", "is_own_host", "is_own_origin", "is_plain_path"]

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@\[\]]+))(?::[0-9]{0,5})?", re.ASCII)
_SEGMENT = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*"
_PATH = re.compile(rf"/{_SEGMENT}(?:/{_SEGMENT})*")


def host_in(header: str) -> str:
    """Return the name or number in a Host header, in lower case; "" where there is none.

    The port is not looked at: whoever forwards a port chooses another one.
    """
    found = _HOST.fullmatch(header.lower())
    return (found[1] or found[2]).rstrip(".") if found else ""


def is_number(host: str) -> bool:
    """Whether this is an address and not a name: nobody can make it lead elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_own_host(header: str, bound: str, names: Collection[str]) -> bool:
    """Whether a Host header means a server that is bound to `bound` and also called `names`.

    On loopback these are loopback's names and numbers; elsewhere any number, because machines have
    several, and forwarded ones that they do not know of.
    """
    host = host_in(header)
    if host in names or is_loopback(host):
        return True
    return not is_loopback(bound) and (is_number(host) or host == bound.lower())


def is_own_origin(origin: str, header: str, names: Collection[str]) -> bool:
    """Whether a page of this Origin is the server's own, by its Host header or by `names`."""
    scheme, _, place = origin.lower().partition("://")
    if scheme not in ("http", "https") or not host_in(place):
        return False
    port = ":443" if scheme == "https" else ":80"
    same = place.removesuffix(port) == header.lower().removesuffix(port)
    return same or host_in(place) in names


def is_plain_path(path: str) -> bool:
    """Whether a path means the same to whoever reads it, decoded or not.

    It has no empty segments but for a last one, no `.` or `..`, and nothing in it is encoded that
    would be a separator, a control character or another encoding.
    """
    if not _PATH.fullmatch(path) or "//" in path:
        return False
    decoded = unquote(path)
    return (
        decoded.isprintable()
        and decoded.count("/") == path.count("/")
        and not any(each in decoded for each in "\\%\ufffd")
        and not any(segment in (".", "..") for segment in decoded.split("/"))
    )
