"""Every policy against a tiny reference in plain Python, with kernels compiled and interpreted.

A reference keeps an obvious data structure and recomputes the whole order on demand; it shares
nothing with the kernels. Interpreted means that each kernel of the module is replaced by its
`.py_func`, helpers included, so what numba compiles is also checked as the Python it is.
"""

from collections import OrderedDict
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eviction import POLICIES, create_policy
from eviction.base import picking
from eviction.kernels import buckets, log, sieve
from eviction.opt import OptPolicy

ROWS = 10


class Lru:
    def __init__(self):
        self.ids = []

    def insert(self, id_, depth):
        self.remove(id_)
        self.ids.append(id_)

    def touch(self, id_):
        if id_ in self.ids:
            self.insert(id_, 0)

    def remove(self, id_):
        if id_ in self.ids:
            self.ids.remove(id_)

    def evict(self, id_):
        self.remove(id_)

    def order(self):
        return list(self.ids)


class Fifo(Lru):
    def insert(self, id_, depth):
        if id_ not in self.ids:
            self.ids.append(id_)

    def touch(self, id_):
        pass


class Sieve(Fifo):
    """The algorithm as published: one eviction at a time, marks cleared as the hand passes."""

    def __init__(self):
        super().__init__()
        self.used = set()
        self.hand = 0

    def insert(self, id_, depth):
        self.touch(id_)
        super().insert(id_, depth)

    def touch(self, id_):
        if id_ in self.ids:
            self.used.add(id_)

    def remove(self, id_):
        if id_ in self.ids:
            place = self.ids.index(id_)
            del self.ids[place]
            self.used.discard(id_)
            self.hand -= place < self.hand
            # A hand that has passed the youngest starts again at the oldest, as published; what
            # is inserted meanwhile does not come under it.
            if self.hand == len(self.ids):
                self.hand = 0

    def evict(self, id_):
        while True:
            self.hand %= len(self.ids)
            candidate = self.ids[self.hand]
            if candidate == id_ and candidate not in self.used:
                break
            self.used.discard(candidate)
            self.hand += 1
        self.remove(id_)

    def order(self):
        ids, used, hand = list(self.ids), set(self.used), self.hand
        order = []
        while ids:
            hand %= len(ids)
            if ids[hand] in used:
                used.discard(ids[hand])
                hand += 1
            else:
                order.append(ids.pop(hand))
        return order


class Counting:
    """Sorts by (uses, deeper first if asked, time of last use)."""

    def __init__(self, *, keep=False, by_depth=False):
        self.keep, self.by_depth = keep, by_depth
        self.uses, self.depth, self.last, self.time = {}, {}, {}, 0

    def insert(self, id_, depth):
        if id_ not in self.last:
            self.depth[id_] = depth
        self._use(id_)

    def touch(self, id_):
        if id_ in self.last:
            self._use(id_)

    def _use(self, id_):
        self.time += 1
        self.last[id_] = self.time
        self.uses[id_] = self.uses.get(id_, 0) + 1

    def remove(self, id_):
        self.last.pop(id_, None)
        if not self.keep:
            self.uses.pop(id_, None)

    evict = remove

    def key(self, id_):
        return (self.uses[id_], -self.depth[id_] if self.by_depth else 0, self.last[id_])

    def order(self):
        return sorted(self.last, key=self.key)


class Opt(Counting):
    def __init__(self, future):
        super().__init__(keep=True)
        self.future = future

    def touch(self, id_):
        if id_ in self.last:
            self._use(id_)
        else:
            self.uses[id_] = self.uses.get(id_, 0) + 1

    def key(self, id_):
        places = [place for place, used in enumerate(self.future) if used == id_]
        done = self.uses[id_]
        upcoming = places[done] if done < len(places) else len(self.future)
        return (-upcoming, self.last[id_])


REFERENCES = {
    "lru": Lru,
    "fifo": Fifo,
    "sieve": Sieve,
    "lfu": Counting,
    "lfu_perfect": lambda: Counting(keep=True),
    "length_aware": lambda: Counting(by_depth=True),
}

present = st.lists(st.integers(0, ROWS - 1), max_size=8)
anything = st.lists(st.integers(-2, ROWS + 1), max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), present, st.lists(st.integers(0, 3), min_size=8, max_size=8)),
        st.tuples(st.just("touch"), anything, st.none()),
        st.tuples(st.just("remove"), anything, st.none()),
        st.tuples(st.just("evict"), present, st.integers(0, 6)),
    ),
    max_size=25,
)


def build(name, life):
    """The policy and its reference."""
    if name != "opt":
        return create_policy(name, ROWS), REFERENCES[name]()
    future = [
        id_
        for verb, ids, _ in life
        if verb in ("insert", "touch")
        for id_ in ids
        if id_ in range(ROWS)
    ]
    return OptPolicy(ROWS, np.array(future, dtype=np.int64)), Opt(future)


def live(name, life):
    """Take policy and reference through the same life, comparing after each step."""
    policy, reference = build(name, life)
    for verb, ids, extra in life:
        array = np.array(ids, dtype=np.int64)
        if verb == "insert":
            depths = np.array(extra[: len(ids)], dtype=np.int32)
            policy.insert(array, depths)
            for id_, depth in zip(ids, extra, strict=False):
                reference.insert(id_, depth)
        elif verb == "evict":
            leased = set(ids)
            expected = [id_ for id_ in reference.order() if id_ not in leased][:extra]
            free = np.isin(np.arange(ROWS), array, invert=True)
            victims = policy.victims(extra, picking(eligible=free.__getitem__))
            assert victims.tolist() == expected
            policy.remove(victims)
            for id_ in expected:
                reference.evict(id_)
        else:
            getattr(policy, verb)(array)
            for id_ in ids:
                if id_ in range(ROWS):
                    getattr(reference, verb)(id_)
        policy.check_integrity()
        assert len(policy) == len(reference.order())
        assert policy.coldest(ROWS).tolist() == reference.order()
        assert [id_ for id_ in range(ROWS) if id_ in policy] == sorted(reference.order())


def interpret(monkeypatch):
    """Replace every kernel by the Python function it was made from."""
    for module in (log, sieve, buckets):
        for name, kernel in list(vars(module).items()):
            if hasattr(kernel, "py_func"):
                monkeypatch.setattr(module, name, kernel.py_func)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150, deadline=None)
@given(life=steps)
def test_compiled_policy_equals_its_reference(name, life):
    live(name, life)


@pytest.mark.parametrize("name", POLICIES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(life=steps)
def test_interpreted_policy_equals_its_reference(name, monkeypatch, life):
    interpret(monkeypatch)
    live(name, life)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_kernels_do_the_same_compiled_and_interpreted(name, seed, monkeypatch):
    """On more ids and deeper trees than the references bear, down to every column."""

    def run():
        random = np.random.default_rng(seed)
        future = random.integers(0, 300, 2000)
        policy = OptPolicy(300, future) if name == "opt" else create_policy(name, 300)
        for _ in range(25):
            depths = random.integers(0, 9000, 40).astype(np.int32)
            policy.insert(random.integers(0, 300, 40), depths)
            policy.touch(random.integers(-1, 301, 40))
            policy.touch(random.integers(0, 20, 40).astype(np.int32))
            policy.remove(random.integers(-1, 301, 5))
            policy.remove(policy.victims(10))
        policy.check_integrity()
        return {name: each for name, each in vars(policy).items() if isinstance(each, np.ndarray)}

    compiled = run()
    interpret(monkeypatch)
    interpreted = run()
    assert compiled.keys() == interpreted.keys()
    for column in compiled:
        np.testing.assert_array_equal(compiled[column], interpreted[column])


def test_every_bit_of_the_key_tree_is_found_again():
    """Keys next to and far from one another, at every level of the tree."""
    kernels = buckets
    words = np.zeros(kernels.WORDS, dtype=np.uint64)
    random = np.random.default_rng(0)
    keys = {0, 63, 64, 4095, 4096, 2**18 - 1, 2**18, kernels.KEYS - 1}
    keys |= set(random.integers(0, kernels.KEYS, 200).tolist())
    for find, mark, unmark in (
        (kernels._next_key, kernels._mark, kernels._unmark),
        (kernels._next_key.py_func, kernels._mark.py_func, kernels._unmark.py_func),
    ):
        for key in keys:
            mark(words, key)
        found, key = [], find(words, 0)
        while key >= 0:
            found.append(int(key))
            key = find(words, key + 1)
        assert found == sorted(keys)
        for key in keys:
            unmark(words, key)
        assert find(words, 0) == -1
        assert not words.any()


@pytest.mark.parametrize("name", POLICIES)
def test_integrity_check_notices_broken_links(name):
    """The check can fail: each policy's columns are damaged behind its back."""
    policy = create_policy(name, 16)
    policy.insert(np.arange(8))
    if hasattr(policy, "_places"):
        policy._places[5] = 2
    else:
        columns = policy._nodes if hasattr(policy, "_nodes") else policy._links
        columns[5, 0] = 2
    with pytest.raises(AssertionError, match="disagree"):
        policy.check_integrity()
    if not hasattr(policy, "_places"):
        with pytest.raises(AssertionError, match="neighbours"):
            policy.remove(np.arange(8))


def test_warmup_leaves_nothing_to_compile():
    """Both widths of ids, through every policy, add no signature after the warm-up."""
    modules = (log, sieve, buckets)
    kernels = [k for m in modules for k in vars(m).values() if hasattr(k, "py_func")]
    for module in modules:
        module.warmup()
    before = [len(kernel.signatures) for kernel in kernels]
    for name in POLICIES:
        for kind in (np.int64, np.int32):
            policy = create_policy(name, 16)
            policy.insert(np.arange(8, dtype=kind), np.arange(8, dtype=np.int32))
            policy.insert(np.arange(8, dtype=kind))
            policy.touch(np.arange(8, dtype=kind))
            policy.remove(policy.victims(2, picking(sizes=np.ones_like)))
            policy.check_integrity()
    assert [len(kernel.signatures) for kernel in kernels] == before


def long_life(name, seed, ids, rounds, longest):
    """Live through enough to squeeze the log many times, beside an OrderedDict."""
    random = np.random.default_rng(seed)
    policy, order = create_policy(name, ids), OrderedDict()
    for round_ in range(rounds):
        batch = random.integers(0, ids, random.integers(1, longest))
        verb = ("insert", "touch", "touch", "remove", "evict")[random.integers(0, 5)]
        if verb == "evict":
            batch = policy.victims(len(batch) // 2)
            assert batch.tolist() == list(islice(order, len(batch)))
            verb = "remove"
        getattr(policy, verb)(batch)
        for id_ in batch.tolist():
            if verb == "remove":
                order.pop(id_, None)
            elif id_ not in order:
                if verb == "insert":
                    order[id_] = None
            elif name == "lru":
                order.move_to_end(id_)
        if round_ % 20 == 0:
            policy.check_integrity()
            assert policy.coldest(ids).tolist() == list(order)
    assert policy.coldest(ids).tolist() == list(order)
    return int(policy._head[log.END])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_a_squeezed_log_keeps_its_order(name, seed):
    ids, longest = 20_000, 6_000
    end = long_life(name, seed, ids, 400, longest)
    assert end <= 2 * (ids + log.SLACK + log.RUN)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_an_interpreted_log_is_squeezed_alike(name, seed, monkeypatch):
    interpret(monkeypatch)
    monkeypatch.setattr(log, "SLACK", 8)
    monkeypatch.setattr(log, "RUN", 4)
    end = long_life(name, seed, 40, 1500, 12)
    assert end <= 2 * (40 + log.SLACK + log.RUN)
