"""Time to the first token of prefixes that lie on a disk: much less than computing, or as much.

Lookups are weighed against computing (`prefill_tokens_per_s`). A disk from which reading takes
several times as long must cost no more than computing does, and the weighing nothing where the disk
is quick.
"""

import random
import statistics
from itertools import combinations
from typing import NamedTuple

import pytest

from mooncake_store import Client, LocalCluster
from tests.disks.disk import Disk, missing
from tests.vllm.conftest import ours
from tests.vllm.model import make_model
from tests.waiting import until

MIB = 1 << 20
PREFIX, PREFIXES = 2048, 4
HEADS, LAYERS = 8, 4
PREFIX_BYTES = PREFIX * LAYERS * 2 * HEADS * 32 * 4
MEMORY = 96 * MIB
ROUNDS = 10
PAIRS_MIN, PAIRS_MAX, DOUBT_MAX = 24, 120, 0.05
"""How many first tokens are compared: until it is known within such a share of computing."""
RECENT = 5
"""Of how many prefixes the median says what computing one takes now."""
TIMES_THROTTLED = 10
"""As slow as that is the quick disk made; reading may be worth it still."""
SLOWER = 5
"""How many times as long as computing it takes to read a prefix of the slow disk."""
LATER_MAX = 0.1
"""How much later than computed, as a share of that."""
WHOLE_LOOKS_MAX = 3
"""Prefixes that are read whole in vain: the first ones that nobody could know of."""
LOSS_MAX = 0.02

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    yield disk
    disk.end()


def prompt(name):
    draw = random.Random(name)
    return [draw.randrange(3, 253) for _ in range(PREFIX)] + [7, 8, 9]


class FirstToken(NamedTuple):
    """Seconds to it, how much before it was not computed, and seconds the connector was asked."""

    seconds: float
    cached: int
    watched_s: float


def first_token(engine, number):
    """Have the first token behind a prefix."""
    engine("settle")  # what is being saved is not forgotten
    assert engine("reset")["reset"]
    answer = engine("generate", prompts=[prompt(number)], tokens=1)
    return FirstToken(answer["seconds"], answer["cached"][0], answer["watched_s"])


def median_s(engine, numbers, *, cached):
    """The median of seconds; fails unless so much of each prefix was not computed."""
    taken = [first_token(engine, number) for number in numbers]
    assert [each.cached for each in taken] == [cached] * len(taken)
    return statistics.median(each.seconds for each in taken)


class Compared(NamedTuple):
    """First tokens behind prefixes on a disk, and of others that were computed in turn.

    All of the former count, those that read to find out included: that is what users wait for.
    """

    spared: list[FirstToken]
    beside: list[FirstToken]

    @property
    def later_s(self):
        """How much later the former come: the median of the means of any two pairs in turn.

        A machine with other work computes at two speeds, between which plain medians jump.
        """
        found = [a.seconds - b.seconds for a, b in zip(self.spared, self.beside, strict=True)]
        return statistics.median((a + b) / 2 for a, b in combinations(found, 2))

    @property
    def doubt_s(self):
        """By how much that may be wrong: twice the standard error, but for the longest."""
        found = [a.seconds - b.seconds for a, b in zip(self.spared, self.beside, strict=True)]
        usual = sorted(found)[:-WHOLE_LOOKS_MAX]
        return 2 * statistics.stdev(usual) / len(usual) ** 0.5

    @property
    def beside_s(self):
        return statistics.mean(each.seconds for each in self.beside)

    @property
    def read_whole(self):
        return sum(each.cached == PREFIX for each in self.spared)

    def __str__(self):
        read = sum(each.cached > 0 for each in self.spared)
        return (
            f"{self.later_s:+.3f} s (within {self.doubt_s:.3f} s) to {self.beside_s:.3f} s "
            f"computed in turn; longest {max(each.seconds for each in self.spared):.3f} s, of "
            f"{len(self.spared)} {read} read something, {self.read_whole} all"
        )


def compared(engine, disk, whole_s, computed_s):
    """First tokens on a disk on which it takes so long to read a prefix."""
    disk.fail(read=f"slow {PREFIX_BYTES / whole_s}")
    found = Compared([], [])
    while len(found.spared) < PAIRS_MIN or (
        found.doubt_s > DOUBT_MAX * found.beside_s and len(found.spared) < PAIRS_MAX
    ):
        # A machine with other work may compute half as quickly in one minute as in the next.
        lately = [each.seconds for each in found.beside[-RECENT:]] or [computed_s]
        engine("weigh", tokens_per_s=PREFIX / statistics.median(lately))
        turn = len(found.spared)
        found.spared.append(first_token(engine, turn % PREFIXES))
        # In the pool is nothing of it.
        found.beside.append(first_token(engine, f"{whole_s} {turn}"))
    assert not any(each.cached for each in found.beside)
    return found


def leave_memory(store):
    """Have the disk take all that there is, and other bytes the place in memory."""
    on_disk = lambda: sum(s.used_bytes for s in store.status().segments if s.tier)  # noqa: E731
    until(lambda: on_disk() >= PREFIXES * PREFIX_BYTES, what="the disk has all prefixes")
    for number in range(2 * MEMORY // MIB):
        store.put(f"filler/{number}", bytes(MIB))


def test_a_slow_disk_costs_what_computing_does(start, vllm, disk, tmp_path, capsys):
    model = make_model(tmp_path / "larger", hidden=256, layers=LAYERS, heads=HEADS, kv_heads=HEADS)
    pool = {"files": [f"{disk.path / 'pool'}:{2 << 30}"]}
    # What is read of the disk is read there again.
    policy = {"offload": "write", "promotion_hits": 0}
    numbers = range(PREFIXES)
    with (
        LocalCluster(1, MEMORY, worker=pool, master=policy) as cluster,
        Client(cluster.url) as store,
    ):

        def engine(**options):
            started = start(model, **ours(cluster.url, **options), max_model_len=4096)
            started("generate", prompts=[[5] * 40])
            return started

        first = engine()
        median_s(first, numbers, cached=0)
        first("settle")
        first.close()
        leave_memory(store)
        second = engine()
        computed_s = median_s(second, [f"computed {turn}" for turn in range(9)], cached=0)
        worth = PREFIX / computed_s
        # By one engine in turns: what a read takes depends on how the pages of its process lie.
        quick, watched = {worth: [], 0: []}, {worth: [], 0: []}
        for tokens_per_s in [worth, 0] * ROUNDS:
            second("weigh", tokens_per_s=tokens_per_s)
            for answer in (first_token(second, number) for number in numbers):
                assert answer.cached == PREFIX
                quick[tokens_per_s].append(answer.seconds)
                watched[tokens_per_s].append(answer.watched_s)
        weighed_s, unweighed_s = map(statistics.median, quick.values())
        # First tokens differ by a quarter from one to the next, which hides a loss of some percent.
        looking_s, asking_s = map(statistics.median, watched.values())
        throttled = compared(second, disk, TIMES_THROTTLED * unweighed_s, computed_s)
        slow = compared(second, disk, SLOWER * computed_s, throttled.beside_s)
        second("weigh", tokens_per_s=0)
        slow_s = median_s(second, numbers[:1], cached=PREFIX)
        disk.work()
    with capsys.disabled():
        print(
            f"\nfirst token behind {PREFIX} tokens on a disk: computed {computed_s:.3f} s, read "
            f"{weighed_s:.3f} s weighed, {looking_s * 1e3:.2f} ms of it in the connector, and "
            f"{unweighed_s:.3f} s not, {asking_s * 1e3:.2f} ms of it\n"
            f"throttled {TIMES_THROTTLED} times: {throttled}\n"
            f"{SLOWER} times as slow as computing: {slow}, {slow_s:.3f} s not weighed"
        )
    assert slow_s > 2 * computed_s
    assert slow.read_whole <= WHOLE_LOOKS_MAX
    for each in throttled, slow:
        assert each.later_s < LATER_MAX * each.beside_s
    assert looking_s - asking_s < LOSS_MAX * unweighed_s
