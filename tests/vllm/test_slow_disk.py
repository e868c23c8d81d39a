"""Time to the first token of prefixes that lie on a disk: much less than computing, or as much.

Lookups are weighed against computing (`prefill_tokens_per_s`). A disk from which reading takes
several times as long must cost no more than computing does, and the weighing nothing where the disk
is quick.
"""

import statistics

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
ROUNDS, SLOW_ROUNDS = 10, 6
SLOWER = 5
"""How many times as long as computing it takes to read a prefix of the slow disk."""
COMPUTING_TIMES_MAX = 1.1
LOSS_MAX = 1.02

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    yield disk
    disk.end()


def prompt(number):
    return [3 + (n * 7 + 11 * number) % 250 for n in range(PREFIX)] + [7, 8, 9]


def first_token(engine, number):
    """Seconds to the first token behind a prefix, and how much of it was not computed."""
    engine("settle")  # what is being saved is not forgotten
    assert engine("reset")["reset"]
    answer = engine("generate", prompts=[prompt(number)], tokens=1)
    return answer["seconds"], answer["cached"][0]


def median_s(engine, numbers, *, cached):
    """The median of seconds; fails unless so much of each prefix was not computed."""
    taken = [first_token(engine, number) for number in numbers]
    assert [found for _, found in taken] == [cached] * len(taken)
    return statistics.median(seconds for seconds, _ in taken)


def leave_memory(store):
    """Have the disk take all that there is, and other bytes the place in memory."""
    on_disk = lambda: sum(s.used_bytes for s in store.status().segments if s.tier)  # noqa: E731
    until(lambda: on_disk() >= PREFIXES * PREFIX_BYTES, what="the disk has all prefixes")
    for number in range(2 * MEMORY // MIB):
        store.put(f"filler/{number}", bytes(MIB))


def test_a_slow_disk_costs_what_computing_does(start, vllm, disk, tmp_path, capsys):
    model = make_model(tmp_path / "larger", hidden=256, layers=LAYERS, heads=HEADS, kv_heads=HEADS)
    pool = {"files": [f"{disk.path / 'pool'}:{1 << 30}"]}
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
        computed_s = median_s(first, numbers, cached=0)
        first("settle")
        first.close()
        leave_memory(store)
        weighing, plain = engine(prefill_tokens_per_s=PREFIX / computed_s), engine()
        quick = [
            [median_s(each, [number], cached=PREFIX) for each in (weighing, plain)]
            for number in [*numbers] * ROUNDS
        ]
        # The quickest of many: what others of the machine do is no loss of the weighing.
        weighed_s, unweighed_s = map(min, zip(*quick, strict=True))
        disk.fail(read=f"slow {PREFIX_BYTES / computed_s / SLOWER}")
        slow_s = median_s(plain, numbers[:1], cached=PREFIX)
        spared, beside = [], []
        for turn in range(SLOW_ROUNDS * PREFIXES):
            spared.append(first_token(weighing, turn % PREFIXES))
            beside.append(first_token(weighing, PREFIXES + turn))  # in the pool is nothing of it
        disk.work()
    assert not any(cached for _, cached in beside)
    # All of them, those that read to find out included: that is what users wait for.
    spared_s, beside_s = (
        statistics.median(seconds for seconds, _ in each) for each in (spared, beside)
    )
    tried = sum(cached > 0 for _, cached in spared)
    with capsys.disabled():
        print(
            f"\nfirst token behind {PREFIX} tokens on a disk: computed {computed_s:.3f} s, read "
            f"{weighed_s:.3f} s weighed and {unweighed_s:.3f} s not; on a slow disk {spared_s:.3f} "
            f"s weighed ({tried} of {len(spared)} read to find out), {slow_s:.3f} s not, "
            f"beside {beside_s:.3f} s computed in turn"
        )
    assert slow_s > 2 * computed_s
    assert tried < len(spared) / 4
    assert spared_s < COMPUTING_TIMES_MAX * beside_s
    assert weighed_s < LOSS_MAX * unweighed_s
