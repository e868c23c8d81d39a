"""Whether who came dialled this end, or somebody who stands between.

    reached = Reached(["10.96.0.1:50051", "192.0.2.7"])       # also leads here; "any": do not ask
    reached.objection("10.0.0.9:7000", sock.getsockname())    # what is against it, or None

A client says in its first message which address it connected to, and nobody can change that on the
way without its secret. If it is not the one at which the connection came in, somebody took it in
between, or a service, forwarded port or tunnel leads here, which has to be said.
Cost: a few microseconds, once a connection.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from transfer_engine.errors import ConfigError
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.networks import number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ANY", "Reached", "dialled", "end_of", "reached_as"]

ANY = "any"


class Reached:
    """The addresses that lead here beside the own ones. Raises ConfigError for what is none."""

    def __init__(self, further: Sequence[str] = ()) -> None:
        self._any = ANY in further
        self._further = frozenset(reached_as(each) for each in further if each != ANY)

    def objection(self, dialled: str, here: tuple[str, int]) -> str | None:
        """Return what is against who says that he dialled this; None where he says nothing."""
        own = end_of(here)
        if self._any or not dialled or dialled == own:
            return None
        host, _, _ = dialled.rpartition(":")
        if dialled in self._further or host in self._further:
            return None
        return f"the client dialled {dialled} and came to {own}: somebody may stand between"


def end_of(name: tuple[str, int]) -> str:
    """Return how an end of a socket is written, by numbers, of version 4 where that is meant."""
    return f"{number_of(name[0].partition('%')[0])}:{name[1]}"


def dialled(name: tuple[str, int] | None) -> str:
    """Return what a client says that it has dialled, by the name of the other end of its socket.

    Nothing where that end has none any more: it is gone, as the first message will show.
    """
    return "" if name is None else end_of(name)


def reached_as(text: str) -> str:
    """Read host:port, or a host for all its ports, by number. Raises ConfigError."""
    with contextlib.suppress(ValueError):
        return str(number_of(text.removeprefix("[").removesuffix("]")))
    try:
        address = Address.parse(text)
        return end_of((address.host, address.port))
    except (ConfigError, ValueError):
        raise ConfigError(
            f"{text!r} is no address by number",
            advice="write 10.96.0.1:50051, [2001:db8::1]:50051, 10.96.0.1 for all ports, or any",
        ) from None
