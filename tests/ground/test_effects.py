"""Every setting does something: each is changed where it is used, and what is seen there differs.

`OBSERVED` has an entry for each setting: overrides that change it, and a function that starts the
part concerned with given overrides and returns what a user could see, which must differ.
"""

import asyncio
import contextlib
import functools
import io
import logging
import os
import signal
import tempfile
import time
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import fsspec
import msgspec
import numpy as np
import pytest

from mooncake_store import Client, LocalCluster, credentials
from mooncake_store.cli.shared.program_options import begin
from mooncake_store.config.settings import (
    PROGRAMS,
    ClientConfig,
    MasterConfig,
    MemberConfig,
    WorkerConfig,
    load,
    settings_of,
)
from mooncake_store.credentials import secret_in
from mooncake_store.errors import StoreError
from mooncake_store.master.building import liveness_times
from mooncake_store.master.liveness import Liveness
from mooncake_store.master.running import serve_master
from mooncake_store.program import logs
from mooncake_store.standby.member import serve_member
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.worker import capacity
from mooncake_store.worker.capacity import Machine
from mooncake_store.worker.program import run_worker
from mooncake_store.worker.worker import Worker
from serving.scheduling.views import Demand, PrefillView
from serving.system import ServingSystem, SystemSettings
from tests.clocks import ManualClock
from tests.ground.of_clients import (
    a_damaged_read,
    asked_of_etcd,
    first_question,
    found_by_the_next_program,
    lease_after_a_get,
    namespace,
    own_segment,
    patience,
    patience_with_connections,
    reads_without_a_request,
    secret,
    segments_of_the_pool,
    stored,
    threads_of_the_engine,
)
from tests.ground.of_gates import (
    TLS,
    master_meets_alice,
    of_tls,
    reached_through_a_tunnel,
    worker_meets_alice,
    worker_reached_through_a_tunnel,
    write_certificates,
)
from tests.ground.of_shards import (
    checks,
    events_that_are_left,
    evicted_first,
    hard_pins,
    hauled_after_a_get,
    hauled_behind_a_get,
    hauled_by_pressure,
    hauled_of_a_namespace,
    leased_for_long,
    left_after_a_tick,
    longest_lease,
    offsets,
    pinned_beyond_reason,
    pinned_for,
    pinned_under_pressure,
    replaced_after_20_s,
    room_after_100_s,
    room_of_a_namespace,
    spread,
    statuses,
)
from tests.master.wires import ClusterWire, descriptor
from tests.serving.scheduling.test_placement import costs
from tests.waiting import PATIENCE_S, until
from transfer_engine import SegmentDescriptor
from transfer_engine.wire.rights import Role

MIB = 1 << 20
GIB = 1 << 30
SECOND = 1_000_000_000


class Observation(NamedTuple):
    """Overrides that change one setting, what they are compared with, and what is looked at."""

    changed: dict
    observe: object
    base: dict = MappingProxyType({})


def states_of_a_silent_worker(given):
    """When a worker that says nothing becomes what."""
    clock, states = ManualClock(), []
    times = liveness_times(load(MasterConfig, environ={}, overrides=given).value)

    def became(_uuid, _epoch, state):
        states.append((clock.now_ns(), state))

    liveness = Liveness(times, 1, clock, became, pytest.fail)
    liveness.watch(b"w" * 16, 1)
    for _ in range(60):
        clock.advance(SECOND // 2)
        liveness.check()
    return states


@contextlib.contextmanager
def master(given):
    with LocalCluster(0, in_process=True, master=given) as cluster:
        wire = ClusterWire(cluster.address)
        try:
            yield cluster, wire
        finally:
            wire.close()


def address(given):
    with master(given) as (cluster, _):
        return cluster.address


def cluster_map(given):
    with master(given) as (_, wire):
        found = wire.map()
        return len(found.shards), found.ping_interval_ms


def mounted_at_10_0_0_1(given):
    with master(given) as (_, wire):
        uuid = b"u" * 16
        known = SegmentDescriptor.decode(descriptor(uuid, "s", MIB, 1))
        known = msgspec.structs.replace(known, tcp_host="10.0.0.1")
        spec = cluster_wire.SegmentSpec(uuid, "s", MIB, known.encode())
        try:
            return wire.ask(cluster_wire.MOUNT, cluster_wire.Mount(uuid, 1, "w", "h", (spec,)))
        except StoreError as error:
            return error.what


def ways_of_a_worker_to_10_0_0_1(given):
    """How a worker would reach what it is to copy there."""
    known = SegmentDescriptor.decode(descriptor(b"u" * 16, "s", MIB, 1))
    known = msgspec.structs.replace(known, tcp_host="10.0.0.1")
    with master({}) as (cluster, _):
        own = {"master": cluster.address, "segments": "1MiB"}
        worker = Worker(load(WorkerConfig, environ={}, overrides=own | given).value)
        try:
            worker.start()
            return worker._copier._engine.explain(known)
        finally:
            worker.stop(leases_s=0.0)


def granted(given):
    with master(given) as (_, wire):
        return wire.shard().opened.lease_ttl_ms


def connected(given):
    with master(given) as (cluster, _), contextlib.ExitStack() as stack:
        answers = 0
        for _ in range(4):
            with contextlib.suppress(StoreError, OSError):
                wire = stack.enter_context(contextlib.closing(ClusterWire(cluster.address)))
                wire.status()
                answers += 1
        return answers


def kind_of_names(given):
    with master(given) as (cluster, _), Client(cluster.url) as client:
        return type(client.identity).__name__


def names_of_two_runs(given):
    """Whether the second of two masters names keys as the first."""
    secrets = []
    for _ in range(2):
        with master(given) as (_, wire):
            secrets.append(wire.map().secret)
    return secrets[0] == secrets[1]


def journal_of_a_shard(given):
    """Whether a shard says that it keeps its objects."""
    with master(given) as (_, wire):
        return wire.shard().stats().journal == "none"


class Parent:
    """What a program started by a `LocalCluster` is told by."""

    def watch(self, ended):
        self.end = ended


def run_program(program, given):
    """Run master or worker in this process until it is ready; what was there by then."""
    parent, seen = Parent(), []

    def ready(facts):
        there = bool(config.port_file) and os.path.exists(config.port_file)
        seen.append((there, "metrics" in facts))
        parent.end()

    handler = signal.getsignal(signal.SIGTERM)
    try:
        if program is MasterConfig:
            config = load(program, environ={}, overrides={"port": 0, **given}).value
            asyncio.run(serve_master(config, None, ready, parent))
        else:
            with master({}) as (cluster, _):
                own = {"master": cluster.address, "segments": "1MiB"}
                config = load(program, environ={}, overrides=own | given).value
                end = functools.partial(Worker.stop, leases_s=0.0)
                run_worker(config, None, ready, end=end, parent=parent)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return seen


def started(program):
    """How a program begins: its secret, and what it logs."""

    def observe(given):
        text = io.StringIO()
        root = logging.getLogger()
        levels = {name: logging.getLogger(name).level for name in (*logs.PACKAGES, None)}
        handlers = root.handlers[:]
        try:
            with contextlib.redirect_stderr(text):
                settings = begin(program, None, {"port": 0, **given})
                secret = secret_in(settings.secret_file)
                logging.getLogger("mooncake_store.test").info("a line")
        except StoreError as error:
            return str(error)
        finally:
            root.handlers[:] = handlers
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
        return secret, text.getvalue().lstrip("0123456789-:. ")

    return observe


def refused(program, **given):
    """Whether these settings are refused."""

    def observe(changed):
        try:
            load(program, environ={}, overrides=given | changed)
        except StoreError:
            return True
        return False

    return observe


def beside_a_typo(program):
    """What becomes of an unknown variable."""

    def observe(given):
        try:
            return load(program, environ={"MOONCAKE_LOG_LEVLE": "1"}, overrides=given).unknown
        except StoreError as error:
            return str(error)

    return observe


def lent(given):
    """What others see of a worker, or why there is none."""
    with master({}) as (cluster, wire):
        own = {"master": cluster.address, "segments": "1MiB", "name": "w", "memory": "anonymous"}
        worker = Worker(load(WorkerConfig, environ={}, overrides=own | given).value)
        try:
            worker.start()
            entries = wire.segments(*worker.numbers)
            found = [SegmentDescriptor.decode(entry.descriptor) for entry in entries]
            seen = [
                (each.name, each.size, each.transports, len(each.rails), segment.page_kind)
                for each, segment in zip(found, worker.segments, strict=True)
            ]
            host, _, port = worker.address.rpartition(":")
            return seen, host, port if "port" in given else ""
        except StoreError as error:
            return error.what
        finally:
            worker.stop(leases_s=0.0)


def where_a_put_finds_room(given):
    """In which namespaces, with no other worker."""
    with master({}) as (cluster, _):
        own = {"master": cluster.address, "segments": "1MiB", "memory": "anonymous"}
        worker = Worker(load(WorkerConfig, environ={}, overrides=own | given).value)
        try:
            worker.start()
            found = []
            for namespace in ("default", "team-a"):
                url = cluster.url.replace("/default", f"/{namespace}")
                with Client(url, deadline=2) as client, contextlib.suppress(StoreError):
                    client.put("k", b"v" * 100)
                    found.append(namespace)
            return found
        finally:
            worker.stop(leases_s=0.0)


def kept_cold(given):
    """How many bytes a store gets for a mebibyte of zeros."""
    with master({}) as (cluster, _):
        own = {"master": cluster.address, "segments": "1MiB", "name": "w"}
        own |= given | {"memory": tempfile.mkdtemp(prefix=given["memory"])}  # of this cluster
        worker = Worker(load(WorkerConfig, environ={}, overrides=own).value)
        try:
            worker.start()
            segment = worker.segments[-1]
            until(lambda: segment.ready_to_use)
            zeros = np.zeros(MIB, np.uint8)
            columns = np.array([[0], [MIB], [zeros.ctypes.data]])
            assert segment.write(*columns, time.monotonic() + PATIENCE_S).tolist() == [0]
            (extent,) = segment.after(0, 2)
            store = fsspec.filesystem("memory")
            (path,) = (path for path in store.find("/effects") if path.endswith(extent.file(0)))
            return store.size(path)
        finally:
            worker.stop(leases_s=0.0)


def named_master(given):
    config = load(WorkerConfig, environ={}, overrides={"segments": "1MiB", **given}).value
    try:
        Worker(config).start(timeout_s=0.01)
    except StoreError as error:
        return str(error.peer)
    return "reached"


def asked_by_a_worker(given):
    given = {"master": "mooncake+etcd://127.0.0.1:1", **given}
    worker = Worker(load(WorkerConfig, environ={}, overrides=given).value)
    return first_question(worker._link.masters)


def serve(member):
    """Be a member until something does not answer."""
    with tempfile.TemporaryDirectory() as state, contextlib.suppress(StoreError):
        asyncio.run(serve_member(MasterConfig(state=state), member, None, None, None))


def etcd_of_a_member(given):
    """The etcd that a member turns to, the name there, and who it says it is."""
    chosen = load(MemberConfig, environ={}, overrides=given).value
    coordinator, stop = "mooncake_store.standby.member.EtcdCoordinator", StoreError("no")
    with mock.patch(coordinator, side_effect=stop) as made:
        serve(chosen)
        etcd, name = made.call_args.args
        return etcd, name, made.call_args.kwargs["access"].user


def grace_of_a_member(given):
    """For how long a member that leads waits for a standby."""
    chosen = load(MemberConfig, environ={}, overrides=given).value
    stop = StoreError("no")
    with mock.patch("mooncake_store.standby.member._Member", side_effect=stop) as made:
        serve(chosen)
        return made.call_args.args[-1]


def without_shared_huge_pages(given):
    with mock.patch("transfer_engine.segments.mapping.thp_policy", return_value="never"):
        return lent(given)


def without_memory(observe):
    def observed(given):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "proc").mkdir()
            (Path(folder) / "proc" / "meminfo").write_text("MemAvailable: 0 kB")
            with mock.patch.object(capacity, "MACHINE", Machine(Path(folder))):
                return observe(given)

    return observed


PORT = 20_000 + os.getpid() % 10_000
FREE = {"port": PORT}
SECRET, PORT_FILE, LENT_FILE, STATE = "<secret>", "<port file>", "<file>", "<state>"
KEYS = "<keys>"
CREDENTIALS = "<credentials>"
ETCD = "<etcd>"
KEPT = {"memory": f"{STATE}-memory"}
"""A worker that leaves a record."""

OBSERVED = {
    "master.host": Observation({"host": "127.0.0.2"}, lambda g: address(g).rpartition(":")[0]),
    "master.port": Observation(FREE, lambda g: address(g).endswith(f":{PORT}")),
    "master.shards": Observation({"shards": 2}, lambda g: cluster_map(g)[0]),
    "master.secret_file": Observation({"secret_file": SECRET}, started(MasterConfig)),
    "master.credentials": Observation(
        {"credentials": CREDENTIALS}, master_meets_alice, {"secret_file": SECRET}
    ),
    "master.reached_as": Observation(
        {"reached_as": "127.0.0.1"}, reached_through_a_tunnel, {"secret_file": SECRET}
    ),
    "master.data_networks": Observation({"data_networks": "10.1.0.0/16"}, mounted_at_10_0_0_1),
    "master.insecure": Observation({"insecure": True}, refused(MasterConfig, host="0.0.0.0")),
    "master.port_file": Observation(
        {"port_file": PORT_FILE}, lambda g: run_program(MasterConfig, g)
    ),
    "master.objects_max": Observation({"objects_max": 64}, statuses),
    "master.default_lease_ttl": Observation({"default_lease_ttl": "1s"}, granted),
    "master.lease_ttl_max": Observation({"lease_ttl_max": "1m"}, longest_lease),
    "master.put_discard": Observation({"put_discard": "10s"}, replaced_after_20_s),
    "master.put_release": Observation({"put_release": "60s"}, room_after_100_s),
    "master.client_ttl": Observation({"client_ttl": "20s"}, states_of_a_silent_worker),
    "master.worker_grace": Observation({"worker_grace": "5s"}, states_of_a_silent_worker),
    "master.ping_interval": Observation({"ping_interval": "500ms"}, lambda g: cluster_map(g)[1]),
    "master.suspect_after_pings": Observation(
        {"suspect_after_pings": 5}, states_of_a_silent_worker
    ),
    "master.soft_pin_ttl": Observation({"soft_pin_ttl": "1m"}, pinned_for),
    "master.soft_pin_ttl_max": Observation({"soft_pin_ttl_max": "2h"}, pinned_beyond_reason),
    "master.hard_pin_share": Observation({"hard_pin_share": 0.75}, hard_pins),
    "master.writers_share": Observation({"writers_share": 0.3}, leased_for_long),
    "master.high_watermark": Observation({"high_watermark": 0.5}, left_after_a_tick),
    "master.eviction_ratio": Observation({"eviction_ratio": 0.5}, left_after_a_tick),
    "master.eviction_policy": Observation({"eviction_policy": "fifo"}, evicted_first),
    "master.evict_soft_pinned": Observation({"evict_soft_pinned": False}, pinned_under_pressure),
    "master.offload": Observation({"offload": "write"}, hauled_by_pressure),
    "master.namespace_offloads": Observation(
        {"namespace_offloads": "a=write"}, hauled_of_a_namespace
    ),
    "master.promotion_hits": Observation({"promotion_hits": 1}, hauled_after_a_get),
    "master.promotion_ahead": Observation({"promotion_ahead": 0}, hauled_behind_a_get),
    "master.state": Observation({"state": STATE}, names_of_two_runs),
    "master.journal": Observation(
        {"journal": "none"}, journal_of_a_shard, {"state": STATE, "journal": "written"}
    ),
    "master.identity": Observation({"identity": "xxh3"}, kind_of_names),
    "master.quotas": Observation({"quotas": "a=2MiB"}, room_of_a_namespace),
    "master.allocator": Observation({"allocator": "offset"}, offsets),
    "master.placement": Observation({"placement": "free_ratio"}, spread),
    "master.log_level": Observation({"log_level": "error"}, started(MasterConfig)),
    "master.log_json": Observation({"log_json": True}, started(MasterConfig)),
    "master.debug_integrity": Observation({"debug_integrity": True}, checks),
    "master.events_kept": Observation({"events_kept": 16}, events_that_are_left),
    "master.connections_max": Observation({"connections_max": 2}, connected),
    "master.strict": Observation({"strict": True}, beside_a_typo(MasterConfig)),
    "member.etcd": Observation({"etcd": "127.0.0.1:1"}, etcd_of_a_member),
    "member.name": Observation({"name": "other"}, etcd_of_a_member),
    "member.etcd_file": Observation({"etcd_file": ETCD}, etcd_of_a_member),
    "member.standby_grace": Observation({"standby_grace": "0s"}, grace_of_a_member),
    "worker.master": Observation(
        {"master": "127.0.0.1:2"}, named_master, {"master": "127.0.0.1:1"}
    ),
    "worker.etcd_file": Observation({"etcd_file": ETCD}, asked_by_a_worker),
    "worker.name": Observation({"name": "other"}, lent),
    "worker.host": Observation({"host": "127.0.0.2"}, lent),
    "worker.port": Observation(FREE, lent, {"port": PORT + 1}),
    "worker.segments": Observation({"segments": "2MiB"}, lent),
    "worker.files": Observation({"files": f"{LENT_FILE}:1MiB"}, lent),
    "worker.cold_url": Observation({"cold_url": "memory://effects"}, lent, KEPT),
    "worker.cold_codec": Observation(
        {"cold_codec": "planes"}, kept_cold, {**KEPT, "cold_url": "memory://effects"}
    ),
    "worker.cold_keys": Observation(
        {"cold_keys": KEYS}, kept_cold, {**KEPT, "cold_url": "memory://effects"}
    ),
    "worker.cold": Observation({"cold": "2MiB"}, lent, {**KEPT, "cold_url": "memory://effects"}),
    "worker.namespace": Observation({"namespace": "team-a"}, where_a_put_finds_room),
    "worker.memory": Observation({"memory": "/nowhere"}, lent),
    "worker.hugepages": Observation({"hugepages": "require"}, without_shared_huge_pages),
    "worker.overcommit": Observation({"overcommit": True}, without_memory(lent)),
    "worker.numa": Observation({"numa": 4095}, lent),
    "worker.transports": Observation({"transports": "tcp"}, lent),
    "worker.rails": Observation({"rails": "127.0.0.2"}, lent),
    "worker.secret_file": Observation({"secret_file": SECRET}, started(WorkerConfig)),
    "worker.credentials": Observation(
        {"credentials": CREDENTIALS}, worker_meets_alice, {"secret_file": SECRET}
    ),
    "worker.reached_as": Observation(
        {"reached_as": "any"}, worker_reached_through_a_tunnel, {"secret_file": SECRET}
    ),
    "worker.data_networks": Observation(
        {"data_networks": "127.0.0.0/8"}, ways_of_a_worker_to_10_0_0_1
    ),
    "worker.insecure": Observation({"insecure": True}, refused(WorkerConfig, host="0.0.0.0")),
    "worker.port_file": Observation(
        {"port_file": PORT_FILE}, lambda g: run_program(WorkerConfig, g)
    ),
    "worker.metrics": Observation({"metrics": "127.0.0.1"}, lambda g: run_program(WorkerConfig, g)),
    "worker.log_level": Observation({"log_level": "error"}, started(WorkerConfig)),
    "worker.log_json": Observation({"log_json": True}, started(WorkerConfig)),
    "worker.strict": Observation({"strict": True}, beside_a_typo(WorkerConfig)),
    "client.url": Observation({"url": "other"}, namespace),
    "client.secret_file": Observation({"secret_file": SECRET}, secret),
    "client.data_networks": Observation(
        {"data_networks": "10.0.0.0/8"}, stored, {"transports": "tcp"}
    ),
    "client.etcd_file": Observation({"etcd_file": ETCD}, asked_of_etcd),
    "client.connect_timeout": Observation({"connect_timeout": 500.0}, patience_with_connections),
    "client.deadline": Observation({"deadline": 900.0}, patience),
    "client.lease_ttl": Observation({"lease_ttl": 200.0}, lease_after_a_get),
    "client.verify": Observation({"verify": False}, a_damaged_read, {"lease_cache": True}),
    "client.lease_cache": Observation({"lease_cache": False}, reads_without_a_request),
    "client.lease_cache_entries": Observation({"lease_cache_entries": 8}, reads_without_a_request),
    "client.transports": Observation({"transports": "rdma"}, stored),
    "client.copy_threads": Observation({"copy_threads": 5}, threads_of_the_engine),
    "client.state": Observation({"state": STATE}, found_by_the_next_program),
    "client.segment": Observation({"segment": "4MiB"}, segments_of_the_pool),
    "client.overcommit": Observation(
        {"overcommit": True, "segment": "4MiB"},
        without_memory(own_segment),
        {"segment": "4MiB"},
    ),
    **{name: Observation(*seen) for name, seen in of_tls(SECRET).items()},
    "client.replicas": Observation({"replicas": 2}, stored),
    "client.strict": Observation({"strict": True}, beside_a_typo(ClientConfig)),
}

SETTINGS = [f"{each.table}.{each.name}" for program in PROGRAMS for each in settings_of(program)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_what_is_seen(setting, tmp_path):
    assert setting in OBSERVED, f"{setting}: nothing observes that it has an effect"
    names = {SECRET: "secret", PORT_FILE: "port", LENT_FILE: "f", STATE: "state", KEYS: "keys"}
    names |= {ETCD: "etcd.toml", CREDENTIALS: "credentials", TLS: "tls"}
    places = {placeholder: tmp_path / name for placeholder, name in names.items()}
    places[SECRET].write_text("x" * 32)
    credentials.make(str(places[CREDENTIALS]), "alice", Role.WRITER)
    write_certificates(places[TLS])
    places[KEYS].write_text(f'"*" = "{"a1" * 32}"')
    places[ETCD].write_text('user = "u"\npassword = "p"\n')
    for private in (SECRET, KEYS, ETCD):
        places[private].chmod(0o600)
    (tmp_path / "state-memory").mkdir()

    def filled(given):
        for name, place in places.items():
            given = {
                key: value.replace(name, str(place)) if isinstance(value, str) else value
                for key, value in given.items()
            }
        return given

    observation = OBSERVED[setting]
    assert setting.partition(".")[2] in observation.changed
    before = observation.observe(filled(observation.base))
    after = observation.observe(filled({**observation.base, **observation.changed}))
    assert before != after


def test_nothing_is_observed_that_is_no_setting():
    assert set(OBSERVED) == set(SETTINGS)


def test_the_threshold_of_serving_decides_where_a_prefix_comes_from():
    def pulled(**given):
        system = ServingSystem(SystemSettings(placement="cache-centric", **given))
        found = system._scheduler.policies.placement.place(
            Demand(1000, {"p0": 100, "pool": 160}), [PrefillView("p0")], costs()
        )
        return found.pulled

    assert (pulled(), pulled(balancing=2.0)) == (60, 0)
    with pytest.raises(StoreError, match="balancing is 0"):
        ServingSystem(SystemSettings(balancing=0.5))
