"""A bounded pool of connections that cost a card memory, evicted by SIEVE.

A card keeps the state of a few hundred queue pairs at hand and slows down beyond, so all
connections of a process share one bound. A connection is used by one batch at a time; idle ones
stay, grouped by what they lead to. When the bound is reached, an idle one makes room: SIEVE moves
a hand from the oldest to the newest, spares (once) those used since it last came by, and evicts
the first that was not. Busy ones are passed over. Nothing moves on a hit, only a mark is set.

Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
It does not know what a connection is; making and closing them is up to the caller.
Cost: O(1) a hit; an eviction is O(1) amortised, at worst two rounds over the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from transfer_engine.base import remaining_s
from transfer_engine.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pool"]


class Closable(Protocol):
    """What a pool holds."""

    def close(self) -> None:
        """Give up what it holds. Idempotent."""


KeyT = TypeVar("KeyT", bound=Hashable)
ItemT = TypeVar("ItemT", bound=Closable)


class _Node(Generic[KeyT, ItemT]):
    """One connection in the ring; the ring's head is a node without one."""

    __slots__ = ("busy", "item", "key", "newer", "older", "visited")

    def __init__(self, key: KeyT | None, item: ItemT | None) -> None:
        self.key, self.item = key, item
        self.newer: _Node[KeyT, ItemT] = self
        self.older: _Node[KeyT, ItemT] = self
        self.visited = False
        self.busy = True


class Pool(Generic[KeyT, ItemT]):
    """At most `limit` items, by key. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._changed = threading.Condition()
        self._ring: _Node[KeyT, ItemT] = _Node(None, None)
        self._hand = self._ring
        self._nodes: dict[ItemT, _Node[KeyT, ItemT]] = {}
        self._idle: dict[KeyT, list[_Node[KeyT, ItemT]]] = {}
        self._making = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._nodes) + self._making

    def acquire(
        self,
        key: KeyT,
        make: Callable[[], ItemT],
        deadline: float,
        *,
        fresh: bool = False,
    ) -> tuple[ItemT, bool]:
        """Return an item of this key for the caller alone, and whether it was used before.

        `fresh` drops idle ones of this key and makes a new one. Raises TransferTimeoutError when
        room does not come in time.
        """
        with self._changed:
            if fresh:
                for node in self._idle.pop(key, []):
                    self._remove(node)
            while True:
                if self._closed:
                    raise _closed()
                if key in self._idle:
                    node = self._idle[key][-1]
                    self._forget_idle(node)
                    node.busy = node.visited = True
                    assert node.item is not None
                    return node.item, True
                if len(self) < self.limit or self._evict():
                    self._making += 1
                    break
                left = remaining_s(deadline, "connect", f"one of {self.limit} busy endpoints")
                self._changed.wait(left)
        try:
            item = make()
        except BaseException:
            with self._changed:
                self._making -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._making -= 1
            self._insert(key, item)
        return item, False

    def _insert(self, key: KeyT, item: ItemT) -> None:
        if self._closed:  # meanwhile, so that nobody else would end it
            item.close()
            raise _closed()
        node = _Node(key, item)
        node.newer, node.older = self._ring, self._ring.older
        node.older.newer = node
        self._ring.older = node
        self._nodes[item] = node

    def _evict(self) -> bool:
        """Let the hand find an idle item that was not used since it last came by."""
        for _ in range(2 * len(self._nodes) + 2):
            node = self._hand
            self._hand = node.newer
            if node is self._ring or node.busy:
                continue
            if node.visited:
                node.visited = False
                continue
            self._forget_idle(node)
            self._remove(node)
            return True
        return False

    def _forget_idle(self, node: _Node[KeyT, ItemT]) -> None:
        assert node.key is not None
        idle = self._idle[node.key]
        idle.remove(node)
        if not idle:
            del self._idle[node.key]

    def _remove(self, node: _Node[KeyT, ItemT]) -> None:
        if self._hand is node:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older
        assert node.item is not None
        del self._nodes[node.item]
        node.item.close()

    def release(self, item: ItemT) -> None:
        """Give back an item that can be used again."""
        with self._changed:
            node = self._nodes[item]
            if self._closed:
                self._remove(node)
                return
            node.busy = False
            assert node.key is not None
            self._idle.setdefault(node.key, []).append(node)
            self._changed.notify()

    def discard(self, item: ItemT) -> None:
        """Close an item that cannot."""
        with self._changed:
            self._remove(self._nodes[item])
            self._changed.notify()

    def close(self) -> list[ItemT]:
        """Close idle items, refuse new ones, and return the busy ones. Idempotent."""
        with self._changed:
            self._closed = True
            for idle in self._idle.values():
                for node in idle:
                    self._remove(node)
            self._idle = {}
            self._changed.notify_all()
            return list(self._nodes)

    def items(self) -> list[ItemT]:
        """Return everything in the pool, oldest first."""
        return list(self._nodes)


def _closed() -> PeerLostError:
    return PeerLostError("the transport was closed", operation="connect")
