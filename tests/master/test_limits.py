"""Limits of principals at the ports of a master: what is refused, to whom, and in which words."""

import contextlib
import logging
import re
import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_store import LocalCluster, credentials
from mooncake_store.client import Client
from mooncake_store.core.records import Status
from mooncake_store.core.tasks import TaskState
from mooncake_store.credentials import Alone, credential_of
from mooncake_store.errors import AuthError, IllegalClientError, NoSpaceError, OverloadedError
from mooncake_store.master import roster
from mooncake_store.master.lineage import Lineage
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.wire import shard as wire
from tests.master.wires import ClusterWire, ShardWire
from tests.waiting import until
from transfer_engine import audit
from transfer_engine.wire.rights import Role

MIB = 1 << 20
SECRET = secrets.token_hex(32).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("limits")


@pytest.fixture(scope="module")
def clusters(folder):
    """Pools by their number of shards, that believe one directory."""
    secret_file, directory = folder / "secret", str(folder / "credentials")
    secret_file.write_bytes(SECRET)
    secret_file.chmod(0o600)
    credentials.make(directory, "first", Role.ADMIN)
    guarded = {"secret_file": str(secret_file), "credentials": directory}
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(credentials, "LOOK_S", 0.0)  # whoever is made may come in at once
        yield {
            shards: stack.enter_context(
                LocalCluster(
                    workers=1, segment="16MiB", shards=shards, secret=SECRET, in_process=True,
                    master=guarded, worker=guarded,
                )
            )
            for shards in (1, 2)
        }  # fmt: skip


@pytest.fixture
def cluster(clusters):
    return clusters[1]


class Somebody:
    """A principal of his own, with limits, and connections that are his."""

    def __init__(self, folder, stack, role, namespaces, limits):
        self.name = f"u{secrets.token_hex(4)}"
        text = credentials.make(
            str(folder / "credentials"), self.name, role, namespaces=namespaces, limits=limits
        )
        self.namespaces = namespaces
        self.secret = Alone(credential_of(text.encode()))
        self.file = folder / f"{self.name}.secret"
        credentials.write_text(self.file, text)
        self._stack = stack

    def shard(self, cluster, namespace=None, **options):
        """A connection to the first shard."""
        namespace = namespace or self.namespaces[0]
        wires = ShardWire(
            self.port(cluster, namespace), namespace=namespace, secret=self.secret, **options
        )
        self._stack.callback(wires.close)
        return wires

    def keys(self, count):
        """Names that nobody else has: the digests of all are made in one way here."""
        return [f"{self.name}-{number}".encode() for number in range(count)]

    def port(self, cluster, namespace):
        request = cluster_wire.MapRequest(namespace)
        return self.master(cluster).ask(cluster_wire.MAP, request).shards[0]

    def master(self, cluster):
        wires = ClusterWire(cluster.address, secret=self.secret)
        self._stack.callback(wires.close)
        return wires

    def client(self, cluster):
        """A client; shards that are processes of their own let it in within a second."""
        url = cluster.url.replace("/default", f"/{self.namespaces[0]}")

        def let_in():
            with contextlib.suppress(AuthError):
                return Client(url, secret_file=str(self.file))

        return self._stack.enter_context(until(let_in, what="it is let in"))


@pytest.fixture
def somebody(folder):
    with contextlib.ExitStack() as stack:

        def make(role=Role.WRITER, namespaces=None, **limits):
            if namespaces is None:
                namespaces = [f"n{secrets.token_hex(4)}"]
            return Somebody(folder, stack, role, namespaces, limits)

        yield make


@pytest.fixture
def told(caplog, monkeypatch):
    """The lines that the log of the audit has since the test began."""
    caplog.set_level(logging.INFO, logger=audit.__name__)
    monkeypatch.setattr(audit, "_seldom", type(audit._seldom)())

    def lines():
        return [each.getMessage() for each in caplog.records if each.name == audit.__name__]

    return lines


def limited(who, most, of, taken):
    said = f"the credential of {who.name} has a limit of {most} for {of}"
    return rf"^{re.escape(said)}( on this shard)? \(taken: {taken}\)"


def statuses(reply):
    return [Status(each) for each in reply.tolist()]


# Clients and namespaces.


def test_a_client_too_many_is_refused_until_another_has_left(cluster, somebody, told):
    alice = somebody(clients=2)
    first, second = alice.shard(cluster), alice.shard(cluster)
    again = alice.shard(cluster, uuid=first.uuid)
    message = limited(alice, 2, "clients connected at once", 2)
    with pytest.raises(OverloadedError, match=message) as refused:
        alice.shard(cluster)
    assert refused.value.operation == "open"
    assert "close some of its clients" in refused.value.advice
    assert refused.value.retry_after_s > 0
    (line,) = told()
    assert line.startswith(f"{alice.name} from 127.0.0.1:")
    assert ": open refused: " in line
    first.close()
    with pytest.raises(OverloadedError):  # it has a connection yet
        alice.shard(cluster)
    again.close()

    def let_in():
        with contextlib.suppress(OverloadedError):
            return alice.shard(cluster)

    until(let_in, what="there is a place")
    assert second.exists([b"x"]) == [0]


def test_clients_of_others_are_not_counted(cluster, somebody):
    alice, bob = somebody(clients=1), somebody(clients=1)
    alice.shard(cluster)
    bob.shard(cluster)
    free = somebody()
    for _ in range(5):
        free.shard(cluster)


def test_a_client_that_has_closed_makes_room_for_another(cluster, somebody):
    alice = somebody(clients=1)
    first = alice.client(cluster)
    first.put("k", b"value")
    with pytest.raises(OverloadedError, match=limited(alice, 1, "clients connected at once", 1)):
        alice.client(cluster).get("k")
    first.close()

    def read():
        with contextlib.suppress(OverloadedError):
            return alice.client(cluster).get("k")

    assert until(read, what="it is let in") == b"value"


def test_namespaces_beyond_the_limit_are_not_begun(cluster, somebody):
    alice = somebody(namespaces=[], names=1)
    one, other = f"n{secrets.token_hex(4)}", f"n{secrets.token_hex(4)}"
    somebody().shard(cluster)
    alice.shard(cluster, "default")
    alice.shard(cluster, one)
    alice.shard(cluster, one)
    message = limited(alice, 1, "namespaces that it brings into being", 1)
    with pytest.raises(AuthError, match=message) as refused:
        alice.shard(cluster, other)
    assert "a namespace that there is" in refused.value.advice
    somebody(namespaces=[]).shard(cluster, other)
    alice.shard(cluster, other)


# Bytes, pins and groups.


def test_bytes_beyond_the_limit_are_refused_when_nothing_can_leave(cluster, somebody, told):
    alice = somebody(bytes=3 * MIB)
    shard = alice.shard(cluster)
    keys = alice.keys(5)
    shard.put(keys[:2], MIB)
    shard.get(keys[:2], ttl_ms=60_000)
    rows, _ = shard.put_start(keys[2:], MIB)
    assert statuses(rows["status"]) == [Status.OK, Status.LIMIT_BYTES, Status.LIMIT_BYTES]
    with pytest.raises(NoSpaceError, match=limited(alice, "3MiB", "objects", "3MiB")):
        shard.put_start(keys[3:], MIB)
    (line,) = told()
    assert re.search(r"put_start refused: .*on this shard \(taken: 3MiB\)", line)


def test_the_coldest_leave_for_what_is_put_and_others_keep_theirs(cluster, somebody):
    alice, bob = somebody(bytes=3 * MIB), somebody()
    free, bound = bob.shard(cluster), alice.shard(cluster)
    free.put(bob.keys(1), MIB)
    keys = alice.keys(10)
    for key in keys:
        bound.put([key], MIB)
    assert bound.exists(keys) == [0] * 7 + [1] * 3
    assert free.exists(bob.keys(1)) == [1]


def test_a_client_hears_it_with_name_limit_and_what_is_used(clusters, somebody):
    """Of a batch, keys of the shard that refused; what the other one took is there."""
    alice = somebody(bytes=4 * MIB)
    client = alice.client(clusters[2])
    keys = [f"k{number}" for number in range(8)]
    done = client.put_many(keys, [bytes(MIB)] * 8, hard_pin=True)
    errors = dict(done.errors())
    assert errors
    assert all(isinstance(error, NoSpaceError) for error in errors.values())
    there = client.exists_many(keys)
    assert [not found for found in there] == [at in errors for at in range(8)]
    assert 0 < sum(there) <= 4, "half of it on each shard"
    at = next(iter(errors))
    with pytest.raises(
        NoSpaceError, match=f"of {alice.name} has a limit of 2MiB for objects"
    ) as one:
        client.put(keys[at], bytes(MIB))
    assert "have the limit of bytes raised" in one.value.advice
    assert "a limit of the credential" in str(errors[at]) or alice.name in str(errors[at])


def test_room_is_told_as_the_limits_leave_it(cluster, somebody):
    alice = somebody(bytes=3 * MIB, pins=MIB)
    figures = alice.shard(cluster).stats()
    assert (figures.room_bytes, figures.pinnable_bytes) == (3 * MIB, MIB)
    assert somebody().shard(cluster).stats().room_bytes > 3 * MIB


def test_pins_beyond_the_limit_are_refused(cluster, somebody, told):
    alice = somebody(pins=MIB)
    shard = alice.shard(cluster)
    first, second, third = alice.keys(3)
    shard.put([first, second], MIB)

    def pin(*names):
        request = {"soft_pin": 0, "hard_pin": 1, "ttl_ms": -1}
        digests = shard.put_request(list(names), 1)["digests"]
        return statuses(shard.call(wire.PIN, digests=digests, **request).statuses)

    assert pin(first, second) == [Status.OK, Status.LIMIT_PINS]
    message = limited(alice, "1MiB", "hard pins", "1MiB")
    with pytest.raises(NoSpaceError, match=message) as refused:
        pin(second)
    assert refused.value.operation == "pin"
    with pytest.raises(NoSpaceError, match=message):
        shard.put_start([third], MIB, flags=wire.PutFlag.HARD_PIN)
    assert len(told()) == 1, "once a minute"
    shard.remove([first], flags=wire.RemoveFlag.FORCE)
    assert pin(second) == [Status.OK]
    shard.remove([second], flags=wire.RemoveFlag.FORCE)


def test_groups_beyond_the_limit_are_refused(cluster, somebody):
    alice = somebody(groups=2)
    shard = alice.shard(cluster)
    keys = alice.keys(5)
    shard.put(keys[:2], 100, groups=[b"x", b"y"])
    shard.put(keys[2:3], 100, groups=[b"x"])
    message = limited(alice, 2, "groups of objects", 2)
    with pytest.raises(NoSpaceError, match=message) as refused:
        shard.put_start(keys[3:], 100, groups=[b"x", b"z"])
    assert "put into groups that there are" in refused.value.advice
    shard.put(keys[3:], 100)


def test_what_waits_for_space_is_held_to_the_limit_as_well(cluster, somebody):
    """All is leased, so both wait; by the limit each of them alone may have all that it asks."""
    alice, bob = somebody(bytes=4 * MIB), somebody()
    free, bound = bob.shard(cluster), [alice.shard(cluster) for _ in range(2)]
    rows, _ = free.put_start(bob.keys(16), MIB)
    fill = [key for key, row in zip(bob.keys(16), rows, strict=True) if row["status"] == 0]
    assert set(free.put_end(fill, rows[rows["status"] == 0])) == {0}
    free.get(fill, ttl_ms=500)
    keys = alice.keys(6)
    with ThreadPoolExecutor(2) as both:
        waiting = [
            both.submit(shard.put_start, some, MIB, wait_ms=20_000)
            for shard, some in zip(bound, (keys[:3], keys[3:]), strict=True)
        ]
        given = [status for each in waiting for status in statuses(each.result()[0]["status"])]
    assert sorted(given) == [Status.LIMIT_BYTES] * 2 + [Status.OK] * 4
    assert bound[0].stats().tenant_bytes == 4 * MIB


# Copies and moves.


@pytest.fixture
def second(cluster, somebody):
    """The number of a segment that nobody is behind, so that copies to it never end."""
    master = somebody(Role.WORKER, namespaces=[]).master(cluster)
    uuid = secrets.token_bytes(16)
    segment = secrets.token_bytes(16), "still", 8 * MIB
    (number,) = master.mount(segment, uuid=uuid, name="still").numbers
    yield number
    master.unmount(uuid, 1, segment[0])


def test_copies_beyond_the_limit_wait_for_others_to_end(cluster, somebody):
    alice = somebody(tasks=1)
    shard = alice.shard(cluster)
    keys = alice.keys(2)
    shard.put(keys, 100)
    for key, place in zip(keys, shard.get(keys)[1], strict=True):
        done = shard.submit(0, key, int(place["segment"]))
        assert done.status == Status.OK
        assert done.state == TaskState.SUCCESS, "it lies there already, so it counts no more"


def test_copies_that_have_not_ended_are_counted(cluster, somebody, second, told):
    alice = somebody(tasks=2)
    shard = alice.shard(cluster)
    keys = alice.keys(3)
    shard.put(keys, 100, excluded=[b"still"])

    def refuse():
        """The worker that has them may have ended one before the next is asked for."""
        try:
            for key in keys:
                shard.submit(0, key, second)
        except OverloadedError as error:
            return error

    error = until(refuse, what="one is refused")
    assert re.search(limited(alice, 2, "copies and moves that have not ended", 2), error.what)
    assert error.retry_after_s > 0
    assert "submit_task refused" in told()[0]


def test_copies_count_for_the_bytes(cluster, somebody, second):
    alice = somebody(bytes=3 * MIB)
    shard = alice.shard(cluster)
    shard.put(alice.keys(1), 2 * MIB, excluded=[b"still"])
    with pytest.raises(NoSpaceError, match=limited(alice, "3MiB", "objects", "2MiB")):
        shard.submit(0, alice.keys(1)[0], second)


# What is lent.


def test_segments_beyond_the_limit_are_not_mounted(cluster, somebody, told):
    node = somebody(Role.WORKER, namespaces=[], segments=2)
    master, uuid = node.master(cluster), secrets.token_bytes(16)
    mine = [(secrets.token_bytes(16), f"s{number}", MIB) for number in range(3)]
    assert master.mount(*mine[:2], uuid=uuid, name=node.name).statuses == (0, 0)
    message = limited(node, 2, "segments lent", 2)
    with pytest.raises(AuthError, match=message) as refused:
        master.mount(mine[2], uuid=uuid, name=node.name)
    assert "fewer and larger" in refused.value.advice
    with pytest.raises(AuthError, match=message):
        master.mount(mine[2], name="another")
    assert "mount refused" in told()[0]
    assert master.mount(*mine[:2], uuid=uuid, name=node.name).statuses == (0, 0), "as before"
    other = somebody(Role.WORKER, namespaces=[], segments=1)
    assert other.master(cluster).mount(mine[2], name="other").statuses == (0,)
    master.unmount(uuid, 1, mine[0][0])
    fresh = secrets.token_bytes(16), "s4", MIB
    assert master.mount(fresh, uuid=uuid, name=node.name).statuses == (0,)
    master.unmount(uuid, 1, mine[1][0], fresh[0])


def test_bytes_lent_beyond_the_limit_are_not_mounted(cluster, somebody):
    node = somebody(Role.WORKER, namespaces=[], lent=3 * MIB)
    master, uuid = node.master(cluster), secrets.token_bytes(16)
    first = secrets.token_bytes(16), "s", 2 * MIB
    assert master.mount(first, uuid=uuid, name=node.name).statuses == (0,)
    with pytest.raises(AuthError, match=limited(node, "3MiB", "memory and disks lent", "2MiB")):
        master.mount((secrets.token_bytes(16), "t", 2 * MIB), uuid=uuid, name=node.name)
    master.unmount(uuid, 1, first[0])


def test_whose_a_worker_is_is_known_after_a_restart():
    before, after = roster.Roster(), roster.Roster()
    worker = roster.LentWorker(b"u" * 16, 1, "w", "h", principal="node7")
    spec = roster.wire.SegmentSpec(b"s" * 16, "s", MIB, b"")
    segment = before.announce(worker, spec)
    before.enter(segment)
    after.restore(before.registers(1, Lineage(), ()))
    assert after.workers[b"u" * 16].principal == "node7"


# Who has none.


def test_the_pools_secret_is_limited_by_nothing(cluster, somebody):
    alice = somebody(bytes=0, groups=0, pins=0)
    port = alice.port(cluster, alice.namespaces[0])
    pool = ShardWire(port, namespace=alice.namespaces[0], secret=SECRET)
    first, second = alice.keys(2)
    pool.put([first], 100, groups=[b"x"], flags=wire.PutFlag.HARD_PIN)
    with pytest.raises(NoSpaceError):
        alice.shard(cluster).put_start([second], 100)
    pool.close()


@pytest.mark.parametrize("other", ["alice", "the pool's secret"])
def test_nobody_else_speaks_for_a_client_and_is_held_to_its_limits(cluster, somebody, other):
    """Or who knows the uuid of one without limits would have none."""
    alice, bob = somebody(), somebody(bytes=0)
    if other == "alice":
        hers = alice.shard(cluster)
    else:
        port = alice.port(cluster, alice.namespaces[0])
        hers = ShardWire(port, namespace=alice.namespaces[0], secret=SECRET)
    with pytest.raises(IllegalClientError, match="another principal") as refused:
        bob.shard(cluster, uuid=hers.uuid)
    assert refused.value.operation == "open"
    newer = bob.shard(cluster, uuid=hers.uuid, epoch=2)
    with pytest.raises(NoSpaceError):
        newer.put_start(bob.keys(1), 100)
    hers.close()


def test_the_next_client_of_a_uuid_has_no_limits_of_the_one_before(cluster, somebody):
    alice = somebody(bytes=0)
    shard, namespace = alice.shard(cluster), alice.namespaces[0]
    port = alice.port(cluster, namespace)
    pool = ShardWire(port, uuid=shard.uuid, epoch=2, namespace=namespace, secret=SECRET)
    pool.put(alice.keys(1), 100)
    pool.close()
