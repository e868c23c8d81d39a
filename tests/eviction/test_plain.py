"""Policies of others: in plain Python, by their path, and by the name a distribution gives."""

import csv
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

import numpy as np
import pytest

from eviction import PlainPolicy, count_hits, create_policy, synthetic_trace
from eviction.registry import GROUP, find_policy
from eviction.testing import EvictionPolicyContract
from mooncake_store.client import Client
from mooncake_store.errors import ConfigError
from mooncake_store.local_cluster import LocalCluster
from tests.sources import text

SLRU = next(
    block
    for block in re.findall(r"```python\n(.*?)```", text("eviction/README.md"), re.S)
    if "class Slru" in block
)
"""The example of the package's README, as it stands there."""

USED = """
import numpy as np

from eviction.base import as_ids
from eviction.buckets import BucketPolicy


class Used(BucketPolicy):
    name = "used"

    def insert(self, ids, depths=None):
        ids = as_ids(ids)
        self._move(ids, np.zeros(len(ids), np.int64), self._kernels.PLACE)

    def touch(self, ids):
        ids = as_ids(ids)
        self._move(ids, np.full(len(ids), (1 << 24) - 1), self._kernels.REPLACE)
"""
"""A number per id, by the hook that the README names: what was used at all leaves last."""

with tempfile.NamedTemporaryFile("w", suffix=".py") as _file:
    _file.write(SLRU + USED)
    _file.flush()
    _made = runpy.run_path(_file.name)
    Slru, Used = _made["Slru"], _made["Used"]


class TestSlru(EvictionPolicyContract):
    def make(self, capacity_ids):
        return Slru(capacity_ids)


class TestUsed(EvictionPolicyContract):
    def make(self, capacity_ids):
        return Used(capacity_ids)


def test_the_hook_is_as_the_readme_says():
    said = " ".join(text("eviction/README.md").split())
    assert "`self._move(ids, numbers, self._kernels.PLACE)`: insert `ids`" in said
    assert "an int64 of 0 to 2^24 - 1; `REPLACE` does so for those already present only" in said
    policy = Used(8)
    policy.insert(np.arange(6))
    policy.touch(np.array([2, 0, 7]))
    assert policy.coldest(8).tolist() == [1, 3, 4, 5, 2, 0]
    assert 7 not in policy


def test_the_example_is_short_and_prefers_what_was_used_twice():
    assert len(SLRU.partition("class")[2].splitlines()) <= 25
    policy = Slru(8)
    policy.insert(np.arange(5))
    policy.touch(np.array([0, 1]))
    assert policy.coldest(5).tolist() == [2, 3, 4, 0, 1]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_policies.py").write_text(SLRU + USED + "\n\nclass Other:\n    pass\n")
    return tmp_path


@pytest.fixture
def importable(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("my_policies", None)


def test_a_class_is_found_by_its_path(importable):
    trace = synthetic_trace(200)
    by_path = count_hits(trace.ids, trace.offsets, "my_policies:Slru", 300)
    assert by_path == count_hits(trace.ids, trace.offsets, Slru, 300)
    assert issubclass(find_policy("my_policies:Slru"), PlainPolicy)


@pytest.fixture
def distribution(folder):
    """Has names for policies in the group of entry points."""
    about = folder / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[{GROUP}]\nslru = my_policies:Slru\nlru = my_policies:Slru\n"
    )


def test_a_distribution_gives_its_policies_names_but_takes_none_of_ours(distribution, importable):
    assert create_policy("slru", 4).name == "slru"
    assert create_policy("lru", 4).name == "lru"
    with pytest.raises(ValueError, match="did you mean 'slru'"):
        find_policy("slruu")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_policies:Slr", "has no attribute 'Slr'.*PYTHONPATH"),
        ("nowhere:Slru", "No module named 'nowhere'.*PYTHONPATH"),
        (":", "cannot import"),
        ("my_policies:Other", "no eviction policy.*PlainPolicy"),
        ("os:system", "no eviction policy"),
    ],
)
def test_what_is_no_policy_is_refused_in_a_sentence(importable, name, said):
    with pytest.raises(ValueError, match=said):
        find_policy(name)
    with pytest.raises(ConfigError, match=f"eviction_policy.*{said}"):
        LocalCluster(0, in_process=True, master={"eviction_policy": name}).start()


@pytest.mark.parametrize("name", ["opt", "lfu_perfect"])
def test_a_store_takes_no_policy_for_analysis(name):
    with pytest.raises(ConfigError, match=r"for traces only.*length_aware, sieve"):
        LocalCluster(0, in_process=True, master={"eviction_policy": name}).start()


def scanned(url, uses=1):
    """What is left of 40 objects that came after one that is used early, in a pool of 16."""
    with Client(url, lease_ttl="1ms", lease_cache=False) as store:
        store.put("used", bytes(1 << 20))
        for number in range(40):
            store.put(f"scan-{number}", bytes(1 << 20))
            for _ in range(uses if number == 4 else 0):
                store.get("used")
        return store.exists_many(["used", "scan-0", "scan-39"]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["my_policies:Slru", "my_policies:Used", "length_aware", "sieve"]
)
def test_a_store_evicts_by_a_named_policy(importable, policy):
    settings = {"eviction_policy": policy, "debug_integrity": True}
    with LocalCluster(1, "16MiB", in_process=True, master=settings) as cluster:
        found = scanned(cluster.url)
        assert found[1:] == [False, True]
        if policy.startswith("my_policies:"):
            assert found[0], "it was used twice"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "keeps"), [("slru", True), ("lru", False)])
def test_a_master_takes_the_name_that_a_distribution_gives(
    folder, distribution, start_program, policy, keeps
):
    """The one of ours stays what it is."""
    program = "-m", "mooncake_store"
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    master = start_program(
        *program, "master", "--port", 0, "--json", "--eviction-policy", policy, PYTHONPATH=path
    )
    address = json.loads(master.wait_for_line('"ready": true'))["address"]
    worker = start_program(
        *program, "worker", "--memory", "anonymous", "--master", address, "--segment", "16MiB"
    )
    worker.wait_for_line("lends 16MiB")
    assert scanned(f"mooncake://{address}") == [keeps, False, True]


@pytest.mark.slow
def test_the_bench_takes_a_class_of_its_caller_and_writes_a_matrix(folder):
    table, picture = folder / "hits.csv", folder / "hits.svg"
    done = subprocess.run(
        [
            sys.executable, "-m", "mooncake_store", "bench", "eviction", "--quick",
            "--policy", "lru,my_policies:Slru", "--capacity", "500,inf",
            "--csv", table, "--plot", picture,
        ],
        env=os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["policy"], line["capacity_blocks"]) for line in lines] == [
        ("lru", "500"), ("lru", "inf"), ("my_policies:Slru", "500"), ("my_policies:Slru", "inf"),
    ]  # fmt: skip
    # Without a limit nothing is evicted, whatever the policy.
    assert lines[1]["hits"] == lines[3]["hits"] != lines[0]["hits"]
    shown = [line.split() for line in done.stdout.splitlines()]
    assert ["my_policies:Slru", *(f"{float(line['ratio']):.4f}" for line in lines[2:])] in shown
    drawn = ElementTree.parse(picture).getroot()
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"lru", "my_policies:Slru", "500", "inf"} <= set(words)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
