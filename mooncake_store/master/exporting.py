"""Writing a master's state to one file that any version can read, while no master uses it.

    exported = export_state(path, target, SystemClock())

The journal of each shard is read as a master that starts would read it, so what is exported is what
that would know. What a master would not believe is refused, and nothing is written then. Puts that
were under way are not objects yet: their space is told as held, for as long as a late writer has.

O(bytes of the journal), in the memory that one shard takes in a master.
"""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mooncake_store import __version__
from mooncake_store.core.facts import ClientFact, ForgottenFact, SegmentFact, TenantFact
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.portable import objects_of, readable_rows, unfinished_extents
from mooncake_store.core.records import SegmentState
from mooncake_store.core.restore import StreamEnd, restore
from mooncake_store.core.segment import NEVER
from mooncake_store.core.shard import Shard
from mooncake_store.journal.origin import this_boot
from mooncake_store.master.keeping import take_lock
from mooncake_store.master.kept_files import unusable
from mooncake_store.master.kept_journals import KeptJournals
from mooncake_store.master.losses import runs_of
from mooncake_store.master.registers import SEGMENT_NUMBERS, RegisterFile
from mooncake_store.master.state_columns import held_record, objects_record
from mooncake_store.master.state_directory import held
from mooncake_store.master.state_file import (
    FORMAT,
    VERSION,
    ClientEntry,
    MemoryEntry,
    NamespaceEntry,
    RegistersRecord,
    SegmentEntry,
    ShardRecord,
    StateRecord,
    writing,
)
from transfer_engine.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from mooncake_store.clock import Clock
    from mooncake_store.journal.layout import Facts
    from mooncake_store.master.kept_journals import Seen
    from mooncake_store.master.registers import KeptSegment
    from mooncake_store.master.state_file import StateWriter

__all__ = [
    "ROWS_MAX",
    "Exported",
    "boot_bytes",
    "check_whole",
    "export_state",
    "restored_shard",
]

ROWS_MAX = 1 << 30
"""As many as the setting allows; reserves address space, not memory."""
_NO_BOOT = 0, 0


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    shards: int
    objects: int
    nbytes: int
    """Of the objects, all replicas counted."""
    file_bytes: int


def export_state(path: Path, target: Path, clock: Clock, put_release_ns: int) -> Exported:
    """Write the state in a directory to a file of its user alone, in place of any of that name.

    `put_release_ns` is how long the master would keep the space of unfinished puts.
    Raises ConfigError while a master uses it, and where there is none; StoreError for a state that
    is not whole; OSError for a file that cannot be written.
    """
    journals = KeptJournals.of(path)
    with ExitStack() as locks:
        try:
            locks.enter_context(held(path))
            for shard in range(journals.shards):
                locks.callback(os.close, take_lock(path / f"shard-{shard}"))
        except OSError as error:
            raise unusable(path, error) from error
        registers = RegisterFile(path).read()
        seen = [journals.look(shard) for shard in range(journals.shards)]
        for shard, each in enumerate(seen):
            check_whole(shard, each)
        objects, nbytes = 0, 0
        with writing(target) as out:
            kept = journals.kept
            secret = bytes.fromhex(kept.secret)
            head = FORMAT, VERSION, __version__, kept.cluster, secret, journals.shards
            out.add(StateRecord(*head))
            if registers is not None:
                known = registers.life, registers.last_number, registers.runs
                segments = tuple(map(_without_key, registers.segments))
                out.add(RegistersRecord(*known, registers.workers, segments))
            while seen:
                each = seen.pop(0)
                found = _write_shard(
                    out, journals.shards - len(seen) - 1, each, clock, put_release_ns
                )
                objects, nbytes = objects + found[0], nbytes + found[1]
    return Exported(journals.shards, objects, nbytes, out.nbytes)


def check_whole(shard: int, seen: Seen) -> None:
    """Raise StoreError for the journal of a shard from which something is missing."""
    contents = seen.contents
    why = contents.missing or ("" if contents.facts else "nothing was written down yet")
    if why:
        raise StoreError(
            f"the state of shard {shard} is not whole: {why}",
            advice="see `mooncake journal verify`; only what is whole is carried over",
        )


def _write_shard(
    out: StateWriter, number: int, seen: Seen, clock: Clock, put_release_ns: int
) -> tuple[int, int]:
    """Write all of one shard; returns how many objects, and their bytes."""
    facts = seen.contents.facts
    assert facts is not None
    gc.collect()  # the shard before, whose parts know each other
    shard = restored_shard(seen, facts, put_release_ns)
    out.add(_shard_record(number, shard, facts, seen, clock))
    held_extents = np.concatenate([shard.waiting_extents(), unfinished_extents(shard)])
    if len(held_extents):
        out.add(held_record(held_extents))
    nbytes = 0
    for rows in readable_rows(shard):
        objects = objects_of(shard, rows)
        out.add(objects_record(objects))
        nbytes += int((objects.sizes * objects.replicas).sum())
    return shard.objects, nbytes


def restored_shard(seen: Seen, facts: Facts, put_release_ns: int) -> Shard:
    """Return the shard that a master would have, at the moment that the journal ends in."""
    limits = ShardConfig(
        objects_max=ROWS_MAX,
        segments_max=SEGMENT_NUMBERS,
        put_discard_ns=put_release_ns - 1,
        put_release_ns=put_release_ns,
        events_kept=0,
    )
    shard = Shard(limits)
    # Without the end of leases, which would hide when each object was used last.
    end = StreamEnd(facts.now, 0, facts.events_next, facts.generation, facts.snapshot)
    try:
        restore(shard, runs_of(seen.contents), end, facts.now)
    except ValueError as error:
        raise ConfigError(
            f"the journal in {seen.folder} cannot be understood: {error}",
            advice="use the version that wrote it",
        ) from error
    return shard


def _shard_record(number: int, shard: Shard, facts: Facts, seen: Seen, clock: Clock) -> ShardRecord:
    told = list(shard.all_but_rows())
    boot = seen.contents.boot or this_boot()
    # It goes on from an earlier boot, or from another host, on a clock that nobody has.
    if facts.now > clock.now_ns() or seen.ahead_ns:
        boot = _NO_BOOT
    here = boot == this_boot()
    return ShardRecord(
        shard=number,
        boot=boot_bytes(boot),
        clock_ns=clock.now_ns() if here else facts.now,
        wall_ns=clock.wall_ns() if here else facts.wall_ns,
        leases_until_ns=facts.horizon,
        next_event=facts.events_next,
        generation=facts.generation,
        objects=shard.objects,
        namespaces=tuple(
            NamespaceEntry(each.number, each.name, each.quota_bytes)
            for each in told
            if isinstance(each, TenantFact)
        ),
        clients=tuple(
            ClientEntry(each.handle, each.uuid, each.epoch, each.host)
            for each in told
            if isinstance(each, ClientFact)
        ),
        segments=tuple(_segment(each) for each in told if isinstance(each, SegmentFact)),
        memories=tuple(_memory(each) for each in told if isinstance(each, ForgottenFact)),
    )


def _segment(fact: SegmentFact) -> SegmentEntry:
    return SegmentEntry(
        fact.index,
        fact.uuid,
        fact.name,
        fact.host,
        fact.nbytes,
        fact.owner,
        SegmentState(fact.state).name.lower(),
        SegmentState(fact.returns_as).name.lower(),
        fact.usable_from,
        None if fact.gone_at == NEVER else fact.gone_at,
        fact.busy_until,
        fact.tier,
        fact.unsure_s,
        fact.part,
        fact.namespace,
    )


def _without_key(segment: KeptSegment) -> KeptSegment:
    """Leave out what rights are made with: its worker brings it again."""
    return msgspec.structs.replace(segment, key=b"")


def _memory(fact: ForgottenFact) -> MemoryEntry:
    return MemoryEntry(fact.index, fact.uuid, fact.busy_until, fact.readers_until)


def boot_bytes(boot: tuple[int, int]) -> bytes:
    """Return the id of a boot as it is written."""
    return b"".join(word.to_bytes(8, "big", signed=True) for word in boot)
