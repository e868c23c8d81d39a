"""Who is alive: decisions by a clock of the test, and real processes that die, stop and return."""

import asyncio
import secrets
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from mooncake_store.core.records import SegmentState, Status
from mooncake_store.master.doors import ATTEMPTS
from mooncake_store.master.liveness import Liveness, LivenessTimes
from mooncake_store.wire.cluster import MAP, PING, MapRequest, Ping
from tests.clocks import ManualClock
from tests.master.test_programs import WORKER
from tests.master.wires import PingWire, numbered
from tests.waiting import PATIENCE_S, until
from transfer_engine.wire.frame import Frame

MIB = 1 << 20
SECOND = 1_000_000_000
UUID = b"u" * 16


@pytest.fixture
def watch():
    """Liveness on a clock of our own: ping 1 s, suspect 3 s, absent 10 s, gone 20 s after that."""
    clock = ManualClock(now_ns=50 * SECOND)
    reports = []
    liveness = Liveness(
        LivenessTimes(SECOND, 3 * SECOND, 10 * SECOND, 20 * SECOND),
        7,
        clock,
        lambda *r: reports.append(r),
        lambda error: None,
    )
    liveness.check()
    reports.clear()
    liveness.watch(UUID, 1)
    return clock, liveness, reports


def pass_time(clock, liveness, seconds, step_s=0.5):
    for _ in range(int(seconds / step_s)):
        clock.advance(int(step_s * SECOND))
        liveness.check()


def test_silence_makes_suspect_then_absent_then_gone_and_each_is_reported_once(watch):
    clock, liveness, reports = watch
    pass_time(clock, liveness, 2.5)
    assert reports == []
    pass_time(clock, liveness, 4)
    assert reports == [(UUID, 1, "suspect")]
    pass_time(clock, liveness, 20)
    assert reports == [(UUID, 1, "suspect"), (UUID, 1, "absent")]
    pass_time(clock, liveness, 2)
    assert liveness.state(UUID, 1) == "absent"
    pass_time(clock, liveness, 20)
    assert reports == [(UUID, 1, state) for state in ("suspect", "absent", "gone")]
    assert liveness.state(UUID, 1) == ""


def test_a_master_that_stood_still_blames_nobody(watch):
    clock, liveness, reports = watch
    pass_time(clock, liveness, 2)
    clock.advance(3600 * SECOND)
    liveness.check()
    assert reports == []
    # The silence before the pause still counts.
    pass_time(clock, liveness, 1)
    assert reports == [(UUID, 1, "suspect")]


def test_small_delays_do_not_keep_the_dead_alive(watch):
    clock, liveness, reports = watch
    pass_time(clock, liveness, 20, step_s=1.4)
    assert reports[-1] == (UUID, 1, "absent")


def test_forgotten_workers_are_not_reported(watch):
    clock, liveness, reports = watch
    liveness.forget(UUID)
    pass_time(clock, liveness, 20)
    assert reports == []
    assert liveness.silent_ns(UUID) == 0


def test_a_worker_that_is_called_back_is_a_stranger_until_it_has_mounted(watch):
    clock, liveness, reports = watch
    connection = SimpleNamespace(context=None, on_close=lambda call: None)

    def known():
        frame = Frame(PING.opcode, 0, 1, 0, PING.request.pack(Ping(UUID, 1)))
        return PING.reply.unpack(liveness._handle(connection, frame)).known

    assert known()
    liveness.call_back(UUID)
    for _ in range(20):
        pass_time(clock, liveness, 1)
        assert not known()
    assert reports == []  # it is alive for all that
    liveness.watch(UUID, 1)
    assert known()


def ping(liveness, uuid=UUID, epoch=1):
    """Have a sign of life answered, as on a connection of its own; whether it was known."""
    connection = SimpleNamespace(context=None, on_close=lambda call: None)
    frame = SimpleNamespace(body=PING.request.pack(Ping(uuid, epoch)))
    return PING.reply.unpack(liveness._handle(connection, frame)).known


def test_a_sign_of_life_of_the_same_run_ends_an_absence(watch):
    clock, liveness, reports = watch
    pass_time(clock, liveness, 15)
    assert not ping(liveness, epoch=2)
    assert reports[-1] == (UUID, 1, "absent")
    assert ping(liveness)
    assert reports[-1] == (UUID, 1, "alive")
    assert liveness.silent_ns(UUID) == 0
    pass_time(clock, liveness, 15)
    assert [state for _, _, state in reports] == ["suspect", "absent", "alive", "suspect", "absent"]
    pass_time(clock, liveness, 20)
    assert reports[-1] == (UUID, 1, "gone")
    assert not ping(liveness)


def test_a_master_that_stood_still_does_not_end_an_absence_early(watch):
    clock, liveness, reports = watch
    pass_time(clock, liveness, 15)
    clock.advance(3600 * SECOND)
    liveness.check()
    pass_time(clock, liveness, 14)
    assert reports[-1] == (UUID, 1, "absent")
    pass_time(clock, liveness, 2)
    assert reports[-1] == (UUID, 1, "gone")


@pytest.mark.parametrize(("keeps", "becomes"), [(True, "absent"), (False, "ended")])
def test_a_process_that_ended_is_waited_for_if_its_memory_outlives_it(
    watch, monkeypatch, keeps, becomes
):
    async def refused(doors):
        return True

    monkeypatch.setattr("mooncake_store.master.liveness.refused", refused)
    clock, liveness, reports = watch
    liveness.watch(UUID, 2, keeps=keeps)
    asyncio.run(liveness._doubt(UUID, liveness._watched[UUID]))
    assert reports == [(UUID, 2, becomes)]
    pass_time(clock, liveness, 29)
    assert liveness.state(UUID, 2) == ("absent" if keeps else "")
    pass_time(clock, liveness, 2)
    assert reports[-1] == (UUID, 2, "gone" if keeps else "ended")


def wait_for_state(cluster, name, state):
    until(lambda: cluster.worker_states().get(name) == state, what=f"{name} is {state}")


@pytest.mark.slow
def test_without_a_grace_a_stopped_worker_is_gone_with_its_objects(start_cluster, wire_to):
    quick = {"client_ttl": "6s", "worker_grace": "0s"}
    running = start_cluster(2, in_process=False, master=quick)
    cluster = wire_to(running)
    shard = cluster.shard()
    names = numbered(b"k", 400)
    _, replicas = shard.put(names, 1000)
    number = next(s.number for s in cluster.segments() if s.worker == "worker-1")
    lost = (replicas["segment"] == number).tolist()
    assert {True, False} == set(lost)
    running.stop_worker(1)
    wait_for_state(cluster, "worker-1", "suspect")
    assert next(s.state for s in cluster.segments() if s.number == number) == SegmentState.SUSPECT
    # A suspect takes nothing new, but what it has is not given up yet.
    _, further = shard.put(numbered(b"after", 100), 1000)
    assert number not in further["segment"]
    assert shard.exists(names) == [1] * 400
    wait_for_state(cluster, "worker-1", "gone")
    until(lambda: len(cluster.segments()) == 1)
    assert [not there for there in shard.exists(names)] == lost
    until(lambda: shard.stats().bytes_total == 64 * MIB)
    assert shard.stats().lost_objects == sum(lost)
    until(lambda: cluster.worker_states() == {"worker-0": "alive", "worker-1": "gone"})
    shard.close()


@pytest.mark.slow
def test_a_killed_worker_is_gone_at_once_with_its_objects(start_cluster, wire_to):
    """However long silence is suffered: its address refuses."""
    running = start_cluster(2, in_process=False, master={"client_ttl": "1h"})
    cluster = wire_to(running)
    shard = cluster.shard()
    names = numbered(b"k", 400)
    _, replicas = shard.put(names, 1000)
    number = next(s.number for s in cluster.segments() if s.worker == "worker-1")
    lost = (replicas["segment"] == number).tolist()
    running.kill_worker(1)
    wait_for_state(cluster, "worker-1", "gone")
    until(lambda: [not there for there in shard.exists(names)] == lost)
    assert cluster.worker_states()["worker-0"] == "alive"
    shard.close()


@pytest.mark.slow
def test_a_stopped_worker_is_absent_and_then_back_with_its_objects(start_cluster, wire_to):
    running = start_cluster(2, in_process=False)
    cluster = wire_to(running)
    shard = cluster.shard()
    names = numbered(b"k", 400)
    _, replicas = shard.put(names, 1000)
    before = {s.number: (s.uuid, s.worker) for s in cluster.segments()}
    number = next(number for number, (_, worker) in before.items() if worker == "worker-1")
    away = (replicas["segment"] == number).tolist()
    assert {True, False} == set(away)
    running.stop_worker(1)
    wait_for_state(cluster, "worker-1", "absent")
    until(lambda: cluster.segments(number)[0].state == SegmentState.ABSENT)
    assert [not there for there in shard.exists(names)] == away
    told = shard.get(names, ttl_ms=1000)[0]["status"].tolist()
    assert told == [Status.ABSENT if hidden else 0 for hidden in away]
    assert shard.stat(names[away.index(True)]).absent
    stats = shard.stats()
    assert (stats.misses_absent, stats.lost_objects) == (sum(away), 0)
    assert stats.bytes_total == 64 * MIB
    running.resume_worker(1)
    wait_for_state(cluster, "worker-1", "alive")
    until(lambda: shard.exists(names) == [1] * 400)
    assert {s.number: (s.uuid, s.worker) for s in cluster.segments()} == before
    assert shard.get(names)[1].tolist() == replicas.tolist()
    assert shard.stats().lost_objects == 0
    shard.close()


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["ping", "mount", "mount of one segment", "mount by a newer run"])
def test_a_sign_of_life_brings_an_absent_worker_back_as_it_was(start_cluster, wire_to, sign):
    cluster = wire_to(start_cluster(0))
    worker = secrets.token_bytes(16)
    segments = [(secrets.token_bytes(16), name, MIB) for name in ("one", "two")]
    mounted = cluster.mount(*segments, uuid=worker)
    shard = cluster.shard()
    names = numbered(b"k", 100)
    shard.put(names, 1000)
    wait_for_state(cluster, "w", "absent")  # nobody pings for it
    until(lambda: not any(shard.exists(names)))
    until(lambda: {s.state for s in cluster.segments()} == {SegmentState.ABSENT})
    if sign == "ping":
        pings = PingWire(cluster.map().liveness)
        assert pings.ping(worker).known
        pings.close()
    elif sign == "mount of one segment":
        assert cluster.mount(segments[0], uuid=worker).numbers == mounted.numbers[:1]
    else:
        epoch = 2 if sign == "mount by a newer run" else 1
        assert cluster.mount(*segments, uuid=worker, epoch=epoch) == mounted
    until(lambda: shard.exists(names) == [1] * 100)
    until(lambda: SegmentState.ABSENT not in {s.state for s in cluster.segments()})
    assert [s.number for s in cluster.segments()] == sorted(mounted.numbers)
    assert shard.stats().lost_objects == 0


def test_what_an_absent_worker_holds_is_lost_after_the_grace(start_cluster, wire_to):
    cluster = wire_to(start_cluster(0, master={"worker_grace": "200ms"}))
    cluster.mount((secrets.token_bytes(16), "s", MIB))
    shard = cluster.shard()
    names = numbered(b"k", 100)
    shard.put(names, 1000)
    wait_for_state(cluster, "w", "gone")
    until(lambda: shard.stats().lost_objects == 100)
    assert not any(shard.exists(names))
    assert cluster.segments() == ()


@pytest.mark.parametrize("keeps", [True, False])
def test_the_next_run_finds_what_it_brings_the_memory_of(start_cluster, wire_to, keeps):
    cluster = wire_to(start_cluster(0, master={"client_ttl": "1h"}))
    worker, segment = secrets.token_bytes(16), (secrets.token_bytes(16), "s", MIB)
    names = numbered(b"k", 100)
    shard = cluster.shard()
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(PATIENCE_S)
        where = {"uuid": worker, "tcp_port": door.getsockname()[1], "keeps": keeps}
        mounted = cluster.mount(segment, **where)
        shard.put(names, 1000)
        pings = PingWire(cluster.map().liveness)
        door.accept()[0].close()
        for _ in range(20):  # answered by the loop that looks at the door
            assert pings.ping(worker).known
    pings.close()
    wait_for_state(cluster, "w", "absent" if keeps else "gone")
    until(lambda: not any(shard.exists(names)))
    again = cluster.mount(segment, **where, epoch=2)
    assert again.statuses == (0,)
    assert shard.exists(names) == [int(keeps)] * 100
    assert (again.numbers == mounted.numbers) == keeps
    assert cluster.worker_states() == {"w": "alive"}


def test_a_connection_that_closes_is_no_death(start_cluster, wire_to):
    """Only with an address that answered before, and refuses now, is it one."""
    cluster = wire_to(start_cluster(0, master={"client_ttl": "1h"}))
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_server(("127.0.0.1", 0)) as s,
    ):
        shut = s.getsockname()[1]
        s.close()
        ends = {"listens": door.getsockname()[1], "never listened": shut, "has no address": 0}
        for name, port in ends.items():
            uuid = secrets.token_bytes(16)
            cluster.mount((secrets.token_bytes(16), name, MIB), uuid=uuid, name=name, tcp_port=port)
            pings = PingWire(cluster.map().liveness)
            assert pings.ping(uuid).known
            pings.close()
        door.settimeout(PATIENCE_S)
        for _ in range(ATTEMPTS + 1):  # once when it came, then until it is believed
            door.accept()[0].close()
        assert set(cluster.worker_states().values()) == {"alive"}


@pytest.mark.slow
def test_a_stopped_worker_that_returns_in_time_keeps_its_objects(start_cluster, wire_to):
    running = start_cluster(1, in_process=False, master={"client_ttl": "1h"})
    cluster = wire_to(running)
    shard = cluster.shard()
    shard.put([b"stay"], 1000)
    running.stop_worker(0)
    wait_for_state(cluster, "worker-0", "suspect")
    assert shard.put_start([b"new"], 1000)[0]["status"].tolist() == [Status.NO_SPACE]
    running.resume_worker(0)
    wait_for_state(cluster, "worker-0", "alive")
    assert shard.exists([b"stay"]) == [1]
    assert shard.put_start([b"new"], 1000)[0]["status"].tolist() == [0]
    shard.close()


@pytest.mark.slow
def test_a_stopped_worker_that_returns_too_late_mounts_again(start_cluster, wire_to):
    running = start_cluster(1, in_process=False, master={"worker_grace": "100ms"})
    cluster = wire_to(running)
    shard = cluster.shard()
    shard.put([b"lost"], 1000)
    running.stop_worker(0)
    wait_for_state(cluster, "worker-0", "gone")
    assert shard.exists([b"lost"]) == [0]
    running.resume_worker(0)
    wait_for_state(cluster, "worker-0", "alive")
    shard.put([b"new"], 1000)
    assert cluster.status().ready
    shard.close()


@pytest.mark.slow
def test_a_stopped_master_declares_nobody_dead(start_cluster, wire_to):
    running = start_cluster(1, in_process=False)
    cluster = wire_to(running)
    shard = cluster.shard()
    names = numbered(b"m", 100)
    shard.put(names, 1000)
    running.stop_master()
    stopped = time.monotonic()
    until(lambda: time.monotonic() - stopped > 4, what="longer than client_ttl")
    running.resume_master()
    resumed = time.monotonic()

    def heard_anew():
        (worker,) = cluster.status().workers
        assert worker.state not in ("absent", "gone")
        # A ping that came after the stop, and time to act on the silence before it.
        passed_ms = (time.monotonic() - resumed) * 1000
        return passed_ms > 500 and worker.silent_ms < passed_ms and worker.state == "alive"

    until(heard_anew)
    assert shard.exists(names) == [1] * 100
    shard.close()


def test_pings_are_answered_while_the_loop_of_the_shard_is_busy(start_cluster, wire_to):
    running = start_cluster(workers=0, master={"client_ttl": "60s", "ping_interval": "10s"})
    cluster = wire_to(running)
    worker = secrets.token_bytes(16)
    cluster.mount((secrets.token_bytes(16), "s", MIB), uuid=worker)
    pings = PingWire(cluster.map().liveness)
    busy, release = threading.Event(), threading.Event()

    def long_request():
        busy.set()
        release.wait(20)

    running._master._loop.call_soon_threadsafe(long_request)
    assert busy.wait(20)
    try:
        body = MAP.request.pack(MapRequest())
        unanswered = cluster.connection.send(MAP, body, timeout_s=20)
        for _ in range(20):
            assert pings.ping(worker).known
        assert not release.is_set()
    finally:
        release.set()
    cluster.connection.recv(unanswered, timeout_s=20)
    pings.close()


@pytest.mark.slow
def test_workers_find_a_master_that_was_started_anew(start_program, wire_to, free_port):
    """One that keeps no objects, so nobody needs the memory that they lay in."""
    master = ("master", "--port", free_port, "--journal", "none", "--json")
    arguments = ("-m", "mooncake_store", *master)
    settings = {"MOONCAKE_MASTER_PING_INTERVAL": "100ms", "MOONCAKE_MASTER_CLIENT_TTL": "2s"}
    first = start_program(*arguments, **settings)
    first.wait_for_line('"ready": true')
    worker = start_program(
        *WORKER, "--name", "w", "--segment", "16MiB",
        "--master", f"127.0.0.1:{free_port}",
    )  # fmt: skip
    worker.wait_for_line("mooncake worker w lends 16MiB")
    (before,) = wire_to(f"127.0.0.1:{free_port}").segments()
    first.signal(signal.SIGKILL)
    first.wait()
    second = start_program(*arguments, **settings)
    second.wait_for_line('"ready": true')
    cluster = wire_to(f"127.0.0.1:{free_port}")
    until(lambda: cluster.worker_states().get("w") == "alive", what="w mounts again")
    # Somebody may still read or write under a lease of the first master: not in this memory.
    (after,) = cluster.segments()
    assert after.uuid != before.uuid
    assert after.nbytes == before.nbytes
    shard = cluster.shard()
    shard.put([b"x"], 1000)
    shard.close()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
