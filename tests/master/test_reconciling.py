"""What a master that is started again agrees on with its shards: runs of it without any socket.

The shards' cores go from one run to the next as they are, which is what a shard that kept its
contents looks like; what a run keeps besides lies in a directory.
"""

import errno
import inspect
import itertools
import os
from types import SimpleNamespace

import pytest

from mooncake_store.core.janitor import Janitor
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import SegmentState, Status
from mooncake_store.core.shard import Shard
from mooncake_store.errors import PeerLostError, UnavailableError
from mooncake_store.master import cluster, registers
from mooncake_store.master.cluster import Cluster
from mooncake_store.master.cluster_service import ClusterService
from mooncake_store.master.overview import ClusterFacts
from mooncake_store.master.registers import RegisterFile
from mooncake_store.master.seats import Seats
from mooncake_store.master.shard_link import LocalShard, slice_of
from mooncake_store.master.site import ShardPlace, ShardTimes, Site
from mooncake_store.wire import cluster as wire
from tests.clocks import ManualClock
from tests.waiting import until_async
from transfer_engine.rpc.address import Address
from transfer_engine.wire.frame import Frame
from transfer_engine.wire.rights import EVERYTHING

pytestmark = pytest.mark.asyncio

MIB = 1 << 20
SECOND = 1_000_000_000
TTL = 60 * SECOND


class Connection:
    """What the cluster service sees of whoever asks."""

    def __init__(self):
        self.peer = "127.0.0.1:1"
        self.session = SimpleNamespace(read_only=False, proven=False, rights=EVERYTHING)
        self._closings = []

    def on_close(self, closing):
        self._closings.append(closing)

    def close(self):
        for closing in self._closings:
            closing()


CONNECTION = Connection()
HERE = Address("127.0.0.1", 1)

_lives = itertools.count(1)


def uuid_of(name):
    """A uuid, another one for each name."""
    return name.encode().ljust(16, b".")


class Watch:
    """Liveness that is told whom to watch, and sees what a test says."""

    def __init__(self):
        self.watched = {}
        self.keeping = set()
        self.called_back = set()
        self._states = {}

    def watch(self, uuid, epoch, doors=(), *, keeps=False):
        self.watched[uuid] = epoch
        self._states[uuid, epoch] = "alive"
        if keeps:
            self.keeping.add(uuid)

    def see(self, uuid, epoch, state):
        """See what became of a run."""
        self._states[uuid, epoch] = "" if state in ("gone", "ended") else state

    def state(self, uuid, epoch):
        return self._states.get((uuid, epoch), "")

    def faults(self):
        return {}

    def call_back(self, uuid):
        self.called_back.add(uuid)

    def forget(self, uuid):
        self.watched.pop(uuid, None)

    def silent_ns(self, uuid):
        return 0


class Link(LocalShard):
    """A link that may be down, and shows what it is asked first."""

    def __init__(self, site):
        super().__init__(site)
        self.down = False
        self.overheard = lambda operation, request: None

    async def ask(self, operation, request):
        self.overheard(operation, request)
        if self.down:
            raise PeerLostError("the shard is being started again")
        return await super().ask(operation, request)


class Run:
    """One run of a master over some shards, which have kept their contents unless told else."""

    def __init__(self, folder, shards, kept=True, found="here"):
        clock = ManualClock(now_ns=1000 * SECOND)
        times = ShardTimes(5 * SECOND, 60 * SECOND, TTL)
        self.folder, self.kept, self.liveness = folder, kept, Watch()
        self.found = found
        self.sites = [
            Site(shard, ShardPlace(at, len(shards)), times, clock)
            for at, shard in enumerate(shards)
        ]
        self.links = [Link(site) for site in self.sites]
        seats = Seats(len(shards))
        for seat, link in zip(seats, self.links, strict=True):
            seat.take(link, HERE)
        self.cluster = Cluster(clock, seats)
        self.service = ClusterService(self.cluster.handlers, lambda: self.cluster.begun)

    async def __aenter__(self):
        life = self.cluster.recall(RegisterFile(self.folder), self.found, "here")
        for site in self.sites:
            site.clients.restore(site.now())
        facts = ClusterFacts(
            "name", 1, "version", HERE, 1000, 10_000, "xxh3", b"",
            life if self.kept and life is not None else next(_lives), 1000,
        )  # fmt: skip
        await self.cluster.begin(facts, self.liveness)
        return self

    async def __aexit__(self, *_):
        await self.cluster.stop()

    async def ask(self, operation, request, connection=CONNECTION):
        """Ask the cluster service as a connection would."""
        body = operation.request.pack(request)
        answer = self.service.handle(connection, Frame(operation.opcode, 0, 1, 0, body))
        if inspect.isawaitable(answer):
            answer = await answer
        return operation.reply.unpack(answer)

    async def mount(self, worker, *segments, epoch=1, keeps=False, run=0, disowned=0):
        """Mount segments of 8 MiB."""
        specs = tuple(wire.SegmentSpec(uuid_of(name), name, 8 * MIB, b"") for name in segments)
        request = wire.Mount(uuid_of(worker), epoch, worker, "host", specs, keeps, run, disowned)
        return await self.ask(wire.MOUNT, request)

    def see(self, worker, state):
        """Hear of the first run of a worker what liveness sees of it."""
        self.liveness.see(uuid_of(worker), 1, state)
        self.cluster.changed(uuid_of(worker), 1, state)

    async def segments(self):
        return (await self.ask(wire.SEGMENTS, wire.SegmentsRequest())).segments

    async def names(self):
        return [segment.name for segment in await self.segments()]

    async def life(self):
        return (await self.ask(wire.MAP, wire.MapRequest())).life

    async def workers(self):
        status = await self.ask(wire.STATUS, wire.StatusRequest())
        return {worker.name: worker.state for worker in status.workers}


@pytest.fixture
def shards():
    return [Shard(ShardConfig(objects_max=4096)) for _ in range(2)]


def known(shard):
    """The names of the segments that a shard has."""
    return [s.name for s in shard.segments() if s.state != SegmentState.GONE]


def states(shards):
    """In what state the segments of some shards are, those that are gone left out."""
    found = [s.state for shard in shards for s in shard.segments()]
    return [state for state in found if state != SegmentState.GONE]


def kept_names(folder):
    """The names of the segments in the registers."""
    return [segment.name for segment in RegisterFile(folder).read().segments]


def lose(shard, name):
    """Let a shard not have a segment."""
    (found,) = [segment for segment in shard.segments() if segment.name == name]
    assert shard.unmount(shard.now, found.owner, found.uuid, force=True) == Status.OK


async def test_what_all_shards_have_is_taken_over_as_it_was(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        mounted = await first.mount("w", "a", "b", epoch=3)
        before, life = await first.segments(), await first.life()
    async with Run(tmp_path, shards) as second:
        found = await second.segments()
        assert [each.state for each in found] == [SegmentState.SUSPECT] * 2  # until it mounts
        assert [(each.number, each.uuid) for each in found] == [
            (each.number, each.uuid) for each in before
        ]
        assert await second.life() == life
        assert await second.workers() == {"w": "alive"}
        assert second.liveness.watched == {uuid_of("w"): 3}
        # The worker comes back and changes nothing.
        assert await second.mount("w", "a", "b", epoch=3) == mounted
        assert await second.segments() == before
        assert (await second.mount("w", "a", epoch=2)).statuses == (Status.ILLEGAL_CLIENT,)
        assert (await second.mount("x", "a")).statuses == (Status.ILLEGAL_CLIENT,)


async def test_a_shard_knows_where_its_slices_begin_before_it_serves_anybody(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        numbers = (await first.mount("w", "a", "b")).numbers
    second = Run(tmp_path, shards)
    second.cluster.recall(RegisterFile(tmp_path))
    for at, (site, link) in enumerate(zip(second.sites, second.links, strict=True)):
        site.clients.restore(site.now())
        base, _ = slice_of(8 * MIB, at, 2)
        bases = second.cluster.bases(at, 2)
        assert bases == [(number, base) for number in numbers]
        link.place(bases)
        assert [int(site.bases[number]) for number in numbers] == [base] * 2
        assert known(shards[at]) == ["a", "b"]
        # What is put on a slice without a place would land on another's.
        link.place(bases[1:])
        assert known(shards[at]) == ["b"]


async def test_what_one_shard_has_lost_goes_from_all(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        numbers = (await first.mount("w", "a", "b")).numbers
        await first.mount("v", "c")
    lose(shards[1], "a")
    lose(shards[0], "c")
    async with Run(tmp_path, shards) as second:
        assert await second.names() == ["b"]
        assert [known(shard) for shard in shards] == [["b"], ["b"]]
        assert second.liveness.watched == {uuid_of("w"): 1}
        # Its owner lends it again, under another number.
        again = (await second.mount("w", "a", "b")).numbers
        assert again[1] == numbers[1]
        assert again[0] not in numbers
    async with Run(tmp_path, shards) as third:
        assert await third.names() == ["b", "a"]


async def test_what_only_shards_know_goes(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        await first.mount("w", "a", "b")
    os.unlink(tmp_path / "cluster.json")
    async with Run(tmp_path, shards) as second:
        assert await second.names() == []
        assert [known(shard) for shard in shards] == [[], []]
        assert await second.workers() == {}


async def test_registers_that_are_older_than_the_shards_give_nothing_up(tmp_path, shards):
    """As those of a standby that had not written down yet that a worker was started again."""
    older = tmp_path / "older"
    async with Run(tmp_path, shards) as first:
        mounted = await first.mount("w", "a", "b", epoch=1, keeps=True)
        older.mkdir()
        (older / "cluster.json").write_bytes((tmp_path / "cluster.json").read_bytes())
        await first.mount("w", "a", "b", epoch=2, keeps=True)
    async with Run(older, shards) as second:
        assert await second.names() == ["a", "b"]
        # Hidden until the run that the shards know has mounted, or its time is over.
        assert states(shards) == [SegmentState.ABSENT] * 4
        assert second.liveness.watched == {uuid_of("w"): 1}
        assert await second.mount("w", "a", "b", epoch=2, keeps=True) == mounted
        assert states(shards) == [SegmentState.OK] * 4
    async with Run(older, shards) as third:
        third.liveness.see(uuid_of("w"), 2, "gone")
        third.cluster.changed(uuid_of("w"), 2, "gone")
        await until_async(lambda: states(shards) == [])


async def test_contents_that_were_not_kept_are_another_life(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        numbers = (await first.mount("w", "a", "b")).numbers
        life = await first.life()
    some_kept = [shards[0], Shard(ShardConfig(objects_max=4096))]
    async with Run(tmp_path, some_kept, kept=False) as second:
        assert await second.life() != life
        life = await second.life()
        assert await second.names() == []
        assert known(shards[0]) == []
        assert second.liveness.watched == {}
        again = (await second.mount("w", "a", "b")).numbers
        assert not set(again) & set(numbers)  # nobody takes the new for the old
    async with Run(tmp_path, some_kept) as third:
        assert await third.life() == life
        assert await third.names() == ["a", "b"]


async def test_without_a_directory_every_run_is_another_life(shards):
    async with Run(None, shards) as first:
        await first.mount("w", "a")
        life = await first.life()
    async with Run(None, shards) as second:
        assert await second.life() != life
        assert await second.names() == []


async def test_a_newer_run_of_a_worker_is_the_one_that_is_expected_back(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        await first.mount("w", "a", "b", epoch=1)
        await first.mount("w", "b", epoch=2)
    async with Run(tmp_path, shards) as second:
        assert await second.names() == ["b"]
        assert second.liveness.watched == {uuid_of("w"): 2}


async def test_a_worker_that_left_or_died_is_not_expected_back(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        for name in ("left", "died", "stays"):
            await first.mount(name, f"of {name}")
        await first.ask(wire.UNMOUNT, wire.Unmount(uuid_of("left"), 1, ()))
        first.see("died", "gone")
        await until_async(lambda: known(shards[0]) == ["of stays"])
    async with Run(tmp_path, shards) as second:
        assert await second.names() == ["of stays"]
        assert await second.workers() == {"stays": "alive"}


@pytest.mark.parametrize("state", ["suspect", "absent"])
async def test_a_worker_that_was_silent_has_its_time_again(tmp_path, shards, state):
    async with Run(tmp_path, shards) as first:
        await first.mount("w", "a", keeps=True)
        first.see("w", state)
        await until_async(lambda: states(shards) == [SegmentState[state.upper()]] * 2)
    async with Run(tmp_path, shards) as second:
        assert await second.workers() == {"w": "alive"}
        assert states(shards) == [SegmentState[state.upper()]] * 2
        assert second.liveness.keeping == {uuid_of("w")}
        await second.mount("w", "a", keeps=True)
        assert [s.state for s in await second.segments()] == [SegmentState.OK]
        assert states(shards) == [SegmentState.OK] * 2


async def test_a_drain_goes_on_without_the_jobs_that_ended_with_the_processes(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        (number,) = (await first.mount("w", "a")).numbers
        assert (await first.ask(wire.DRAIN, wire.Drain(number))).state == "running"
    for shard in shards:
        shard.janitor = Janitor(shard, shard.tasks)
    async with Run(tmp_path, shards) as second:
        assert [s.state for s in await second.segments()] == [SegmentState.DRAINING]
        for shard in shards:
            shard.tick(shard.now)
        found = await second.ask(wire.DRAIN_STATUS, wire.DrainStatusRequest(number))
        assert found.state == "done"
    async with Run(tmp_path, shards) as third:
        assert [s.state for s in await third.segments()] == [SegmentState.DRAINED]


async def test_a_segment_is_written_down_first_and_crossed_out_last(tmp_path, shards):
    seen = []

    def overheard(operation, request):
        if operation in (wire.MOUNT_SLICE, wire.SEGMENT_STATE):
            seen.append((operation.name, kept_names(tmp_path)))

    async with Run(tmp_path, shards) as run:
        run.links[1].overheard = overheard
        await run.mount("w", "a")
        await run.mount("v", "b")
        await run.ask(wire.UNMOUNT, wire.Unmount(uuid_of("w"), 1, ()))
        assert kept_names(tmp_path) == ["b"]
    assert seen == [
        ("mount_slice", ["a"]),
        ("mount_slice", ["a", "b"]),
        ("segment_state", ["a", "b"]),
    ]


async def test_what_cannot_be_written_down_is_refused_and_known_to_nobody(
    tmp_path, shards, monkeypatch
):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with Run(tmp_path, shards) as run:
        await run.mount("w", "a")
        with monkeypatch.context() as patched:
            patched.setattr(registers, "write_whole", full)
            with pytest.raises(UnavailableError, match="No space left"):
                await run.mount("v", "b")
            assert await run.names() == ["a"]
            assert [known(shard) for shard in shards] == [["a"], ["a"]]
            assert await run.workers() == {"w": "alive"}
            # What goes, goes.
            outcome = await run.ask(wire.UNMOUNT, wire.Unmount(uuid_of("w"), 1, ()))
            assert outcome.status == 0
            assert [known(shard) for shard in shards] == [[], []]
        assert (await run.mount("v", "b")).statuses == (0,)
    async with Run(tmp_path, shards) as second:
        assert await second.names() == ["b"]


async def test_a_shard_that_comes_back_hears_what_it_missed(tmp_path, shards):
    async with Run(tmp_path, shards) as run:
        for worker, segment in ("wa", "vb", "uc"):
            await run.mount(worker, segment)
        run.see("v", "suspect")
        await until_async(lambda: SegmentState.SUSPECT in states(shards[1:]))
        run.links[1].down = True
        run.see("w", "gone")
        await until_async(lambda: known(shards[0]) == ["b", "c"])
        with pytest.raises(PeerLostError):
            await run.mount("x", "d")
        lose(shards[1], "c")
        run.links[1].down = False
        await run.cluster.reconcile()
        assert await run.names() == ["b"]
        assert [known(shard) for shard in shards] == [["b"], ["b"]]
        assert states(shards) == [SegmentState.SUSPECT] * 2
        assert run.liveness.called_back == {uuid_of("u")}
        assert (await run.mount("x", "d")).statuses == (0,)
        assert await run.names() == ["b", "d"]


@pytest.mark.parametrize("state", ["suspect", "absent"])
async def test_a_shard_that_stalled_hears_of_all_segments_what_it_missed(
    tmp_path, shards, monkeypatch, state
):
    monkeypatch.setattr(cluster, "AGREE_S", 0.001)
    async with Run(tmp_path, shards) as run:
        await run.mount("w", "a", "b", keeps=True)
        asked = []
        run.links[1].overheard = lambda operation, _: asked.append(operation.name)
        for seen, wanted in ((state, SegmentState[state.upper()]), ("alive", SegmentState.OK)):
            run.links[1].down = True
            asked.clear()
            run.see("w", seen)
            await until_async(lambda: asked.count("slices") > 1)  # it failed again and again
            run.links[1].down = False
            await until_async(lambda wanted=wanted: states(shards) == [wanted] * 4)
        assert await run.names() == ["a", "b"]
        run.links[1].down = True
        run.see("w", "gone")
        await until_async(lambda: known(shards[0]) == ["b"])
        run.links[1].down = False
        await until_async(lambda: [known(shard) for shard in shards] == [[], []])
        assert await run.names() == []


async def test_clients_come_back_to_a_shard_that_was_started_again(shards):
    shard, clock = shards[0], ManualClock(now_ns=1000 * SECOND)
    times = ShardTimes(5 * SECOND, 60 * SECOND, TTL)

    def started():
        site = Site(shard, ShardPlace(), times, clock)
        site.clients.restore(clock.now_ns())
        return site

    first = started()
    slice_ = wire.MountSlice(3, uuid_of("a"), "a", "host", 0, MIB, uuid_of("owner"), 1)
    assert (await LocalShard(first).ask(wire.MOUNT_SLICE, slice_)).status == 0
    for name in ("comes back", "does not"):
        first.clients.enroll(clock.now_ns(), uuid_of(name), 1, "host")
    handles = {uuid: client.handle for uuid, client in shard.clients.items()}

    second = started()
    run = second.clients.enroll(clock.now_ns(), uuid_of("comes back"), 1, "host")
    second.clients.connect(run, object())
    assert run.handle == handles[uuid_of("comes back")]
    assert (await LocalShard(second).ask(wire.MOUNT_SLICE, slice_)).status == 0
    assert {uuid: client.handle for uuid, client in shard.clients.items()} == handles
    clock.advance(TTL - 1)
    second.clients.expire(clock.now_ns())
    assert shard.clients.keys() == handles.keys()
    clock.advance(1)
    second.clients.expire(clock.now_ns())
    assert shard.clients.keys() == {uuid_of("comes back"), uuid_of("owner")}
    # An owner ends, as ever, a while after it lost the last of its segments.
    await LocalShard(second).ask(wire.SEGMENT_STATE, wire.SegmentChange(3, "gone"))
    clock.advance(TTL)
    second.clients.expire(clock.now_ns())
    assert shard.clients.keys() == {uuid_of("comes back")}
