"""Which blocks a worker keeps of finished requests, in which slots of its memory, and for how long.

    kept = Kept(slots=256, policy=create_policy("lru", 256))
    claimed = kept.claim(chain, pulled=3, now=now)     # (position, slot); fill them, then
    kept.publish(claimed, chain, good=True)
    slots = kept.pin(chain)                            # the longest prefix; read them, then
    kept.unpin(slots)

A block's name covers its whole prefix, so blocks are worth something from the start of a chain on
only: of a chain the end is colder than the start. What this worker did not compute itself is a
copy of what others have: copies take no more than half of the slots, and one that nobody asked for
during `copy_idle_s` goes.

What changes is gathered for those who follow. Moves no bytes and keeps no clock; thread-safe.
Cost: O(blocks).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eviction.base import picking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eviction import EvictionPolicy

__all__ = ["Changes", "Claim", "Kept"]

COPIES_SHARE = 0.5


class Claim(NamedTuple):
    """A slot that is being filled with the block at some position of a chain."""

    position: int
    slot: int


class Changes(NamedTuple):
    """Names of blocks that are kept now, and of those that are no longer."""

    stored: list[bytes]
    removed: list[bytes]


class Kept:
    """The table of one worker's kept blocks; at most `slots`."""

    def __init__(self, slots: int, policy: EvictionPolicy, *, copy_idle_s: float = 300.0) -> None:
        self.slots = slots
        self._policy = policy
        self._copy_idle_s = copy_idle_s
        self._copies_max = int(COPIES_SHARE * slots)
        self._slot_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._pins = np.zeros(slots, np.int64)
        self._used_at: dict[int, float] = {}
        """Of copies: when they were asked for last."""
        self._filling_copies = 0
        self._changes: dict[bytes, bool] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def copies(self) -> int:
        """How many of them are copies of what others have."""
        return len(self._used_at)

    def length(self, chain: Sequence[bytes]) -> int:
        """How many blocks from the start of a chain are kept."""
        with self._lock:
            return len(self._prefix(chain))

    def names(self) -> list[bytes]:
        """All that is kept."""
        with self._lock:
            return list(self._slot_of)

    # -- reading

    def pin(self, chain: Sequence[bytes], now: float) -> list[int]:
        """Hold the longest prefix of a chain in its slots, until `unpin`."""
        with self._lock:
            slots = self._prefix(chain)
            held = np.asarray(slots, np.int64)
            self._pins[held] += 1
            self._policy.touch(held[::-1])
            for slot in slots:
                if slot in self._used_at:
                    self._used_at[slot] = now
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """Let go of what `pin` returned."""
        with self._lock:
            np.subtract.at(self._pins, np.asarray(slots, np.int64), 1)

    def _prefix(self, chain: Sequence[bytes]) -> list[int]:
        slots = []
        for name in chain:
            slot = self._slot_of.get(name)
            if slot is None:
                break
            slots.append(slot)
        return slots

    # -- filling

    def claim(self, chain: Sequence[bytes], *, pulled: int, now: float) -> list[Claim]:
        """Slots for those blocks of a chain that are not kept; the first `pulled` are copies.

        The coldest blocks go for them, but none of this chain. What does not fit is left out, from
        the end. `publish` follows.
        """
        with self._lock:
            self._drop_idle(now)
            held = np.asarray([self._slot_of[name] for name in chain if name in self._slot_of])
            held = held.astype(np.int64)
            self._pins[held] += 1
            try:
                return self._claim(chain, pulled)
            finally:
                self._pins[held] -= 1
                self._policy.touch(held[::-1])

    def _claim(self, chain: Sequence[bytes], pulled: int) -> list[Claim]:
        claimed: list[Claim] = []
        missing = [at for at, name in enumerate(chain) if name not in self._slot_of]
        copies = sum(at < pulled for at in missing)
        self._drop_oldest_copies(self._copies + copies - self._copies_max)
        self._evict(len(missing) - len(self._free))
        for position in missing:
            copy = position < pulled
            # Behind a hole nothing is found, so there is no use in keeping it.
            if not self._free or (copy and self._copies >= self._copies_max):
                break
            self._filling_copies += copy
            slot = self._free.pop()
            self._pins[slot] = 1
            claimed.append(Claim(position, slot))
        return claimed

    @property
    def _copies(self) -> int:
        return len(self._used_at) + self._filling_copies

    def _drop_oldest_copies(self, count: int) -> None:
        if count > 0:
            idle = [slot for slot in self._used_at if not self._pins[slot]]
            self._drop(sorted(idle, key=self._used_at.__getitem__)[:count])

    def publish(
        self,
        claimed: Sequence[Claim],
        chain: Sequence[bytes],
        *,
        pulled: int,
        now: float,
        good: bool,
    ) -> None:
        """The slots hold what they were claimed for; or not, and are given back."""
        with self._lock:
            fresh = []
            for position, slot in claimed:
                name = chain[position]
                self._pins[slot] = 0
                copy = position < pulled
                self._filling_copies -= copy
                if not good or name in self._slot_of:
                    self._free.append(slot)
                    continue
                self._slot_of[name], self._name_of[slot] = slot, name
                self._changes[name] = True
                fresh.append(slot)
                if copy:
                    self._used_at[slot] = now
            self._policy.insert(np.asarray(fresh[::-1], np.int64))

    def expire(self, now: float) -> None:
        """Drop copies that nobody asked for."""
        with self._lock:
            self._drop_idle(now)

    def _drop_idle(self, now: float) -> None:
        since = now - self._copy_idle_s
        self._drop(
            [slot for slot, at in self._used_at.items() if at < since and not self._pins[slot]]
        )

    def _evict(self, count: int) -> None:
        if count > 0:
            idle = picking(eligible=lambda slots: self._pins[slots] == 0)
            self._drop(self._policy.victims(count, idle).tolist())

    def _drop(self, slots: Sequence[int]) -> None:
        self._policy.remove(np.asarray(slots, np.int64))
        for slot in slots:
            name = self._name_of.pop(slot)
            del self._slot_of[name]
            self._used_at.pop(slot, None)
            self._free.append(slot)
            self._changes[name] = False

    # -- telling

    def take_changes(self) -> Changes:
        """What changed since it was asked last, each block once."""
        with self._lock:
            changes, self._changes = self._changes, {}
        return Changes(
            [name for name, there in changes.items() if there],
            [name for name, there in changes.items() if not there],
        )

    def check_integrity(self) -> None:
        """Every slot is free, being filled, or of one name. For tests."""
        with self._lock:
            assert {name: slot for slot, name in self._name_of.items()} == self._slot_of
            assert len(set(self._free)) == len(self._free)
            assert not set(self._free) & self._name_of.keys()
            assert self._used_at.keys() <= self._name_of.keys()
            assert len(self._policy) == len(self._slot_of)
            assert (self._pins >= 0).all()
            assert not self._pins[self._free].any()
            filling = self.slots - len(self._free) - len(self._slot_of)
            assert 0 <= self._filling_copies <= filling
