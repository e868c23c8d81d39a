"""One shard over its wire: who may speak, what waits, what the rare operations answer."""

import secrets
import threading
import time

import numpy as np
import pytest

from mooncake_store.core.options import CLIPPED
from mooncake_store.core.records import EventKind, Status
from mooncake_store.errors import (
    IllegalClientError,
    InvalidArgumentError,
    PeerLostError,
    RemoteProtocolError,
)
from mooncake_store.wire import shard as wire
from tests.master.wires import ShardWire, digests, numbered, put_reply
from tests.waiting import long_before, until

MIB = 1 << 20
BIG = 40 * MIB  # one fits into the segment of 64 MiB, two do not


def test_objects_come_back_and_go(pool):
    names = numbered(b"a", 300)
    _, replicas = pool.put(names, 5000)
    assert len({(r["segment"], r["offset"]) for r in replicas}) == 300
    assert pool.exists([*names, b"other"]) == [1] * 300 + [0]
    rows, where = pool.get(names, ttl_ms=60_000)
    assert set(rows["size"]) == {5000}
    assert (rows["lease_ns"] > 0).all()
    assert np.array_equal(where["offset"], replicas["offset"])
    assert set(pool.remove(names)) == {Status.HAS_LEASE}
    assert set(pool.remove(names, flags=1)) == {0}
    assert not any(pool.exists(names))


def test_a_connection_must_open_first_and_only_once(pool, start_cluster):
    address = pool.connection.peer
    stranger = ShardWire(address, opened=False)
    with pytest.raises(RemoteProtocolError, match="must be open"):
        stranger.exists([b"x"])
    with pytest.raises(RemoteProtocolError, match="open already"):
        pool.cold(wire.OPEN, wire.OpenClient(secrets.token_bytes(16), 1, "h", "default"))
    with pytest.raises(InvalidArgumentError, match="16 bytes"):
        stranger.cold(wire.OPEN, wire.OpenClient(b"short", 1, "h", "default"))
    stranger.close()


def test_namespaces_are_tenants_with_listings_of_their_own(pool):
    other = ShardWire(pool.connection.peer, namespace="other")
    pool.put([b"mine"], 100)
    other.put([b"theirs"], 100)
    assert pool.list()[1] == b"mine"
    assert other.list()[1] == b"theirs"
    assert other.stats().tenant_objects == 1
    assert other.stats().objects == 2
    other.close()


def test_a_listing_says_when_objects_were_put_and_pages(pool):
    before = int(time.time())
    names = numbered(b"page", 25)
    pool.put(names, 100)
    found, cursor = [], 0
    while True:
        rows, blob, cursor = pool.list(b"page-1", cursor, limit=4)
        for row in rows:
            found.append(blob[: row["name_bytes"]])
            blob = blob[row["name_bytes"] :]
            assert before - 1 <= row["created_s"] <= time.time() + 1
        if not cursor:
            break
    assert sorted(found) == sorted(n for n in names if n.startswith(b"page-1"))


def test_listing_pages_stay_within_a_message_however_long_names_are(pool):
    names = [b"%04d" % i + b"x" * 4000 for i in range(400)]
    pool.put(names, 10)
    seen, cursor = 0, 0
    while True:
        rows, blob, cursor = pool.list(b"", cursor, limit=10_000)
        assert len(blob) <= wire.LIST_BYTES_MAX
        seen += len(rows)
        if not cursor:
            break
    assert seen == 400


def test_a_put_waits_for_space_until_a_lease_ends(pool):
    pool.put([b"first"], BIG)
    leased = time.monotonic()
    pool.get([b"first"], ttl_ms=1500)
    rows, replicas = pool.put_start([b"second"], BIG, wait_ms=60_000, timeout_s=70.0)
    assert time.monotonic() - leased > 1.49
    assert rows["status"][0] == 0
    assert len(replicas) == 1
    assert pool.exists([b"first"]) == [0]


def test_a_put_that_may_not_wait_fails_while_a_lease_runs(pool):
    pool.put([b"first"], BIG)
    pool.get([b"first"], ttl_ms=60_000)
    rows, _ = pool.put_start([b"second"], BIG)
    assert rows["status"][0] == Status.NO_SPACE


def test_a_put_that_waits_in_vain_says_so_in_time_and_holds_nobody_up(pool):
    pool.put([b"first"], BIG)
    pool.get([b"first"], ttl_ms=60_000)
    waiting = ShardWire(pool.connection.peer)
    request = waiting.connection.send(
        wire.PUT_START,
        wire.PUT_START.request.pack(**waiting.put_request([b"second"], BIG, wait_ms=600)),
        timeout_s=20,
    )
    for _ in range(100):
        assert pool.exists([b"first"]) == [1]
    rows, replicas = put_reply(
        wire.PUT_START.reply.unpack(waiting.connection.recv(request, timeout_s=20))
    )
    assert rows["status"][0] == Status.NO_SPACE
    assert len(replicas) == 0
    waiting.close()


def test_answers_of_a_waiting_put_keep_the_order_of_its_keys(pool):
    pool.put([b"old"], BIG)
    pool.get([b"old"], ttl_ms=2000)
    names = [b"big-1", b"small-1", b"old", b"small-2"]
    request = pool.put_request(names, 1000, wait_ms=10_000, groups=[b"g1", b"", b"", b"g2"])
    request["sizes"] = np.array([BIG, 1000, 1000, 2000], np.int64)
    rows, replicas = put_reply(pool.call(wire.PUT_START, **request))
    assert rows["status"].tolist() == [0, 0, Status.ALREADY_EXISTS, 0]
    assert rows["replicas"].tolist() == [1, 1, 0, 1]
    chosen = [0, 1, 3]
    assert pool.put_end([names[i] for i in chosen], rows[chosen]) == [0, 0, 0]
    _, where = pool.get([names[i] for i in chosen])
    assert where["offset"].tolist() == replicas["offset"].tolist()
    assert pool.stat(b"big-1").name == b"big-1"
    assert pool.stat(b"big-1").group == "g1"


def test_the_deadline_of_the_request_bounds_the_wait_for_space(pool):
    pool.put([b"first"], BIG)
    pool.get([b"first"], ttl_ms=60_000)
    rows, _ = pool.put_start([b"second"], BIG, timeout_s=6.0, wait_ms=60_000)
    assert rows["status"][0] == Status.NO_SPACE


def test_what_a_waiting_put_was_granted_is_revoked_when_its_client_goes(pool):
    pool.put([b"first"], BIG)
    pool.get([b"first"], ttl_ms=60_000)
    going = ShardWire(pool.connection.peer)
    request = going.put_request([b"small", b"big"], 0, wait_ms=60_000)
    request["sizes"] = np.array([1000, BIG], np.int64)
    going.connection.send(wire.PUT_START, wire.PUT_START.request.pack(**request), timeout_s=60)
    until(lambda: pool.stats().writing == 1)
    going.close()
    until(lambda: pool.stats().writing == 0, what="the granted key is revoked")
    assert pool.stats().quarantined_bytes == 0


def test_a_waiting_put_that_is_asked_for_again_keeps_what_it_was_granted(pool):
    """The one that waited goes with its connection, and takes nothing from the one that came."""
    pool.put([b"first"], BIG)
    pool.get([b"first"], ttl_ms=60_000)
    going = ShardWire(pool.connection.peer)
    request = going.put_request([b"small", b"big"], 0, wait_ms=60_000, number=5)
    request["sizes"] = np.array([1000, BIG], np.int64)
    going.connection.send(wire.PUT_START, wire.PUT_START.request.pack(**request), timeout_s=60)
    until(lambda: pool.stats().writing == 1)
    again = ShardWire(pool.connection.peer, uuid=going.uuid)
    request |= {"flags": wire.PutFlag.AGAIN, "wait_ms": 0}
    rows, _ = put_reply(again.call(wire.PUT_START, **request))
    assert rows["status"].tolist() == [0, Status.NO_SPACE]
    going.close()
    for _ in range(50):  # the shard notices
        assert pool.stats().writing == 1
    assert again.put_end([b"small"], rows[:1]) == [0]
    again.close()


@pytest.mark.parametrize("flags", [0, wire.PutFlag.AGAIN])
def test_a_put_with_groups_for_some_of_its_keys_is_refused(pool, flags):
    request = pool.put_request([b"one", b"two"], 10, number=7)
    request |= {"flags": flags, "groups": [b"only"]}
    rows, _ = put_reply(pool.call(wire.PUT_START, **request))
    assert rows["status"].tolist() == [Status.INVALID_PARAMS] * 2


@pytest.mark.parametrize("cursor", [-1 << 63, (1 << 64) - 1])
def test_removing_goes_on_at_any_number(pool, cursor):
    request = wire.RemoveMatching("nothing.*", "regex", cursor=cursor)
    assert pool.cold(wire.REMOVE_MATCHING, request) == wire.Removed(0, 0)


def test_followers_of_events_wait_for_the_next_one(pool):
    number = pool.stats().event_number
    first, events, gap = pool.events(number)
    assert (first, len(events), gap) == (number, 0, 0)
    follower = ShardWire(pool.connection.peer)
    request = follower.connection.send(
        wire.EVENTS,
        wire.EVENTS.request.pack(stream=pool.stream, number=number, limit=10, wait_ms=10_000),
        timeout_s=20,
    )
    pool.put([b"news"], 100)
    reply = wire.EVENTS.reply.unpack(follower.connection.recv(request, timeout_s=20))
    first, events = reply.first, reply.events
    assert first == number
    assert events[0][:2].tolist() == digests(b"news")[0].tolist()
    assert pool.events(number)[1]["kind"].tolist() == [EventKind.STORED]
    started = time.monotonic()
    assert len(follower.events(number + 1, wait_ms=200)[1]) == 0
    assert time.monotonic() - started > 0.19
    follower.close()


def test_a_follower_of_an_earlier_life_is_told_to_start_over(pool):
    pool.put(numbered(b"n", 10), 100)
    number = pool.stats().event_number
    for at in (0, 1, number - 1, number, number + 1, (1 << 64) - 1):
        first, events, gap = pool.events(at, wait_ms=10_000, stream=pool.stream ^ 1)
        assert (first, len(events), gap) == (number, 0, 1)


def test_a_number_that_never_was_is_a_gap(pool):
    number = pool.stats().event_number
    for at in (0, number + 1, number + 1000, (1 << 64) - 1):
        first, events, gap = pool.events(at, wait_ms=10_000)
        assert (first, len(events), gap) == (number, 0, 1)


def test_a_follower_that_fell_behind_takes_a_snapshot(start_cluster, wire_to):
    shard = wire_to(start_cluster(master={"events_kept": 8})).shard()
    names = numbered(b"e", 30)
    shard.put(names, 100)
    assert shard.events(1)[2] == 1
    reply = shard.call(wire.SNAPSHOT, cursor=0)
    assert reply.cursor == 0
    assert {tuple(d) for d in reply.digests.tolist()} == {
        tuple(d) for d in digests(*names).tolist()
    }
    shard.put([b"later"], 100)
    first, events, gap = shard.events(reply.next_event)
    assert (first, len(events), gap) == (reply.next_event, 1, 0)
    shard.close()


def test_unfinished_puts_of_a_client_end_when_it_does_not_come_back(pool):
    going = ShardWire(pool.connection.peer)
    going.put_start([b"half"], 1000)
    again = ShardWire(pool.connection.peer, uuid=going.uuid)
    going.close()
    assert pool.stats().writing == 1
    again.close()
    until(lambda: pool.stats().writing == 0, what="the client's time is over")
    assert pool.put_start([b"half"], 1000)[0]["status"].tolist() == [0]


def test_a_client_that_reconnects_in_time_can_end_its_put(pool):
    client = ShardWire(pool.connection.peer)
    rows, _ = client.put_start([b"late"], 1000)
    client.close()
    again = ShardWire(pool.connection.peer, uuid=client.uuid)
    assert again.put_end([b"late"], rows) == [0]
    again.close()


def test_a_newer_run_of_a_client_replaces_the_older_one(pool):
    old = ShardWire(pool.connection.peer, epoch=5)
    rows, _ = old.put_start([b"half"], 1000)
    new = ShardWire(pool.connection.peer, uuid=old.uuid, epoch=6)
    with pytest.raises(PeerLostError):
        until(lambda: old.exists([b"x"]) == "never")
    assert new.put_end([b"half"], rows) != [0]
    with pytest.raises(IllegalClientError, match="newer run"):
        ShardWire(pool.connection.peer, uuid=old.uuid, epoch=5)
    new.close()
    old.close()


def test_pins_renewals_and_releases(pool):
    names = [b"p1", b"p2", b"p3"]
    rows, _ = pool.put(names, 1000)
    statuses = pool.call(
        wire.PIN, soft_pin=1, hard_pin=1, ttl_ms=-1, digests=digests(*names, b"missing")
    ).statuses.tolist()
    assert statuses == [0, 0, 0, Status.NOT_FOUND]
    found = pool.stat(b"p1")
    assert found.hard_pin
    assert found.age_ms < 20_000
    assert (pool.stats().soft_pinned, pool.stats().hard_pinned_bytes) == (3, 3000)
    with pytest.raises(InvalidArgumentError):
        pool.call(wire.PIN, soft_pin=7, hard_pin=0, ttl_ms=0, digests=digests(b"p1"))
    pool.get(names, ttl_ms=60_000)
    generations = np.ascontiguousarray(rows["generation"])
    renewed = pool.call(
        wire.RENEW, ttl_ms=120_000, digests=digests(*names), generations=generations
    )
    assert renewed.statuses.tolist() == [0, 0, 0]
    assert (renewed.remaining_ns > 60e9).all()
    assert pool.remove([b"p1"]) == [Status.HAS_LEASE]
    pool.call(wire.RELEASE, digests=digests(*names), generations=generations)
    assert pool.remove([b"p1"]) == [0]


def test_hints_of_no_sense_are_refused_and_harm_nobody(pool):
    pool.put([b"h1"], 1000)
    keys = digests(b"h1", b"missing")
    wish = {"action": 0, "priority": 3, "ttl_ms": 1 << 62, "digests": keys}
    assert pool.call(wire.HINT, **wish).statuses.tolist() == [CLIPPED, Status.NOT_FOUND]
    for odd in ({"priority": 0}, {"priority": 255}, {"ttl_ms": 0}):
        statuses = pool.call(wire.HINT, **(wish | odd)).statuses.tolist()
        assert statuses == [Status.INVALID_PARAMS] * 2
    with pytest.raises(InvalidArgumentError, match="use 0 to 4"):
        pool.call(wire.HINT, **(wish | {"action": 5}))
    assert pool.stats().soft_pinned == 1
    assert pool.remove([b"h1"]) == [0]


def test_matching_names_are_removed_and_bad_patterns_refused(pool):
    pool.put(numbered(b"red", 10) + numbered(b"blue", 10), 100)
    gone = pool.cold(wire.REMOVE_MATCHING, wire.RemoveMatching("red-", "prefix"))
    assert (gone.removed, gone.cursor) == (10, 0)
    with pytest.raises(InvalidArgumentError):
        pool.cold(wire.REMOVE_MATCHING, wire.RemoveMatching("x", "no such kind"))
    assert pool.cold(wire.REMOVE_MATCHING, wire.RemoveMatching("", "all")).removed == 10


def test_unknown_options_are_refused_and_the_connection_lives(pool):
    for option in ({"soft_pin": 9}, {"excluded": [b"\xff"]}):
        with pytest.raises(InvalidArgumentError, match="option"):
            pool.put_start([b"x"], 100, **option)
    assert pool.put_start([b"x"], 100, replicas=0)[0]["status"].tolist() == [Status.INVALID_PARAMS]
    assert pool.put_start([b"x"], 100)[0]["status"].tolist() == [0]


def test_prefix_and_counters(pool):
    names = numbered(b"c", 5000)
    pool.put(names[:30], 100)
    before = pool.stats()
    assert pool.call(wire.FIND_PREFIX, digests=digests(*names)).length == 30
    after = pool.stats()
    assert after.keys - before.keys == 5000
    # This one and that for the figures; the master itself asks for them too from time to time.
    assert 2 <= after.requests - before.requests < 5000
    assert after.cpu_s > 0
    assert after.rss_bytes > 10 * MIB


def test_many_clients_put_at_once(pool):
    failures = []

    def work(number):
        try:
            mine = ShardWire(pool.connection.peer)
            for step in range(10):
                names = numbered(b"t%d-%d" % (number, step), 20)
                mine.put(names, 500)
                assert mine.exists(names) == [1] * 20
            mine.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.stats().objects == 800


def test_nobody_who_waits_holds_the_end_up(start_cluster, wire_to):
    # What is leased for longer than the put waits does not leave for it.
    patient = {"client_ttl": "60s", "ping_interval": "10s", "default_lease_ttl": "120s"}
    cluster = start_cluster(0, master=patient)
    wire_to(cluster).mount((secrets.token_bytes(16), "s", 64 * MIB))
    shard = wire_to(cluster).shard()
    shard.put([b"first"], BIG)
    shard.get([b"first"], ttl_ms=120_000)
    follower = wire_to(cluster).shard()
    waits = [
        (shard, wire.PUT_START, shard.put_request([b"second"], BIG, wait_ms=60_000)),
        (
            follower,
            wire.EVENTS,
            {"stream": follower.stream, "number": 2, "limit": 9, "wait_ms": 60_000},
        ),
    ]
    sent = [
        peer.connection.send(operation, operation.request.pack(**values), timeout_s=60)
        for peer, operation, values in waits
    ]
    asked = wire_to(cluster).shard()
    for _ in range(3):
        asked.stats()  # after a few rounds of the loop what was sent before has been read
    with long_before(60):
        cluster.close()
    put, events = (
        operation.reply.unpack(peer.connection.recv(request, timeout_s=60))
        for (peer, operation, _), request in zip(waits, sent, strict=True)
    )
    assert put_reply(put)[0]["status"].tolist() == [Status.NO_SPACE]
    assert len(events.events) == 0
