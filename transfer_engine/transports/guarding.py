"""Who has to show rights to an owner, for which segments, and what becomes of them (Python's part).

A segment that was published with a key is guarded: who proved a credential below a worker's reads
and writes it only where he shows rights that were made with that key (`kernels.rights`), unless it
is declared for one of his namespaces. The compiled loop (`kernels.serving`) keeps the same rules
for what is ordinary; here they are for files and devices, for sealed connections, and for whatever
is refused, request by request.

Cost: as the kernels (`kernels.used_rights`), and some 20 us of Python a message.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine import forking
from transfer_engine.base import REFUSED, Operation
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.kernels import rights, used_rights

if TYPE_CHECKING:
    from transfer_engine.base import Access, Columns, Statuses

__all__ = ["KEY_BYTES", "USED", "Guard", "Showing", "Used", "namespace_word"]

KEY_BYTES = 16
PAIRS = 1 << 22
"""Rights to write that a process keeps until they end, about; at 30 s each, 120,000 puts a second.
"""


def namespace_word(namespace: str) -> int:
    """Return the word that stands for a namespace in tables; 0 for none."""
    if not namespace:
        return 0
    digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


class Guard(NamedTuple):
    """What guards a segment: its key, as two words, and the word of its namespace."""

    low: int
    high: int
    namespace: int

    @classmethod
    def of(cls, key: bytes, namespace: str) -> Guard | None:
        """Return the guard of a segment, None for one without a key."""
        if not key and not namespace:
            return None
        if len(key) != KEY_BYTES:
            raise InvalidArgumentError(
                f"a segment is guarded by a key of {KEY_BYTES} bytes, not {len(key)}",
                advice="make one with secrets.token_bytes(16), and tell it to who grants rights",
            )
        low, high = np.frombuffer(key, dtype=np.int64).tolist()
        return cls(low, high, namespace_word(namespace))

    def asks(self, peer: Columns) -> bool:
        """Whether this peer has to show rights here. peer: see `kernels.serving`."""
        from transfer_engine.kernels.serving import ASKED, NAMESPACES

        return bool(peer[ASKED]) and not (
            self.namespace and bool((peer[NAMESPACES:] == self.namespace).any())
        )


class Used:
    """The table of used rights of this process; made when a segment is first guarded."""

    def __init__(self) -> None:
        self._table: Columns = used_rights.make(0)
        self._lock = threading.Lock()
        forking.register(self)

    @property
    def table(self) -> Columns:
        """The table, for the kernels."""
        with self._lock:
            if self._table.size == used_rights.HEAD:
                self._table = used_rights.make(PAIRS)
            return self._table

    def after_fork(self) -> None:
        """In a forked child: the parent's rights are used there, and its lock may be held."""
        self._lock = threading.Lock()
        self._table = used_rights.make(0)


USED = Used()


class Showing:
    """The rights that are shown with one message, from when they are judged to its answer.

    A context: rights to write that were claimed are given back when it ends by an error.
    """

    def __init__(
        self, guard: Guard | None, access: Access, shown: tuple[Columns, Columns], clock_ms: int
    ) -> None:
        self._guard = guard
        self._access = access
        self._tags, self._stamps = shown
        self._clock_ms = clock_ms
        self._writing = access.operation is Operation.WRITE
        self._claimed: Statuses | None = None
        self.left_s = np.inf
        """For how long what is moved may be."""

    def judge(self, statuses: Statuses) -> None:
        """Refuse requests whose rights are not good; the others are used from now on."""
        guard, access = self._guard, self._access
        if guard is None:
            return
        now_ms = time.time_ns() // 1_000_000 + self._clock_ms
        kind = rights.WRITE if self._writing else rights.READ
        _, ends = used_rights.judge(
            guard.low, guard.high, access.offsets, access.lengths, self._tags, self._stamps, kind,
            now_ms, statuses,
        )  # fmt: skip
        if ends:
            self.left_s = (ends - now_ms) / 1000
        if self._writing:
            used_rights.claim(USED.table, self._tags, self._stamps, now_ms, statuses)
            self._claimed = statuses.copy()

    def receipts(self, statuses: Statuses) -> Columns:
        """Return what tells that the requests whose status is 0 were written in full.

        The rights of those that failed meanwhile are given back.
        """
        found = np.zeros(statuses.size, dtype=np.int64)
        guard, access = self._guard, self._access
        if guard is not None and self._claimed is not None:
            rights.tags_of(
                guard.low, guard.high, access.offsets, access.lengths, rights.WRITTEN,
                self._stamps, found,
            )  # fmt: skip
            found[statuses != 0] = 0
            failed = np.where(statuses != 0, self._claimed, np.int32(REFUSED))
            self._give_back(failed)
        return found

    def _give_back(self, claimed: Statuses) -> None:
        self._claimed = None
        used_rights.give_back(USED.table, self._tags, self._stamps, claimed)

    def __enter__(self) -> Showing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._claimed is not None:
            self._give_back(self._claimed)
