"""Puts that cannot be written where they were to go: what is tried next, and for how long."""

import pytest

from mooncake_store import PeerLostError, UnavailableError
from mooncake_store.client import writes
from tests.waiting import long_before


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_single_put_that_cannot_be_written_goes_elsewhere(url, connect, monkeypatch, transport):
    store = connect(url, transports=[transport])
    store.put_many([f"open {n}" for n in range(256)], [b"x"] * 256)  # reach every segment
    engine, target = store._core.engine, {}

    def lost(handle, *arguments, **options):
        target["failed"] = handle
        monkeypatch.undo()
        raise PeerLostError("the owner is gone")

    monkeypatch.setattr(engine, "write_batch", lost)
    monkeypatch.setattr(store._core, "inline_bytes_max", 0)  # moved by the engine, shm as well
    assert store.put("key", b"value").stored
    assert store.get("key") == b"value"
    (place,) = store.query("key").replicas
    assert place.segment != target["failed"].descriptor.name
    assert store.stats().resting_segments == [target["failed"].descriptor.name]


def test_a_put_that_cannot_be_written_goes_to_no_segment_that_was_excluded(
    url, connect, monkeypatch
):
    store = connect(url, transports=["tcp"])
    store.put_many([f"open {n}" for n in range(256)], [b"x"] * 256)  # reach every segment
    (place,) = store.query("open 0").replicas

    def lost(handle, *arguments, **options):
        monkeypatch.undo()
        assert handle.descriptor.name != place.segment
        raise PeerLostError("the owner is gone")

    monkeypatch.setattr(store._core.engine, "write_batch", lost)
    assert store.put_many(["key"], [b"value"], excluded=[place.segment]).ok
    (found,) = store.query("key").replicas
    assert found.segment != place.segment


def test_a_put_to_segments_that_nobody_tells_of_is_given_up_after_some_attempts(
    url, connect, monkeypatch
):
    attempts = []

    def learn_nothing(core, numbers, until):
        attempts.append(numbers)
        yield from ()
        raise UnavailableError("nobody tells of segments")

    monkeypatch.setattr(writes, "learn_segments", learn_nothing)
    store = connect(url, deadline="60s")
    with long_before(60), pytest.raises(UnavailableError, match="nobody tells of segments"):
        store.put_many(["key"], [b"value"]).check()
    assert 1 < len(attempts) < 10
    monkeypatch.undo()
    assert store.put("key", b"value").outcome == "stored"  # what was begun is in nobody's way
