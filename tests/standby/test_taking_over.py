"""A standby that leads when the host of its leader is gone: processes, sockets and all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import signal
import threading

import numpy as np
import pytest

from mooncake_store.client import patience
from mooncake_store.errors import NoSpaceError, NotFoundError, StoreError, UnavailableError
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.wire.shard import FETCH_HAULS, FETCH_TASKS, FetchTasks
from mooncake_store.wire.standby import HAND_OVER, PROMOTE, SHIPPING, HandOver, PromoteRequest
from tests.client.test_follow import Mirror, digests_of
from tests.master.wires import ClusterWire
from tests.processes import stopped
from tests.standby import asking
from tests.waiting import PATIENCE_S, until

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
    with pytest.raises(NoSpaceError):
        led.put("new", b"value", deadline="2s")


def test_what_a_worker_holds_is_not_given_up_where_it_was_started_again_at_last(pool):
    """A copy may know that from its shards alone: the master's own file was written later."""
    pool.lead(*QUICK, "--journal", "replicated")
    pool.follow(*QUICK)
    pool.lend()
    pool.until_copied()
    keys = [f"key-{number:05d}" for number in range(500)]
    put(pool.client(), keys)
    registers = pool.state("standby") / "cluster.json"
    before = registers.read_bytes()
    pool.kill("worker")
    pool.lend()
    put(pool.client(), ["last"])
    pool.until_copied()
    pool.kill("leader")
    pool.kill("standby")
    assert registers.read_bytes() != before
    registers.write_bytes(before)
    pool.run(
        "standby", "master", *QUICK, "--port", 0, "--state", pool.state("standby"),
        "--journal", "replicated",
    )  # fmt: skip
    led = pool.client("standby")
    with pytest.raises(NotFoundError, match="the workers that hold the object are absent"):
        led.get("last")
    pool.kill("worker")
    pool.lend("standby")
    until(lambda: led.exists("last"))
    assert_there(led, [*keys, "last"])


def test_whoever_was_told_both_addresses_goes_on_by_himself(pool, monkeypatch):
    monkeypatch.setattr(patience, "TAKEOVER_S", float(PATIENCE_S))
    pool.lead(*QUICK, "--journal", "replicated")
    pool.follow(*QUICK)
    pool.lend("standby", "leader")  # in any order
    pool.until_copied()
    client = pool.client("standby", "leader", deadline=PATIENCE_S)
    assert client.master == pool.addresses["leader"]
    keys = [f"key-{number:05d}" for number in range(1000)]
    put(client, keys)
    follower = Mirror(client.follow(wait="50ms", deadline=PATIENCE_S))
    assert follower.settle() == digests_of(client, keys)
    pool.kill("leader")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        meanwhile = threads.submit(client.exists_many, keys)
        pool.promote()
        # Nothing is read before the worker has mounted there, and nothing fails.
        assert len(meanwhile.result(PATIENCE_S)) == len(keys)
    assert client.master == pool.addresses["standby"]
    until(lambda: client.status().ready)
    pool.programs["worker"].wait_for_line(f"mounted (at {pool.addresses['standby']})")
    assert_there(client, keys)
    put(client, ["new"])
    held = digests_of(client, [*keys, "new"])
    until(lambda: follower.take() and follower.held == held)
    assert pool.programs["worker"].process.poll() is None


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
    assert "no standby follows" in asking.refusal(client)
    pool.follow(*QUICK)
    pool.until_copied()
    put(client, ["one"])
    pool.stop("standby")
    assert "does not follow" in asking.refusal(client)
    assert_there(client, ["one"])  # reads go on
    before = pool.state("standby").joinpath("shard-0")
    files = sorted(path.name for path in before.glob("journal-*"))
    pool.follow(*QUICK)
    until(lambda: not asking.refusal(client), what="a put")
    # It went on with the copy that it had.
    assert files[0] in {path.name for path in before.glob("journal-*")}
    led = pool.take_over()
    until(lambda: led.status().ready)
    assert_there(led, ["one"])


def test_a_standby_with_the_directory_of_another_pool_touches_nothing_there(pool, tmp_path):
    pool.lead(*QUICK)
    other = tmp_path / "standby"
    pool.run("other", "master", "--port", 0, "--state", other)
    pool.kill("other")
    before = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    with pytest.raises(pytest.fail.Exception, match="of another one"):
        pool.follow(*QUICK)
    after = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    assert after == before


def test_workers_are_handed_no_work_that_nothing_may_come_of(pool, tmp_path):
    """Else each of them would take its master for silent, several times a second."""
    pool.lead(*QUICK, "--journal", "replicated")
    wire = ClusterWire(pool.addresses["leader"])
    shard = wire.shard()
    try:
        assert shard.cold(FETCH_TASKS, FetchTasks(10)).tasks == ()
        hauls = shard.call(FETCH_HAULS, limit=10, device=0)
        assert not len(hauls.haul)
        assert not len(hauls.namespaces)
        assert "no standby follows" in asking.refusal(pool.client())
    finally:
        wire.close()


def test_one_standby_counts_and_others_are_copies(pool, tmp_path):
    pool.lead(*QUICK, "--journal", "replicated")
    pool.lend()
    pool.follow(*QUICK)
    pool.until_copied()
    client = pool.client(deadline="20s")
    put(client, ["one"])
    counting = pool.state("leader") / "shard-0" / "standby"
    number = counting.read_text()
    pool.stop("standby")
    assert asking.refusal(client)
    # Another one is copied to, and nothing is changed that the first does not have.
    second = pool.state("standby").rename(tmp_path / "first")
    pool.follow(*QUICK)
    asking.until_copied(pool.addresses["standby"])
    assert asking.refusal(client)
    assert counting.read_text() == number
    assert second.joinpath("standby.number").read_text() == number
    # Started again, the leader waits for the same one, and at no other level.
    pool.kill("leader")
    with pytest.raises(pytest.fail.Exception, match="may be promoted as if it had all"):
        pool.lead(*QUICK)
    pool.lead(*QUICK, "--journal", "replicated")
    assert f"{number.strip()}, does not follow" in asking.refusal(pool.client())


def test_a_leader_that_comes_back_changes_nothing(pool):
    """Its standby has been promoted, and follows nobody any more."""
    pool.lead(*QUICK, "--journal", "replicated")
    pool.lend()
    pool.follow(*QUICK)
    pool.until_copied()
    put(pool.client(), ["one"])
    led = pool.take_over()
    until(lambda: led.status().ready)
    pool.lead(*QUICK, "--journal", "replicated")
    assert "does not follow" in asking.refusal(pool.client())
    put(led, ["two"])
    assert_there(led, ["one", "two"])


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


LATER = "tests.standby.later"
"""The program in a later version."""


def test_a_standby_that_keeps_other_journals_is_refused_and_says_so(pool):
    pool.lead(*QUICK)
    pool.follow(*QUICK, version=(LATER, "journal"))
    said = f"the standby asks for journals of version {SHIPPING + 1}, this master has them of"
    until(lambda: said in pool.status().shards[0].why)
    assert f"is not copied as a whole: {said}" in pool.status().lacking
    assert "start the standby with the version of its leader" in pool.status().lacking
    pool.programs["standby"].wait_for_line(said)
    # Started as it is told to, it follows with the same directory.
    pool.stop("standby")
    pool.follow(*QUICK)
    pool.until_copied()


def test_a_standby_that_does_not_understand_registers_does_not_start(pool):
    pool.run("leader", "master", "--port", 0, "--state", pool.state("leader"), *QUICK,
             version=(LATER, "registers"))  # fmt: skip
    with pytest.raises(
        pytest.fail.Exception, match="registers of version 4, this standby reads up to 3"
    ):
        pool.follow(*QUICK)
    assert not pool.state("standby").joinpath("cluster.json").exists()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_leader_hands_over_and_nobody_who_uses_the_pool_notices(pool, shards):
    options = (*QUICK, "--journal", "replicated", "--shards", shards)
    pool.lead(*options)
    pool.follow(*options)
    pool.lend("leader", "standby")
    pool.until_copied()
    # Changes wait some seconds for the next standby, too few for a busy machine to start one.
    pool.begin_to_follow("standby", *options, name="next")
    pool.programs["next"].wait_for_line("this is a standby of")  # it asked, and asks again
    client = pool.client("leader", "standby", deadline=PATIENCE_S)
    early, late, failed, over = [f"early-{n:05d}" for n in range(500)], [], [], threading.Event()
    put(client, early)

    def use():
        try:
            while not over.is_set():
                key = f"late-{len(late):06d}"
                put(client, [key])
                late.append(key)
                assert_there(client, [key, early[len(late) % 500]])
        except (StoreError, AssertionError) as error:
            failed.append(error)

    using = threading.Thread(target=use)
    using.start()
    try:
        until(lambda: failed or len(late) > 100)
        assert asking.promote(pool.addresses["standby"], hand_over=True) == 0
        assert pool.programs["leader"].wait() == 0
        pool.programs["standby"].wait_for_line('"leads": true')
        # Whoever starts it again as before would have two.
        with pytest.raises(pytest.fail.Exception, match="has handed its pool over to a standby"):
            pool.lead(*options)
        handed = len(late)
        until(lambda: failed or len(late) > handed + 100)
        pool.until_ready("next")
        # As a standby it goes on in the directory that it has.
        pool.change_places()
        pool.follow(*options)
        asking.until_copied(pool.addresses["standby"])
    finally:
        over.set()
        using.join()
    assert not failed
    led = pool.take_over("next")
    until(lambda: led.exists_many(early + late).all())
    assert_there(led, early + late)


def test_behind_a_leader_that_handed_over_leases_are_known(pool):
    """So a full pool lets go what is coldest, and not what was put since, for minutes."""
    options = (*QUICK, "--journal", "replicated", "--default-lease-ttl", "1s")
    pool.lead(*options)
    pool.follow(*options)
    pool.lend("leader", "standby")
    pool.until_copied()
    client = pool.client("leader", "standby", deadline=PATIENCE_S)
    before, after = [f"before-{n:03d}" for n in range(100)], itertools.count()
    for key in before:
        client.put(key, key.encode() * 100_000)
    assert client.get(before[-1]) == before[-1].encode() * 100_000
    asking.promote(pool.addresses["standby"], hand_over=True)
    assert pool.programs["leader"].wait() == 0
    pool.programs["standby"].wait_for_line('"leads": true')
    pool.change_places()
    pool.follow(*options)

    def all_left():
        client.put(f"after-{next(after):05d}", bytes(1_000_000))
        return not client.exists_many(before).any()

    until(all_left)


def test_a_leader_hands_over_at_any_level(pool):
    """At written nobody waits for a standby; it has all before its leader ends."""
    pool.lead(*QUICK)
    pool.follow(*QUICK)
    pool.lend("leader", "standby")
    pool.until_copied()
    client = pool.client("leader", "standby", deadline=PATIENCE_S)
    put(client, [f"key-{n:05d}" for n in range(2000)])
    asking.promote(pool.addresses["standby"], hand_over=True)
    assert pool.programs["leader"].wait() == 0
    pool.programs["standby"].wait_for_line('"leads": true')
    assert_there(client, [f"key-{n:05d}" for n in range(2000)])
    put(client, ["another"])  # into space that is free for certain


def test_a_leader_whose_standby_does_not_take_over_leads_on(pool):
    pool.lead(*QUICK)
    pool.lend()
    put(pool.client(), ["one"])
    # As a standby does that is lost then.
    asking.ask(pool.addresses["leader"], HAND_OVER, HandOver())
    with pytest.raises(UnavailableError, match="is moving to another host"):
        pool.client(connect_timeout="500ms")

    def answered():
        with contextlib.suppress(UnavailableError):
            return pool.client(connect_timeout="500ms")
        return None

    client = until(answered)
    put(client, ["two"])
    assert_there(client, ["one", "two"])
    with pytest.raises(UnavailableError, match="has gone on since it was to hand over"):
        asking.ask(pool.addresses["leader"], HAND_OVER, HandOver(done=True))
