"""How near the network of a route is to the memory it serves: the weight of a path.

Which interface a route leaves by is the kernel's choice, so it is asked: a UDP socket that is
connected sends nothing, and knows its own address afterwards. The interface with that address is
then looked up in the matrix, for the place the memory lies in.

What cannot be told (an address of version 6, a bridge in between) counts as near.
Cost: two system calls an interface, once per route.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.topology import Topology

__all__ = ["FAR", "NEAR", "interface_of", "weight"]

NEAR, FAR = 1.0, 3.0
"""A far network is used while it arrives earlier than three times the queue of a near one."""
_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("256s")
_ANY_PORT = 9


def weight(host: str, found: Topology, location: str) -> float:
    """Return the weight of a route to `host` for memory at `location`, such as "cpu:1"."""
    cell = found.preference(location, "ethernet")
    return FAR if interface_of(host, found) in cell.secondary else NEAR


def interface_of(host: str, found: Topology) -> str:
    """Return the interface that packets to `host` leave by; empty when it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, _ANY_PORT))
            here = socket.inet_aton(sock.getsockname()[0])
        except OSError:
            return ""
        for device in found.of_kind("ethernet"):
            request = _REQUEST.pack(device.name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if answer[20:24] == here:
                return device.name
    return ""
