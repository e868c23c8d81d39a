"""Who may do what: every operation by every role, and what a tenant sees of another.

Nothing of this is told by clients: requests are sent as somebody would who wrote his own.
"""

import secrets

import numpy as np
import pytest

from mooncake_store import LocalCluster, credentials
from mooncake_store.client import Client
from mooncake_store.config.settings import WorkerConfig, load
from mooncake_store.core.records import EVENT, Status
from mooncake_store.core.tasks import TaskState
from mooncake_store.credentials import Alone, credential_of, secret_in
from mooncake_store.errors import AuthError, StoreError
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.wire import hosts
from mooncake_store.wire import shard as wire
from mooncake_store.worker.worker import Worker
from tests.master.wires import ClusterWire, ShardWire
from tests.waiting import until
from transfer_engine.notify import Alive, Probe
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.transports.calling import ask_at
from transfer_engine.wire.keyring import read_only_secret
from transfer_engine.wire.rights import Role

SECRET = secrets.token_hex(32).encode()
TENANTS = {"alice": "team-a", "bob": "team-b"}
READS = {
    "open", "get", "exists", "find_prefix", "renew", "release", "list", "events", "snapshot",
    "stat", "stats", "task", "map", "segments", "status", "drain_status", "hosts", "standby",
    "about",
}  # fmt: skip
WRITES = {
    "put_start", "put_end", "put_end_shown", "put_revoke", "remove", "remove_replicas", "rename",
    "pin", "hint", "remove_matching", "submit_task",
}  # fmt: skip
LENDS = {
    "mount", "unmount", "ping", "fetch_tasks", "finish_task", "fetch_hauls", "finish_haul", "held",
}  # fmt: skip
"""Everything else is an admin's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rights")


@pytest.fixture(scope="module")
def texts(folder):
    """What principals have in their files: one of each role, and two tenants."""
    where = str(folder / "credentials")
    made = {role: credentials.make(where, role.name.lower(), role) for role in Role}
    made |= {
        name: credentials.make(where, name, Role.WRITER, namespaces=[namespace])
        for name, namespace in TENANTS.items()
    }
    return {name: text.encode() for name, text in made.items()}


@pytest.fixture(scope="module")
def cluster(folder, texts):
    secret_file = folder / "secret"
    secret_file.write_bytes(SECRET)
    secret_file.chmod(0o600)
    guarded = {"secret_file": str(secret_file), "credentials": str(folder / "credentials")}
    with LocalCluster(
        workers=1, segment="16MiB", secret=SECRET, master=guarded, worker=guarded
    ) as running:
        yield running


def keyring(text):
    return Alone(credential_of(text))


@pytest.fixture(scope="module")
def secret_of(texts):
    """The secret of each role: by name, and the two without one."""
    named = {role: keyring(texts[role]) for role in Role}
    return named | {"pool": SECRET, "looking": read_only_secret(SECRET)}


@pytest.fixture(scope="module")
def ports(cluster):
    wires = ClusterWire(cluster.address, secret=SECRET)
    told = wires.map()
    wires.close()
    return {
        cluster_wire.CLUSTER: cluster.address,
        cluster_wire.LIVENESS: told.liveness,
        wire.SHARD: told.shards[0],
    }


OPERATIONS = [
    (registry, operation)
    for registry in (cluster_wire.CLUSTER, cluster_wire.LIVENESS, wire.SHARD)
    for operation in registry
]


def test_every_operation_is_of_one_role():
    """What is new has to be said here, and nothing is of nobody."""
    by_name = {}
    for registry in (*{each for each, _ in OPERATIONS}, cluster_wire.ADMIN, hosts.HOST):
        by_name |= {(registry.service, each.name): each.needs for each in registry}
    expected = {
        (service, name): Role.READER
        if name in READS
        else Role.WRITER
        if name in WRITES
        else Role.WORKER
        if name in LENDS
        else Role.ADMIN
        for service, name in by_name
    }
    assert by_name == expected


@pytest.mark.parametrize("who", [*Role, "pool", "looking"], ids=str)
@pytest.mark.parametrize(
    ("registry", "operation"), OPERATIONS, ids=lambda each: getattr(each, "name", "")
)
def test_an_operation_is_refused_to_who_is_less(ports, secret_of, who, registry, operation):
    """An empty request: who may ask hears what is wrong with it, others that they may not."""
    has = {"pool": Role.ADMIN, "looking": Role.READER}.get(who, who)
    with (
        BlockingConnection.connect(ports[registry], registry, secret=secret_of[who]) as connection,
        pytest.raises(StoreError) as refused,
    ):
        connection.call(operation, b"", timeout_s=10)
    assert isinstance(refused.value, AuthError) == (operation.needs > has)
    if operation.needs > has:
        assert refused.value.operation == operation.name
        assert operation.needs.name.lower() in refused.value.advice


@pytest.mark.parametrize("text", [b"mooncake:alice:" + b"0" * 64, b"mooncake:nobody:" + b"0" * 64])
def test_who_proves_nothing_gets_no_session(ports, text):
    for registry, address in ports.items():
        with pytest.raises(AuthError, match="did not prove that it is"):
            BlockingConnection.connect(address, registry, secret=keyring(text))


# Tenants.


@pytest.fixture
def tenant(ports, texts):
    """Connections to the shard: of a principal, for a namespace."""
    opened = []

    def open_for(name, namespace=None):
        secret = SECRET if name == "pool" else keyring(texts[name])
        opened.append(
            ShardWire(ports[wire.SHARD], namespace=namespace or TENANTS[name], secret=secret)
        )
        return opened[-1]

    yield open_for
    for each in opened:
        each.close()


@pytest.mark.parametrize("namespace", ["team-b", "default", "team-a2", ""])
def test_a_namespace_of_others_is_not_opened_nor_its_secret_told(cluster, ports, texts, namespace):
    secret = keyring(texts["alice"])
    with pytest.raises(AuthError, match="is not for namespace"):
        ShardWire(ports[wire.SHARD], namespace=namespace, secret=secret)
    if namespace:
        wires = ClusterWire(cluster.address, secret=secret)
        with pytest.raises(AuthError, match="is not for namespace"):
            wires.ask(cluster_wire.MAP, cluster_wire.MapRequest(namespace))
        wires.close()


@pytest.fixture
def kept(cluster, folder, texts):
    """An object of alice, and its digest, which bob has come to know."""
    file = folder / f"alice-{secrets.token_hex(4)}"
    file.write_bytes(texts["alice"])
    file.chmod(0o600)
    url = cluster.url.replace("/default", "/team-a")
    with Client(url, secret_file=str(file)) as client:
        client.put("hers", b"value" * 100)
        yield client, client.identity.digests(["hers"])
        assert client.get("hers") == b"value" * 100
        client.remove("hers", force=True)


def statuses(reply):
    return [Status(each) for each in reply.statuses.tolist()]


def test_a_tenant_finds_nothing_by_a_key_of_another(kept, tenant):
    alice, digests = kept
    bob, generation = tenant("bob"), np.array([1], np.uint32)
    assert tenant("alice").call(wire.EXISTS, digests=digests).present.tolist() == [1]
    assert bob.call(wire.EXISTS, digests=digests).present.tolist() == [0]
    assert bob.call(wire.FIND_PREFIX, digests=digests).length == 0
    got = bob.call(wire.GET, ttl_ms=1000, stop_at_miss=0, digests=digests)
    assert got.replicas.tolist() == [[0, 0]], "neither place nor right, and no tag"
    one = digests[0].tobytes()
    assert not bob.cold(wire.STAT, wire.StatRequest(one)).found
    assert bob.cold(wire.SUBMIT_TASK, wire.SubmitTask(0, one, (0,))).status == Status.NOT_FOUND
    for operation, more in (
        (wire.REMOVE, {"flags": 1}),
        (wire.REMOVE_REPLICAS, {"flags": 0, "segment": 0}),
        (wire.PIN, {"soft_pin": 1, "hard_pin": -1, "ttl_ms": -1}),
        (wire.HINT, {"action": 3, "priority": 0, "ttl_ms": -1}),
        (wire.RELEASE, {"generations": generation}),
        (wire.RENEW, {"ttl_ms": 1000, "generations": generation}),
        (wire.PUT_END, {"generations": generation, "checksums": np.zeros(1, np.uint64)}),
        (wire.PUT_REVOKE, {"late": 0, "generations": generation}),
    ):
        told = statuses(bob.call(operation, digests=digests, **more))
        nobody = np.array([[7, 7]], np.uint64)
        assert told == statuses(bob.call(operation, digests=nobody, **more)), operation.name
    assert alice.exists("hers")


def test_a_tenant_begins_nothing_under_a_key_of_another(kept, tenant):
    _, digests = kept
    bob = tenant("bob")
    for flags in (0, 1):  # 1: in place of what is there
        with pytest.raises(AuthError, match="another namespace"):
            bob.call(
                wire.PUT_START, **bob.put_request([b"x"], 10, flags=flags) | {"digests": digests}
            )
    mine = np.array([[1, 1]], np.uint64)
    with pytest.raises(AuthError, match="another namespace"):
        bob.call(wire.RENAME, overwrite=1, flags=1, sources=mine, targets=digests, names=[b"x"])
    renamed = bob.call(
        wire.RENAME, overwrite=1, flags=1, sources=digests, targets=mine, names=[b"x"]
    )
    assert statuses(renamed) == [Status.NOT_FOUND]


def test_events_and_snapshots_leave_out_what_is_anothers(kept, tenant):
    _, digests = kept
    alice, bob, pool = tenant("alice"), tenant("bob"), tenant("pool", "default")
    key = tuple(digests[0].tolist())

    def told(who):
        snapshot = who.call(wire.SNAPSHOT, cursor=0)
        events = who.call(
            wire.EVENTS, stream=snapshot.stream, number=1, limit=1000, wait_ms=0
        ).events.view(EVENT)
        return (
            key in {tuple(each) for each in snapshot.digests.tolist()},
            key in {(int(each["digest_lo"]), int(each["digest_hi"])) for each in events.ravel()},
            len(events),
        )

    shown, hidden, all_of_them = told(alice), told(bob), told(pool)
    assert shown[:2] == all_of_them[:2] == (True, True)
    assert hidden[:2] == (False, False)
    assert shown[2] == hidden[2], "events have the same numbers for all"


def test_removals_by_name_are_of_ones_own(kept, tenant):
    alice, _ = kept
    everything = wire.RemoveMatching("", "all", force=True)
    assert tenant("bob").cold(wire.REMOVE_MATCHING, everything).removed == 0
    assert [each.key for each in alice.list()] == ["hers"]


# A worker that does not know the pool's secret.


@pytest.fixture
def lending(cluster, folder, texts):
    """A second worker, with nothing but a credential of its own and the directory."""
    own = folder / "node.secret"
    own.write_bytes(texts[Role.WORKER])
    own.chmod(0o600)
    config = load(
        WorkerConfig,
        environ={},
        overrides={
            "name": "node", "master": cluster.address, "segments": "8MiB", "memory": "anonymous",
            "secret_file": str(own), "credentials": str(folder / "credentials"),
        },
    ).value  # fmt: skip
    worker = Worker(config, secret=secret_in(str(own)))
    worker.start()
    yield worker
    worker.stop(leases_s=0.0)


def test_a_worker_lends_and_copies_with_a_credential_of_its_own(
    cluster, folder, texts, tenant, lending
):
    file = folder / "alice-copies"
    file.write_bytes(texts["alice"])
    file.chmod(0o600)
    url = cluster.url.replace("/default", "/team-a")
    with Client(url, secret_file=str(file)) as client:
        client.put("here", b"value" * 1000, preferred=["worker-0"])
        [number] = lending.numbers
        digest = client.identity.digest("here")
        shard = tenant("alice")
        task = shard.cold(wire.SUBMIT_TASK, wire.SubmitTask(0, digest, (number,))).number
        asked = wire.TaskRequest(task)
        until(lambda: shard.cold(wire.TASK, asked).state == TaskState.SUCCESS)
        assert len(client.stat("here").replicas) == 2
        assert client.get("here") == b"value" * 1000
        client.remove("here", force=True)
        client.put("there", b"other" * 1000, preferred=["node"])
        assert client.get("there") == b"other" * 1000
        client.remove("there", force=True)


def test_who_knows_the_secret_of_the_pool_proves_nothing_to_such_a_worker(lending):
    with pytest.raises(AuthError, match="did not prove"):
        ask_at(lending.address, Probe(), Alive, SECRET, 60)


def test_a_writer_lends_no_memory(cluster, folder, texts):
    own = folder / "writer.secret"
    own.write_bytes(texts[Role.WRITER])
    own.chmod(0o600)
    overrides = {
        "master": cluster.address, "segments": "8MiB", "memory": "anonymous",
        "secret_file": str(own), "credentials": str(folder / "credentials"),
    }  # fmt: skip
    worker = Worker(
        load(WorkerConfig, environ={}, overrides=overrides).value, secret=secret_in(str(own))
    )
    with pytest.raises(AuthError, match="one of a writer") as refused:
        worker.start(timeout_s=30)
    worker.stop()
    assert refused.value.operation == "mount"
