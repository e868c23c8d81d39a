"""Who may come in at a port: strangers, sessions, and who makes room for whom.

    entrance = Entrance("tcp port 7000", idle_s=idle_s, sessions_max=256)
    first = entrance.arrive(guest, "10.0.0.9")    # not yet known; who has to go
    welcome, first = entrance.admit(guest)        # it said who it is
    entrance.leave(guest)                         # for whatever reason

Whoever reaches a port can connect, and say nothing. So those who have yet to say who they are, the
strangers, have a few places of their own, apart from those of sessions: in all, and for each
address they come from. Where these are taken the newcomer comes in, and the stranger that came
first of the address that has most goes. So no number of strangers keeps anybody out who says at
once what there is to say.

Where all places of sessions are taken, the one that was idle for longest goes, if for a second at
least; its client connects anew when it next asks. Only where every session is at work a newcomer is
refused.

Near the limit of descriptors of the process (RLIMIT_NOFILE), whoever opened them, a newcomer takes
a place of others, too, and is refused where nobody can go, before there is none left to accept the
next one with.

It ends nobody itself: it says who has to go. For any thread. Cost: 13 us for each who comes in; the
clock of a session is the kernel's (`tcp_idle_s`), so a request costs nothing. To look for idle
sessions costs 4 us for each, and in vain never more than a twentieth of the time.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

from transfer_engine.lasting import Seldom

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = [
    "GROWTH_BYTES",
    "HANDSHAKE_S",
    "STALL_S",
    "STRANGERS_MAX",
    "Entrance",
    "spare_descriptors",
    "tcp_bytes",
    "tcp_carried",
    "tcp_idle_s",
]

STRANGERS_MAX = 128
"""Strangers that one port has at a time."""
PER_ADDRESS_MAX = 64
"""Of these, those that come from one address."""
HANDSHAKE_S = 5.0
"""The time a stranger has to say who it is, in all."""
RESTS_S = 1.0
"""Sessions that were idle for less do not make room. Clients trust a connection for as long."""
STALL_S = 30.0
"""A message that began has to be through, or grow by `GROWTH_BYTES`, in each such time."""
GROWTH_BYTES = 64 << 10
_LOOKING_SHARE = 20
_FEW = 4
_DESCRIPTORS = "/proc/self/fd"
_IDLE_FIELDS = struct.Struct("<44xI4xI")
_BYTE_FIELDS = struct.Struct("<120xQQ")

G = TypeVar("G")


class Entrance(Generic[G]):
    """Counts the guests of one port in and out.

    `idle_s` says for how long a session has had no request under way, below 0 where it has one;
    `rests_s` is the least that it has to be idle to make room, `RESTS_S` unless told.
    """

    def __init__(
        self,
        name: str,
        *,
        idle_s: Callable[[G], float],
        sessions_max: int,
        log: logging.Logger,
        strangers_max: int = STRANGERS_MAX,
        rests_s: float | None = None,
    ) -> None:
        self.name = name
        self.sessions_max = sessions_max
        self._strangers_max = strangers_max
        self._per_address_max = min(PER_ADDRESS_MAX, strangers_max)
        self._idle_s = idle_s
        self._rests_s = RESTS_S if rests_s is None else rests_s
        self._log = log
        self._lock = threading.Lock()
        self._strangers: dict[str, dict[G, None]] = {}
        self._addresses: dict[G, str] = {}
        self._sessions: set[G] = set()
        self._idlest: list[G] = []
        self._look_at = 0.0
        self._seldom: dict[str, Seldom] = {}
        self.told: Counter[str] = Counter()
        """How often something was told, by its kind."""

    @property
    def guests(self) -> int:
        """How many have come and not left."""
        return len(self._addresses) + len(self._sessions)

    def arrive(self, guest: G, address: str) -> G | None:
        """Count a stranger in; return who has to go for it, if anybody has."""
        with self._lock:
            mine = self._strangers.setdefault(address, {})
            mine[guest] = None
            self._addresses[guest] = address
            if len(mine) > self._per_address_max:
                return self._turn_out(mine)
            if len(self._addresses) > self._strangers_max:
                return self._turn_out(max(self._strangers.values(), key=len))
            if _left() > 1.0:
                return None
            # A few may have said what there is to say, and are just not heard yet.
            idle = None if len(self._addresses) > _FEW else self._make_room()
            if idle is None and len(self._addresses) > 1:
                return self._turn_out(max(self._strangers.values(), key=len))
            return idle

    def relieve(self) -> G | None:
        """Return who has to go because nobody can be accepted: there is no descriptor left."""
        with self._lock:
            if self._addresses:
                return self._turn_out(max(self._strangers.values(), key=len))
            return self._make_room()

    def admit(self, guest: G) -> tuple[bool, G | None]:
        """Make a stranger a session; return whether there is a place, and who has to go for it."""
        with self._lock:
            if guest not in self._addresses:  # it had to go meanwhile
                return False, None
            left = _left()
            full = len(self._sessions) >= self.sessions_max
            idle = self._make_room() if full or left <= 1.0 else None
            if idle is None and (full or left <= 0.5):
                return False, None
            self._forget_stranger(guest)
            self._sessions.add(guest)
            return True, idle

    def leave(self, guest: G) -> None:
        """Count a guest out. Idempotent."""
        with self._lock:
            self._sessions.discard(guest)
            self._forget_stranger(guest)

    def tell(self, kind: str, what: str) -> None:
        """Log what a stranger did, once in a while, with how often such things happened."""
        with self._lock:
            self.told[kind] += 1
            seldom = self._seldom.setdefault(kind, Seldom())
            more = seldom.due()
        if more is not None:
            self._log.warning("%s: %s%s", self.name, what, more)

    def _turn_out(self, mine: dict[G, None]) -> G:
        first = next(iter(mine))
        self._forget_stranger(first)
        return first

    def _forget_stranger(self, guest: G) -> None:
        address = self._addresses.pop(guest, None)
        if address is not None:
            mine = self._strangers[address]
            del mine[guest]
            if not mine:
                del self._strangers[address]

    def _make_room(self) -> G | None:
        """Count the session out that was idle for longest; None where all are at work."""
        looked = False
        while True:
            while self._idlest:
                guest = self._idlest.pop()
                if guest in self._sessions and self._idle_s(guest) >= self._rests_s:
                    self._sessions.remove(guest)
                    return guest
            began = time.monotonic()
            if looked or began < self._look_at:
                return None
            looked = True
            rests = [(self._idle_s(guest), guest) for guest in self._sessions]
            rests = [each for each in rests if each[0] >= self._rests_s]
            self._idlest = [guest for _, guest in sorted(rests, key=lambda each: each[0])]
            if not rests:
                ended = time.monotonic()
                self._look_at = ended + _LOOKING_SHARE * (ended - began)


def spare_descriptors(limit: int) -> int:
    """How many descriptors below its limit a process begins to be short of them."""
    return min(64, max(8, limit // 16))


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    # Linux tells from 6.2 on; before, they have to be counted.
    return os.stat(_DESCRIPTORS).st_size or len(os.listdir(_DESCRIPTORS))


def _left() -> float:
    """How many descriptors are left to this process, as a share of those that are spared."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return (limit - open_descriptors()) / spare_descriptors(limit)


def tcp_idle_s(sock: socket.socket) -> float:
    """For how long a connection has carried nothing either way; below 0 for one that is gone."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _IDLE_FIELDS.size)
    except OSError:
        return -1.0
    sent_ms, received_ms = _IDLE_FIELDS.unpack(info)
    return float(min(sent_ms, received_ms)) / 1000


def tcp_carried(sock: socket.socket) -> tuple[int, int]:
    """How many bytes a connection has sent and received, those on their way not counted."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTE_FIELDS.size)
    except OSError:
        return 0, 0
    acknowledged, received = _BYTE_FIELDS.unpack(info)
    return acknowledged, received


def tcp_bytes(sock: socket.socket) -> int:
    """How many bytes a connection has carried either way."""
    return sum(tcp_carried(sock))
