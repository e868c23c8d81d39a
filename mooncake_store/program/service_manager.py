"""What a program tells the service manager that started it: it serves, goes on, ends.

    notify("READY=1", "STATUS=it leads")        # nothing where no NOTIFY_SOCKET is named
    beating = asyncio.ensure_future(beat())     # on the event loop that does the work

This is the protocol of systemd's `Type=notify`, which other supervisors speak as well: datagrams of
`NAME=value` to the socket that NOTIFY_SOCKET names, by a path or as an abstract one (`@name`).

A manager that sets WATCHDOG_USEC restarts a program that it has not heard of for so long. So the
signs of life come from whatever must not hang, and stop with it: from the event loop of a master,
once what else has to answer did (`watch_also`: its shard processes), or from a worker's main
thread, once it has looked at the others. Three come in the time of one.

What the environment says is for this process; its children tell nothing. A datagram costs some
microseconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING

from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["ALIVE", "beat", "beat_pause_s", "notify", "watch_also", "watch_no_more"]

log = logging.getLogger(__name__)

ALIVE = "WATCHDOG=1"
BEATS = 3
"""As many come in the time in which one has to."""
SEND_S = 1.0

_looks: dict[object, Callable[[], Awaitable[object]]] = {}


def notify(*said: str) -> None:
    """Tell the service manager, if there is one that listens."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return
    address = f"\0{place[1:]}" if place.startswith("@") else place
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_S)
            sender.sendto("\n".join(said).encode(), address)
    except OSError as error:
        log.warning("the service manager at %s was not told %s: %s", place, said[0], error)


def beat_pause_s() -> float | None:
    """After how long the manager is to hear of this process again; None if it does not wait."""
    micros, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(micros) / 1e6 / BEATS


async def beat() -> None:
    """Say that this process goes on, until cancelled, where somebody waits for that.

    Not while one of those that are watched does not answer.
    """
    pause_s = beat_pause_s()
    while pause_s is not None:
        try:
            await asyncio.gather(*(look() for look in tuple(_looks.values())))
        except StoreError as error:
            log.warning("the service manager is not told that this program goes on: %s", error)
        else:
            notify(ALIVE)
        await asyncio.sleep(pause_s)


def watch_also(owner: object, look: Callable[[], Awaitable[object]]) -> None:
    """Let `beat` wait for `look`, on its event loop, from now on."""
    _looks[owner] = look


def watch_no_more(owner: object) -> None:
    """Forget what is watched for an owner. Does nothing for one that is not known."""
    _looks.pop(owner, None)
