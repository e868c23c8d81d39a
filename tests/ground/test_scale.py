"""The page on very large clusters: its tables are what the script makes of its costs."""

from pathlib import Path

import numpy as np
import pytest

from mooncake_store.wire import cluster
from scripts.scale import ASSUMED, Costs, Pool, amount, reached, tables
from scripts.scale_costs import core_costs, process_costs, restart_costs
from tests.sources import text

PAGE = text(Path("docs/internals/scale.md"))


def told():
    """The costs of the run that the page names, read off its table."""
    _, _, rest = PAGE.partition("| what | value | unit |\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    values = [float(line.split("|")[2]) for line in lines]
    return Costs(**dict(zip(Costs.__annotations__, values, strict=True)))


@pytest.mark.parametrize("table", tables(told()), ids=lambda table: table.title)
def test_the_page_has_the_tables_of_the_script(table):
    assert f"{table}\n" in PAGE, f"{table.title}: put what `python scripts/scale.py` prints there"


@pytest.mark.parametrize("pools", [4, 16, 64])
def test_a_pool_has_the_fewest_shards_that_do_its_work(pools):
    pool = Pool(ASSUMED, told(), pools)
    able = ASSUMED.cores_busy
    assert pool.cores_for(pool.shards) <= able * pool.shards
    assert all(pool.cores_for(each) > able * each for each in range(1, pool.shards))


@pytest.mark.parametrize(("keys", "shards"), [(1, 9), (128, 1), (128, 16), (128, 2000)])
def test_a_batch_reaches_as_many_shards_as_random_keys_do(keys, shards):
    drawn = np.random.default_rng(0).integers(0, shards, (2000, keys))
    seen = np.mean([len(np.unique(row)) for row in drawn])
    assert reached(keys, shards) == pytest.approx(seen, rel=0.01)


def test_what_more_of_a_pool_takes_is_in_its_limits():
    whole = {name: needed for name, needed, _, _ in Pool(ASSUMED, told(), 1).limits()}
    part = {name: needed for name, needed, _, _ in Pool(ASSUMED, told(), 64).limits()}
    assert whole["answer with all segments"] > 60 * part["answer with all segments"]
    one = cluster.SegmentEntry(1, bytes(16), "n", "h", 1, 1, b"")
    body = cluster.SEGMENTS.reply.pack(cluster.SegmentsReply((one,) * ASSUMED.nodes))
    # The real entry has a descriptor, which is most of it.
    assert len(body) < whole["answer with all segments"] < 20 * len(body)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0, "", "0"), (157, "", "157"), (9999, "B", "9,999 B"), (10_000, "", "10 k"),
        (3.125e9, "B/s", "3.12 GB/s"), (15.6, "s", "15.6 s"), (0.43, "s", "430 ms"),
        (1000, "s", "1,000 s"), (2e15, "B", "2 PB"), (3e-7, "s", "300 ns"), (0.256, "", "0.256"),
    ],
)  # fmt: skip
def test_amounts_have_three_digits(value, unit, shown):
    assert amount(value, unit) == shown


@pytest.mark.slow
def test_all_costs_are_measured():
    """A short run: every figure is there, and none is nothing. Memory has a bench of its own."""
    found = core_costs(4096) | process_costs(8192) | restart_costs(5000)
    assert set(found) == set(Costs.__annotations__) - {"object_bytes", "slice_bytes"}
    assert all(value > 0 for name, value in found.items() if name != "replay_us")
