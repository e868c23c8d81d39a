"""Sessions: objects read or written range by range, layer by layer, under one lease or one put.

A read session leases its objects once; reads of ranges then ask nobody while the leases run, and
afterwards only get bytes of the same generation. A write session asks for room once and makes its
objects readable once, when every byte was written.

A lost write fails its key; `batch_put_session_end` answers for each. Sessions belong to this store
object and are named by their keys, as in the original.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.client import Pieces
from mooncake_store.compat.base import require_keys
from mooncake_store.compat.codes import INVALID_PARAMS, OK, codes
from mooncake_store.compat.pointers import PointerCalls, column
from mooncake_store.errors import InvalidArgumentError, LeaseExpiredError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from mooncake_store.client.extension import PutSession
    from mooncake_store.compat.values import ReplicateConfig

    Column = NDArray[np.int64]
    Nested = Sequence[Sequence[int]]

__all__ = ["RangeCalls"]


class RangeCalls(PointerCalls):
    """Sessions over keys."""

    def __init__(self) -> None:
        super().__init__()
        self._reading: dict[str, int] = {}  # generation of each key that is being read
        self._writing: dict[str, tuple[PutSession, int]] = {}
        self._sessions_lock = threading.Lock()

    def close(self) -> int:
        """Forget all sessions and close the store; unfinished puts end with their deadline."""
        self._reading, self._writing = {}, {}
        return super().close()

    # -- reads

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Find and lease objects; 0, or a negative number, per key."""
        keys = require_keys(keys)
        if not keys:
            return []
        try:
            client = self._require()
            result, generations = client._run(client._operations.lease_with_generations(keys, {}))
        except StoreError as error:
            return [self._failed("batch_get_session_start", error)] * len(keys)
        with self._sessions_lock:
            for at in np.flatnonzero(result.statuses == 0).tolist():
                self._reading[keys[at]] = int(generations[at])
        return codes(result.statuses)

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Nested,
        all_sizes: Nested,
        all_src_offsets: Nested,
    ) -> list[int]:
        """Read ranges of objects of a session to places in memory; bytes or negative per key."""
        keys, what = require_keys(keys), "batch_get_into_multi_buffer_ranges"
        out, chosen, pieces = self._ranges(
            keys, all_buffer_ptrs, all_sizes, all_src_offsets, self._reading
        )
        if pieces is None:
            return out
        try:
            client = self._require()
            mine = [keys[at] for at in chosen]
            result, generations = client._run(client._operations.get_ranges(mine, pieces))
        except StoreError as error:
            number = self._failed(what, error)
            return [number if at in chosen else out[at] for at in range(len(keys))]
        found = codes(result.statuses)
        for j, at in enumerate(chosen):
            number = found[j]
            if number == 0 and int(generations[j]) != self._reading.get(keys[at]):
                number = LeaseExpiredError.code  # the object was replaced since the session began
            out[at] = int(pieces.totals[j]) if number == 0 else number
        self._judge_reads(what, mine, result)
        return out

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Give the leases of a session back. 0 whether it was one or not."""
        keys = require_keys(keys)
        with self._sessions_lock:
            mine = [key for key in keys if self._reading.pop(key, None) is not None]
        if mine:
            try:
                self._require().release_many(mine)
            except StoreError as error:
                return self._failed("batch_get_session_end", error)
        return OK

    # -- writes

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Ask for room for objects; 0, -705 for a key that exists, or another number, per key."""
        keys = require_keys(keys)
        nbytes = column(sizes)
        if len(keys) != len(nbytes):
            return [INVALID_PARAMS] * len(keys)
        if not keys:
            return []
        try:
            client = self._require()
            options = self._options(config, len(keys), int(nbytes.sum()))
            if any(key in self._doubts for key in keys):
                options["upsert"] = True
            session = client._operations.put_session(keys, nbytes, options)
            client._run(session.start())
        except StoreError as error:
            return [self._failed("batch_put_session_start", error)] * len(keys)
        out = codes(session.status.astype(np.int16))
        with self._sessions_lock:
            for at, key in enumerate(keys):
                if session.is_open(at):
                    self._writing[key] = (session, at)
                    out[at] = OK
        return out

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Nested,
        all_sizes: Nested,
        all_dst_offsets: Nested,
    ) -> list[int]:
        """Write memory to ranges of objects of a session; bytes or negative per key."""
        keys = require_keys(keys)
        out, chosen, pieces = self._ranges(
            keys, all_buffer_ptrs, all_sizes, all_dst_offsets, self._writing
        )
        if pieces is None:
            return out
        what, totals = "batch_put_from_multi_buffer_ranges", pieces.totals.tolist()
        for session, mine, index in self._by_session([keys[at] for at in chosen]):
            numbers = self._step(what, session, "write", index, _selected(pieces, mine))
            for j, number in zip(mine, numbers, strict=True):
                out[chosen[j]] = totals[j] if number == 0 else number
        return out

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Make the objects of a session readable; 0 or negative per key.

        An object of which a byte was never written is refused and its session goes on.
        """
        return self._finish("batch_put_session_end", require_keys(keys), "commit")

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Give the objects of a session up; 0 or negative per key."""
        return self._finish("batch_put_session_revoke", require_keys(keys), "revoke")

    def _finish(self, what: str, keys: list[str], step: str) -> list[int]:
        out = [INVALID_PARAMS] * len(keys)
        for session, mine, index in self._by_session(keys):
            numbers = self._step(what, session, step, index)
            for j, at, number in zip(mine, index.tolist(), numbers, strict=True):
                out[j] = number
                with self._sessions_lock:
                    if step == "revoke" or not session.is_open(at):
                        self._writing.pop(keys[j], None)
                if number == 0 and step == "commit":
                    self._doubts.clear([keys[j]])
        return out

    def _step(self, what: str, session: PutSession, step: str, *args: Any) -> list[int]:
        """Run a step of a write session; a number per key of it."""
        count = len(args[0])
        try:
            client = self._require()
            until = (client._core.until({}),) if step != "revoke" else ()
            return codes(client._run(getattr(session, step)(*args, *until)))
        except StoreError as error:
            return [self._failed(what, error)] * count

    def _by_session(self, keys: list[str]) -> Iterator[tuple[PutSession, list[int], Column]]:
        """Each session of which there are keys: it, their positions here, and those in it."""
        found: dict[PutSession, list[tuple[int, int]]] = {}
        with self._sessions_lock:
            for j, key in enumerate(keys):
                if key in self._writing:
                    session, at = self._writing[key]
                    found.setdefault(session, []).append((j, at))
        for session, places in found.items():
            yield session, [j for j, _ in places], np.array([at for _, at in places], np.int64)

    # -- what both share

    def _ranges(
        self,
        keys: list[str],
        addresses: Nested,
        sizes: Nested,
        offsets: Nested,
        known: dict[str, Any],
    ) -> tuple[list[int], list[int], Pieces | None]:
        """Numbers so far, the keys that may go on, and their pieces (None if no key may)."""
        out = [INVALID_PARAMS] * len(keys)
        if not len(keys) == len(addresses) == len(sizes) == len(offsets):
            return out, [], None
        chosen = [
            at
            for at, key in enumerate(keys)
            if key in known
            and len(offsets[at]) == len(sizes[at])
            and self._may(addresses[at], sizes[at])
            and min(offsets[at]) >= 0
        ]
        if not chosen:
            return out, [], None
        try:
            pieces = Pieces.of(
                [addresses[at] for at in chosen],
                [sizes[at] for at in chosen],
                [offsets[at] for at in chosen],
            )
        except InvalidArgumentError:
            return out, [], None
        return out, chosen, pieces


def _selected(pieces: Pieces, objects: list[int]) -> Pieces:
    """The pieces of some objects."""
    if objects == list(range(len(pieces))):
        return pieces
    rows, firsts = pieces.rows(np.array(objects, np.int64))
    assert pieces.offsets is not None
    starts = [*firsts.tolist(), len(rows)]
    return Pieces(
        pieces.addresses[rows], pieces.lengths[rows], starts, offsets=pieces.offsets[rows]
    )
