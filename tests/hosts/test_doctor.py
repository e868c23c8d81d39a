"""The doctor on a host of a pool, where one of the ways from there is not as the others.

Left out unless `make test-hosts` asks for it, because it takes a minute.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("MOONCAKE_TEST_SEEDS"), reason="make test-hosts runs it"),
]

WORKERS = ("worker", "c1", "c2")
LATE_S = 0.2
"""On a way, each way: a conversation takes some ten times that, and half of what it may."""
LOST = 0.4


@pytest.fixture
def pool(make_pool):
    """Two members and three workers, and c0, where the doctor is."""
    made = make_pool(clients=3)
    for name in WORKERS[1:]:
        made.start_worker(name)
    return made


def first(pool):
    """What the doctor says first."""
    command = [
        sys.executable, *map(str, pool.network.on("c0")), "-m", "mooncake_store", "doctor",
        "--json", "--pool", pool.masters(), "--secret-file", str(pool.secret),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 10, 11), done.stderr
    found = json.loads(done.stdout)["findings"]
    members = {item["name"].partition(" at ")[0] for item in found if " at " in item["name"]}
    assert {f"worker {name}" for name in WORKERS} | {"master", "shard 0"} <= members
    assert any(name.startswith("standby ") for name in members)
    return found[0]


@pytest.mark.parametrize("name", ["c1", "m1"])
def test_a_way_that_is_long_loses_packets_or_is_cut_is_named_first(pool, name):
    way, address = ("c0", name), f" at {pool.network[name]}:"
    pool.network.slow(LATE_S, between=way)
    late = first(pool)
    assert (late["severity"], address in late["name"]) == ("warning", True), late
    assert "are usual" in late["found"] or "answers took" in late["found"], late
    pool.network.slow(loss=LOST, between=way)
    lossy = first(pool)
    assert (lossy["severity"] in ("warning", "problem"), address in lossy["name"]) == (True, True)
    pool.network.mend()
    pool.network.cut(*way)
    gone = first(pool)
    assert (gone["severity"], address in gone["name"]) == ("problem", True), gone
    assert gone["advice"]
