"""Who did what only an admin may, and who was refused what is others': a line of the log each.

    alice from 10.0.0.9:40112: merge(factor=2): answered shards=4
    bob from 10.0.0.12:51044: remove refused: the credential is read-only, of bob

All of them are of one logger, so that they can be kept apart from the rest. No line has a secret
or bytes of an object. Refusals cost whoever asks for them nothing, so of one principal the same
kind of them is told at most once a minute, with the address that the first one of them came from
and how many there were since. O(length of the arguments).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec.structs import asdict

from transfer_engine.errors import StoreError
from transfer_engine.lasting import Seldom

if TYPE_CHECKING:
    from msgspec import Struct

__all__ = ["ANYBODY", "POOL", "READERS", "Lack", "Limited", "acted", "refused"]

log = logging.getLogger(__name__)

Limited: TypeAlias = Literal[
    "clients", "names", "groups", "tasks", "pins", "bytes", "segments", "lent"
]
"""What a principal may have some of and no more."""
Lack: TypeAlias = Literal["role", "namespace", "key"] | Limited
"""What somebody lacks for what he asks."""
POOL, READERS = "the pool's secret", "the read-only secret"
ANYBODY = "anybody, as there is no secret"
"""Who somebody is that has no name."""
_ARGUMENT_CHARS, _OUTCOME_CHARS, _SHOWN_BYTES = 60, 200, 8
_KINDS_MAX = 1024
_seldom: OrderedDict[tuple[str, Lack], Seldom] = OrderedDict()
_lock = threading.Lock()


def acted(
    who: str, peer: str, operation: str, request: Struct, end: Struct | BaseException
) -> None:
    """Tell of an action that has ended, with its answer or an error."""
    if isinstance(end, asyncio.CancelledError):
        outcome = "its caller did not wait for the end"
    elif isinstance(end, BaseException):
        outcome = f"{type(end).__name__}: {end.what if isinstance(end, StoreError) else end}"
    else:
        outcome = f"answered {_short(end)}".strip()
    log.info(
        "%s from %s: %s(%s): %s",
        who, peer, operation, _short(request), _cut(outcome, _OUTCOME_CHARS),
        extra={"peer": peer, "operation": operation},
    )  # fmt: skip


def refused(who: str, peer: str, operation: str, why: str, lack: Lack) -> None:
    """Tell that somebody asked for what is not his, unless the like was just told of him."""
    kind = who, lack
    with _lock:
        seldom = _seldom.setdefault(kind, Seldom())
        _seldom.move_to_end(kind)
        if len(_seldom) > _KINDS_MAX:
            _seldom.popitem(last=False)
        often = seldom.due()
    if often is not None:
        log.warning(
            "%s from %s: %s refused: %s%s", who, peer, operation, why, often,
            extra={"peer": peer, "operation": operation},
        )  # fmt: skip


def _short(request: Struct) -> str:
    return ", ".join(f"{name}={_written(value)}" for name, value in asdict(request).items())


def _written(value: object) -> str:
    if isinstance(value, bytes):
        return _cut(value.hex(), 2 * _SHOWN_BYTES)
    return _cut(repr(value), _ARGUMENT_CHARS)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}..."
