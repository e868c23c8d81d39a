"""Which standby changes wait for, over eras: shards of one process, standbys that a test moves."""

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_store.coordination.base import Put
from mooncake_store.coordination.election import campaign
from mooncake_store.core.options import ShardConfig
from mooncake_store.errors import (
    ConfigError,
    InvalidArgumentError,
    PeerLostError,
    RemoteProtocolError,
    UnavailableError,
)
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.master.all_shards import AllShards
from mooncake_store.master.counting import Counted, check_level, counting_standby
from mooncake_store.master.keeping import Keeper
from mooncake_store.master.shard_link import LocalShard
from mooncake_store.master.shipping import Shipping
from mooncake_store.master.site import ShardPlace, ShardTimes, Site
from mooncake_store.master.standbys import Standbys
from mooncake_store.program.fence import Fence
from mooncake_store.standby.member import DROPPED, _Office
from mooncake_store.wire.guests import OUTSTANDING, OutstandingRequest
from mooncake_store.wire.standby import JOURNAL, SHIPPING, Drop
from tests.clocks import ManualClock
from tests.coordination.memory import MemoryCluster, MemoryCoordinator
from tests.core.lab import digests_of
from tests.waiting import until_async
from transfer_engine.wire.frame import Frame

pytestmark = pytest.mark.asyncio

SECOND = 1_000_000_000
LIMITS = ShardConfig(objects_max=1000, segments_max=8, events_kept=16)
X, Y = 0xA, 0xB


class Leader(LocalShard):
    """A shard at the level replicated; a link to it that may be down."""

    def __init__(self, folder, at, shards):
        clock = ManualClock(now_ns=5 * SECOND)
        origin = Origin("0123456789abcdef", at, shards)
        self.folder = folder / f"shard-{at}"
        self.keeper = Keeper.open(LIMITS, origin, self.folder, "replicated", clock.now_ns())
        times = ShardTimes(5 * SECOND, 60 * SECOND, 60 * SECOND)
        site = Site(self.keeper.shard, ShardPlace(at, shards), times, clock, self.keeper)
        self.shipping, self.now, self.down = Shipping(site), clock.now_ns(), False
        self._keys = itertools.count()
        self._client = self.keeper.shard.open_client(self.now, b"c" * 16, 1, "host")
        self.keeper.shard.mount(self.now, self._client, b"s" * 16, "segment", 1 << 20)
        super().__init__(site, self.shipping)

    async def ask(self, operation, request):
        if self.down:
            raise PeerLostError("the shard is being started again")
        return await super().ask(operation, request)

    def let_pass(self, seconds):
        """Have heard of all standbys so much earlier."""
        for each in (self.keeper.counting, *self.shipping._standbys.values()):
            each.heard_ns -= seconds * SECOND

    def put(self):
        """Put another object; return a task that ends when that may be answered."""
        self.keeper.check()
        digests = digests_of([next(self._keys)])
        shard, now = self.keeper.shard, self.now
        rows, _ = shard.put_start(now, self._client, 0, digests, np.full(1, 64))
        statuses = shard.put_end(
            now, self._client, digests, rows["generation"], np.full(1, 7, "u8")
        )
        assert not statuses.any()
        return asyncio.ensure_future(self.keeper.synced())


class Connection:
    """What a shard knows of one."""

    peer = "10.0.0.6:1"

    def __init__(self, role="standby"):
        self.session = SimpleNamespace(
            read_only=False, proven=False, peer=SimpleNamespace(role=role)
        )
        self.closed = []

    def on_close(self, tell):
        self.closed.append(tell)


class Standby:
    """Follows one shard, a request at a time."""

    def __init__(self, leader, number, role="standby"):
        self.number, self.history, self.position, self.head = number, 0, 0, 0
        self.exact, self.era = False, 0
        self._shipping = leader.shipping
        self._role = role
        self.connection = Connection(role)

    async def ask(self):
        """Ask once; return whether it was told that it has everything."""
        body = JOURNAL.request.pack(
            version=SHIPPING, wait_ms=0, history=self.history, position=self.position,
            held=self.position, standby=self.number,
        )  # fmt: skip
        frame = Frame(JOURNAL.opcode, 0, 1, 0, body)
        reply = JOURNAL.reply.unpack(await self._shipping.answer(self.connection, frame))
        assert reply.whole
        self.history, self.position = reply.history, reply.position + len(reply.words)
        self.exact, self.era, self.head = bool(reply.exact), reply.era, reply.head
        return self.exact

    async def follow(self):
        """Ask until it has all, and has told so."""
        told = None
        while told != (self.position, self.head):
            told = (self.position, self.head)
            await self.ask()

    def leave(self):
        """End its connection."""
        for tell in self.connection.closed:
            tell()
        self.connection = Connection(self._role)


class Elected:
    """An election that says yes, unless it is told else."""

    def __init__(self, grace_s=0.0):
        self.fence, self.era, self.grace_s, self.agrees = None, 0, grace_s, True
        self.dropped = []

    async def settle(self):
        pass

    async def advance(self, number):
        if not self.agrees:
            raise UnavailableError("the etcd does not answer")
        self.era += 100
        self.dropped.append(number)


@pytest.fixture
def lead(tmp_path):
    """Start the shards of a leader."""
    made = []

    def leaders(shards=1, *, elected=True):
        made.extend(Leader(tmp_path, at, shards) for at in range(shards))
        for each in made:
            if elected:
                each.keeper.counting.elect(Counted())
        return made

    yield leaders
    for each in made:
        each.keeper.close()
        remove_rings(each.folder)


async def standbys_of(shards, election):
    made = Standbys(election)
    made.begin(AllShards(shards))
    await made.stop()  # looked after by the test alone
    return made


async def test_a_copy_of_which_nobody_knows_whose_it_is_counts_nowhere(lead):
    """As one is that a standby makes beside those that it has."""
    (shard,) = lead(elected=False)
    nobody = Standby(shard, 0)
    await nobody.follow()
    with pytest.raises(UnavailableError, match="no standby follows"):
        shard.put()
    first = Standby(shard, X)
    await first.follow()
    answered = shard.put()
    await nobody.follow()
    assert not answered.done()
    await first.follow()
    await answered
    assert (first.exact, nobody.exact) == (True, False)
    told = await (await standbys_of([shard], None)).told()
    assert [each.number for each in told["standbys"] if each.counts] == [X]


async def test_a_host_counts_for_shards_elsewhere_and_a_standby_for_those_of_its_master(lead):
    beside, elsewhere = lead(2, elected=False)
    elsewhere.keeper.counting.lead_alone()
    for shard, number in ((beside, X), (elsewhere, Y)):
        copies = [Standby(shard, X), Standby(shard, Y, role="copy")]
        for _ in range(2):
            for each in copies:
                await each.follow()
        assert counting_standby(shard.folder) == Counted(number)
        assert [each.exact for each in copies] == [number == X, number == Y]
        assert [each.number for each in shard.shipping.told().standbys] == [number]
    standbys = Standbys()
    standbys.begin(AllShards([beside]), [elsewhere])
    assert await standbys.counting() == {X}
    assert [each.number for each in (await standbys.told())["standbys"]] == [X, Y]
    # Another host that copies it takes the place of one that is gone for good.
    with pytest.raises(UnavailableError, match="follows"):
        await standbys.drop(Drop(Y))
    elsewhere.let_pass(3600)
    another = Standby(elsewhere, 0xC, role="copy")
    await another.follow()
    assert (await standbys.drop(Drop(Y))).number == 0xC
    assert counting_standby(elsewhere.folder) == Counted(0xC, 1)
    assert counting_standby(beside.folder) == Counted(X)


async def test_what_comes_from_a_host_waits_for_the_standby_of_the_first(lead):
    first, other = lead(2)
    standby = Standby(first, X)
    await standby.follow()
    assert other.keeper.counting.counted == Counted()
    other.keeper.counting.elect(Counted())
    assert other.keeper.counting.counted == Counted(X)
    assert counting_standby(other.folder) == Counted(X)


async def test_what_a_standby_still_has_is_not_said_to_be_gone(lead):
    """Else another shard would give out its space, and it came back with the bytes of others."""
    (shard,) = lead()
    standby = Standby(shard, X)
    await standby.follow()
    answered = shard.put()
    await standby.follow()
    await answered
    shard.keeper.shard.remove(shard.now, digests_of([0]), True, 0)
    nothing = np.empty(0, np.int64).tobytes()
    asked = asyncio.ensure_future(shard.ask(OUTSTANDING, OutstandingRequest(nothing, nothing)))
    await asyncio.sleep(0)
    assert not asked.done()
    await standby.follow()
    assert (await asked).there == b""


async def test_another_standby_takes_the_place_of_one_that_is_gone(lead):
    (shard,) = lead()
    await shard.put()  # waits for nobody
    first, second = Standby(shard, X), Standby(shard, Y)
    await first.follow()
    await second.follow()
    assert (first.exact, second.exact) == (True, False)
    answered = shard.put()
    await second.follow()
    first.leave()
    assert not answered.done()  # what is not with the first one is with nobody who counts
    election = Elected()
    standbys = await standbys_of([shard], election)
    assert (await standbys.drop(Drop(X))).number == Y
    assert election.dropped == [X]
    assert counting_standby(shard.folder) == Counted(Y, 100)
    await second.follow()
    await answered
    assert second.exact
    assert second.era == 100
    # The first one comes back, and is told that it lacks; it changes nothing.
    await first.follow()
    assert not first.exact
    answered = shard.put()
    await first.follow()
    assert not answered.done()
    await second.follow()
    await answered


async def test_who_takes_over_has_all_before_it_is_told_so(lead):
    """What was answered before changes waited for it may be on its way still."""
    (shard,) = lead()
    first, second = Standby(shard, X), Standby(shard, Y)
    await first.follow()
    await second.follow()
    answered = shard.put()
    await first.follow()
    await answered
    first.leave()
    standbys = await standbys_of([shard], Elected())
    await standbys.drop(Drop(X))
    assert not await second.ask()  # it asks for what it lacks
    assert await second.ask()


async def test_without_another_one_elected_leaders_wait_for_nobody_and_others_refuse(lead):
    (shard,) = lead()
    first = Standby(shard, X)
    await first.follow()
    answered = shard.put()
    first.leave()
    standbys = await standbys_of([shard], Elected())
    dropped = await standbys.drop(Drop(X))
    assert (dropped.number, dropped.elected) == (0, True)
    await answered
    await shard.put()


async def test_a_leader_that_nobody_elected_refuses_changes_until_another_one_counts(lead):
    (shard,) = lead(elected=False)
    first = Standby(shard, X)
    await first.follow()
    first.leave()
    with pytest.raises(UnavailableError, match="does not follow"):
        shard.put()
    standbys = await standbys_of([shard], None)
    dropped = await standbys.drop(Drop(X))
    assert (dropped.number, dropped.elected) == (0, False)
    with pytest.raises(UnavailableError, match="no standby follows"):
        shard.put()
    check_level(shard.folder, "written")  # nobody is left who would lead without something
    second = Standby(shard, Y)
    await second.follow()
    answered = shard.put()
    await second.follow()
    await answered
    with pytest.raises(ConfigError, match=f"{Y:016x} may be promoted"):
        check_level(shard.folder, "written")


async def test_a_standby_of_another_version_is_refused_with_a_sentence(lead, monkeypatch):
    (shard,) = lead()
    monkeypatch.setattr("mooncake_store.master.shipping.SHIPPING", SHIPPING + 1)
    with pytest.raises(RemoteProtocolError, match=f"asks for journals of version {SHIPPING}, this"):
        await Standby(shard, X).ask()


async def test_only_who_counts_and_is_gone_is_dropped(lead):
    (shard,) = lead()
    first, second = Standby(shard, X), Standby(shard, Y)
    await first.follow()
    await second.follow()
    election = Elected()
    standbys = await standbys_of([shard], election)
    with pytest.raises(UnavailableError, match=f"{X:016x} follows"):
        await standbys.drop(Drop(X))
    with pytest.raises(InvalidArgumentError, match="do not wait"):
        await standbys.drop(Drop(Y))
    assert not election.dropped


async def test_what_the_disk_has_is_not_what_the_standby_has(lead):
    (shard,) = lead()
    first = Standby(shard, X)
    await first.follow()
    answered = shard.put()
    first.leave()
    await asyncio.sleep(0)
    await asyncio.to_thread(shard.keeper.close)  # all is brought to the disk
    for _ in range(3):
        await asyncio.sleep(0)
    assert not answered.done()
    answered.cancel()


@pytest.mark.parametrize("left", [False, True])
async def test_who_is_silent_for_too_long_is_dropped(lead, left):
    (shard,) = lead()
    first = Standby(shard, X)
    await first.follow()
    patient = await standbys_of([shard], Elected(grace_s=3600.0))
    for_ever = await standbys_of([shard], Elected(grace_s=0.0))
    strict = await standbys_of([shard], Elected(grace_s=10.0))
    answered = shard.put()
    await strict.look()
    assert shard.keeper.counting.counted.number == X
    if left:
        first.leave()
    shard.let_pass(20)
    await patient.look()
    await for_ever.look()
    assert shard.keeper.counting.counted.number == X
    assert not answered.done()
    await strict.look()
    await answered
    assert counting_standby(shard.folder) == Counted(0, 100)


async def test_where_another_one_follows_less_silence_will_do(lead):
    (shard,) = lead()
    first, second = Standby(shard, X), Standby(shard, Y)
    await first.follow()
    standbys = await standbys_of([shard], Elected(grace_s=3600.0))
    for_ever = await standbys_of([shard], Elected(grace_s=0.0))
    shard.let_pass(20)
    await second.follow()
    await for_ever.look()
    assert shard.keeper.counting.counted.number == X
    shard.let_pass(20)  # all are silent: it is the leader that was held up
    await standbys.look()
    assert shard.keeper.counting.counted.number == X
    await second.follow()
    await standbys.look()
    assert shard.keeper.counting.counted.number == Y


async def test_a_standby_that_waits_for_news_is_not_silent(lead):
    (shard,) = lead()
    first = Standby(shard, X)
    await first.follow()
    body = JOURNAL.request.pack(
        version=SHIPPING, wait_ms=60_000, history=first.history, position=first.position,
        held=first.position, standby=X,
    )  # fmt: skip
    shard.let_pass(20)
    asking = asyncio.ensure_future(
        shard.shipping.answer(first.connection, Frame(JOURNAL.opcode, 0, 1, 0, body))
    )
    await until_async(lambda: shard.shipping.told().silent_ms == 0 and not asking.done())
    shard.let_pass(20)
    standbys = await standbys_of([shard], Elected(grace_s=10.0))
    await standbys.look()
    assert shard.keeper.counting.counted.number == X
    shard.shipping.give_up()
    await asking


async def test_nothing_is_answered_without_a_standby_before_the_election_agrees(lead):
    (shard,) = lead()
    first = Standby(shard, X)
    await first.follow()
    answered = shard.put()
    first.leave()
    shard.let_pass(20)
    election = Elected(grace_s=10.0)
    election.agrees = False
    standbys = await standbys_of([shard], election)
    with pytest.raises(UnavailableError, match="etcd"):
        await standbys.look()
    assert not answered.done()
    assert counting_standby(shard.folder) == Counted(X)
    election.agrees = True
    await standbys.look()
    await answered


async def test_a_shard_that_did_not_hear_of_an_era_waits_on_and_is_told_later(lead):
    shards = lead(2)
    first = [Standby(shard, X) for shard in shards]
    second = [Standby(shard, Y) for shard in shards]
    for each in (*first, *second):
        await each.follow()
    election = Elected()
    standbys = await standbys_of(shards, election)
    for each in first:
        each.leave()
    late = shards[1]
    asked = late.ask

    async def silent(operation, request):
        if operation.name == "count":
            raise PeerLostError("the shard is being started again")
        return await asked(operation, request)

    late.ask = silent
    with pytest.raises(PeerLostError):
        await standbys.drop(Drop(X))
    await until_async(lambda: shards[0].keeper.counting.counted == Counted(Y, 100))
    # The other one is still for the first standby alone, and tells the second so.
    with pytest.raises(UnavailableError, match=f"{X:016x}, does not follow"):
        late.put()
    for each in second:
        await each.follow()
    assert [each.exact for each in second] == [True, False]
    assert standbys.term().counted == Counted(Y, 100)  # what a process that starts now is told
    late.ask = asked
    await standbys.look()
    assert counting_standby(late.folder) == Counted(Y, 100)
    await second[1].follow()
    assert second[1].exact
    assert election.dropped == [X]


async def test_a_shard_begins_in_the_era_of_the_election(lead, tmp_path):
    """Its leader was killed between what the election said and what its shards did."""
    (shard,) = lead()
    await Standby(shard, X).follow()
    assert counting_standby(shard.folder) == Counted(X)
    shard.keeper.counting.elect(Counted(0, 7))
    await shard.put()
    assert counting_standby(shard.folder) == Counted(0, 7)
    shard.keeper.counting.elect(Counted(Y, 7))  # what is of this era stays
    assert counting_standby(shard.folder) == Counted(0, 7)


async def test_the_first_shard_decides_in_its_own_era(lead):
    shards = lead(2)
    await shards[0].shipping.turn(Counted(X, 100))
    first = Standby(shards[1], X)
    await first.follow()
    assert not first.exact  # here the era of before goes on
    await shards[1].shipping.turn(Counted(0, 100))
    await first.follow()
    assert first.exact


async def test_what_a_leader_tells_of_its_standbys(lead):
    (shard,) = lead()
    first, second = Standby(shard, X), Standby(shard, Y)
    await first.follow()
    await second.follow()
    standbys = await standbys_of([shard], Elected())
    standbys.met(SimpleNamespace(peer="10.0.0.6:40000"), X, "0.0.0.0:50051")
    standbys.met(SimpleNamespace(peer="10.0.0.7:40000"), Y, "")
    answered = shard.put()
    told = await standbys.told()
    one, other = told["standbys"]
    assert (one.number, one.address) == (X, "10.0.0.6:50051")
    assert (one.counts, one.follows, one.exact) == (True, True, True)
    assert (other.number, other.address) == (Y, "")
    assert (other.counts, other.follows, other.exact) == (False, True, False)
    assert one.objects == other.objects == 1
    assert one.behind_words == other.behind_words > 0
    await until_async(lambda: shard.shipping.told().waiting == 1)
    await first.follow()
    await answered
    told = await standbys.told()
    assert told["standbys"][0].behind_words == 0
    assert (told["waiting"], told["refusing"]) == (0, "")
    first.leave()
    told = await standbys.told()
    one = told["standbys"][0]
    # Nothing is answered without it, so it still has everything.
    assert (one.counts, one.follows, one.exact, one.behind_words) == (True, False, True, -1)
    assert "does not follow" in told["refusing"]


@pytest.fixture
def fence():
    """The end of a term."""
    made = Fence.make()
    yield made
    made.close()


async def test_an_era_begins_only_while_its_leader_leads(fence):
    cluster = MemoryCluster()
    mine, yours = MemoryCoordinator(cluster, "c"), MemoryCoordinator(cluster, "c")
    first = await campaign(mine, "leader", b"first", ttl_s=3)
    office = _Office(mine, first, 0, 10.0, fence)
    await office.advance(X)
    began = await mine.get(DROPPED)
    assert office.era == began.revision
    assert int(began.value, 16) == X
    # It lost its lease without hearing of it, and another one leads.
    await yours.delete("leaders/leader")
    await campaign(yours, "leader", b"second", ttl_s=3)
    with pytest.raises(UnavailableError, match="leads no more"):
        await office.advance(Y)
    assert (await yours.get(DROPPED)).revision == office.era
    await mine.close()
    await yours.close()


async def test_an_era_whose_answer_was_lost_is_found_also_when_it_comes_late(monkeypatch, fence):
    coordinator = MemoryCoordinator(MemoryCluster(), "c")
    leadership = await campaign(coordinator, "leader", b"me", ttl_s=3)
    office = _Office(coordinator, leadership, 0, 10.0, fence)
    change = coordinator.change

    async def lost(*operations, **options):
        raise UnavailableError("the connection broke; nobody knows whether it was done")

    monkeypatch.setattr(coordinator, "change", lost)
    with pytest.raises(UnavailableError, match="nobody knows"):
        await office.advance(X)
    await office.settle()
    assert office.era == 0
    era = await change(Put(DROPPED, b"0a"))
    await office.settle()
    assert office.era == era
    await coordinator.close()
