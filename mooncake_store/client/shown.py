"""Rights to memory, as a client has them that has to show some: where they come from, and go.

A shard tells who is asked (`Opened.shows_rights`): whoever has a name and only reads or writes.
Its answers to such a client have a right behind each place, tag and stamp, which the owner of the
memory wants to see: `Rights` keeps those of one batch, `ShownLeases` those of the leases that this
client holds. What a write is answered, the receipts, goes back to the shard when the put ends.

A right is for one whole range, what a replica takes. So of an object nothing less is read, and
nothing less is written: pieces are brought together first (`pieces.gather`, `sessions.py`), and
ranges cut out of the whole (`unsure.py`). A segment that is declared for the namespace of the
client wants no rights, and none of that happens there.

Besides, what such clients put has a tag of its content (`transfer_engine.tagging`), under a key of
the namespace; gets are told it, and what was read is compared with it instead of the checksum.

Other clients have none of these objects. No I/O. Cost: 16 bytes a key and replica, O(n) in kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mooncake_store.client.kernels import reading as k
from mooncake_store.client.kernels import shown as kernels
from mooncake_store.client.leases import Leases, untouched
from mooncake_store.errors import UnavailableError
from mooncake_store.wire.shard import GET
from mooncake_store.wire.single_key import GET_SHOWN
from transfer_engine.tagging import load_kernels as load_tag_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.tagging import Tagging
    from transfer_engine.wire.frame import Body

    Column = NDArray[np.int64]

__all__ = ["Rights", "Shown", "ShownLeases", "load_kernels", "split"]

Shown: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""What `leases.Found` has, then tag and stamp of the right, and the tag of the content or 0."""


def load_kernels() -> None:
    """Load or compile what the first request would otherwise wait for."""
    kernels.warmup()
    load_tag_kernels()


def split(replicas: Column, keys: int = 0) -> tuple[Column, Column, Column]:
    """The places of an answer, the rights behind them, one for each, and the tags of some keys."""
    count, odd = divmod(len(replicas) - keys, 2)
    if odd or count < 0:
        raise UnavailableError(f"{len(replicas)} rows came as places, each with a right")
    return replicas[:count], replicas[count : 2 * count], replicas[2 * count :]


class Rights:
    """The rights of a batch of so many keys: to each replica in the answers, and to the chosen."""

    __slots__ = ("_receipts", "_shown", "chosen", "contents")

    def __init__(self, count: int) -> None:
        # Of the replica that was chosen for each key.
        self.chosen: Column = np.zeros((count, 2), np.int64)
        # Tags of the content of each key, 0 where it has none.
        self.contents: Column = np.zeros(count, np.int64)
        self._shown: Column = self.chosen[:0]
        self._receipts: Column = self.chosen[:0, 0]

    def take(self, replicas: Column, base: int, tagged: Column) -> Column:
        """Add the rights of an answer, behind those to `base` replicas; return its places.

        `tagged` are the keys of which tags came as well.
        """
        places, rights, tags = split(replicas, len(tagged))
        self.contents[tagged] = tags[:, 0]
        if base:
            rights = np.concatenate((self._shown, rights))
            rights.flags.writeable = False
        self._shown, self._receipts = rights, self._receipts[:0]
        return places

    def pick(self, index: Column, replicas: Column, cols: Column) -> None:
        """Note the right to the replica that was chosen for each of these keys."""
        kernels.pick(index, replicas, self._shown, cols, self.chosen)

    def part(self, index: Column) -> Rights:
        """The same for some of the keys, by the same answers."""
        part = Rights(len(index))
        part.chosen[:], part._shown = self.chosen[index], self._shown
        part.contents[:] = self.contents[index]
        return part

    def needed(self, index: Column) -> NDArray[np.bool_]:
        """Which of these keys cannot be read without the right to the chosen replica."""
        return np.asarray(self.chosen[index, 1] != 0)

    def to_read(self, index: Column) -> Column | None:
        """The rights to the chosen replicas of these keys; None where none is needed."""
        every = len(index) == len(self.chosen)
        return _needed(self.chosen if every else self.chosen[index])

    def compared_by(self, index: Column, tagging: Tagging | None) -> tuple[bool, Tagging | None]:
        """Whether any of these keys need a checksum, and what makes tags if any has one.

        What has a tag is compared with that alone.
        """
        tagged = self.contents[index] != 0
        if tagging is None or not tagged.any():
            return True, None
        return not tagged.all(), tagging

    def sums(self, index: Column, tags: NDArray[np.uint64], sums: Column, wanted: Column) -> Column:
        """The checksums of keys, or none, where tags are to decide: wanted ones, or others."""
        contents = self.contents[index]
        decided = np.where(contents == tags.view(np.int64), wanted, ~wanted)
        return decided if not len(sums) else np.where(contents == 0, sums, decided)

    def to_write(self, replicas: Column) -> Column | None:
        """The rights to these of all replicas; None where none is needed."""
        return _needed(self._shown[replicas])

    def written(self, replicas: Column, receipts: Column | None) -> None:
        """Note what the owner answered to writes of these replicas."""
        if len(self._receipts) != len(self._shown):
            self._receipts = np.zeros(len(self._shown), np.int64)
        self._receipts[replicas] = 0 if receipts is None else receipts

    def receipts(self, firsts: Column, counts: Column) -> Column:
        """The receipts of some keys, which have so many replicas each from `firsts` on."""
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return self._receipts[np.arange(total) + np.repeat(firsts - ends + counts, counts)]


def _needed(rights: Column) -> Column | None:
    return rights if rights[:, 1].any() else None


class ShownLeases(Leases):
    """Leases, and beside each the right to its replica, which may end sooner."""

    def __init__(self, entries_max: int) -> None:
        super().__init__(entries_max)
        rows = self._words // k.SET_WORDS * k.WAYS
        shape = rows, kernels.RIGHT_WORDS
        self._rights = untouched(rows * kernels.RIGHT_WORDS).reshape(shape)

    def lookup_shown(self, digests: Column, now: int, cols: Column, rights: Rights) -> int:
        """Do as `lookup`, with the rights of the keys."""
        with self._lock:
            found = rights.chosen, rights.contents
            return int(kernels.lookup_shown(self._table, self._rights, digests, now, cols, *found))

    def remember_shown(
        self, digests: Column, index: Column, now: int, cols: Column, rights: Rights
    ) -> None:
        """Do as `remember`, with the rights of the keys."""
        with self._lock:
            found = rights.chosen, rights.contents
            latest = kernels.remember_shown(
                self._table, self._rights, digests, index, now, cols, *found
            )
            self._latest = max(self._latest, latest)

    def one_shown(self, low: int, high: int, now: int) -> Shown:
        """Do as `one`, with the right; not found where that has ended."""
        with self._lock:
            found: Shown = kernels.lookup_one_shown(self._table, self._rights, low, high, now)
            return found

    def content(self, low: int, high: int) -> int:
        """The tag of the content of a key that is in the table, or 0."""
        with self._lock:
            return int(kernels.content_of(self._table, self._rights, low, high))

    def take_shown(
        self, low: int, high: int, body: Body, sent: int, now: int, targets: Column, turn: int
    ) -> tuple[Shown, Any]:
        """Read the body of an answer to a get of one key, and enter its lease and right.

        Returns the reply as well where it was taken apart; the end is 0 for anything unusual.
        """
        known, fields, reply = (self._table, self._rights, low, high), GET_SHOWN.match(body), None
        with self._lock:
            found: Shown
            if fields is not None:
                found = kernels.take_single_shown(*known, *fields, sent, now, targets)
            else:
                reply = GET.reply.unpack(body)
                rows, shown = reply.rows.view(np.int64), split(reply.replicas.view(np.int64), 1)
                found = kernels.take_one_shown(*known, rows, *shown, sent, now, targets, turn)
            self._latest = max(self._latest, found[0])
        return found, reply
