"""A standby that leads when the host of its leader is gone: processes, sockets and all."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from mooncake_store.errors import NotFoundError, StoreError, UnavailableError
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.wire.standby import PROMOTE, PromoteRequest
from tests.processes import stopped
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUICK = ("--ping-interval", "200ms")


def value_of(key: str) -> bytes:
    """Bytes that belong to a key and to no other."""
    seed = int.from_bytes(key.encode()[-8:], "little")
    return np.random.default_rng(seed).bytes(300 + seed % 5000)


def put(client, keys):
    client.put_many(keys, [value_of(key) for key in keys]).check()


def assert_there(client, keys):
    """Every object can be read, and has its bytes."""
    for key, value in zip(keys, client.get_many(keys).values, strict=True):
        assert value is not None, f"{key} is lost"
        assert bytes(value) == value_of(key), f"{key} has other bytes"


@pytest.mark.parametrize("shards", [1, 2])
def test_all_that_was_answered_is_there_when_a_standby_leads(pool, shards):
    """At the level replicated, whenever the leader is killed."""
    pool.lead(*QUICK, "--shards", shards, "--journal", "replicated")
    pool.follow(*QUICK)
    pool.lend()
    pool.until_copied()
    client = pool.client()
    early, removed = ([f"{kind}-{n:05d}" for n in range(1000)] for kind in ("early", "removed"))
    put(client, early + removed)
    client.remove_many(removed).check()
    answered = []

    def write():
        writer = pool.client(deadline="20s")
        for number in range(100_000):
            key = f"late-{number:06d}"
            try:
                writer.put(key, value_of(key))
            except StoreError:
                return
            answered.append(key)

    writing = threading.Thread(target=write)
    writing.start()
    until(lambda: len(answered) > 200)
    led = pool.take_over()
    writing.join()
    until(lambda: led.status().ready)
    assert_there(led, early + answered)
    assert not led.exists_many(removed).any()
    # What is free is known exactly, so it can be used at once.
    put(led, [f"new-{n}" for n in range(500)])
    led.remove_many(early[:500], force=True).check()
    assert_there(led, early[500:] + answered)


def test_a_copy_that_may_lack_the_last_words_serves_no_wrong_byte(pool):
    """At the level written nobody waits for the standby; what it has is right, the rest is gone."""
    pool.lead(*QUICK)
    pool.lend()
    client = pool.client()
    kept = [f"kept-{n:05d}" for n in range(2000)]
    put(client, kept)
    pool.follow(*QUICK)
    pool.until_copied()
    last = [f"last-{n:05d}" for n in range(2000)]
    for first in range(0, len(last), 100):
        put(client, last[first : first + 100])
    led = pool.take_over()
    until(lambda: led.status().ready)
    assert_there(led, kept)
    for key, value in zip(last, led.get_many(last).values, strict=True):
        assert value is None or bytes(value) == value_of(key)
    # Who was told of space that these words may have given out is waited for.
    with pytest.raises(StoreError):
        led.put("new", b"value", wait_for_space="0s")


def test_a_standby_is_not_promoted_beside_its_leader(pool):
    pool.lead(*QUICK)
    pool.follow(*QUICK)
    pool.until_copied()
    with pytest.raises(UnavailableError, match="answers: stop that first"):
        pool.ask(PROMOTE, PromoteRequest())
    assert "stop that first" in pool.status().lacking
    with pytest.raises(UnavailableError, match="this is a standby of the master at"):
        pool.client("standby", connect_timeout="3s")


def test_changes_wait_for_a_standby_and_are_refused_without_one(pool):
    pool.lead(*QUICK, "--journal", "replicated")
    pool.lend()
    client = pool.client(deadline="20s")
    with pytest.raises(UnavailableError, match="no standby follows"):
        client.put("key", b"value")
    pool.follow(*QUICK)
    pool.until_copied()
    put(client, ["one"])
    pool.stop("standby")
    until(lambda: refused(client), what="a refusal")
    assert_there(client, ["one"])  # reads go on
    before = pool.state("standby").joinpath("shard-0")
    files = sorted(path.name for path in before.glob("journal-*"))
    pool.follow(*QUICK)
    until(lambda: not refused(client), what="a put")
    # It went on with the copy that it had.
    assert files[0] in {path.name for path in before.glob("journal-*")}
    led = pool.take_over()
    until(lambda: led.status().ready)
    assert_there(led, ["one"])


def refused(client):
    try:
        client.put("another", b"value", upsert=True)
    except UnavailableError as error:
        return "standby" in str(error)
    return False


def test_a_leader_that_is_started_again_is_followed_on(pool, free_port):
    pool.lead(*QUICK, port=free_port)
    pool.lend()
    pool.follow(*QUICK)
    client = pool.client()
    put(client, ["before"])
    pool.until_copied()
    pool.kill("leader")
    until(lambda: pool.status().shards[0].state == "cut off")
    pool.lead(*QUICK, port=free_port)
    until(lambda: client.exists("before"))
    before = pool.status().shards[0].position
    put(client, ["after"])
    pool.until_copied(beyond=before)
    led = pool.take_over()
    until(lambda: led.status().ready)
    assert_there(led, ["before", "after"])


def test_a_leader_without_its_objects_takes_none_from_its_standby(pool, free_port):
    """A copy is worth most when the original is gone."""
    pool.lead(*QUICK, port=free_port)
    pool.lend()
    pool.follow(*QUICK)
    client = pool.client()
    put(client, ["kept"])
    pool.until_copied()
    pool.kill("worker")  # or it would lend other memory to the leader that knows of none
    pool.kill("leader")
    kept = pool.state("leader")
    for path in (*kept.joinpath("shard-0").iterdir(), kept / "cluster.json"):
        path.unlink()
    remove_rings(kept / "shard-0")
    pool.lead(*QUICK, port=free_port)
    pool.programs["standby"].wait_for_line("has lost the objects that are copied here")
    with pytest.raises(UnavailableError, match="stop that first"):
        pool.ask(PROMOTE, PromoteRequest())
    led = pool.take_over()
    until(lambda: led.status().ready)
    assert_there(led, ["kept"])


def test_a_standby_that_falls_behind_the_ring_goes_on_from_files(pool):
    pool.lead(*QUICK)
    pool.lend()
    pool.follow(*QUICK)
    pool.until_copied()
    client = pool.client()
    standby, before = pool.programs["standby"].process.pid, pool.status().shards[0].position
    pool.programs["standby"].signal(signal.SIGSTOP)
    until(lambda: stopped(standby))
    # Names of 4,000 bytes are written down, 500 words each: twice a ring, and more.
    long = "name-" * 800
    for first in range(0, 20_000, 1000):
        keys = [f"{long}{number:06d}" for number in range(first, first + 1000)]
        client.put_many(keys, [b"v"] * 1000).check()
        client.remove_many(keys, force=True).check()
    put(client, ["in the end"])
    pool.programs["standby"].signal(signal.SIGCONT)
    pool.until_copied(beyond=before + 500 * 20_000)
    led = pool.take_over()
    until(lambda: led.status().ready)
    assert_there(led, ["in the end"])
    with pytest.raises(NotFoundError):
        led.get(f"{long}{0:06d}")
