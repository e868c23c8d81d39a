"""A follower and a shard that is used, started anew and left at random: nothing is ever missed.

The model writes down what it did, in order. News that do not reset must be exactly what was written
between their position and the one before; once all is told, what the follower holds is what there
is. The steps of the client are answered by the service itself, without a connection.
"""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mooncake_store.client.following import Following, Position
from mooncake_store.core.shard import Shard
from mooncake_store.master.shard_service import ShardService
from mooncake_store.master.site import ShardPlace, ShardTimes
from tests.clocks import ManualClock
from tests.core.lab import MIB, SECOND, Lab, digest_of
from transfer_engine.wire.frame import Frame

KEYS = st.lists(st.integers(0, 39), min_size=1, max_size=12, unique=True)
KEPT = 16
PAGE_ROWS = 8
ENOUGH = 100
FAR = float("inf")


class Life:
    """One life of a shard: its service, and what happened in it."""

    def __init__(self):
        self.lab = Lab(nbytes=MIB, objects_max=1000, events_kept=KEPT)
        self.keys = set()
        self.told = []  # (key, stored) of each event, or None for those a follower never sees
        asyncio.run(self._serve())

    async def _serve(self):
        times = ShardTimes(5 * SECOND, 60 * SECOND, 60 * SECOND)
        self.service = ShardService(self.lab.shard, ShardPlace(), times, ManualClock())
        # Answered without a loop, where nobody else asks.
        self.service.site.turns = SimpleNamespace(take=lambda _: None)

    def put(self, keys):
        for key in keys:
            if key not in self.keys:
                self.lab.put([key])
                self.keys.add(key)
                self.told.append((digest_of(key), True))

    def remove(self, keys):
        for key in keys:
            if key in self.keys:
                assert self.lab.remove([key]) == [0]
                self.keys.discard(key)
                self.told.append((digest_of(key), False))

    def clear(self):
        self.lab.remove_matching("", "all")
        self.keys.clear()
        self.told += [None] * (self.lab.shard.events.next_number - 1 - len(self.told))

    def answer(self, call):
        _, operation, body = call
        connection = SimpleNamespace(context=SimpleNamespace(handle=1, tenant=0, confined=False))
        return self.service.handle(connection, Frame(operation.opcode, 0, 1, 0, body))


class Followed(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.life = Life()
        self.streams = [self.life.service.site.stream]
        self.kept = (frozenset(), None)
        self.come_back()

    # What happens to the store.

    @rule(keys=KEYS)
    def put(self, keys):
        self.life.put(keys)

    @rule(keys=KEYS)
    def remove(self, keys):
        self.life.remove(keys)

    @rule()
    def clear(self):
        self.life.clear()

    @rule(keys=KEYS)
    def start_anew(self, keys):
        self.life = Life()
        self.streams.append(self.life.service.site.stream)
        self.life.put(keys)

    # What happens to the follower.

    @rule()
    def listen(self):
        self.take()

    def take(self):
        """Take the next news and see that they go on where the last ones ended."""
        steps, outcome = self.following.next(0.0, FAR), None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                news = end.value
                break
            outcome = [self.life.answer(call) for call in step.calls]
        changes = [
            ((int(low), int(high)), bool(stored))
            for (low, high), stored in zip(news.digests, news.stored, strict=True)
        ]
        if news.reset:
            self.held = set()
        elif not news.snapshot:
            assert self.position.stream == news.position.stream == self.life.service.site.stream
            expected = self.life.told[self.position.number - 1 : news.position.number - 1]
            assert changes == expected
        for digest, stored in changes:
            (self.held.add if stored else self.held.discard)(digest)
        self.position = news.position
        return news.reset

    @precondition(lambda self: self.position is not None)
    @rule()
    def keep(self):
        """Note what is known together with its position, as an index on disk does."""
        self.kept = (frozenset(self.held), self.position)

    @rule()
    def come_back(self):
        """Forget all but what was kept, and follow from there."""
        held, self.position = self.kept
        self.held = set(held)
        self.following = Following(0, 1, self.position)

    @rule(life=st.integers(0, 100), number=st.integers(0, 100))
    def come_with_another_position(self, life, number):
        """A position of another life, or a number that this one has not reached."""
        stream = self.streams[life % len(self.streams)]
        if stream == self.life.service.site.stream:
            number += self.life.service.site.shard.events.next_number + 1
        self.held, self.position = {"of another"}, Position(stream, number)
        self.following = Following(0, 1, self.position)
        assert self.take()

    @rule()
    def settle(self):
        """Listen until all events were told: then what there is is known."""
        end = (self.life.service.site.stream, self.life.service.site.shard.events.next_number)
        for _ in range(ENOUGH):
            if self.position == end:
                break
            self.take()
        assert self.position == end
        assert self.held == {digest_of(key) for key in self.life.keys}

    def teardown(self):
        if hasattr(self, "life"):
            self.settle()


@pytest.fixture(autouse=True)
def pages_of_few_rows(monkeypatch):
    """A snapshot takes several requests, with anything in between."""
    whole = Shard.event_snapshot

    def page(shard, cursor=0, rows_max=PAGE_ROWS, **of):
        return whole(shard, cursor, rows_max, **of)

    monkeypatch.setattr(Shard, "event_snapshot", page)


@pytest.mark.timeout(900)  # a thorough search takes minutes
def test_nothing_is_missed_and_nothing_is_told_twice():
    run_state_machine_as_test(Followed)
