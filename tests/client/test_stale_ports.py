"""A master that is started again has other ports, and others may have those that were its own."""

import contextlib
import socket
import threading

import pytest

from mooncake_store import AsyncClient
from transfer_engine.rpc.address import Address

VALUE = b"value" * 1000


@contextlib.contextmanager
def listening_at(address, target):
    """Listen at an address, for the service that is at another one."""
    ends, pumps = [], []

    def pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        end(source, sink)

    def accept(listener):
        with contextlib.suppress(OSError):
            while True:
                one, _ = listener.accept()
                other = socket.create_connection((target.host, target.port), timeout=60)
                ends.extend((one, other))
                for pair in ((one, other), (other, one)):
                    pumps.append(threading.Thread(target=pump, args=pair))
                    pumps[-1].start()

    with socket.create_server((address.host, address.port)) as listener:
        accepting = threading.Thread(target=accept, args=(listener,))
        accepting.start()
        try:
            yield
        finally:
            end(listener)
            accepting.join(60)
            end(*ends)
            for each in pumps:
                each.join(60)
            for each in ends:
                each.close()


def end(*sockets):
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def moved(own_cluster, cluster, connect):
    """A cluster whose master is started again, with another service at its shard's former port."""

    @contextlib.contextmanager
    def move(used, service):
        former = Address.parse(used.status().shards[0])
        other = connect(cluster.url).status().shards[0]
        running.kill_master()
        # Held from the start: the master might be given the port again.
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((former.host, former.port))
            running.restart_master()
        targets = {"its cluster service": running.address, "another cluster's shard": other}
        with listening_at(former, Address.parse(targets[service])):
            yield

    running = own_cluster(workers=1, master={"journal": "written"})
    move.url = running.url
    return move


SERVICES = ["its cluster service", "another cluster's shard"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_client_finds_its_shards_again_where_others_have_their_ports(moved, connect, service):
    store = connect(moved.url)
    store.put("key", VALUE)
    with moved(store, service):
        assert store.get("key") == VALUE
        assert store.put("other", VALUE).outcome == "stored"
        assert connect(moved.url).get("other") == VALUE


@pytest.mark.asyncio
@pytest.mark.parametrize("service", SERVICES)
async def test_so_does_one_of_asyncio(moved, connect, service):
    async with AsyncClient(moved.url) as store:
        await store.put("key", VALUE)
        with moved(connect(moved.url), service):
            assert await store.get("key") == VALUE
            assert (await store.put("other", VALUE)).outcome == "stored"
            assert connect(moved.url).get("other") == VALUE
