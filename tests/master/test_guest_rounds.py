"""The master asks who still has what in the parts of others, and tells who owns the part."""

import numpy as np
import pytest

from mooncake_store.master import guest_rounds
from mooncake_store.master.guest_rounds import GuestRounds
from mooncake_store.wire import guests as wire
from transfer_engine.errors import UnavailableError

pytestmark = pytest.mark.asyncio


class Shard:
    """A shard with guests, by number where they lie, and with places of its own elsewhere."""

    def __init__(self, guests=(), own=()):
        self.held = dict(guests)
        self.own = set(own)
        self.away = False
        self.asked = []

    async def ask(self, operation, request):
        if self.away:
            raise UnavailableError("it is being started again")
        self.asked.append(operation.name)
        # As it would go over the wire.
        request = operation.request.unpack(operation.request.pack(request))
        answer = getattr(self, operation.name)(request)
        return operation.reply.unpack(operation.reply.pack(answer))

    def guests(self, request):
        numbers = [n for n in sorted(self.held) if n >= request.after][: wire.GUESTS_MAX]
        places = [self.held[n] for n in numbers]
        columns = (np.array(c, np.int64).tobytes() for c in (numbers, [0] * len(places), places))
        return wire.Guests(*columns)

    def outstanding(self, request):
        there = [place in self.own for place in wire.column(request.places).tolist()]
        return wire.Outstanding(bytes(there))

    def guests_left(self, request):
        numbers = wire.column(request.numbers).tolist()
        for number in numbers:
            del self.held[number]
        return wire.Left(len(numbers))


async def rounds_of(shards, count):
    rounds = GuestRounds(shards)
    return [await rounds.go_round() for _ in range(count)]


async def test_the_space_of_what_nobody_has_any_more_comes_back_and_no_other():
    one = Shard({1: 100, 2: 200, 3: 300})
    shards = [one, Shard({7: 700}, own=[100]), Shard(own=[300, 700])]
    await rounds_of(shards, 2)
    assert (one.held, shards[1].held) == ({1: 100, 3: 300}, {7: 700})
    shards[1].own.clear()
    await rounds_of(shards, 2)
    assert one.held == {3: 300}
    shards[2].own.clear()
    assert (await rounds_of(shards, 4))[-1] is False
    assert not any(shard.held for shard in shards)


async def test_nothing_comes_back_while_one_that_may_have_it_does_not_answer():
    one, other = Shard({1: 100}), Shard(own=[100])
    other.away = True
    assert await rounds_of([one, Shard(), other], 3) == [True] * 3
    assert one.held == {1: 100}
    other.away = False
    other.own.clear()
    await rounds_of([one, Shard(), other], 1)
    assert not one.held


async def test_guests_are_taken_up_some_at_a_time(monkeypatch):
    monkeypatch.setattr(wire, "GUESTS_MAX", 10)
    one = Shard({number: 100 * number for number in range(1, 36)})
    assert len(one.held) == 35
    rounds = GuestRounds([one, Shard()])
    left = []
    for _ in range(4):
        await rounds.go_round()
        left.append(len(one.held))
    assert left == [25, 15, 5, 0]


async def test_rounds_end_where_no_shard_has_a_guest(monkeypatch):
    monkeypatch.setattr(guest_rounds, "ROUND_S", 0.0)
    shards = [Shard({1: 100}), Shard({2: 200})]
    await GuestRounds(shards).run()
    assert not any(shard.held for shard in shards)
    alone = Shard()
    await GuestRounds([alone]).run()
    assert alone.asked == ["guests"]
