"""Reaching a store: quickly, or with an error that names the address and the next step."""

import contextlib
import os
import socket
import threading
import time

import pytest

from mooncake_store import (
    Client,
    ConfigError,
    NotFoundError,
    RemoteProtocolError,
    UnavailableError,
)
from mooncake_store.client import setup
from tests.waiting import long_before
from transfer_engine.rpc import blocking
from transfer_engine.wire.frame import VersionRange


def test_nothing_listens(free_port):
    said = f"nothing listens there.*127.0.0.1:{free_port}"
    with long_before(60), pytest.raises(UnavailableError, match=said):
        Client(f"mooncake://127.0.0.1:{free_port}", connect_timeout="60s", deadline="60s")


def test_something_listens_and_says_nothing(monkeypatch):
    monkeypatch.setenv("MOONCAKE_CLIENT_CONNECT_TIMEOUT", "30s")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = f"nothing answered in time.*{port}"
        with long_before(60), pytest.raises(UnavailableError, match=said):
            Client(f"mooncake://127.0.0.1:{port}", connect_timeout="300ms")


def test_something_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.recv(100)
                connection.sendall(
                    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + b" " * 40
                )
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RemoteProtocolError, match="mooncake"):
            Client(f"mooncake://127.0.0.1:{server.getsockname()[1]}")
        thread.join(60)


def test_a_shard_is_no_cluster(cluster):
    with Client(cluster.url) as store:
        shard = store.status().shards[0]
    with pytest.raises(RemoteProtocolError, match="mooncake-shard"):
        Client(f"mooncake://{shard}")


def test_another_version_is_named(cluster, monkeypatch):
    real = blocking.ClientHandshake

    def newer(identity, *, secret, versions):
        return real(identity, secret=secret, versions=VersionRange(90, 91))

    monkeypatch.setattr(blocking, "ClientHandshake", newer)
    with pytest.raises(RemoteProtocolError, match="90"):
        Client(cluster.url)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "http://127.0.0.1"}, "mooncake://"),
        ({"url": "mooncake://me:secret@127.0.0.1"}, "no credentials"),
        ({"deadlin": 3}, "deadline"),
        ({"deadline": "soon"}, "deadline"),
        ({"transports": ["pigeon"]}, "pigeon"),
        ({"secret_file": "/nonexistent"}, "/nonexistent"),
        ({"segment": "1k"}, "1MiB"),
    ],
)
def test_settings_are_checked_before_anything_is_reached(settings, said):
    with pytest.raises(ConfigError, match=said):
        Client(**settings)


def test_settings_come_from_the_environment_and_keywords_win(cluster, monkeypatch):
    monkeypatch.setenv("MOONCAKE_CLIENT_URL", cluster.url)
    monkeypatch.setenv("MOONCAKE_CLIENT_DEADLINE", "7s")
    with Client() as store:
        assert store.config.deadline_s == 7
        assert store.namespace == "default"
    with Client(deadline="9s", verify=False) as store:
        assert store.config.deadline_s == 9
        assert not store.config.verify


def test_connecting_is_quick_once_kernels_are_loaded(cluster):
    Client(cluster.url).close()

    def connect_s():
        started = time.process_time()
        Client(cluster.url).close()
        return time.process_time() - started

    assert min(connect_s() for _ in range(5)) < 0.05


def test_a_closed_client_says_so(cluster):
    store = Client(cluster.url)
    store.close()
    store.close()
    with pytest.raises(UnavailableError, match="closed"):
        store.get("key")


def test_a_local_cluster_comes_with_the_client():
    with Client("mooncake://local/mine", segment="32MB") as store:
        assert store.namespace == "mine"
        assert store.put("key", b"value").stored
        assert store.get("key") == b"value"
        assert store.stats().bytes_read == {"local": 5}
        with store.view("key") as view:
            assert view.zero_copy
            assert bytes(view.data) == b"value"
        url = store.config.url
        with Client(url) as other:
            assert other.get("key") == b"value"
    with pytest.raises(UnavailableError):
        Client(url)


def test_a_client_lends_memory_to_the_pool(own_cluster, connect):
    cluster = own_cluster(workers=0)
    store = connect(cluster.url, transports=["shm"])
    assert not store.status().segments
    with Client(cluster.url, segment="8MB") as lender:
        assert lender.put("key", b"value").stored
        assert lender.stats().bytes_written == {"local": 5}
        assert store.get("key", ttl="200ms") == b"value"
        assert store.stats().bytes_read == {"shm": 5}
    with pytest.raises(NotFoundError):
        connect(cluster.url, lease_cache=False).get("key")


def test_a_forked_child_is_a_client_of_its_own(cluster):
    with Client(cluster.url) as store:
        store.put("parent", b"1", upsert=True)
        assert store.get("parent") == b"1"
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert store.get("parent") == b"1"
                assert store.put("child", b"2", upsert=True).stored
                assert store.get("child") == b"2"
                os.write(writer, store._driver.setup.run.uuid)
                store.close()
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            uuid = pipe.read()
        assert os.waitpid(pid, 0)[1] == 0
        assert len(uuid) == 16
        assert uuid != store._driver.setup.run.uuid
        assert store.get("parent") == b"1"
        assert store.get("child") == b"2"
        assert store.put("parent", b"3", upsert=True).stored


def test_threads_share_a_client(store):
    """Every thread sees its own objects; the threads outnumber idle connections."""
    failures = []

    def work(number):
        try:
            for turn in range(30):
                key = f"{number}-{turn % 3}"
                value = f"{number}:{turn}".encode() * 50
                store.put(key, value, upsert=True)
                assert store.get(key) == value
                assert store.get_many([key, "missing"]).values == [value, None]
                assert store.exists(key)
                if turn % 10 == 9:
                    store.remove(key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_kernels_are_loaded_once():
    setup.load_kernels()
    before = setup.load_kernels.cache_info().misses
    setup.load_kernels()
    assert setup.load_kernels.cache_info().misses == before
