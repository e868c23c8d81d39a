"""The contract every coordinator keeps, as a test suite to inherit, and a clock that tests move.

    class TestMine(CoordinatorContract):
        @pytest_asyncio.fixture
        async def site(self): ...            # yields a Site

Elections are part of it: they lean on all the rest. Needs pytest and pytest-asyncio; nothing
outside tests imports this.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import pytest

from mooncake_store.coordination.base import (
    FAULTS,
    OPERATIONS_MAX,
    VALUE_BYTES_MAX,
    Change,
    CompactedError,
    Delete,
    Put,
    Seen,
)
from mooncake_store.coordination.election import Leader, campaign, leader, leaders
from transfer_engine.errors import InvalidArgumentError, LeaseExpiredError, StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mooncake_store.coordination.base import Coordinator

__all__ = ["CoordinatorContract", "MovedPace", "Site"]

T = TypeVar("T")

TTL_S = 4
"""Long enough for a machine that is busy with other things."""
_TURNS = 100


class MovedPace:
    """A pace that stands still but for `advance`."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now_ns(self) -> int:
        """Return nanoseconds since it was made."""
        return self._now_ns

    async def sleep(self, seconds: float) -> None:
        """Return when it was advanced by so much."""
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        until_ns = self._now_ns + max(int(seconds * 1e9), 0)
        heapq.heappush(self._sleepers, (until_ns, next(self._numbers), waits))
        await waits

    async def advance(self, seconds: float) -> None:
        """Let time pass: who sleeps wakes at its moment, and does what it does at once."""
        goal_ns = self._now_ns + round(seconds * 1e9)
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= goal_ns:
            until_ns, _, waits = heapq.heappop(self._sleepers)
            self._now_ns = max(until_ns, self._now_ns)
            if not waits.done():
                waits.set_result(None)
            await self.settle()
        self._now_ns = goal_ns
        await self.settle()

    def stand_still(self, seconds: float) -> None:
        """Let time pass without anybody having a turn, as when a process is stopped."""
        self._now_ns += round(seconds * 1e9)

    async def settle(self) -> None:
        """Let everybody do what needs no time."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)


class Site(ABC):
    """A service, and what a test can do to it."""

    @abstractmethod
    async def open(self, namespace: str = "c1", timeout_s: float = 30.0) -> Coordinator:
        """A new client of the service; it is closed with the test."""

    @abstractmethod
    def cut(self, coordinator: Coordinator, cut: bool = True) -> None:
        """Have a client reach nothing from now on, or (`False`) everything again."""

    @abstractmethod
    async def compact(self, revision: int) -> None:
        """Have the service forget what changed before a revision."""

    @abstractmethod
    async def until(self, condition: Callable[[], object]) -> None:
        """Let time pass until a condition holds; fails when it does not for very long."""

    async def soon(self, awaitable: Awaitable[T]) -> T:
        """Let time pass until something has been awaited, and return its result."""
        task = asyncio.ensure_future(awaitable)
        await self.until(task.done)
        return task.result()


class _Watching:
    """What a watch has told, kept by a task."""

    def __init__(self, coordinator: Coordinator, prefix: str, revision: int) -> None:
        self.batches: list[tuple[Change, ...]] = []
        self.error: StoreError | None = None
        self._watch = (coordinator, prefix, revision)
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        coordinator, prefix, revision = self._watch
        try:
            async with aclosing(coordinator.watch(prefix, revision)) as batches:
                async for batch in batches:
                    self.batches.append(batch)
        except StoreError as error:
            self.error = error

    def told(self) -> list[list[tuple[str, bytes | None]]]:
        """Names and values of each batch."""
        return [
            [(change.key, change.entry and change.entry.value) for change in batch]
            for batch in self.batches
        ]

    async def close(self) -> None:
        """End the watch."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _written(writing: Awaitable[int | None]) -> int:
    """The revision of a change that nothing speaks against."""
    revision = await writing
    assert revision is not None
    return revision


@pytest.mark.asyncio
class CoordinatorContract:
    """Tests for one kind of coordinator, on the `site` that a fixture of the subclass yields."""

    async def test_what_was_put_is_there_until_it_is_removed(self, site: Site) -> None:
        """A name has one value; revisions grow, and say when it came to be."""
        mine, yours = await site.open(), await site.open()
        assert await mine.get("a") is None
        first = await _written(mine.put("a", b"one"))
        second = await _written(mine.put("a", b"\x00\xff"))
        await yours.put("a/b", b"")
        assert second > first
        found = await yours.get("a")
        assert found == ("a", b"\x00\xff", second, first, 0)
        entries, revision = await mine.list("a")
        assert [(entry.key, entry.value) for entry in entries] == [("a", b"\x00\xff"), ("a/b", b"")]
        assert revision > second
        assert await yours.delete("a")
        assert await mine.get("a") is None
        assert [entry.key for entry in (await yours.list("")).entries] == ["a/b"]
        third = await mine.put("a", b"again")
        assert (await yours.get("a") or found).created == third

    async def test_a_condition_that_does_not_hold_changes_nothing(self, site: Site) -> None:
        """Of two who saw the same, one is told that the other came first."""
        mine, yours = await site.open(), await site.open()
        first = await _written(mine.put("a", b"mine", seen=0))
        assert await yours.put("a", b"yours", seen=0) is None
        second = await _written(yours.put("a", b"yours", seen=first))
        assert await mine.put("a", b"mine", seen=first) is None
        assert await mine.delete("a", seen=first) is None
        assert await mine.delete("b", seen=1) is None
        found = await mine.get("a")
        assert found is not None
        assert (found.value, found.revision) == (b"yours", second)
        assert await mine.delete("a", seen=second)
        assert await yours.put("a", b"yours", seen=second) is None
        assert await yours.put("a", b"yours", seen=0)

    async def test_several_changes_are_one(self, site: Site) -> None:
        """All or nothing, all of one revision, and told at once."""
        mine, yours = await site.open(), await site.open()
        first = await _written(mine.change(Put("a", b"1"), Put("b", b"1")))
        given = [Seen("a", first), Seen("c", 0)]
        changes = (Delete("a"), Put("b", b"2"), Put("c", b"2"))
        assert await mine.change(*changes, given=[*given, Seen("b", first + 1)]) is None
        second = await _written(mine.change(*changes, given=given))
        assert second == first + 1
        assert await yours.change(Put("d", b"3"), given=given) is None
        entries, revision = await yours.list("")
        assert revision == second
        assert [(entry.key, entry.created, entry.revision) for entry in entries] == [
            ("b", first, second),
            ("c", second, second),
        ]
        # Nothing is changed by removing nothing.
        assert await mine.change(Delete("nothing")) == second
        watching = _Watching(yours, "", first)
        await site.until(lambda: len(watching.batches) == 2)
        assert watching.told()[0] == [("a", b"1"), ("b", b"1")]
        assert sorted(watching.told()[1]) == [("a", None), ("b", b"2"), ("c", b"2")]
        await watching.close()

    async def test_a_watch_tells_each_change_once_and_in_order(self, site: Site) -> None:
        """Those that were before it began, from its revision on, and those that come."""
        mine, yours = await site.open(), await site.open()
        await mine.put("a/1", b"before")
        first = await _written(mine.put("a/1", b"x"))
        await mine.put("b", b"x")
        await mine.delete("a/1")
        early, late = _Watching(yours, "a/", first), _Watching(mine, "a/", first + 3)
        await site.until(lambda: len(early.batches) == 2)
        for number in range(20):
            await (mine, yours)[number % 2].put("a/2", b"%d" % number)
            await mine.put("a", b"not below it")
        await site.until(lambda: len(early.batches) == 22 and len(late.batches) == 20)
        assert early.told()[:2] == [[("a/1", b"x")], [("a/1", None)]]
        assert early.told()[2:] == [[("a/2", b"%d" % number)] for number in range(20)]
        assert late.batches == early.batches[2:]
        revisions = [batch[0].revision for batch in early.batches]
        assert revisions == sorted(set(revisions))
        await early.close()
        await late.close()

    async def test_a_watch_goes_on_where_it_was_when_it_was_cut_off(self, site: Site) -> None:
        """What changed meanwhile is told afterwards."""
        mine, yours = await site.open(), await site.open()
        first = await _written(mine.put("a", b"1"))
        watching = _Watching(yours, "", first)
        await site.until(lambda: len(watching.batches) == 1)
        site.cut(yours)
        await mine.put("a", b"2")
        await mine.put("a", b"3")
        site.cut(yours, False)
        await site.until(lambda: len(watching.batches) == 3)
        assert watching.told() == [[("a", b"1")], [("a", b"2")], [("a", b"3")]]
        await watching.close()

    async def test_a_watch_says_that_history_was_forgotten(self, site: Site) -> None:
        """It does not begin later in silence, neither at its begin nor after a cut."""
        mine, yours = await site.open(), await site.open()
        first = await _written(mine.put("a", b"1"))
        cut_off = _Watching(yours, "", first)
        await site.until(lambda: len(cut_off.batches) == 1)
        site.cut(yours)
        await mine.put("a", b"2")
        third = await _written(mine.put("a", b"3"))
        await site.compact(third)
        from_there, before = _Watching(mine, "", third), _Watching(mine, "", first)
        await site.until(lambda: before.error is not None)
        assert isinstance(before.error, CompactedError)
        assert "list" in str(before.error)
        await site.until(lambda: len(from_there.batches) == 1)
        assert from_there.told() == [[("a", b"3")]]
        site.cut(yours, False)
        await site.until(lambda: cut_off.error is not None)
        assert isinstance(cut_off.error, CompactedError)
        assert cut_off.told() == [[("a", b"1")]]
        await from_there.close()

    async def test_namespaces_do_not_see_each_other(self, site: Site) -> None:
        """Nor does one whose name begins with another one's."""
        one, ten = await site.open("c1"), await site.open("c10")
        first = await _written(one.put("a", b"one"))
        watching = _Watching(one, "", first)
        assert await ten.put("a", b"ten", seen=0)
        assert await ten.delete("a")
        assert await ten.get("a") is None
        assert (await ten.list("")).entries == ()
        assert [entry.value for entry in (await one.list("")).entries] == [b"one"]
        await one.put("last", b"")
        await site.until(lambda: len(watching.batches) == 2)
        assert watching.told() == [[("a", b"one")], [("last", b"")]]
        assert (await site.soon(campaign(one, "x", b"1", ttl_s=TTL_S))).leads()
        assert (await site.soon(campaign(ten, "x", b"1", ttl_s=TTL_S))).leads()
        await watching.close()

    async def test_a_lease_is_kept_alive(self, site: Site) -> None:
        """What was put with it outlives its length, for as long as its holder lives."""
        mine, yours = await site.open(), await site.open()
        lease = await mine.lease(TTL_S)
        await mine.put("a", b"1", lease=lease.id)
        begin_ns = lease.held_until_ns()
        assert begin_ns <= mine.pace.now_ns() + lease.ttl_s * 10**9
        await site.until(lambda: mine.pace.now_ns() > begin_ns + TTL_S * 10**8)
        assert lease.held()
        found = await yours.get("a")
        assert found is not None
        assert found.lease == lease.id
        await lease.release(5.0)
        assert not lease.held()
        assert lease.held_until_ns() == 0
        assert await yours.get("a") is None
        await lease.release(5.0)

    async def test_a_lease_ends_for_its_holder_first(self, site: Site) -> None:
        """Who is cut off knows that it is over before anybody else sees what follows."""
        mine, yours = await site.open(), await site.open()
        lease = await mine.lease(TTL_S)
        await mine.change(Put("a", b"1", lease.id), Put("b", b"1", lease.id), Put("c", b"1"))
        held: list[bool] = []

        async def follow() -> tuple[Change, ...]:
            async with aclosing(yours.watch("", (await yours.list("")).revision + 1)) as batches:
                async for batch in batches:
                    held.append(lease.held())
                    return batch
            raise AssertionError("a watch goes on")

        following = asyncio.create_task(follow())
        site.cut(mine)
        gone = await site.soon(following)
        assert held == [False]
        assert sorted((change.key, change.entry) for change in gone) == [("a", None), ("b", None)]
        site.cut(mine, False)
        await site.soon(lease.ended())
        assert not lease.held()
        with pytest.raises(LeaseExpiredError, match="ended"):
            await mine.change(Put("c", b"2"), Put("a", b"2", lease.id))
        assert [entry.value for entry in (await yours.list("")).entries] == [b"1"]

    async def test_a_lease_that_others_end_is_over(self, site: Site) -> None:
        """Its holder hears it with the next renewal, while it may still count on it."""
        mine, yours = await site.open(), await site.open()
        lease = await mine.lease(60)
        short = await mine.lease(TTL_S)
        await yours.revoke(short.id, 5.0)
        await site.soon(short.ended())
        assert lease.held()
        await yours.revoke(short.id, 5.0)
        await mine.close()
        assert not lease.held()
        await mine.close()

    async def test_what_cannot_be_is_refused_with_its_reason(self, site: Site) -> None:
        """Limits are the same everywhere, and what was refused changed nothing."""
        mine = await site.open()
        many = [Put(f"k{number}", b"") for number in range(OPERATIONS_MAX + 1)]
        for operations, reason in (
            ([Put("a", bytes(VALUE_BYTES_MAX + 1))], "a value has up to"),
            ([Put("a", b"1"), Delete("a")], "once"),
            ([Put("", b"1")], "a name has"),
            ([Put("b", b"1"), Put("n" * 1025, b"1")], "a name has"),
            (many, "up to 128 operations"),
        ):
            with pytest.raises(InvalidArgumentError, match=reason):
                await mine.change(*operations)
        with pytest.raises(InvalidArgumentError, match="a name has"):
            await mine.get("")
        with pytest.raises(InvalidArgumentError, match="seconds"):
            await mine.lease(1)
        assert (await mine.list("")).entries == ()
        assert await mine.change(*many[1:])
        assert await mine.put("large", bytes(VALUE_BYTES_MAX))

    async def test_a_call_that_reaches_nothing_says_so(self, site: Site) -> None:
        """Within its deadline, with what it was and whom it asked."""
        mine = await site.open()
        site.cut(mine)
        for call in (
            lambda: mine.get("a", timeout_s=0.2),
            lambda: mine.list("", timeout_s=0.2),
            lambda: mine.put("a", b"1", timeout_s=0.2),
            lambda: mine.lease(TTL_S, timeout_s=0.2),
        ):
            with pytest.raises(FAULTS) as caught:
                await site.soon(call())
            error = caught.value
            assert error.operation
            assert error.peer
            assert error.elapsed_s is not None
            assert error.advice
        site.cut(mine, False)
        assert await site.soon(mine.put("b", b"1"))

    async def test_one_leads_and_the_next_one_has_a_larger_epoch(self, site: Site) -> None:
        """Who resigns makes way at once; everybody is told who leads."""
        mine, yours, other = await site.open(), await site.open(), await site.open()
        news: list[Leader | None] = []

        async def follow() -> None:
            async with aclosing(leaders(other, "shard")) as changes:
                async for who in changes:
                    if not news or who != news[-1]:
                        news.append(who)

        following = asyncio.create_task(follow())
        await site.until(lambda: news == [None])
        first = await site.soon(campaign(mine, "shard", b"mine", ttl_s=TTL_S))
        second = asyncio.create_task(campaign(yours, "shard", b"yours", ttl_s=TTL_S))
        # What has another name, though it begins so, is no matter.
        assert (await site.soon(campaign(yours, "shards", b"yours", ttl_s=TTL_S))).leads()
        assert await leader(other, "shard") == Leader(b"mine", first.epoch)
        begin_ns = first.leading_until_ns()
        await site.until(lambda: mine.pace.now_ns() > begin_ns + TTL_S * 10**8)
        assert first.leads()
        assert not second.done()
        await first.resign()
        assert not first.leads()
        assert first.leading_until_ns() == 0
        after = await site.soon(second)
        assert after.epoch > first.epoch
        await site.until(lambda: news[-1] == Leader(b"yours", after.epoch))
        assert news[1] == Leader(b"mine", first.epoch)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    async def test_a_leader_that_is_cut_off_stops_before_the_next_one_begins(
        self, site: Site
    ) -> None:
        """And what it does nonetheless is refused, when it is connected again."""
        mine, yours = await site.open(), await site.open()
        first = await site.soon(campaign(mine, "shard", b"mine", ttl_s=TTL_S))
        assert await mine.change(Put("map", b"mine"), given=[first.still])
        led: list[bool] = []

        async def follow() -> None:
            leadership = await campaign(yours, "shard", b"yours", ttl_s=TTL_S)
            led.append(first.leads())
            assert leadership.epoch > first.epoch
            assert await yours.change(Put("map", b"yours"), given=[leadership.still])

        following = asyncio.create_task(follow())
        site.cut(mine)
        await site.soon(following)
        assert led == [False]
        await site.soon(first.ended())
        site.cut(mine, False)
        assert await site.soon(mine.change(Put("map", b"mine"), given=[first.still])) is None
        found = await yours.get("map")
        assert found is not None
        assert found.value == b"yours"

    async def test_a_leader_whose_value_is_removed_hears_it(self, site: Site) -> None:
        """Though its lease goes on; it may lead again, with another epoch."""
        mine, yours = await site.open(), await site.open()
        first = await site.soon(campaign(mine, "shard", b"mine", ttl_s=3600))
        await yours.delete(first.still.key)
        await site.soon(first.ended())
        again = await site.soon(campaign(mine, "shard", b"mine", ttl_s=3600))
        assert again.epoch > first.epoch

    async def test_who_gives_up_a_campaign_holds_nothing(self, site: Site) -> None:
        """Nor does it take what becomes free afterwards; a closed client leads no more."""
        mine, yours = await site.open(), await site.open()
        first = await site.soon(campaign(mine, "shard", b"mine", ttl_s=TTL_S))
        second = asyncio.create_task(campaign(yours, "shard", b"yours", ttl_s=TTL_S))
        begin_ns = first.leading_until_ns()
        await site.until(lambda: first.leading_until_ns() > begin_ns)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await mine.close()
        assert not first.leads()
        assert await leader(yours, "shard") is None
        assert (await yours.list("")).entries == ()

    async def test_a_campaign_outlasts_a_service_that_is_away(self, site: Site) -> None:
        """It leads once the service is back and nobody else does."""
        mine = await site.open(timeout_s=1.0)
        site.cut(mine)
        standing = asyncio.create_task(campaign(mine, "shard", b"mine", ttl_s=TTL_S))
        with pytest.raises(FAULTS):
            await site.soon(mine.get("a", timeout_s=0.2))
        site.cut(mine, False)
        assert (await site.soon(standing)).leads()
