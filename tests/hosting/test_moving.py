"""What becomes of a shard whose move fails, at each step of it."""

import asyncio
from types import SimpleNamespace

import pytest

from mooncake_store.master import moving
from mooncake_store.master.farm import RESTS
from mooncake_store.master.moving import HERE, Moves
from mooncake_store.master.seats import MASTER, Seats
from mooncake_store.wire.hosts import LEAD, YIELD, CopyState, Led, Move
from tests.waiting import until_async
from transfer_engine.errors import InvalidArgumentError, UnavailableError
from transfer_engine.rpc.address import Address

pytestmark = pytest.mark.asyncio

PLACE, OTHER = Address("10.0.0.5", 1), Address("10.0.0.6", 2)
NUMBER = 7


class Shard:
    """A shard that leads beside the master."""

    def __init__(self):
        self.rests = False

    async def ask(self, operation, request):
        assert operation is YIELD
        self.rests = request.on


class Host:
    """Another host; `fails` says at what."""

    def __init__(self, shard):
        self.number, self.address = NUMBER, str(OTHER)
        self.shard = shard
        self.fails = ""
        self.copies = self.leads = False

    async def ask(self, operation, request, timeout_s):
        if operation is LEAD:
            if self.fails == "lead":
                raise UnavailableError("no process could be started")
            self.leads = request.on
            return Led(str(OTHER))
        self.copies = bool(request.source)
        state = RESTS if self.shard.rests and self.fails != "rest" else "following"
        if self.fails == "copy":
            state = "failing"
        return CopyState(NUMBER, state, 10, 10)


class Hosts:
    """What the master knows of hosts: one."""

    def __init__(self, host, seats):
        self.host, self.seats = host, seats
        self.facts = SimpleNamespace(run=1, journal="written")
        self.granted = 0.0

    def at(self, address):
        assert address == self.host.address
        return self.host

    def of(self, number):
        return self.host if number == NUMBER else None

    def granted_s(self, number):
        return self.granted

    def take(self, host, shard, address):
        self.seats[shard].take(host, Address.parse(address))


class Pool:
    """A master with one shard and another host."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(moving, "POLL_S", 0.001)
        monkeypatch.setattr(moving, "REST_S", 0.02)
        self.seats = Seats(1)
        self.seats.restore(())
        self.shard = Shard()
        self.seats[0].take(self.shard, PLACE)
        self.host = Host(self.shard)
        self.hosts = Hosts(self.host, self.seats)
        self.written = [self.seats.owners]
        self.told = []
        self.deaf = 0
        self.ended = []
        self.full = False
        self.moves = Moves(
            self.seats, self.hosts, None, asyncio.Lock(), self.keep, self.announce, self.agree,
            self.end,
        )  # fmt: skip

    async def keep(self):
        if self.full:
            raise UnavailableError("the disk is full")
        self.written.append(self.seats.owners)

    async def announce(self):
        if self.shard.rests and self.deaf:
            self.deaf -= 1
            raise UnavailableError("its standby does not hear")
        self.told.append((self.seats.owners, self.shard.rests))

    async def agree(self):
        assert self.seats[0].taken

    async def end(self, shard):
        self.ended.append(shard)

    async def move(self, **how):
        self.moves.begin(Move(0, str(OTHER), **how))
        return await until_async(self.how_it_ended)

    def how_it_ended(self):
        state = self.moves.begin(Move(0))
        return state if state.state in ("done", "failed") else None

    def goes_on_where_it_was(self):
        return (
            self.seats[0].owner == MASTER
            and self.seats[0].address == PLACE
            and not (self.shard.rests or self.host.leads or self.host.copies or self.ended)
        )


@pytest.fixture
def pool(monkeypatch):
    return Pool(monkeypatch)


async def test_who_leads_is_written_down_before_it_does(pool):
    written = []
    lead = pool.host.ask

    async def heard(operation, *rest):
        if operation is LEAD:
            written.append(pool.written[-1])
        return await lead(operation, *rest)

    pool.host.ask = heard
    assert (await pool.move()).state == "done"
    assert written == [(NUMBER,)]
    assert pool.seats[0].address == OTHER
    assert pool.ended == [0]


@pytest.mark.parametrize("fails", ["copy", "rest"])
async def test_a_shard_that_cannot_be_copied_goes_on(pool, fails):
    pool.host.fails = fails
    state = await pool.move()
    assert (state.state, bool(state.why)) == ("failed", True)
    assert pool.goes_on_where_it_was()
    assert pool.written == [()]


async def test_a_move_that_cannot_be_written_down_is_none(pool):
    pool.full = True
    assert "the disk is full" in (await pool.move()).why
    assert pool.goes_on_where_it_was()
    # The standby was told before, and again before the shard went on.
    assert pool.told == [((), False), ((NUMBER,), True), ((), True)]


async def test_a_shard_whose_standby_does_not_hear_of_its_move_rests_until_it_has_heard_of_none(
    pool,
):
    pool.deaf = 3
    assert "does not hear" in (await pool.move()).why
    assert pool.goes_on_where_it_was()
    assert pool.told == [((), False), ((), True)]
    assert pool.written == [()]


async def test_a_master_that_stops_while_a_standby_is_to_hear_leaves_the_shard_at_rest(pool):
    """Whoever leads next decides whose it is; that one may have heard, or not."""
    heard = asyncio.Event()

    async def announce():
        if pool.shard.rests:
            heard.set()
            await asyncio.Event().wait()

    pool.moves._announce = announce
    pool.moves.begin(Move(0, str(OTHER)))
    await heard.wait()
    assert pool.seats[0].pending
    await pool.moves.stop()
    assert pool.shard.rests
    assert pool.written == [()]


async def test_the_first_shard_of_a_replicated_pool_stays(pool):
    pool.hosts.facts.journal = "replicated"
    with pytest.raises(InvalidArgumentError, match="shard 0 leads on the host of its master"):
        pool.moves.begin(Move(0, str(OTHER)))


async def test_one_that_was_written_down_is_finished_when_it_is_asked_for_again(pool):
    pool.host.fails = "lead"
    assert (await pool.move()).state == "failed"
    assert (pool.seats[0].owner, pool.seats[0].taken) == (NUMBER, False)
    assert pool.ended == [0]  # the former does not stay, at rest
    pool.host.fails = ""
    assert (await pool.move()).state == "done"
    assert (pool.host.leads, pool.seats[0].address) == (True, OTHER)


async def test_a_copy_of_a_lost_host_leads_when_that_may_answer_no_more(pool):
    pool.seats[0].owner = 5
    pool.hosts.granted = 0.05
    began = asyncio.get_running_loop().time()
    assert (await pool.move(lost=True)).state == "done"
    assert asyncio.get_running_loop().time() - began >= 0.05
    assert pool.seats[0].owner == NUMBER
    assert pool.written[-1] == (NUMBER,)


async def test_what_leads_here_is_not_lost(pool):
    assert "it is not lost" in (await pool.move(lost=True)).why
    assert pool.goes_on_where_it_was()


async def test_moves_are_one_after_the_other(pool):
    pool.host.fails = "rest"
    pool.moves.begin(Move(0, str(OTHER)))
    with pytest.raises(UnavailableError, match="another shard is being moved"):
        pool.moves.begin(Move(0, HERE))
    await until_async(pool.how_it_ended)
    with pytest.raises(InvalidArgumentError, match="no shard 3"):
        pool.moves.begin(Move(3, HERE))
