"""Which addresses of segments are connected to: a descriptor says where, and a peer wrote it.

    networks = Networks(["10.0.0.0/8"])
    networks.objection("169.254.169.254", near=False)     # why not; None for "10.0.0.7"

A name is judged by the addresses that it stands for, when it is connected to. Networks that are
given are the only ones. Without, every address is allowed that can be a worker's: none of links
(where clouds keep their credentials) or groups, and of a loopback only where the owner runs on
this very host, because there it is another machine's. Cost: a few microseconds an address, once
a connection; nothing per batch.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import TYPE_CHECKING, TypeAlias

from transfer_engine.errors import ConfigError, UnavailableError
from transfer_engine.rpc.dialing import first_accepting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
    Number: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
    Objection: TypeAlias = Callable[[str], str | None]

__all__ = ["ADVICE", "Networks", "connect", "network_of", "number_of"]

SETTING = "data_networks"
"""What users call the networks that are given."""
ADVICE = f"name its network in {SETTING} if this is meant"
_NO_WORKERS = tuple(
    (ipaddress.ip_network(network), what)
    for network, what in (
        ("0.0.0.0/8", "no address of a machine"),
        ("::/128", "no address of a machine"),
        ("169.254.0.0/16", "an address of one link"),
        ("fe80::/10", "an address of one link"),
        ("224.0.0.0/4", "an address of a group"),
        ("ff00::/8", "an address of a group"),
        ("255.255.255.255/32", "an address of everybody"),
    )
)


class Networks:
    """The networks that may be connected to; none given: those where workers can be.

    Raises ConfigError for what is no network.
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._given = tuple(map(network_of, given))

    def objection(self, host: str, *, near: bool) -> str | None:
        """Return what is against connecting to an address; None for a name, and where nothing is.

        `near` says that the owner runs on this host.
        """
        try:
            number = number_of(host)
        except ValueError:
            return None
        if self._given:
            if any(number in network for network in self._given):
                return None
            return f"{host} is in none of the networks of {SETTING}"
        for network, what in _NO_WORKERS:
            if number in network:
                return f"{host} is {what}, which {SETTING} does not allow"
        if number.is_loopback and not near:
            return f"{host} is an address of another host's own, which {SETTING} does not allow"
        return None


def network_of(text: str) -> Network:
    """Return the network that a text names. Raises ConfigError for what is none."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a network: {error}",
            advice="write one such as 10.0.0.0/8 or 2001:db8::/32",
        ) from None


def number_of(host: str) -> Number:
    """Return the address that this is, the one of version 4 in one of version 6.

    Raises ValueError for a name.
    """
    number = ipaddress.ip_address(host)
    inner = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return number if inner is None else inner


def connect(address: tuple[str, int], timeout_s: float, objection: Objection) -> socket.socket:
    """Connect to the first address of a host that accepts, of those that nothing is against.

    Raises OSError; UnavailableError where something is against all of them.
    """
    name = f"{address[0]}:{address[1]}"
    against, targets = "", []
    for family, _, _, _, target in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        found = objection(str(target[0]))
        if found is None:
            targets.append((family, target))
        against = found or against
    if not targets:
        raise UnavailableError(
            f"{name} is not connected to: {against or 'the name has no address'}",
            peer=name,
            operation="connect",
            advice=ADVICE,
        )
    return first_accepting(targets, time.monotonic() + timeout_s)
