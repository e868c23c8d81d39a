"""What is seen of the settings of a client: each function makes one with those it is given."""

import contextlib
import time
from unittest import mock

from mooncake_store import Client, LocalCluster
from mooncake_store.client.setup import Setup
from mooncake_store.errors import StoreError


@contextlib.contextmanager
def client(given, **options):
    """A client with these settings, and the cluster it is connected to."""
    with LocalCluster(2, "4MiB", in_process=True) as cluster:
        url = given.get("url", "default")
        rest = {name: value for name, value in given.items() if name != "url"}
        with Client(f"mooncake://{cluster.address}/{url}", **rest, **options) as found:
            yield found, cluster


def namespace(given):
    with client(given) as (found, _):
        return found.namespace


def secret(given):
    setup = Setup("mooncake://127.0.0.1:1", dict(given))
    setup.engine.close()
    return setup.secret


def asked_of_etcd(given):
    """What an etcd is asked first that knows the masters."""
    setup = Setup("mooncake+etcd://127.0.0.1:1", dict(given))
    setup.engine.close()
    return first_question(setup.masters)


def first_question(masters):
    """What is asked first of who knows where the masters are."""
    return next(masters.search(time.monotonic() + 1)).call.operation


def patience_with_connections(given):
    """How long the first connection is waited for."""
    with mock.patch(
        "transfer_engine.rpc.blocking.BlockingConnection.connect", side_effect=StoreError("no")
    ) as connect:
        with contextlib.suppress(StoreError):
            Client("mooncake://127.0.0.1:1", deadline=1000, **given)
        return round(connect.call_args.kwargs["timeout_s"], 1)


def patience(given):
    """The deadline of an operation that names none, in hundreds of seconds."""
    with client(given) as (found, _):
        return round((found._core.until({}) - time.monotonic()) / 100)


def lease_after_a_get(given):
    with client(given) as (found, _):
        found.put("a", b"1")
        found.get("a")
        return found.stat("a").lease_s > 60


def a_damaged_read(given):
    with client(given) as (found, cluster):
        found.put("a", bytes(4096))
        for worker in cluster._workers:
            for segment in worker.segments:
                segment.buffer[:] = bytes([1]) * segment.size
        try:
            return found.get("a") == bytes([1]) * 4096
        except StoreError as error:
            return type(error).__name__


def reads_without_a_request(given):
    with client(given) as (found, _):
        keys = [f"key{number}" for number in range(64)]
        for key in keys:
            found.put(key, b"1")
        for key in keys + keys:
            found.get(key)
        return found._core.counters.lease_cache_hits


def stored(given):
    with client(given, deadline=3.0) as (found, _):
        try:
            found.put("a", b"1")
        except StoreError as error:
            return type(error).__name__
        return len(found.stat("a").replicas)


def threads_of_the_engine(given):
    with mock.patch("mooncake_store.client.setup.TransferEngine") as engine:
        Setup("mooncake://127.0.0.1:1", dict(given))
        return engine.call_args.kwargs["threads"]


def segments_of_the_pool(given):
    with client({}) as (found, cluster):
        try:
            with Client(cluster.url, **given):
                return len(found.status().segments)
        except StoreError as error:
            return error.what


def own_segment(given):
    """Whether a client can lend memory to a pool without any of its own."""
    with LocalCluster(0, in_process=True) as cluster:
        try:
            with Client(cluster.url, **given) as found:
                return len(found.status().segments)
        except StoreError as error:
            return error.what


def found_by_the_next_program(given):
    found = []
    for _ in range(2):
        with Client("mooncake://local", segment="4MiB", **given) as store:
            found.append(store.exists("key"))
            store.put("key", b"value")
    return found
