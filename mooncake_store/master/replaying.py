"""A shard made anew of what it wrote down, for a debugger: of any position, and changing nothing.

    replayed = replay(journals, 0, until=None)      # or StoreError, which says what is missing
    replayed.shard, replayed.restored               # as a master that is started would have it
    replayed.stat("key", "default")

It is made in this process, beside a master that may run, of what `KeptJournals` reads. A position
before the end shows the shard as it was before the word there was written: a whole snapshot must
come before it, and no word since may be missing. The clock, leases and the numbers of events are
those of the end all the same, because they are not written down with each change. The end itself is
what a master makes of it, also where a damage has cost objects.

What is not written down is not there: counters, and who has leases. O(words + rows log rows).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.config.settings import MasterConfig
from mooncake_store.core.restore import StreamEnd, restore
from mooncake_store.core.shard import Shard
from mooncake_store.core.stretches import snapshots, stretch
from mooncake_store.identity import identity_of, secret_of
from mooncake_store.master.building import shard_config
from mooncake_store.master.exporting import ROWS_MAX
from mooncake_store.master.losses import runs_of
from transfer_engine.errors import ConfigError, InvalidArgumentError, NotFoundError, StoreError

if TYPE_CHECKING:
    from mooncake_store.core.last_cells import Run
    from mooncake_store.core.reads import ObjectStat
    from mooncake_store.core.restore import Restored
    from mooncake_store.core.stretches import Snapshot
    from mooncake_store.journal.reading import Contents
    from mooncake_store.master.kept_journals import KeptJournals, Seen

__all__ = ["Replayed", "believed", "replay"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it."""

    shard: Shard
    number: int
    restored: Restored
    snapshot: int
    """Where the snapshot begins that it is made of."""
    end: int
    """The position behind the last word that it is made of."""
    journals: KeptJournals
    identity: str
    """How keys become digests: one of `identity.KINDS`."""
    unused: str
    """Why a master that is started now begins with nothing instead; "" where it does not."""

    def stat(self, key: str | bytes, namespace: str = "default") -> ObjectStat | None:
        """Return everything known of an object, None where there is none."""
        secret = secret_of(bytes.fromhex(self.journals.kept.secret), namespace)
        digest = identity_of(self.identity, secret, namespace).digest(key)
        return self.shard.stat(self.shard.now, np.frombuffer(digest, np.uint64))

    def broken(self) -> str:
        """Return which invariant of the state does not hold, "" where all do. O(rows)."""
        try:
            self.shard.check_integrity()
        except AssertionError as error:
            return str(error) or "an invariant without a name"
        return ""


def believed(seen: Seen) -> Contents:
    """Return what a shard has kept; raises StoreError where nothing of it may be believed."""
    if seen.contents.void:
        raise StoreError(
            f"the journal in {seen.folder} may not be believed: {seen.contents.void}",
            advice="see `mooncake journal verify`",
        )
    return seen.contents


def replay(
    journals: KeptJournals, number: int, until: int | None = None, *, identity: str = "keyed"
) -> Replayed:
    """Make a shard of what is kept of it, up to a position.

    Raises StoreError where words are missing, NotFoundError where there are none, ConfigError for
    words that mean nothing, InvalidArgumentError for a shard or a position that is not there.
    """
    if not 0 <= number < journals.shards:
        last = journals.shards - 1
        raise InvalidArgumentError(f"there is no shard {number}: they are 0 to {last}")
    seen = journals.look(number)
    contents = believed(seen)
    facts = contents.facts
    if facts is None:
        raise NotFoundError(f"nothing was written down yet in {seen.folder}")
    if until is not None and until > contents.end:
        raise InvalidArgumentError(
            f"the journal of shard {number} ends at position {contents.end}, before {until}"
        )
    damage = None
    try:
        if until in (None, contents.end) and not seen.judgement.unusable:
            runs, begin, end = runs_of(contents), facts.snapshot, contents.end
            damage = seen.judgement.damage
        else:
            every = list(zip(contents.positions, contents.runs, strict=True))
            until = contents.end if until is None else until
            begin = _snapshot(every, number, until).begin
            runs, end = stretch(every, begin, until)
        # How many objects the master's settings allow is not written down.
        limits = dataclasses.replace(shard_config(MasterConfig(), number), objects_max=ROWS_MAX)
        shard = Shard(limits)
        known = StreamEnd(facts.now, facts.horizon, facts.events_next, facts.generation, begin)
        restored = restore(shard, runs, known, facts.now, damage)
    except ValueError as error:
        raise ConfigError(
            f"the journal of shard {number} cannot be understood: {error}",
            advice="use the version that wrote it",
        ) from error
    return Replayed(
        shard, number, restored, begin, end, journals, identity, seen.judgement.unusable
    )


def _snapshot(runs: list[Run], number: int, until: int) -> Snapshot:
    """Return the newest snapshot that the shard at a position can be made of."""
    found = snapshots(runs)
    for snapshot in reversed(found):
        if snapshot.whole <= until <= snapshot.until:
            return snapshot
    if not found:
        raise StoreError(
            f"no whole snapshot of shard {number} is left to begin with",
            advice="see `mooncake journal verify`",
        )
    spans = ", ".join(f"{each.whole} to {each.until}" for each in _merged(found))
    raise StoreError(
        f"shard {number} cannot be made as it was at position {until}: all words are needed from "
        "the beginning of a whole snapshot on, and not all are there",
        advice=f"positions that it can be made of with --until: {spans}",
    )


def _merged(found: list[Snapshot]) -> list[Snapshot]:
    """Return of the snapshots between two gaps only the first: what it reaches the others do."""
    return [each for at, each in enumerate(found) if not at or found[at - 1].until != each.until]
