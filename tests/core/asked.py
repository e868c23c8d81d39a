"""A writer among the clients who has to show rights: what he is given, and what he gives back.

Segments have keys, so each place that he may write or read comes with a right. He uses it to the
end, whatever he said meanwhile. So the model is told that he is never believed, and each right that
may be used yet is held against what lies there: nothing of anybody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.core.records import GET_ROW, PUT_ROW, REPLICA, Status
from mooncake_store.core.rights import Asking
from tests.core.lab import SECOND, digests_of
from tests.core.rules import Rules, name_of
from tests.core.space import expect
from transfer_engine.kernels.rights import READ, WRITE, WRITTEN, end_of, stamp_of, tag_of

if TYPE_CHECKING:
    import random

    from tests.core.nouns import Object, Version
    from tests.core.space import Extent, Space

__all__ = ["AskedRules", "key_of", "receipt", "right"]

EPOCH_MS = 1_700_000_000_123
"""When the clock of these tests began."""
MS = 1_000_000
UNGUARDED = 3


def key_of(number: int) -> bytes:
    """The key of a segment."""
    return bytes([number + 1]) * 16


def right(key: bytes, kind: int, offset: int, length: int, stamp: int) -> int:
    """The tag of a right, as its owner makes it anew."""
    return int(tag_of(*np.frombuffer(key, np.int64), offset, length, kind, stamp))


def receipt(key: bytes, offset: int, length: int, stamp: int) -> int:
    """What the owner of a segment answers to a write."""
    return right(key, WRITTEN, offset, length, stamp)


class _Given(NamedTuple):
    """A right that may be used until it ends, and what lay there when it was given."""

    space: Space
    spot: tuple[int, int]
    who: str
    end_ns: int


class AskedRules(Rules):
    """The rules, and a writer who shows rights among the clients."""

    def __init__(
        self, rng: random.Random, check_every: int = 1, *, wide: bool | None = None
    ) -> None:
        super().__init__(rng, check_every, wide=wide)
        self.asker = self.checked.open_client(6, 1)
        self.model.asked.add(self.asker)
        self.refused = self.ended = 0
        self._given: list[_Given] = []
        self._shown: dict[int, dict[tuple[int, int], int]] = {}  # receipts, by generation
        most = self.model.config.segments_max
        self._asking = Asking(("team",), EPOCH_MS * MS, 4096 * np.arange(most))
        self.rules |= {
            self.begin: 12,
            self.finish: 12,
            self.give_up: 6,
            self.read: 8,
            self.spoil: 4,
        }

    def _mount(self, number: int) -> None:
        """With a key; one is of a worker that has none, and asks for no rights."""
        super()._mount(number)
        segment = self.checked.shard.space.by_uuid(number.to_bytes(16, "big"))
        assert segment is not None
        key = b"" if number == UNGUARDED else key_of(number)
        self.checked.shard.space.set_guard(segment, key, "")

    def step(self) -> None:
        super().step()
        now, kept = self.checked.now, []
        for given in self._given:
            if given.end_ns > now:
                there = given.space.owners.get(given.spot, "nobody")
                expect(there.startswith(given.who), f"a right to {given.who} meets {there}")
                kept.append(given)
        self._given = kept

    def _note(self, extent: Extent, stamp: int) -> None:
        space = self.model.segments[extent.segment].space
        spot = extent.offset, extent.offset + extent.size
        end_ns = (int(end_of(stamp)) - EPOCH_MS) * MS
        self._given.append(_Given(space, spot, space.owners[spot], end_ns))

    def _replicas(self, extents: list[Extent]) -> tuple[np.ndarray, list[int]]:
        """These places as they are answered, in whole segments."""
        replicas = np.zeros(len(extents), REPLICA)
        replicas["segment"] = [extent.segment for extent in extents]
        replicas["offset"] = [extent.offset for extent in extents]
        replicas["offset"] += self._asking.bases[replicas["segment"]]
        return replicas, replicas["offset"].tolist()

    def _key(self, extent: Extent) -> bytes:
        segment = self.checked.shard.space.get(extent.segment)
        assert segment is not None
        return segment.key

    def _own(self) -> list[Object]:
        return [
            item
            for item in self.model.objects.values()
            if item.writing is not None and item.writing.owner == self.asker
        ]

    # Rules

    def begin(self) -> None:
        """Put, and be given a right for each place."""
        keys = self.rng.sample(self.known_of[0], self.rng.randrange(1, 5))
        sizes, options = self._sizes(keys), self._options(keys)
        upsert = self.rng.random() < 0.3
        self.checked.put_start(
            self.asker, keys, sizes, options, lambda _: 0, name_of, upsert=upsert
        )
        for item in self._own():
            assert item.writing is not None
            if item.writing.generation not in self._shown:
                self._be_given(item, item.writing)

    def _be_given(self, item: Object, version: Version) -> None:
        answers = np.zeros(1, PUT_ROW)
        answers["generation"], answers["replicas"] = version.generation, len(version.extents)
        replicas, places = self._replicas(version.extents)
        rights = self.checked.shard.rights_to_write(
            self.checked.now, self._asking, digests_of([item.key]), answers, replicas
        )
        ends_ms = (version.started + self.model.config.put_discard_ns) // MS + EPOCH_MS
        stamp = int(stamp_of(ends_ms, version.generation))
        shown = self._shown[version.generation] = {}
        for extent, place, told in zip(version.extents, places, rights.tolist(), strict=True):
            key, spot = self._key(extent), (extent.segment, extent.offset)
            known, shown[spot] = [0, 0], 0
            if key:
                known = [right(key, WRITE, place, version.size, stamp), stamp]
                shown[spot] = receipt(key, place, version.size, stamp)
                self._note(extent, stamp)
            expect(told == known, f"the right to write {item.key} is {told}, not {known}")

    def finish(self) -> None:
        """Show what owners answered: of all places, of some, of others, or made up."""
        own = self._own()
        own = self.rng.sample(own, self.rng.randrange(len(own) + 1))
        shown, lacking = list[int](), []
        for item in own:
            version = item.writing
            assert version is not None
            here = [
                self._shown[version.generation][extent.segment, extent.offset]
                for extent in version.extents
                if self.checked.shard.space.alive[extent.segment] or self.rng.random() < 0.5
            ]
            if here and self.rng.random() < 0.3:
                del here[self.rng.randrange(len(here))]
                here += [self.rng.randrange(1 << 62)]
            shown += here
            needed = {
                self._shown[version.generation][extent.segment, extent.offset]
                for extent in version.extents
                if not self.checked.shard.space.dead[extent.segment]
            }
            lacking.append(not needed - {0} <= set(here))
        self.rng.shuffle(shown)
        keys = [item.key for item in own]
        generations = [item.writing.generation for item in own if item.writing]
        refused = self.checked.shard.unwritten(
            self.checked.now, self._asking, self.asker, digests_of(keys),
            np.array(generations, np.uint32), np.array(shown, np.int64),
        )  # fmt: skip
        expect(refused.tolist() == lacking, f"of {keys} {refused} are refused, not {lacking}")
        done = [at for at, lacks in enumerate(lacking) if not lacks]
        self.refused, self.ended = self.refused + sum(lacking), self.ended + len(done)
        ended = [keys[at] for at in done], [generations[at] for at in done]
        self.checked.put_end(self.asker, *ended)
        self._use_up({spot for g in ended[1] for spot in self._shown[g]})

    def _use_up(self, spots: set[tuple[int, int]]) -> None:
        """A right that was used is good no more."""
        spaces = {index: segment.space for index, segment in self.model.segments.items()}
        used = {(id(spaces[index]), offset) for index, offset in spots if index in spaces}
        self._given = [g for g in self._given if (id(g.space), g.spot[0]) not in used]

    def give_up(self) -> None:
        """Revoke own puts, and end those that were lost long ago, which gives back nothing."""
        own = [(item.key, item.writing.generation) for item in self._own() if item.writing]
        lost = [
            (entry.writer[2], entry.writer[1])
            for entry in self.model.quarantine
            if entry.writer and entry.writer[0] == self.asker
        ]
        some = self.rng.sample(own, min(len(own), 2)) + lost[:2]
        keys, generations = [key for key, _ in some], [generation for _, generation in some]
        self.checked.put_end(self.asker, keys, generations, revoke=True, late=True)
        lost_keys, numbers = [key for key, _ in lost], [number for _, number in lost]
        self.checked.put_end(self.asker, lost_keys, numbers)

    def read(self) -> None:
        """Get, and be given a right for each replica, until a little before the lease ends."""
        known = [key for key in self.known if self.model.readable(key)] + self._keys(4)
        keys = list(dict.fromkeys(self.rng.sample(known, min(len(known), 6))))
        ttl = self.rng.choice((0, SECOND // 10, self._ttl()))
        before = self.checked.now
        rows, replicas = self.checked.shard.get(before, self.asker, digests_of(keys), ttl)
        self._follow(keys, rows, ttl)
        at = 0
        places = replicas.copy()
        places["offset"] += self._asking.bases[places["segment"]]
        rights = self.checked.shard.rights_to_read(before, self._asking, rows, places)
        for key, row in zip(keys, rows, strict=True):
            self._check_read(key, row, replicas[at:], places[at:], rights[at:])
            at += int(row["replicas"])

    def _follow(self, keys: list[int], rows: np.ndarray, ttl: int) -> None:
        assert rows.dtype == GET_ROW
        for key, row in zip(keys, rows, strict=True):
            status = Status(int(row["status"]))
            expect(status == self.model.expect_get(key), f"get of {key}: {status!r}")
            if status == Status.OK:
                told = int(row["lease_ns"])
                left = self.model.lease(self.model.objects[key], self.asker, ttl, told)
                expect(left == told, f"get of {key} leases {told} ns, not {left}")

    def _check_read(
        self,
        key: int,
        row: np.void,
        replicas: np.ndarray,
        places: np.ndarray,
        rights: np.ndarray,
    ) -> None:
        version = item.current if (item := self.model.objects.get(key)) else None
        by_spot = {(e.segment, e.offset): e for e in (version.extents if version else ())}
        end_ms = (self.checked.now + int(row["lease_ns"])) // MS + EPOCH_MS - 250
        stamp = int(stamp_of(end_ms, int(row["generation"]))) if row["lease_ns"] else 0
        for at in range(int(row["replicas"])):
            extent = by_spot[int(replicas["segment"][at]), int(replicas["offset"][at])]
            place, told, known = int(places["offset"][at]), rights[at].tolist(), [0, 0]
            if stamp and (own := self._key(extent)):
                known = [right(own, READ, place, int(row["size"]), stamp), stamp]
                self._note(extent, stamp)
            expect(told == known, f"the right to read {key} is {told}, not {known}")

    def spoil(self) -> None:
        """Remove what he reads himself, and put it anew."""
        mine = self._leased(6)
        self.checked.remove(self.asker, self.rng.sample(mine, min(len(mine), 3)), False)
