"""Where the segments of workers may be: what a master takes, and whom everybody connects to."""

import asyncio
import secrets
import socket

import msgspec
import pytest

from mooncake_store import Client
from mooncake_store.errors import InvalidArgumentError, UnavailableError
from mooncake_store.master.doors import answering, doors_of
from mooncake_store.wire import cluster as wire
from tests.master.wires import descriptor
from transfer_engine.base import SegmentDescriptor
from transfer_engine.rpc.networks import Networks

MIB = 1 << 20


def spec(where, port=1, **change):
    uuid = secrets.token_bytes(16)
    plain = SegmentDescriptor.decode(descriptor(uuid, "there", MIB, port))
    told = msgspec.structs.replace(plain, tcp_host=where, **change)
    return wire.SegmentSpec(uuid, "there", MIB, told.encode())


def mount(cluster, *specs):
    worker = wire.Mount(secrets.token_bytes(16), 1, "w", "h", specs)
    return cluster.ask(wire.MOUNT, worker).statuses


def test_a_segment_where_none_can_be_is_not_mounted(start_cluster, wire_to):
    cluster = wire_to(start_cluster(1))
    for bad in (spec("169.254.169.254"), spec("127.0.0.1", rails=("10.0.0.1:1", "224.0.0.1:1"))):
        with pytest.raises(InvalidArgumentError, match=r"'there': .*data_networks"):
            mount(cluster, spec("127.0.0.1"), bad)
    assert len(cluster.segments()) == 1
    # What is on the loopback of another host is for its clients; names are looked up when needed.
    assert mount(cluster, spec("127.0.0.1", host="another"), spec("worker.example")) == (0, 0)


def test_a_master_takes_segments_in_its_networks_only(start_cluster, wire_to):
    given = {"data_networks": "127.0.0.0/8,10.1.0.0/16"}
    cluster = wire_to(start_cluster(1, master=given))
    assert mount(cluster, spec("10.1.2.3")) == (0,)
    with pytest.raises(InvalidArgumentError, match=r"10\.2\.0\.1 is in none of the networks"):
        mount(cluster, spec("10.2.0.1"))


def test_a_client_is_not_sent_where_it_may_not_go(start_cluster):
    running = start_cluster(1)
    settings = {"transports": "tcp", "deadline": 3.0}
    with Client(running.url, data_networks="127.0.0.0/8", **settings) as client:
        client.put("key", b"value")
    with Client(running.url, data_networks="10.0.0.0/8,192.168.0.0/16", **settings) as client:
        with pytest.raises(UnavailableError) as caught:
            client.get("key")
        for said in ("worker-0", "127.0.0.1 is in none of the networks of data_networks"):
            assert said in str(caught.value)


@pytest.mark.parametrize(
    ("networks", "where", "of", "open_there"),
    [
        ([], "127.0.0.1", None, True),
        ([], "localhost", None, True),
        ([], "127.0.0.1", "another host", False),
        ([], "localhost", "another host", False),
        (["10.0.0.0/8"], "127.0.0.1", None, False),
        (["10.0.0.0/8"], "localhost", None, False),
    ],
)
def test_a_master_looks_after_workers_where_they_may_be(networks, where, of, open_there):
    """And knocks nowhere else, whatever it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        change = {} if of is None else {"host": of}
        doors = doors_of([spec(where, listener.getsockname()[1], **change)], Networks(networks))
        assert bool(asyncio.run(answering(doors))) is open_there
        listener.setblocking(False)
        if not open_there:
            with pytest.raises(BlockingIOError):
                listener.accept()
