"""The contract every eviction policy keeps, as a test suite to inherit.

    class TestMine(EvictionPolicyContract):
        def make(self, capacity_ids):
            return MyPolicy(capacity_ids)

It checks what the owner of a table relies on, whatever the policy's taste: membership, batches,
and proposals that change nothing. What is particular to one policy belongs in that policy's own
tests. Needs pytest; nothing outside tests imports this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eviction.base import INSERT, NOTE_SHIFT, picking

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eviction.base import EvictionPolicy

__all__ = ["EvictionPolicyContract"]


def _ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _order(policy: EvictionPolicy) -> list[int]:
    return policy.coldest(len(policy)).tolist()  # type: ignore[no-any-return]


def _churn(policy: EvictionPolicy, seed: int, steps: int = 60) -> list[int]:
    """Drive a policy through a fixed random life and return what it evicted, in order."""
    random = np.random.default_rng(seed)
    evicted: list[int] = []
    for _ in range(steps):
        ids = random.integers(0, policy.capacity_ids, size=8)
        policy.insert(ids, random.integers(0, 30, size=8).astype(np.int32))
        policy.touch(random.integers(-1, policy.capacity_ids, size=12))
        policy.remove(random.integers(-1, policy.capacity_ids, size=2))
        victims = policy.victims(int(random.integers(0, 5)))
        policy.remove(victims)
        evicted += victims.tolist()
        policy.check_integrity()
    return evicted


class EvictionPolicyContract(ABC):
    """Tests for one policy; `make` builds it, empty, for ids below `capacity_ids`."""

    @abstractmethod
    def make(self, capacity_ids: int) -> EvictionPolicy:
        """A new, empty policy."""

    def test_an_empty_policy_has_no_victims(self) -> None:
        """Nothing in, nothing out, and no call on nothing fails."""
        policy = self.make(8)
        policy.touch(_ids(3))
        policy.remove(_ids(3))
        policy.insert(_ids())
        assert len(policy) == 0
        assert 3 not in policy
        assert policy.victims(5).tolist() == []
        assert policy.coldest(5).tolist() == []
        policy.check_integrity()

    def test_without_uses_the_oldest_leaves_first(self) -> None:
        """Equally deep blocks that nobody used leave in order of insertion, across batches."""
        policy = self.make(16)
        policy.insert(_ids(9, 2, 15))
        policy.insert(_ids(0, 7))
        assert len(policy) == 5
        assert [id_ in policy for id_ in (9, 0, 1, 16, -1)] == [True, True, False, False, False]
        assert _order(policy) == [9, 2, 15, 0, 7]
        assert policy.coldest(3).tolist() == [9, 2, 15]
        assert policy.coldest(9).tolist() == [9, 2, 15, 0, 7]

    def test_a_batch_equals_its_ids_one_by_one(self) -> None:
        """Duplicates in one batch included."""
        whole, single = self.make(8), self.make(8)
        random = np.random.default_rng(5)
        for _ in range(40):
            for verb in ("insert", "touch", "remove"):
                ids = random.integers(0, 8, size=6 if verb != "remove" else 3)
                getattr(whole, verb)(ids)
                for id_ in ids:
                    getattr(single, verb)(_ids(id_))
            assert _order(whole) == _order(single)
            whole.check_integrity()

    def test_notes_equal_the_calls_they_stand_for(self) -> None:
        """In order, kinds mixed, absent ids and repetitions included."""
        noted, called = self.make(8), self.make(8)
        random = np.random.default_rng(6)
        for _ in range(60):
            kinds, ids = random.integers(0, 3, 20), random.integers(0, 8, 20)
            noted.replay(kinds << NOTE_SHIFT | ids)
            for kind, id_ in zip(kinds.tolist(), ids.tolist(), strict=True):
                (called.touch, called.insert, called.remove)[kind](_ids(id_))
            assert _order(noted) == _order(called)
            noted.check_integrity()
        noted.replay(_ids())
        with pytest.raises(ValueError, match="outside 0 to 7"):
            noted.replay(_ids(INSERT << NOTE_SHIFT | 8))
        assert _order(noted) == _order(called)

    def test_absent_ids_are_ignored(self) -> None:
        """Also those no table row can have: a failed lookup is -1."""
        policy = self.make(8)
        policy.insert(_ids(1, 2))
        for verb in (policy.touch, policy.remove):
            verb(_ids(-1, 5, 8, 2**40, -(2**40)))
        assert _order(policy) == [1, 2]

    @pytest.mark.parametrize("bad", [-1, 8, 2**32 + 1, -(2**40)])
    def test_an_id_outside_the_table_is_refused_whole(self, bad: int) -> None:
        """The good ids of that batch are not inserted either."""
        policy = self.make(8)
        policy.insert(_ids(4))
        with pytest.raises(ValueError, match="outside 0 to 7"):
            policy.insert(_ids(1, bad, 2))
        assert _order(policy) == [4]
        policy.check_integrity()

    @pytest.mark.parametrize("ids", [np.zeros((2, 2), dtype=np.int64), np.array([0.5]), 3])
    def test_only_vectors_of_integers_are_ids(self, ids: Any) -> None:
        """A float that would be rounded is a bug of the caller."""
        with pytest.raises(ValueError, match="vector of integers"):
            self.make(8).insert(ids)

    def test_every_layout_of_ids_is_understood(self) -> None:
        """32 bits, strided, reversed, read-only, byte-swapped, unsigned, and plain lists."""
        base = np.arange(8, dtype=np.int64)
        frozen = np.frombuffer(base.tobytes(), dtype=np.int64)
        layouts: list[Any] = [
            base.astype(np.int32),
            np.repeat(base, 2)[::2],
            base[::-1].copy()[::-1],
            frozen,
            base.astype(">i8"),
            base.astype(np.uint16),
            list(range(8)),
        ]
        for ids in layouts:
            policy = self.make(8)
            policy.insert(ids)
            policy.touch(ids)
            assert sorted(_order(policy)) == list(range(8))
            policy.remove(ids)
            assert len(policy) == 0

    def test_an_id_can_be_reused(self) -> None:
        """A removed id comes back as the hottest of the unused ones."""
        policy = self.make(4)
        policy.insert(_ids(0, 1, 2))
        policy.remove(_ids(0))
        assert 0 not in policy
        policy.insert(_ids(3))
        policy.check_integrity()
        policy.insert(_ids(0))
        assert len(policy) == 4
        assert sorted(_order(policy)) == [0, 1, 2, 3]

    def test_victims_change_nothing(self) -> None:
        """Asking twice proposes the same, and the order is as before."""
        policy = self.make(64)
        _churn(policy, seed=1)
        before = _order(policy)
        first = policy.victims(7)
        assert first.tolist() == before[:7]
        assert policy.victims(7).tolist() == first.tolist()
        assert _order(policy) == before

    def test_victims_add_up_to_the_bytes_asked_for(self) -> None:
        """The shortest cold run that reaches the amount; all there is when that is less."""
        policy = self.make(16)
        policy.insert(np.arange(10))
        sizes = np.arange(16) * 100

        sized = picking(sizes=sizes.__getitem__)
        assert policy.victims(0, sized).tolist() == []
        assert policy.victims(-5, sized).tolist() == []
        assert policy.victims(1, sized).tolist() == [0, 1]
        assert policy.victims(300, sized).tolist() == [0, 1, 2]
        assert policy.victims(301, sized).tolist() == [0, 1, 2, 3]
        assert policy.victims(10**9, sized).tolist() == list(range(10))
        assert policy.victims(10**9, sized, limit=4).tolist() == [0, 1, 2, 3]
        assert policy.victims(10**9, limit=0).tolist() == []

    def test_the_ineligible_are_passed_over(self) -> None:
        """Leased ids stay where they are while colder and hotter ones leave."""
        policy = self.make(16)
        policy.insert(np.arange(10))
        leased = np.zeros(16, dtype=np.bool_)
        leased[[0, 1, 4]] = True

        free = picking(eligible=lambda ids: np.logical_not(leased[ids]))
        assert policy.victims(3, free).tolist() == [2, 3, 5]
        assert policy.victims(99, free, limit=2).tolist() == [2, 3]
        leased[:] = True
        assert policy.victims(3, free).tolist() == []
        assert _order(policy) == list(range(10))

    def test_the_search_goes_on_to_the_last_id(self) -> None:
        """One eligible id behind thousands of leased ones is found, asked once about each."""
        policy = self.make(5000)
        policy.insert(np.arange(5000))
        asked: list[int] = []

        def last_only(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
            asked.extend(ids.tolist())
            return np.isin(ids, [4999])

        assert policy.victims(2, picking(np.ones_like, last_only)).tolist() == [4999]
        assert asked == list(range(5000))

    def test_evicting_everything_yields_every_id_once(self) -> None:
        """In small bites, with uses in between, until nothing is left."""
        policy = self.make(64)
        policy.insert(np.arange(64))
        policy.touch(np.arange(0, 64, 3))
        gone: list[int] = []
        while len(policy):
            victims = policy.victims(5)
            policy.remove(victims)
            policy.touch(policy.coldest(3)[2:])
            gone += victims.tolist()
            policy.check_integrity()
        assert sorted(gone) == list(range(64))

    def test_the_same_life_gives_the_same_victims(self) -> None:
        """No clock and no chance: replaying a log must evict the same objects."""
        assert _churn(self.make(64), seed=2) == _churn(self.make(64), seed=2)

    @pytest.mark.parametrize("capacity", [0, -1, 2**32])
    def test_a_capacity_no_table_has_is_refused(self, capacity: int) -> None:
        """Links are 32 bits wide."""
        with pytest.raises(ValueError, match="capacity_ids"):
            self.make(capacity)
