"""Who is let in with the settings of a master or a worker, in a pool that has a secret."""

import contextlib
from pathlib import Path

from mooncake_store import LocalCluster, credentials
from mooncake_store.config.settings import ClientConfig, MasterConfig, WorkerConfig, load
from mooncake_store.credentials import Alone, credential_of, gate_of, sealing, secret_in
from mooncake_store.errors import AuthError, ConfigError
from tests.certificates import Authority
from tests.master.wires import ClusterWire
from tests.strangers import relay
from transfer_engine import SegmentDescriptor, TransferServer
from transfer_engine.notify import Alive, Probe
from transfer_engine.transports.calling import ask_at


def alice_of(given):
    """What alice proves, and what the pool's secret is."""
    folder = Path(given["secret_file"]).parent / "credentials"
    text = credentials.rotate(str(folder), "alice", keep_s=0)
    return Alone(credential_of(text.encode())), secret_in(given["secret_file"])


def meets(call, *arguments):
    """Whether somebody is let in."""
    try:
        call(*arguments)
    except AuthError:
        return False
    return True


@contextlib.contextmanager
def guarded_worker(secret, given):
    """The address of the data port of a worker of a pool with a secret."""
    settings = {"segments": "1MiB", "transports": "tcp", **given}
    with LocalCluster(1, in_process=True, secret=secret, worker=settings) as cluster:
        known = ClusterWire(cluster.address, secret=secret)
        [segment] = known.segments()
        known.close()
        found = SegmentDescriptor.decode(segment.descriptor)
        yield f"{found.tcp_host}:{found.tcp_port}"


def master_meets_alice(given):
    alice, secret = alice_of(given)
    with LocalCluster(0, in_process=True, secret=secret, master=given) as cluster:
        return meets(lambda: ClusterWire(cluster.address, secret=alice).close())


def worker_meets_alice(given):
    alice, secret = alice_of(given)
    with guarded_worker(secret, given) as address:
        return meets(ask_at, address, Probe(), Alive, alice, 30)


def reached_through_a_tunnel(given):
    secret = secret_in(given["secret_file"])
    with (
        LocalCluster(0, in_process=True, secret=secret, master=given) as cluster,
        relay(cluster.address) as address,
    ):
        return meets(lambda: ClusterWire(address, secret=secret).close())


def worker_reached_through_a_tunnel(given):
    secret = secret_in(given["secret_file"])
    with guarded_worker(secret, given) as there, relay(there) as address:
        return meets(ask_at, address, Probe(), Alive, secret, 30)


TLS = "<tls>"
"""The folder of `write_certificates`."""
_HERE, _POOL = "127.0.0.1", "pool.example"
_SHOWN = {"tls_certificate": f"{TLS}/{_HERE}.pem"}
_BELIEVED = {"tls_authority": f"{TLS}/authority.pem"}


def write_certificates(folder):
    """An authority, and a certificate for this host and one for another name, with their keys."""
    folder.mkdir()
    authority = Authority(folder)
    authority.signs(_HERE)
    authority.signs(_POOL)


def _known(given, **settings):
    """The secret of the pool, for a client with these settings."""
    config = load(ClientConfig, environ={}, overrides=settings).value
    return sealing(config, secret_in(given["secret_file"]))


def _files(given):
    folder = Path(given["secret_file"]).parent / "tls"
    return str(folder / "authority.pem"), str(folder / f"{_HERE}.pem")


@contextlib.contextmanager
def _master(secret, given):
    """The port of a master, and how somebody is met there."""
    with LocalCluster(0, in_process=True, secret=secret, master=given) as cluster:
        yield lambda known: meets(lambda: ClusterWire(cluster.address, secret=known).close())


@contextlib.contextmanager
def _data_port(secret, given):
    """The data port that a worker has, and how somebody is met there."""
    config = load(WorkerConfig, environ={}, overrides=given).value
    with TransferServer(unix=None, **gate_of(config, secret)) as server:
        address = "{}:{}".format(*server.tcp_address)
        yield lambda known: meets(ask_at, address, Probe(), Alive, known, 30)


def _met(port, *, sealed):
    """Whether a client is met at a port with the settings given that speaks TLS, or does not."""

    def observe(given):
        settings = {"tls_authority": _files(given)[0]} if sealed else {}
        with port(secret_in(given["secret_file"]), given) as meeting:
            return meeting(_known(given, **settings))

    return observe


def _meets_a_master(given):
    """Whether a client with these settings gets in at a master that asks for a certificate."""
    authority, own = _files(given)
    there = {"tls_certificate": own, "tls_authority": authority}
    settings = {name: value for name, value in given.items() if name.startswith("tls_")}
    with _master(secret_in(given["secret_file"]), there) as meeting:
        return meeting(_known(given, **settings))


def _begins(program):
    """Whether the certificate of a program can be used."""

    def observe(given):
        config = load(program, environ={}, overrides=given).value
        try:
            sealing(config, secret_in(given["secret_file"]))
        except ConfigError:
            return False
        return True

    return observe


def _believes(program):
    """Whether a program believes a master whose certificate is for its address."""

    def observe(given):
        secret = secret_in(given["secret_file"])
        config = load(program, environ={}, overrides=given).value
        with _master(secret, {"tls_certificate": _files(given)[1]}) as meeting:
            return meeting(sealing(config, secret))

    return observe


def of_tls(secret):
    """What is changed for each setting of TLS, what is seen then, and what is given besides."""
    guarded = {"secret_file": secret}
    key, name = {"tls_key": f"{TLS}/{_POOL}.pem"}, {"tls_name": _POOL}
    found = {
        "client.tls_authority": (_BELIEVED, _meets_a_master, guarded | _SHOWN),
        "client.tls_certificate": (_SHOWN, _meets_a_master, guarded | _BELIEVED),
    }
    for program, port in ((MasterConfig, _master), (WorkerConfig, _data_port)):
        table, shown = program.table, guarded | _SHOWN
        found[f"{table}.tls_certificate"] = _SHOWN, _met(port, sealed=False), guarded
        found[f"{table}.tls_authority"] = _BELIEVED, _met(port, sealed=True), shown
    for program in (MasterConfig, WorkerConfig, ClientConfig):
        table, shown = program.table, guarded | _SHOWN
        found[f"{table}.tls_key"] = key, _begins(program), shown
        found[f"{table}.tls_name"] = name, _believes(program), shown | _BELIEVED
    return found
