"""Who did what only an admin may, and who was refused what is others': what the log says of it."""

import json
import logging
import re
import secrets

import numpy as np
import pytest

from mooncake_store import LocalCluster, credentials
from mooncake_store.credentials import credential_of
from mooncake_store.errors import AuthError, StoreError
from mooncake_store.master.cluster_service import REPEATED
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.wire import hosts, standby
from mooncake_store.wire import shard as wire
from tests.master.wires import ClusterWire, ShardWire
from transfer_engine import audit
from transfer_engine.lasting import Seldom
from transfer_engine.wire.keyring import Alone, read_only_secret
from transfer_engine.wire.rights import Role

SECRET = secrets.token_hex(32).encode()
ROLES = {"root": Role.ADMIN, "node": Role.WORKER, "looker": Role.READER}
ACTIONS = {
    cluster_wire.DRAIN, hosts.MOVE, hosts.SPLIT, hosts.MERGE,
    standby.PROMOTE, standby.HAND_OVER, standby.DROP,
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A directory of credentials, and what principals have: of roles, and two tenants."""
    where = str(tmp_path_factory.mktemp("audit") / "credentials")
    made = {name: credentials.make(where, name, role) for name, role in ROLES.items()}
    for name in ("alice", "bob"):
        made[name] = credentials.make(where, name, Role.WRITER, namespaces=[name])
    return where, made


@pytest.fixture(scope="module")
def guarded(texts, tmp_path_factory):
    """The settings of a pool that believes them."""
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return {"secret_file": str(file), "credentials": texts[0]}


@pytest.fixture(scope="module")
def cluster(guarded):
    with LocalCluster(
        workers=1, segment="16MiB", secret=SECRET, in_process=True, master=guarded, worker=guarded
    ) as running:
        yield running


@pytest.fixture
def asked_by(cluster, texts):
    """Connections to the master by the name of who asks."""
    opened = []

    def connect(name):
        without_name = {"": SECRET, "the read-only secret": read_only_secret(SECRET)}
        secret = without_name.get(name) or Alone(credential_of(texts[1][name].encode()))
        opened.append(ClusterWire(cluster.address, secret=secret))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


@pytest.fixture
def told(caplog, monkeypatch):
    """The lines that the log has of it since the test began."""
    caplog.set_level(logging.INFO, logger=audit.__name__)
    monkeypatch.setattr(audit, "_seldom", type(audit._seldom)())

    def lines():
        return [each.getMessage() for each in caplog.records if each.name == audit.__name__]

    return lines


def test_every_operation_of_admins_is_an_action_or_repeats():
    """What is new has to be said here."""
    of_admins = {each for each in cluster_wire.CLUSTER if each.needs == Role.ADMIN}
    assert of_admins == ACTIONS | REPEATED


@pytest.mark.parametrize(("name", "who"), [("root", "root"), ("", "the pool's secret")])
def test_an_action_is_told_with_who_from_where_what_and_how_it_ended(asked_by, told, name, who):
    wires = asked_by(name)
    wires.drain(0)
    wires.drain(0, cancel=True)
    with pytest.raises(StoreError):
        wires.ask(hosts.SPLIT, hosts.Split(3))
    drained, cancelled, split = told()
    where = rf"{re.escape(who)} from 127\.0\.0\.1:\d+: "
    assert re.fullmatch(
        where + r"drain\(number=0, cancel=False\): answered status=0, state='running'.*", drained
    )
    assert re.fullmatch(where + r"drain\(number=0, cancel=True\): answered status=0, .*", cancelled)
    assert re.match(where + r"split\(factor=3\): UnavailableError: ", split)


def test_what_only_asks_is_no_action(asked_by, told):
    wires = asked_by("root")
    wires.map()
    wires.status()
    wires.drain_status(0)
    wires.ask(hosts.MOVE, hosts.Move(0))
    assert told() == []


@pytest.mark.parametrize("name", ["node", "looker", "the read-only secret"])
def test_a_refusal_is_told_once_however_often_it_is_asked_for(asked_by, told, name):
    wires = asked_by(name)
    for _ in range(50):
        with pytest.raises(AuthError):
            wires.drain(0)
    with pytest.raises(AuthError):
        wires.ask(hosts.SPLIT, hosts.Split(2))
    (line,) = told()
    first = r" from 127\.0\.0\.1:\d+: drain refused: the credential is "
    assert re.match(re.escape(name) + first, line)


def test_a_tenant_who_asks_for_what_is_anothers_is_told(cluster, texts, told, asked_by):
    port = asked_by("root").map().shards[0]

    def shard(name, namespace):
        secret = Alone(credential_of(texts[1][name].encode()))
        return ShardWire(port, namespace=namespace, secret=secret)

    with pytest.raises(AuthError):
        shard("bob", "alice")
    alice, bob = shard("alice", "alice"), shard("bob", "bob")
    digests = np.array([[5, 5]], np.uint64)
    alice.call(wire.PUT_START, **alice.put_request([b"k"], 10) | {"digests": digests})
    with pytest.raises(AuthError):
        bob.call(wire.PUT_START, **bob.put_request([b"k"], 10) | {"digests": digests})
    alice.close()
    bob.close()
    opened, begun = told()
    opened, begun = (re.sub(r"127\.0\.0\.1:\d+", "PEER", line) for line in (opened, begun))
    who = "bob from PEER"
    assert opened == f"{who}: open refused: the credential of bob is not for namespace 'alice'"
    assert begun == f"{who}: put_start refused: a key is taken by an object of another namespace"


def test_the_address_is_of_the_first_and_the_count_of_all(told, monkeypatch):
    """What came within the minute is told with the next line, whoever sent it."""
    now = 1000.0
    monkeypatch.setattr(audit, "Seldom", lambda: Seldom(clock=lambda: now))
    for port in range(1, 6):
        audit.refused("bob", f"10.0.0.9:{port}", "remove", "why", "role")
    now += 61
    audit.refused("bob", "10.0.0.7:1", "remove", "why", "role")
    first, second = told()
    assert first == "bob from 10.0.0.9:1: remove refused: why"
    assert second == ("bob from 10.0.0.7:1: remove refused: why (5 times since this was told last)")


def test_no_line_has_a_secret_or_more_than_the_beginning_of_what_was_sent(asked_by, told, texts):
    wires = asked_by("root")
    with pytest.raises(StoreError):
        wires.ask(hosts.MOVE, hosts.Move(0, "x" * 1000))
    (line,) = told()
    assert len(line) < 500
    assert SECRET.decode() not in line
    assert not any(text.rpartition(":")[2] in line for text in texts[1].values())


def test_refusals_do_not_fill_the_memory(told):
    for number in range(2 * audit._KINDS_MAX):
        audit.refused(f"somebody{number}", "here:1", "drain", "why", "role")
    assert len(audit._seldom) == audit._KINDS_MAX


def test_it_is_there_in_json_as_well(start_program, guarded):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in guarded.items()]
    master = start_program(
        "-m", "mooncake_store", "master", "--port", 0, "--log-json", "--json", *options
    )
    address = json.loads(master.wait_for_line('"ready": true', 100))["address"]
    wires = ClusterWire(address, secret=SECRET)
    with pytest.raises(StoreError):
        wires.ask(hosts.MERGE, hosts.Merge(2))
    wires.close()
    line = json.loads(master.wait_for_line('"transfer_engine.audit"'))
    assert line["level"] == "info"
    assert ": merge(factor=2): UnavailableError: " in line["message"]
