"""The contract of directories on every backend, and what is particular to each."""

import secrets

import pytest

from tests.directory import servers
from tests.waiting import until
from transfer_engine.directory import create
from transfer_engine.directory.etcd import EtcdDirectory
from transfer_engine.directory.http import HttpDirectory
from transfer_engine.directory.http_server import HttpDirectoryServer
from transfer_engine.directory.memory import MemoryDirectory
from transfer_engine.directory.redis import RedisDirectory
from transfer_engine.directory.testing import DirectoryContract
from transfer_engine.errors import AuthError, ConfigError, NoSpaceError, UnavailableError

SECRET = b"a secret of enough bytes"


def answers(directory):
    try:
        directory.names("none")
    except UnavailableError:
        return False
    return True


@pytest.fixture(scope="module")
def open_server():
    with HttpDirectoryServer() as server:
        yield server


@pytest.fixture(scope="module")
def closed_server():
    with HttpDirectoryServer(secret=SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with servers.etcd(tmp_path_factory.mktemp("etcd")) as (address, _):
        until(lambda: answers(EtcdDirectory(address)), 30, "etcd has a leader")
        yield address


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with servers.redis(tmp_path_factory.mktemp("redis")) as (address, _):
        until(lambda: answers(RedisDirectory(address)), 30, "redis answers")
        yield address


class TestMemory(DirectoryContract):
    @pytest.fixture
    def directory(self):
        return MemoryDirectory()

    @pytest.fixture
    def other(self, directory):
        return directory


class TestHttp(DirectoryContract):
    @pytest.fixture
    def directory(self, open_server):
        with HttpDirectory(open_server.address) as directory:
            yield directory

    @pytest.fixture
    def other(self, open_server):
        with HttpDirectory(open_server.address) as other:
            yield other


class TestHttpWithSecret(DirectoryContract):
    @pytest.fixture
    def directory(self, closed_server):
        with HttpDirectory(closed_server.address, secret=SECRET) as directory:
            yield directory

    @pytest.fixture
    def other(self, closed_server):
        with HttpDirectory(closed_server.address, secret=SECRET) as other:
            yield other


class TestEtcd(DirectoryContract):
    @pytest.fixture
    def directory(self, etcd):
        return EtcdDirectory(etcd)

    @pytest.fixture
    def other(self, etcd):
        # The first endpoint does not answer.
        return EtcdDirectory(f"127.0.0.1:{servers.free_port()},{etcd}")


class TestRedis(DirectoryContract):
    @pytest.fixture
    def directory(self, redis):
        return RedisDirectory(redis)

    @pytest.fixture
    def other(self, redis):
        return RedisDirectory(redis)


def test_time_is_the_clock_of_the_directory():
    now = [100.0]
    directory = MemoryDirectory(clock=lambda: now[0])
    directory.publish("a", b"1", ttl_s=10)
    now[0] = 109.9
    assert directory.lookup("a") == b"1"
    now[0] = 110.0
    assert directory.names() == []
    assert not directory.withdraw("a")


def test_a_full_directory_says_so_and_makes_room_of_what_has_ended():
    now = [0.0]
    directory = MemoryDirectory(entries_max=2, clock=lambda: now[0])
    directory.publish("a", b"1", ttl_s=10)
    directory.publish("b", b"1")
    with pytest.raises(NoSpaceError, match="2 names"):
        directory.publish("c", b"1")
    directory.publish("b", b"2", replace=True)
    now[0] = 11
    directory.publish("c", b"1")
    assert directory.names() == ["b", "c"]


@pytest.mark.parametrize("scheme", ["http", "etcd", "redis"])
def test_a_directory_that_is_not_there_is_unavailable_and_named(scheme):
    address = f"127.0.0.1:{servers.free_port()}"
    with create(f"{scheme}://{address}") as directory:
        for call in (
            lambda: directory.publish("a", b"1"),
            lambda: directory.lookup("a"),
            lambda: directory.withdraw("a"),
            lambda: directory.names(),
        ):
            with pytest.raises(UnavailableError) as caught:
                call()
            assert address in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("htp://host:1", "did you mean 'http'"),
        ("memory://x", "memory"),
        ("etcd://", "etcd"),
        ("", "is not a directory"),
        ("redis://nowhere", "write host:port"),
        ("http://nowhere", "write host:port"),
        ("etcd://a:1,b", "write host:port"),
        *((f"{scheme}://{'a' * 64}:1", "write host:port") for scheme in ("http", "etcd", "redis")),
        ("http://host:65536", "write host:port"),
    ],
)
def test_a_wrong_url_is_refused(url, said):
    with pytest.raises(ConfigError) as caught:
        create(url)
    assert said in str(caught.value)


def test_redis_asks_for_its_password(tmp_path):
    with servers.redis(tmp_path, "--requirepass", "hunter2hunter2") as (address, _):
        right = create(f"redis://{address}", secret=b"hunter2hunter2")
        until(lambda: answers(right), 30)
        right.publish("a", b"1")
        for wrong in (None, b"wrong"):
            with pytest.raises(AuthError):
                create(f"redis://{address}", secret=wrong).lookup("a")


def test_etcd_that_dies_is_unavailable_and_back_when_it_is(tmp_path):
    with servers.etcd(tmp_path / "one") as (address, child):
        directory = EtcdDirectory(address)
        until(lambda: answers(directory), 30)
        directory.publish("a", b"1")
        child.kill()
        child.wait(60)
        with pytest.raises(UnavailableError):
            directory.lookup("a")
    with servers.etcd(tmp_path / "two") as (second, _):
        until(lambda: answers(EtcdDirectory(second)), 30)
        # The dead endpoint is passed over.
        both = EtcdDirectory(f"{address},{second}")
        both.publish("b", secrets.token_bytes(100))
        assert EtcdDirectory(second).names() == ["b"]
