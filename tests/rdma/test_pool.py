"""The endpoint pool: its bound, its order of eviction, and threads that wait for room."""

import threading
import time

import pytest

from transfer_engine.errors import PeerLostError, TransferTimeoutError
from transfer_engine.rdma.pool import Pool


class Item:
    def __init__(self, name):
        self.name, self.closed = name, False

    def close(self):
        self.closed = True


def later(seconds=10):
    return time.monotonic() + seconds


def use(pool, key):
    """Take an item of a key and give it back; return it."""
    item, _ = pool.acquire(key, lambda: Item(key), later())
    pool.release(item)
    return item


def names(pool):
    return [item.name for item in pool.items()]


def test_items_are_used_again():
    pool = Pool(4)
    first, used = pool.acquire("a", lambda: Item("a"), later())
    assert not used
    pool.release(first)
    assert pool.acquire("a", lambda: Item("a"), later()) == (first, True)
    second, used = pool.acquire("a", lambda: Item("a"), later())
    assert second is not first
    assert not used
    assert len(pool) == 2


def test_the_one_not_used_since_makes_room():
    pool = Pool(3)
    items = {name: use(pool, name) for name in "abc"}
    use(pool, "a")
    use(pool, "c")
    use(pool, "d")
    assert items["b"].closed
    assert names(pool) == ["a", "c", "d"]


def test_what_was_used_is_spared_once():
    pool = Pool(2)
    a, b = use(pool, "a"), use(pool, "b")
    use(pool, "a"), use(pool, "b")
    use(pool, "c")  # the hand clears both marks and takes the oldest
    assert a.closed
    assert not b.closed
    use(pool, "d")  # b's mark is gone, and c is newer than the hand
    assert b.closed
    assert names(pool) == ["c", "d"]


def test_against_the_algorithm_as_published():
    """The same accesses on a list, as the paper writes it."""
    import random

    rng = random.Random(4)
    pool, limit = Pool(8), 8
    queue, marked, hand = [], set(), 0  # oldest first
    for _ in range(5000):
        key = int(rng.paretovariate(0.6)) % 40
        if key in queue:
            marked.add(key)
        else:
            if len(queue) == limit:
                while queue[hand] in marked:
                    marked.discard(queue[hand])
                    hand = (hand + 1) % limit
                queue.pop(hand)
                hand %= len(queue)  # what comes now is newer than where the hand stands
            queue.append(key)
        use(pool, key)
        assert names(pool) == queue


def test_busy_items_are_passed_over():
    pool = Pool(2)
    busy, _ = pool.acquire("a", lambda: Item("a"), later())
    idle = use(pool, "b")
    use(pool, "c")
    assert idle.closed
    assert not busy.closed
    held, _ = pool.acquire("c", lambda: Item("c"), later())
    with pytest.raises(TransferTimeoutError):
        pool.acquire("d", lambda: Item("d"), later(0.05))
    pool.release(held)
    assert use(pool, "d").name == "d"
    assert held.closed


def test_who_waits_gets_the_room_that_comes():
    pool = Pool(1)
    held, _ = pool.acquire("a", lambda: Item("a"), later())
    got = []
    threads = [threading.Thread(target=lambda: got.append(use(pool, "b"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    pool.discard(held)
    for thread in threads:
        thread.join(60)
    assert [item.name for item in got] == ["b"] * 3
    assert held.closed
    assert len(pool) == 1


def test_a_fresh_item_replaces_the_idle_ones():
    pool = Pool(4)
    old = use(pool, "a")
    new, used = pool.acquire("a", lambda: Item("a"), later(), fresh=True)
    assert not used
    assert old.closed
    assert new is not old


def test_a_failed_connection_takes_no_room():
    pool = Pool(1)

    def fail():
        raise PeerLostError("no")

    for _ in range(3):
        with pytest.raises(PeerLostError):
            pool.acquire("a", fail, later())
    assert use(pool, "a").name == "a"


def test_a_closed_pool_hands_out_nothing():
    pool = Pool(4)
    idle = use(pool, "b")
    busy, _ = pool.acquire("a", lambda: Item("a"), later())
    assert pool.close() == [busy]
    assert idle.closed
    with pytest.raises(PeerLostError, match="closed"):
        pool.acquire("a", lambda: Item("a"), later())
    pool.release(busy)
    assert busy.closed
    assert pool.close() == []


def test_what_is_made_while_the_pool_is_closed_is_closed_as_well():
    pool, made = Pool(4), []

    def make():
        made.append(Item("a"))
        assert pool.close() == []
        return made[0]

    with pytest.raises(PeerLostError, match="closed"):
        pool.acquire("a", make, later())
    assert made[0].closed
    assert len(pool) == 0
