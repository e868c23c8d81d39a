"""Who is let in with the settings of a master or a worker, in a pool that has a secret."""

import contextlib
from pathlib import Path

from mooncake_store import LocalCluster, credentials
from mooncake_store.credentials import Alone, credential_of, secret_in
from mooncake_store.errors import AuthError
from tests.master.wires import ClusterWire
from tests.strangers import relay
from transfer_engine import SegmentDescriptor
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
