"""How many Python functions of this project a batch goes through, on the thread that asks.

Each costs time that no longer batch hides, and is one more for a reader to follow. Which replica
is read and what the other end does is no part of it: one worker, one shard, 128 objects. Nor is how
an answer is waited for that does not come at once: that is up to the machine and what else it does.
"""

import collections
import sys
from pathlib import Path

import pytest

from mooncake_store import Client, LocalCluster
from tests.sources import PACKAGES

KEYS = 128
VALUES = [bytes(4096)] * KEYS
ROOT = f"{Path(__file__).resolve().parents[2]}/"
OURS = tuple(ROOT + package for package in PACKAGES)
WAITING = (
    "transfer_engine/rpc/spinning.py:Spin.failed",
    "transfer_engine/rpc/spinning.py:Spin.paid",
    "transfer_engine/rpc/blocking.py:BlockingConnection._arm",
    "transfer_engine/rpc/blocking.py:BlockingConnection._poll",
)


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(workers=1, segment="256MiB") as running:
        yield running


def calls_of(function):
    """Python calls by function, of those whose source is ours."""
    found = collections.Counter()

    def note(frame, event, _argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and code is not outer:
            found[f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname}"] += 1

    outer = function.__code__
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


def few(found, most):
    for name in WAITING:
        found.pop(name, None)
    assert found.total() <= most, "\n".join(f"{n:4} {name}" for name, n in found.most_common())


def named(name):
    return [f"{name}-{at}" for at in range(KEYS)]


def test_a_batch_is_put_and_read_in_few_calls(cluster):
    with Client(cluster.url) as store, Client(cluster.url) as reader:
        for turn in range(5):
            store.put_many(named(f"warm-{turn}"), VALUES).check()
            reader.get_many(named(f"warm-{turn}")).check()
        keys = named("counted")
        few(calls_of(lambda: store.put_many(keys, VALUES)), 110)
        few(calls_of(lambda: reader.get_many(keys)), 90)
        assert reader.get_many(keys).check().values == VALUES
