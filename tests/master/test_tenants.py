"""What a tenant learns by asking of things of another: every operation, by every role.

The matrix comes from the registries. An operation is asked of one's own thing, of another
namespace's and of what is not there, by credentials of each role for one namespace. What is
another's has to be answered as what is not there, byte for byte; what is one's own otherwise, or
the case asks for nothing. An operation, or a field of one, without a place here fails.
"""

import secrets
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from mooncake_store import LocalCluster, credentials
from mooncake_store.core.records import PUT_ROW, Status
from mooncake_store.credentials import Alone, credential_of
from mooncake_store.errors import AuthError, StoreError
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.wire import hosts
from mooncake_store.wire import shard as wire
from tests.master.wires import ClusterWire, ShardWire
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.wire.rights import Role
from transfer_engine.wire.schema import Packed

SECRET = secrets.token_hex(32).encode()
OWN, FOREIGN, NOWHERE = "team-a", "team-b", "team-nowhere"
SIZE = 1000
REGISTRIES = (
    cluster_wire.CLUSTER, cluster_wire.LIVENESS, cluster_wire.ADMIN, hosts.HOST, wire.SHARD,
)  # fmt: skip


class Thing(NamedTuple):
    """All there is to name of an object: one of a tenant, or one that is not there."""

    namespace: str
    digest: bytes
    name: bytes
    generation: int
    task: int
    """The number of a copy of it that was asked for."""

    @property
    def key(self):
        """Its digest as a column."""
        return np.frombuffer(self.digest, np.uint64).reshape(1, 2)

    @property
    def generations(self):
        """Its generation as a column."""
        return np.array([self.generation], np.uint32)


class Case(NamedTuple):
    """How an operation is asked of a thing, and the fields by which it names that."""

    names: set[str]
    asked: object
    taken: bool = False
    """Whether something is to begin under its key, which is refused where that is another's."""
    state: str = "readable"
    """In which one's own thing is another matter than what is not there..."""
    told: Role = Role.READER
    """...and from which role on; others are answered the same of everything."""


def key_of(**others):
    """Of a column of digests, and of further fields that name nothing."""
    return Case({"digests"}, lambda thing: {"digests": thing.key, **others})


def turn_of(state="readable", told=Role.READER, **others):
    """Of digests with their generations."""
    return Case(
        {"digests", "generations"},
        lambda thing: {"digests": thing.key, "generations": thing.generations, **others},
        state=state,
        told=told,
    )


def put_of(thing):
    """A put under its key."""
    return {
        "flags": 0, "replicas": 1, "replicas_min": 1, "soft_pin": 0, "placement": -1,
        "soft_pin_ttl_ms": -1, "wait_ms": 0, "number": 0, "digests": thing.key,
        "sizes": np.array([SIZE]), "names": [thing.name], "groups": [], "preferred": [],
        "excluded": [],
    }  # fmt: skip


def spare():
    """A key that nobody has."""
    return np.frombuffer(secrets.token_bytes(16), np.uint64).reshape(1, 2)


def renamed(thing, *, to):
    """A renaming of it, or to its key."""
    sources, targets = (spare(), thing.key) if to else (thing.key, spare())
    columns = {"sources": sources, "targets": targets, "names": [b"another name"]}
    return {"overwrite": 0, "flags": 1, **columns}


def matching(kind, pattern):
    """A removal by name."""
    return Case({"pattern"}, lambda thing: wire.RemoveMatching(pattern(thing.name.decode()), kind))


CASES = [
    ("open", Case({"namespace"}, lambda thing: wire.OpenClient(
        secrets.token_bytes(16), 1, "h", thing.namespace))),
    ("map", Case({"namespace"}, lambda thing: cluster_wire.MapRequest(thing.namespace))),
    ("put_start", Case({"digests"}, put_of, taken=True)),
    ("put_end", turn_of("writing", checksums=np.zeros(1, np.uint64))),
    ("put_end_shown", turn_of(
        "writing", checksums=np.zeros(1, np.uint64), receipts=np.zeros(1, np.int64),
        tags=np.zeros(1, np.uint64))),
    ("put_revoke", turn_of("writing", late=0)),
    ("get", key_of(ttl_ms=1000, stop_at_miss=0)),
    ("get", key_of(ttl_ms=0, stop_at_miss=0)),
    ("exists", key_of()),
    ("find_prefix", key_of()),
    ("renew", turn_of(ttl_ms=1000)),
    ("release", turn_of(told=Role.WORKER)),
    ("remove", key_of(flags=0)),
    ("remove", key_of(flags=wire.RemoveFlag.FORCE)),
    ("remove_replicas", key_of(flags=0, segment=0)),
    ("rename", Case({"sources"}, lambda thing: renamed(thing, to=False))),
    ("rename", Case({"targets"}, lambda thing: renamed(thing, to=True), taken=True)),
    ("pin", key_of(soft_pin=1, hard_pin=-1, ttl_ms=-1)),
    ("pin", key_of(soft_pin=0, hard_pin=1, ttl_ms=-1)),
    *(("hint", key_of(action=action, priority=1, ttl_ms=1000)) for action in range(5)),
    ("list", Case({"prefix"}, lambda thing: {
        "cursor": 0, "limit": 100, "prefix": np.frombuffer(thing.name, np.uint8)})),
    ("stat", Case({"digest"}, lambda thing: wire.StatRequest(thing.digest))),
    ("remove_matching", matching("prefix", lambda name: name)),
    ("remove_matching", matching("glob", lambda name: f"*{name[1:]}")),
    ("remove_matching", matching("regex", lambda name: f"^{name}$")),
    ("submit_task", Case({"digest"}, lambda thing: wire.SubmitTask(0, thing.digest, (0,)))),
    ("submit_task", Case({"digest"}, lambda thing: wire.SubmitTask(1, thing.digest, (0,)))),
    ("task", Case({"number"}, lambda thing: wire.TaskRequest(thing.task))),
]  # fmt: skip
TELLING = {
    "events": {"stream": 0, "number": 1, "limit": 1000, "wait_ms": 0},
    "snapshot": {"cursor": 0},
    "list": {"cursor": 0, "limit": 1000, "prefix": np.empty(0, np.uint8)},
    "stats": wire.StatsRequest(),
    "remove_matching": wire.RemoveMatching("", "all"),
}
"""What tells of many objects, or takes many, without naming any."""
POOL = {
    "segments", "status", "drain_status", "standby", "hosts", "mount", "unmount", "ping", "held",
    "fetch_tasks", "finish_task", "fetch_hauls", "finish_haul", "drain", "registers", "promote",
    "drop", "join", "serving", "stay", "move", "split", "hand_over", "merge", "relay", "copy",
    "lead", "mount_slice", "segment_state", "slices", "standbys", "count", "yield", "guests",
    "outstanding", "guests_left", "journal", "metrics", "tasks", "namespaces", "set_quota",
    "about",
}  # fmt: skip
"""What is about the pool itself, which is nobody's and everybody's: whoever has the role may."""
PLAIN = {
    "uuid", "epoch", "host", "run",  # of who asks himself
    "flags", "replicas", "replicas_min", "soft_pin", "hard_pin", "placement", "soft_pin_ttl_ms",
    "wait_ms", "sizes", "names", "groups", "checksums", "receipts", "tags", "late", "ttl_ms",
    "stop_at_miss", "overwrite", "action", "priority", "cursor", "limit", "kind", "force",
    "rows_max", "own_leases", "stream", "number", "generations",
    "preferred", "excluded", "segment", "targets", "source",  # segments, which are the pool's
}  # fmt: skip
"""Fields that lead to no thing of anybody. Groups are of a namespace by themselves."""


def fields(operation):
    """The fields of a request."""
    layout = operation.request
    if isinstance(layout, Packed):
        return {name for name, _ in layout.scalars} | {each.name for each in layout.columns}
    return set(layout.kind.__struct_fields__)


def test_every_operation_and_every_field_has_a_place():
    known = {each.name: each for registry in REGISTRIES for each in registry}
    named = {name for name, _ in CASES}
    assert named | TELLING.keys() | POOL == known.keys()
    assert not (named | TELLING.keys()) & POOL
    for name in named | TELLING.keys():
        tried = {field for each, case in CASES if each == name for field in case.names}
        assert fields(known[name]) <= tried | PLAIN, name
        assert not {"digests", "digest", "sources"} & fields(known[name]) - tried, name
    for name in POOL:
        changes = known[name].needs >= Role.WORKER
        assert changes or not fields(known[name]) - {"numbers", "number"}, name


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_bytes(SECRET)
    guarded = {"secret_file": str(secret), "credentials": str(folder / "credentials")}
    made = {
        (role, namespace): Alone(credential_of(credentials.make(
            guarded["credentials"], f"{role.name.lower()}-{namespace}", role,
            namespaces=[namespace]).encode()))
        for role in Role for namespace in (OWN, FOREIGN)
    }  # fmt: skip
    with LocalCluster(
        workers=1, segment="32MiB", secret=SECRET, master=guarded, worker=guarded
    ) as running:
        yield running, made


@pytest.fixture(scope="module")
def ports(cluster):
    running, _ = cluster
    wires = ClusterWire(running.address, secret=SECRET)
    shard = wires.map().shards[0]
    wires.close()
    return {cluster_wire.CLUSTER: running.address, wire.SHARD: shard}


@pytest.fixture(scope="module")
def session(cluster, ports):
    """Connections by role and namespace: open ones to the shard, others elsewhere."""
    _, made = cluster
    opened = {}

    def of(role, namespace=OWN, registry=wire.SHARD, *, fresh=False):
        secret = made[role, namespace]
        if registry is not wire.SHARD or fresh:
            return BlockingConnection.connect(ports[registry], registry, secret=secret)
        if (role, namespace) not in opened:
            opened[role, namespace] = ShardWire(
                ports[wire.SHARD], namespace=namespace, secret=secret
            )
        return opened[role, namespace].connection

    yield of
    for each in opened.values():
        each.close()


def ask(connection, operation, *request, **columns):
    """What an operation is answered with."""
    body = operation.request.pack(*request, **columns)
    return operation.reply.unpack(connection.call(operation, body, timeout_s=60))


@pytest.fixture(scope="module")
def thing(session):
    """Make an object of a namespace, or begin one as who is to end its put; or make none.

    Workers end puts without showing that something was written.
    """

    def make(namespace, state="readable", role=Role.WRITER):
        digest, name = secrets.token_bytes(16), b"thing-" + secrets.token_hex(8).encode()
        if namespace == NOWHERE:
            return Thing(namespace, digest, name, 1, 1 << 40)
        least = Role.WORKER if state == "readable" else Role.WRITER
        connection = session(max(role, least), namespace)
        begun = ask(connection, wire.PUT_START, **put_of(Thing(namespace, digest, name, 0, 0)))
        (row,) = begun.rows.view(PUT_ROW)
        assert row["status"] == Status.OK
        made = Thing(namespace, digest, name, int(row["generation"]), 0)
        if state == "writing":
            return made
        ended = ask(
            connection, wire.PUT_END, digests=made.key, generations=made.generations,
            checksums=np.zeros(1, np.uint64),
        )  # fmt: skip
        assert ended.statuses.tolist() == [Status.OK]
        task = ask(connection, wire.SUBMIT_TASK, wire.SubmitTask(0, digest, (0,)))
        assert task.status == Status.OK
        return made._replace(task=task.number)

    return make


BY_NAME = {each.name: (registry, each) for registry in REGISTRIES for each in registry}
MATRIX = [
    pytest.param(name, case, role, state, id=f"{at}-{name}-{role.name}-{state}")
    for at, (name, case) in enumerate(CASES)
    for role in Role
    for state in ("readable", "writing")
]


@pytest.fixture
def answered(session):
    """What an operation is answered with, as bytes, where it is asked of a thing."""

    def ask(role, name, case, thing):
        registry, operation = BY_NAME[name]
        wish = case.asked(thing)
        packed = isinstance(operation.request, Packed)
        body = operation.request.pack(**wish) if packed else operation.request.pack(wish)
        alone = registry is not wire.SHARD or operation is wire.OPEN
        connection = session(role, registry=registry, fresh=alone)
        try:
            reply = connection.call(operation, body, timeout_s=60)
        except StoreError as error:
            told = f"{type(error).__name__}: {error}"
            for echoed in repr(thing.namespace), thing.digest.hex(), thing.name.decode():
                told = told.replace(echoed, "one")
            return told.encode()
        finally:
            if alone:
                connection.close()
        if operation is wire.TASK:  # it says which number was asked for
            told = operation.reply.unpack(reply)
            return operation.reply.pack(msgspec.structs.replace(told, number=0))
        return bytes(reply)

    return ask


def seen(connection, thing):
    """What its own tenant sees of an object, but for its age."""
    told = ask(connection, wire.STAT, wire.StatRequest(thing.digest))
    return msgspec.structs.replace(told, age_ms=0)


@pytest.mark.parametrize(("name", "case", "role", "state"), MATRIX)
def test_what_is_anothers_is_answered_as_what_is_not_there(
    session, thing, answered, name, case, role, state
):
    _, operation = BY_NAME[name]
    hers, nothing = thing(FOREIGN, state), thing(NOWHERE)
    owner = session(Role.WRITER, FOREIGN)
    before = seen(owner, hers)
    of_hers, of_nothing = (answered(role, name, case, each) for each in (hers, nothing))
    assert seen(owner, hers) == before
    assert hers.digest not in of_hers
    assert hers.name not in of_hers
    if operation.needs > role:
        assert of_hers.startswith(b"AuthError")
        assert of_hers == of_nothing
        return
    if case.taken:
        assert of_hers.startswith(b"AuthError: a key is taken by an object of another namespace")
        assert not of_nothing.startswith(b"AuthError")
        return
    assert of_hers == of_nothing
    if state == case.state:
        mine = thing(OWN, state, role)
        of_mine = answered(role, name, case, mine)
        assert (of_mine != of_nothing) == (role >= case.told), "this case asks for nothing"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", TELLING)
def test_what_tells_of_many_tells_of_ones_own(session, thing, name, role):
    _, operation = BY_NAME[name]
    hers, mine = thing(FOREIGN), thing(OWN)
    wish, packed = TELLING[name], isinstance(operation.request, Packed)
    if name == "events":  # of this life of the shard
        wish = wish | {"stream": ask(session(role), wire.SNAPSHOT, cursor=0).stream}
    body = operation.request.pack(**wish) if packed else operation.request.pack(wish)
    before = seen(session(Role.WRITER, FOREIGN), hers)
    if operation.needs > role:
        with pytest.raises(AuthError):
            session(role).call(operation, body, timeout_s=60)
    else:
        reply = bytes(session(role).call(operation, body, timeout_s=60))
        assert hers.digest not in reply
        assert hers.name not in reply
        if name in ("events", "snapshot"):
            assert mine.digest in reply
        elif name == "list":
            assert mine.name in reply
    assert seen(session(Role.WRITER, FOREIGN), hers) == before
