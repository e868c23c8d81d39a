"""What the writer of an object hears when its put was given up, or can be placed nowhere now."""

import re

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.client import writes
from mooncake_store.client.failures import error_of
from mooncake_store.core.records import Status
from mooncake_store.errors import NoSpaceError, NotFoundError, StoreError, TransferTimeoutError
from mooncake_store.units import MIB
from tests.client.test_faults import PATIENT, stand_still
from tests.waiting import PATIENCE_S, until


@pytest.mark.parametrize("operation", ["put", "commit"])
def test_a_writer_is_told_that_its_put_was_given_up(operation):
    error = error_of(Status.NOT_FOUND, key="key", operation=operation)
    assert isinstance(error, NotFoundError)
    assert "given up" in str(error)
    assert "never put" not in str(error)


def test_a_pool_without_workers_is_not_said_to_be_full():
    with LocalCluster(0, in_process=True) as cluster, Client(cluster.url) as client:

        def said():
            with pytest.raises((NoSpaceError, TransferTimeoutError)) as raised:
                client.put("key", b"value", deadline=0.5)
            return str(raised.value)

        # The shard uses nearly all of the time; a busy one cannot say more within the rest.
        text = until(lambda: "no worker lends any now" in (text := said()) and text)
        assert "0B of 0B" not in text


def test_a_put_without_options_waits_for_room_as_well(own_cluster, connect):
    store = connect(own_cluster(workers=1, segment="16MB").url, deadline=PATIENCE_S)
    keys = [f"key-{number}" for number in range(13)]
    assert store.put_many(keys, [bytes(MIB)] * len(keys)).ok
    assert store.get_many(keys, ttl="1s").ok  # nothing here may be evicted until then
    assert store.put("new", bytes(4 * MIB)).stored


def put(store, value, deadline):
    store.put("key", value, deadline=deadline)


def put_many(store, value, deadline):
    store.put_many(["key", "small"], [value, b"x"], deadline=deadline).check()


@pytest.mark.parametrize("way", [put, put_many])
def test_a_put_that_failed_at_its_deadline_is_in_nobodys_way(
    own_cluster, connect, monkeypatch, way
):
    """One so large that its owner may take all the time that there is."""
    monkeypatch.setattr(writes, "_REVOKE_S", PATIENCE_S)  # however slow the master is
    cluster = own_cluster(workers=1, master=PATIENT)
    store, other = connect(cluster.url, transports=["tcp"]), connect(cluster.url)
    for client in (store, other):  # from now on they need nothing of the worker to begin
        assert client.put("met", b"x", upsert=True).stored
    stand_still(cluster, 0)
    try:
        with pytest.raises(StoreError, match="worker-0"):
            way(store, bytes(32 * MIB), 1.0)
        assert other.put("key", b"other").stored
        assert other.get("key") == b"other"
    finally:
        cluster.resume_worker(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda store, **late: store.put("new", b"value", **late),
        lambda store, **late: store.put_many(["new"], [b"value"], **late).check(),
        lambda store, **late: store.get("key", **late),
        lambda store, **late: store.get_many(["key"], **late).check(),
        lambda store, **late: store.exists("key", **late),
        lambda store, **late: store.stat("key", **late),
        lambda store, **late: list(store.list(**late)),
        lambda store, **late: store.remove("key", **late),
        lambda store, **late: store.rename("key", "other", **late),
        lambda store, **late: store.clear(**late),
        lambda store, **late: store.status(**late),
    ],
)
def test_no_operation_speaks_of_a_negative_time(store, call):
    """A deadline that is over before anything could be asked."""
    store.put("key", b"value")
    assert store.get("key") == b"value"
    store.release_many(["key"])
    with pytest.raises(TransferTimeoutError, match="the deadline") as caught:
        call(store, deadline="1ns")
    assert not re.search(r"-\d", str(caught.value))
    assert caught.value.elapsed_s is None or caught.value.elapsed_s >= 0
    assert store.get("key") == b"value"
