"""A state directory whose shards are used without processes, and what is true of all of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store import ids
from mooncake_store.config.settings import MasterConfig, load
from mooncake_store.core.options import ShardConfig, StartOptions
from mooncake_store.core.portable import objects_of, readable_rows, unfinished_extents
from mooncake_store.core.reads import extents_of
from mooncake_store.core.records import State as RowState
from mooncake_store.core.records import Status
from mooncake_store.core.segment import NEVER
from mooncake_store.journal.origin import Origin
from mooncake_store.master.exporting import restored_shard
from mooncake_store.master.keeping import Keeper
from mooncake_store.master.kept_journals import KeptJournals
from mooncake_store.master.merging import merge_state
from mooncake_store.master.registers import (
    VERSION,
    KeptSegment,
    KeptWorker,
    RegisterFile,
    Registers,
    write_registers,
)
from mooncake_store.master.shard_link import slice_of
from mooncake_store.master.splitting import split_state
from mooncake_store.master.state_directory import StateDirectory, read_kept
from tests.clocks import ManualClock
from tests.core.lab import MIB, SECOND, digests_of, names_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mooncake_store.core.shard import Shard

WORKER = KeptWorker(b"w" * 16, 1, "worker", "host", True)
OBJECTS_MAX = 20_000
LIMITS = ShardConfig(objects_max=OBJECTS_MAX, segments_max=16, lease_ttl_max_ns=20 * SECOND)
RELEASE_NS = LIMITS.put_release_ns
PIECE = 256
"""Bytes of what is given out to see what that is."""
START = 10_000 * SECOND
CLIENTS = [WORKER.uuid, b"c" * 16, b"d" * 16]
TENANTS = ["default", "red", "green"]


class State:
    """The shards of one pool; `run` is a life of all of them."""

    def __init__(self, folder: Path, shards: int, sizes: Sequence[int]) -> None:
        self.path = folder
        config = load(MasterConfig, environ={}, overrides={"state": str(folder)}).value
        StateDirectory.of(config).close()
        kept = read_kept(folder)
        assert kept is not None
        self.cluster = kept.cluster
        self.clock = ManualClock(START)
        self.shards: list[Shard] = []
        self.ahead: dict[int, int] = {}
        """How far the times of shards are ahead of the clock, once, as after a move."""
        segments = tuple(
            KeptSegment(number, bytes([number + 1]) * 16, f"s{number}", nbytes, b"", WORKER.uuid)
            for number, nbytes in enumerate(sizes)
        )
        self._write(Registers(VERSION, 1, len(sizes) - 1, (WORKER,), segments, (1,)))
        with self.run(shards):
            for at, shard in enumerate(self.shards):
                # Each counts for itself.
                for uuid in np.roll(np.array(CLIENTS, object), at).tolist():
                    shard.open_client(self.now(at), uuid, 1)
                for name in np.roll(np.array(TENANTS, object), at).tolist():
                    shard.tenant(name, MIB * (at + 1) if name == "red" else None)
                for known in segments:
                    self.mount(at, known)

    def mount(self, at: int, known: KeptSegment) -> None:
        """Let a shard have its slice of a segment, as the master does, also of one that it has."""
        shard, count = self.shards[at], len(self.shards)
        shares = known.shares or count
        status, number = shard.mount(
            self.now(at),
            shard.clients[WORKER.uuid].handle,
            known.uuid,
            known.name,
            slice_of(known.nbytes, at * shares // count, shares)[1],
            "host",
            known.number,
        )
        assert (status, number) == (Status.OK, known.number)

    def _write(self, registers: Registers) -> None:
        write_registers(self.path / "cluster.json", registers)

    @property
    def registers(self) -> Registers:
        """What is written down of segments."""
        found = RegisterFile(self.path).read()
        assert found is not None
        return found

    @property
    def count(self) -> int:
        """How many shards there are."""
        return KeptJournals.of(self.path).shards

    @contextmanager
    def run(self, count: int = 0) -> Iterator[None]:
        """Have all shards."""
        count = count or self.count
        times = self.clock.now_ns(), self.clock.wall_ns()
        self._keepers = [
            Keeper.open(
                LIMITS,
                Origin(self.cluster, at, count),
                self.path / f"shard-{at}",
                "written",
                *times,
            )
            for at in range(count)
        ]
        for at, ahead_ns in self.ahead.items():
            keeper = self._keepers[at]
            keeper.ahead_ns = keeper._ring.ring.header[10] = ahead_ns
        self.ahead.clear()
        self.shards = [keeper.shard for keeper in self._keepers]
        try:
            yield
            for shard in self.shards:
                shard.check_integrity()
        finally:
            for keeper in self._keepers:
                keeper.close()
            self.shards = []

    def now(self, at: int) -> int:
        """The time of a shard."""
        return self.clock.now_ns() + self._keepers[at].ahead_ns

    # -- what clients do

    def _each(self, keys: Sequence[int]) -> Iterator[tuple[int, Shard, list[int]]]:
        owners = ids.shard_of(digests_of(keys), len(self.shards))
        for at in np.unique(owners).tolist():
            yield at, self.shards[at], [k for k, o in zip(keys, owners, strict=True) if o == at]

    def begin(
        self, keys: Sequence[int], size: int, client: int = 1, tenant: str = "default", **how: Any
    ) -> dict[int, int]:
        """Begin to put what there is room for; return their generations."""
        begun = {}
        for at, shard, some in self._each(keys):
            answers, _ = shard.put_start(
                self.now(at),
                shard.clients[CLIENTS[client]].handle,
                shard.tenant(tenant),
                digests_of(some),
                np.full(len(some), size, np.int64),
                names_of([f"name/{key}" for key in some]),
                StartOptions(**how),
            )
            for key, answer in zip(some, answers, strict=True):
                if answer["status"] == Status.OK:
                    begun[key] = int(answer["generation"])
        return begun

    def end(self, begun: dict[int, int], client: int = 1) -> list[int]:
        """Complete puts."""
        said = []
        for at, shard, some in self._each(list(begun)):
            said += shard.put_end(
                self.now(at),
                shard.clients[CLIENTS[client]].handle,
                digests_of(some),
                np.array([begun[key] for key in some], np.uint32),
                np.array(some, np.uint64),
            ).tolist()
        return said

    def put(self, keys: Sequence[int], size: int, client: int = 1, **how: Any) -> list[int]:
        """Put what there is room for; return which."""
        begun = self.begin(keys, size, client, **how)
        assert not any(self.end(begun, client))
        return list(begun)

    def lease(self, keys: Sequence[int], ttl_ns: int) -> None:
        """Read objects."""
        for at, shard, some in self._each(keys):
            handle = shard.clients[CLIENTS[2]].handle
            shard.get(self.now(at), handle, digests_of(some), ttl_ns)

    def remove(self, keys: Sequence[int]) -> None:
        """Remove objects, whoever reads them."""
        for at, shard, some in self._each(keys):
            shard.remove(self.now(at), digests_of(some), True, 0)

    def pass_time(self, delta_ns: int) -> None:
        """Let time pass, and all duties be done."""
        self.clock.advance(delta_ns)
        for _ in range(300):
            for at, shard in enumerate(self.shards):
                shard.tick(self.now(at))

    def go_round(self) -> int:
        """Give back what nobody has any more, as the master does; return how many are left."""
        for shard in self.shards:
            guests = shard.guests()
            there = np.zeros(len(guests), bool)
            for other in self.shards:
                if other is not shard:
                    there |= other.outstanding(guests[:, 0], guests[:, 1])
            shard.guests_left(self.now(self.shards.index(shard)), guests[~there, 3])
        return sum(len(shard.guests()) for shard in self.shards)

    # -- changes

    def split(self, factor: int) -> None:
        """Make several of each."""
        split_state(self.path, factor, self.clock, RELEASE_NS)

    def merge(self, factor: int, objects_max: int = OBJECTS_MAX) -> None:
        """Make one of several."""
        merge_state(self.path, factor, self.clock, RELEASE_NS, objects_max)

    # -- what is there

    def look(self) -> list[Shard]:
        """The shards as they are written down; what is done to them is not."""
        journals = KeptJournals.of(self.path)
        found = []
        for at in range(journals.shards):
            seen = journals.look(at)
            assert seen.contents.facts is not None
            found.append(restored_shard(seen, seen.contents.facts, RELEASE_NS))
            found[-1].check_integrity()
        return found

    def bases(self, at: int, count: int) -> dict[int, int]:
        """Where in each segment the slice begins in which a shard has space."""
        found = {}
        for known in self.registers.segments:
            shares = known.shares or count
            found[known.number] = slice_of(known.nbytes, at * shares // count, shares)[0]
        return found

    def objects(self) -> dict[bytes, Any]:
        """All of every object that is to stay the same."""
        found, shards = {}, self.look()
        for at, shard in enumerate(shards):
            bases = self.bases(at, len(shards))
            for rows in readable_rows(shard):
                some = objects_of(shard, rows)
                ends = np.cumsum(some.replicas)
                name_ends = np.cumsum(some.name_bytes)
                assert (ids.shard_of(some.digests, len(shards)) == at).all()
                for row in range(len(rows)):
                    lies = slice(ends[row] - some.replicas[row], ends[row])
                    name = some.names[name_ends[row] - some.name_bytes[row] : name_ends[row]]
                    writer = shard.client_by_handle.get(int(some.writers[row]))
                    found[some.digests[row].tobytes()] = (
                        name,
                        *(int(column[row]) for column in (
                            some.sizes, some.checksums, some.generations, some.pins, some.wanted,
                        )),
                        shard.tenant_by_number[int(some.namespaces[row])].name,
                        some.groups[row] and some.group_names[some.groups[row] - 1],
                        None if writer is None else writer.uuid,
                        sorted(
                            (s, o + bases[s])
                            for s, o in zip(
                                some.segments[lies].tolist(),
                                some.offsets[lies].tolist(),
                                strict=True,
                            )
                        ),
                    )  # fmt: skip
        return found

    def given_out(self) -> int:
        """How many bytes all of them may give out."""
        return sum(segment.nbytes for shard in self.look() for segment in shard.segments())

    def check_space(self) -> int:
        """Nothing overlaps, and nothing that is given out; return how many bytes were."""
        shards, given = self.look(), 0
        taken: dict[int, list[np.ndarray]] = {}
        for at, shard in enumerate(shards):
            states = shard.rows["state"][: shard.table.rows_high]
            readable = np.flatnonzero(states == RowState.READABLE)
            row, segment, offset = extents_of(shard, readable)
            size = shard.rows["size"][row].astype(np.int64)
            waits = np.concatenate([shard.waiting_extents(), unfinished_extents(shard)])
            waits = waits[waits[:, 4] < NEVER][:, :3]
            lies = np.concatenate([np.stack([segment, offset, size], axis=1), waits])
            bases = self.bases(at, len(shards))
            for known in shard.segments():
                base = bases[known.index]
                mine = lies[lies[:, 0] == known.index][:, 1:] + [base, 0]
                free = known.allocator.allocate(np.full(known.nbytes // PIECE + 1, PIECE))
                free = free[free >= 0] + base
                given += PIECE * len(free)
                fresh = np.stack([free, np.full(len(free), PIECE)], axis=1)
                taken.setdefault(known.index, []).extend([mine, fresh])
        for number, some in taken.items():
            every = np.concatenate(some)
            every = every[np.argsort(every[:, 0])]
            ends = every[:, 0] + every[:, 1]
            assert (ends[:-1] <= every[1:, 0]).all(), f"two lie at one place in segment {number}"
        return given
