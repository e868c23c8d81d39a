"""Where engines may publish their events: who registers one says where a server connects to.

    places = EnginePlaces(hosts=["10.0.0.5"], networks=["10.1.0.0/16"])
    places.check("tcp://10.0.0.5:5557")     # InvalidArgumentError for anywhere else

Loopback, the hosts of engines that the operator named, and networks that the operator allows. A
name is only one of those hosts: what else a name leads to may be another thing the next time it is
looked up. Nothing is looked up or connected to here. O(networks).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mooncake_store.errors import InvalidArgumentError
from transfer_engine.rpc.address import is_loopback
from transfer_engine.rpc.networks import network_of, number_of

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["EnginePlaces"]

_ENDPOINT = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", re.ASCII)


class EnginePlaces:
    """Where may be connected to. Raises ConfigError for a network that is none."""

    def __init__(self, hosts: Collection[str] = (), networks: Collection[str] = ()) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._networks = tuple(map(network_of, networks))

    def check(self, endpoint: str) -> None:
        """Raise InvalidArgumentError for where a server of ours is not to connect to."""
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None or not 0 < int(found[3]) < 65536:
            raise InvalidArgumentError(
                f"{endpoint!r} is no endpoint of a publisher",
                advice="write one such as tcp://10.0.0.5:5557",
            )
        host = (found[1] or found[2]).lower()
        if not (is_loopback(host) or host in self._hosts or self._is_near(host)):
            raise InvalidArgumentError(
                f"{endpoint!r} is neither of an engine that was named nor in a network for them",
                advice="start the server with --engine-network for that of the engine",
            )

    def _is_near(self, host: str) -> bool:
        try:
            number = number_of(host)
        except ValueError:
            return False
        return any(number in network for network in self._networks)
