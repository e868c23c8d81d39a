"""A pool whose programs speak nothing but TLS: every port of masters, standbys, hosts, workers."""

import json
import socket

import numpy as np
import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.config.settings import ClientConfig, MasterConfig, WorkerConfig, load
from mooncake_store.credentials import sealing
from mooncake_store.errors import AuthError, ConfigError
from tests.certificates import Authority
from tests.master.wires import ClusterWire
from tests.strangers import relay
from tests.waiting import PATIENCE_S, until
from transfer_engine import SegmentDescriptor
from transfer_engine.notify import Alive, Probe
from transfer_engine.transports.calling import ask_at

SECRET = b"the secret of this pool"
HERE = "127.0.0.1"
DEADLINE = f"{PATIENCE_S}s"
KEYS = [f"key/{number}" for number in range(60)]


def value_of(key):
    seed = int.from_bytes(key.encode(), "little") % 1000
    return np.random.default_rng(seed).bytes(1 + 37_000 * (seed % 9))


def check_all(client):
    got = client.get_many(KEYS).check().values
    assert [bytes(value) for value in got] == [value_of(key) for key in KEYS]


def lent_by(client):
    return sum(shard.bytes_total for shard in client.store_stats())


@pytest.fixture
def files(tmp_path):
    """What programs are told: the secret, a certificate for this host, and who signed it."""
    authority = Authority(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    return {
        "secret_file": str(secret),
        "tls_certificate": str(authority.signs(HERE)),
        "tls_authority": str(authority.file),
    }


def over_tcp(url, files, **more):
    return Client(url, transports="tcp", deadline=DEADLINE, **files, **more)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_pool_works_as_without(files, shards):
    given = {key: value for key, value in files.items() if key != "secret_file"}
    lent = {"segments": "32MiB", "transports": "tcp", **given}
    master = {"shards": shards, "client_ttl": "1h", **given}
    with (
        LocalCluster(3, secret=SECRET, master=master, worker=lent) as cluster,
        over_tcp(cluster.url, files) as client,
    ):
        client.put("alone", b"a value")
        assert client.get("alone") == b"a value"
        client.put_many(KEYS, [value_of(key) for key in KEYS], replicas=2).check()
        check_all(client)
        assert client.get_range(KEYS[1], 0, 1) == value_of(KEYS[1])[:1]
        big = max(KEYS, key=lambda key: len(value_of(key)))
        assert client.get_range(big, 5_000, 100_000) == value_of(big)[5_000:105_000]
        lent_bytes = lent_by(client)
        cluster.kill_worker(0)
        until(lambda: lent_by(client) == lent_bytes * 2 // 3, what="its memory is given up")

        def whole():
            """Whether the workers that live have copied what was lost from one another."""
            return all(len(client.query(key).replicas) == 2 for key in KEYS)

        until(whole, what="all replicas are there again")
        cluster.kill_worker(1)
        until(lambda: lent_by(client) == lent_bytes // 3, what="its memory is given up")
        check_all(client)


def test_others_are_told_what_is_missing(files, tmp_path):
    given = {key: value for key, value in files.items() if key != "secret_file"}
    lent = {"segments": "1MiB", "transports": "tcp", **given}
    with LocalCluster(1, in_process=True, secret=SECRET, master=given, worker=lent) as cluster:
        alone = {"secret_file": files["secret_file"]}
        with pytest.raises(AuthError, match="this port speaks TLS only"):
            Client(cluster.url, **alone)
        with pytest.raises(AuthError, match="asks for a certificate"):
            Client(cluster.url, tls_authority=files["tls_authority"], **alone)
        another = Authority(tmp_path, "another")
        with pytest.raises(AuthError, match="not accepted"):
            Client(cluster.url, **files | {"tls_authority": str(another.file)})
        with over_tcp(cluster.url, files) as client:
            client.put("key", b"value")
            assert client.get("key") == b"value"


def test_neither_keys_nor_values_can_be_read_between(files):
    given = {key: value for key, value in files.items() if key != "secret_file"}
    lent = {"segments": "8MiB", "transports": "tcp", **given}
    master = {**given, "reached_as": "any"}
    seen = bytearray()
    with (
        LocalCluster(1, in_process=True, secret=SECRET, master=master, worker=lent) as cluster,
        relay(cluster.address, seen=seen) as between,
        over_tcp(f"mooncake://{between}/default", files) as client,
    ):
        client.put("a-key-to-be-kept-secret", b"x" * 1000)
        assert [each.key for each in client.list()] == ["a-key-to-be-kept-secret"]
    assert len(seen) > 1000
    assert b"kept-secret" not in seen


@pytest.mark.slow
def test_standbys_and_hosts_follow_over_tls(files, start_program, tmp_path, monkeypatch):
    for name, value in files.items():
        monkeypatch.setenv(f"MOONCAKE_{name.upper()}", value)
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]

    def begin(*arguments, wait=True):
        program = start_program("-m", "mooncake_store", *arguments, "--json")
        return json.loads(program.wait_for_line('"ready"'))["address"] if wait else program

    lead = begin(
        "master", "--port", port, "--shards", 2, "--lead", "0", "--state", tmp_path / "master",
        wait=False,
    )  # fmt: skip
    begin("shard", "serve", "--of", f"{HERE}:{port}", "--lead", "1", "--state", tmp_path / "host")
    master = json.loads(lead.wait_for_line('"ready"'))["address"]
    standby = begin("standby", "--of", master, "--port", 0, "--state", tmp_path / "standby")
    begin("worker", "--master", master, "--segment", "32MiB", "--transport", "tcp")
    with Client(f"mooncake://{master}/tests", transports="tcp", deadline=DEADLINE) as client:
        client.put_many(KEYS, [value_of(key) for key in KEYS]).check()
        check_all(client)
    found = start_program("-m", "mooncake_store", "standbys", master, "--json")
    assert found.wait() == 0
    assert standby in found.output


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        (ClientConfig, {"tls_key": "k"}, "tls_certificate"),
        (ClientConfig, {"tls_name": "pool"}, "tls_authority"),
        (MasterConfig, {"tls_authority": "a"}, "tls_certificate"),
        (WorkerConfig, {"tls_authority": "system", "tls_certificate": "c"}, "any certificate"),
    ],
)
def test_settings_that_miss_something_are_refused(config, given, said):
    with pytest.raises(ConfigError, match=said):
        load(config, environ={}, overrides=given)


def test_tls_without_a_secret_is_refused(files):
    config = load(ClientConfig, environ={}, overrides=files).value
    with pytest.raises(ConfigError, match="nothing says who may come in"):
        sealing(config, None)


def test_a_key_that_others_can_read_is_refused(files, tmp_path):
    key = tmp_path / "key.pem"
    key.write_bytes((tmp_path / f"{HERE}.pem").read_bytes())
    key.chmod(0o644)
    config = load(ClientConfig, environ={}, overrides=files | {"tls_key": str(key)}).value
    with pytest.raises(ConfigError, match="mode 0644"):
        sealing(config, SECRET)


def test_data_ports_speak_tls_as_well(files):
    given = {key: value for key, value in files.items() if key != "secret_file"}
    lent = {"segments": "1MiB", "transports": "tcp", **given}
    known = sealing(load(ClientConfig, environ={}, overrides=files).value, SECRET)
    with LocalCluster(1, in_process=True, secret=SECRET, master=given, worker=lent) as cluster:
        wire = ClusterWire(cluster.address, secret=known)
        (segment,) = wire.segments()
        wire.close()
        found = SegmentDescriptor.decode(segment.descriptor)
        address = f"{found.tcp_host}:{found.tcp_port}"
        assert ask_at(address, Probe(), Alive, known, PATIENCE_S)
        with pytest.raises(AuthError, match="this port speaks TLS only"):
            ask_at(address, Probe(), Alive, SECRET, PATIENCE_S)
