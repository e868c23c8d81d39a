"""The table of kept blocks: against a model, and what leaves first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eviction import create_policy
from serving.workers.kept import Kept

SLOTS = 12
IDLE_S = 50.0


def kept_of(slots=SLOTS):
    return Kept(slots, create_policy("lru", slots), copy_idle_s=IDLE_S)


def chain(name, length):
    return [f"{name}{at}".encode() for at in range(length)]


def keep(kept, blocks, *, pulled=0, now=0.0):
    claimed = kept.claim(blocks, pulled=pulled, now=now)
    kept.publish(claimed, blocks, pulled=pulled, now=now, good=True)
    return [each.position for each in claimed]


def found(kept, blocks, now=0.0):
    slots = kept.pin(blocks, now)
    kept.unpin(slots)
    return len(slots)


def test_what_was_kept_is_found_from_the_start_on():
    kept = kept_of()
    assert keep(kept, chain("a", 4)) == [0, 1, 2, 3]
    assert found(kept, chain("a", 6)) == 4
    assert found(kept, chain("b", 1)) == 0
    assert keep(kept, chain("a", 6)) == [4, 5]
    assert kept.take_changes() == (chain("a", 6), [])
    kept.check_integrity()


def test_ends_of_cold_chains_leave_first():
    kept = kept_of()
    keep(kept, chain("a", 6))
    keep(kept, chain("b", 6))
    found(kept, chain("a", 6))
    keep(kept, chain("c", 2))
    assert found(kept, chain("a", 6)) == 6
    assert found(kept, chain("b", 6)) == 4
    assert sorted(kept.take_changes().removed) == [b"b4", b"b5"]


def test_a_chain_does_not_push_itself_out():
    kept = kept_of()
    keep(kept, chain("a", 4))
    assert keep(kept, chain("a", SLOTS + 5)) == list(range(4, SLOTS))
    assert found(kept, chain("a", SLOTS + 5)) == SLOTS


def test_what_is_read_stays():
    kept = kept_of()
    keep(kept, chain("a", SLOTS))
    slots = kept.pin(chain("a", SLOTS), 0.0)
    assert keep(kept, chain("b", 3)) == []
    kept.unpin(slots)
    assert keep(kept, chain("b", 3)) == [0, 1, 2]


def test_copies_of_others_blocks_take_a_half_and_go_when_cold():
    kept = kept_of()
    assert keep(kept, chain("a", 8), pulled=8) == list(range(6))
    assert kept.copies == SLOTS // 2
    assert keep(kept, chain("b", 8), pulled=3) == list(range(8))  # for older copies
    assert kept.copies == SLOTS // 2
    assert found(kept, chain("b", 8), now=IDLE_S - 1) == 8
    kept.expire(IDLE_S + 1)
    assert kept.copies == 3
    assert found(kept, chain("a", 8), now=IDLE_S + 1) == 0
    assert found(kept, chain("b", 8), now=IDLE_S + 1) == 8
    kept.expire(3 * IDLE_S)
    assert len(kept) == 5
    assert found(kept, chain("b", 8)) == 0
    kept.check_integrity()


def test_what_could_not_be_copied_is_not_there():
    kept = kept_of()
    blocks = chain("a", 3)
    claimed = kept.claim(blocks, pulled=1, now=0.0)
    assert found(kept, blocks) == 0
    kept.publish(claimed, blocks, pulled=1, now=0.0, good=False)
    assert found(kept, blocks) == 0
    assert kept.take_changes() == ([], [])
    assert len(kept.claim(chain("b", SLOTS), pulled=0, now=0.0)) == SLOTS
    kept.check_integrity()


NAMES = st.sampled_from("abc")
LENGTHS = st.integers(0, 9)


class KeptMachine(RuleBasedStateMachine):
    """What is told of is what is there; what is pinned, or half filled, is nobody else's."""

    @initialize()
    def start(self):
        self.kept = kept_of()
        self.now = 0.0
        self.told = set()
        self.pinned = []
        self.filling = []

    @rule(name=NAMES, length=LENGTHS, pulled=LENGTHS)
    def claim(self, name, length, pulled):
        blocks = chain(name, length)
        claimed = self.kept.claim(blocks, pulled=pulled, now=self.now)
        used = {slot for slots in self.pinned for slot in slots}
        used |= {each.slot for claims, *_ in self.filling for each in claims}
        assert not used & {each.slot for each in claimed}
        self.filling.append((claimed, blocks, pulled))

    @rule(good=st.booleans())
    def publish(self, good):
        if self.filling:
            claimed, blocks, pulled = self.filling.pop(0)
            self.kept.publish(claimed, blocks, pulled=pulled, now=self.now, good=good)

    @rule(name=NAMES, length=LENGTHS)
    def pin(self, name, length):
        slots = self.kept.pin(chain(name, length), self.now)
        assert len(slots) <= length
        assert set(chain(name, len(slots))) <= set(self.kept.names())
        self.pinned.append(slots)

    @rule()
    def unpin(self):
        if self.pinned:
            self.kept.unpin(self.pinned.pop())

    @rule(passed=st.sampled_from([1.0, IDLE_S]))
    def wait(self, passed):
        self.now += passed
        self.kept.expire(self.now)

    @rule()
    def follow(self):
        stored, removed = self.kept.take_changes()
        assert not set(stored) & set(removed)
        self.told = (self.told - set(removed)) | set(stored)
        assert self.told == set(self.kept.names())

    @invariant()
    def whole(self):
        self.kept.check_integrity()
        assert self.kept.copies <= SLOTS // 2


TestKept = KeptMachine.TestCase
TestKept.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("policy", ["lru", "lfu", "sieve", "fifo", "length_aware"])
def test_any_policy_of_the_store_will_do(policy):
    kept = Kept(SLOTS, create_policy(policy, SLOTS))
    for name in "abcd":
        keep(kept, chain(name, 5))
        assert found(kept, chain(name, 5)) >= 1
        kept.check_integrity()
