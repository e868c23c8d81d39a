"""Variables of other programs: which are warned of, which are known to be none of ours."""

import logging
import os

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.config import loading
from mooncake_store.config.settings import ClientConfig, MasterConfig, WorkerConfig, load
from mooncake_store.errors import ConfigError

# As a pod has them beside a service called mooncake-master with two named ports.
KUBERNETES = {
    "MOONCAKE_MASTER_SERVICE_HOST": "10.96.0.1",
    "MOONCAKE_MASTER_SERVICE_PORT": "50051",
    "MOONCAKE_MASTER_SERVICE_PORT_RPC": "50051",
    "MOONCAKE_MASTER_SERVICE_PORT_SIDE_DOOR": "7",
    "MOONCAKE_MASTER_PORT": "tcp://10.96.0.1:50051",
    "MOONCAKE_MASTER_PORT_50051_TCP": "tcp://10.96.0.1:50051",
    "MOONCAKE_MASTER_PORT_50051_TCP_PROTO": "tcp",
    "MOONCAKE_MASTER_PORT_50051_TCP_PORT": "50051",
    "MOONCAKE_MASTER_PORT_50051_TCP_ADDR": "10.96.0.1",
    "MOONCAKE_MASTER_PORT_7_UDP": "udp://10.96.0.1:7",
    "MOONCAKE_MASTER_PORT_7_UDP_PROTO": "udp",
    "MOONCAKE_MASTER_PORT_7_UDP_PORT": "7",
    "MOONCAKE_MASTER_PORT_7_UDP_ADDR": "10.96.0.1",
    "MOONCAKE_MASTER_PORT_9_SCTP": "sctp://10.96.0.1:9",
}
IPV6 = {
    "MOONCAKE_WORKER_SERVICE_HOST": "fd00:10:96::1",
    "MOONCAKE_WORKER_PORT": "tcp://[fd00:10:96::1]:50051",
    "MOONCAKE_WORKER_PORT_50051_TCP": "tcp://[fd00:10:96::1]:50051",
    "MOONCAKE_WORKER_PORT_50051_TCP_ADDR": "fd00:10:96::1",
}
# As `docker run --link` sets them, port ranges and copied variables included.
DOCKER = {
    "MOONCAKE_WORKER_NAME": "/app/mooncake-worker",
    "MOONCAKE_WORKER_PORT": "tcp://172.17.0.5:50051",
    "MOONCAKE_WORKER_PORT_50051_TCP_START": "tcp://172.17.0.5:50051",
    "MOONCAKE_WORKER_PORT_50051_TCP_END": "tcp://172.17.0.5:50059",
    "MOONCAKE_WORKER_PORT_50051_TCP_PORT_START": "50051",
    "MOONCAKE_WORKER_PORT_50051_TCP_PORT_END": "50059",
    "MOONCAKE_WORKER_ENV_PYTHON_VERSION": "3.12",
}


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(loading, "_told", set())


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("environ", [KUBERNETES, IPV6, DOCKER])
@pytest.mark.parametrize("program", [MasterConfig, WorkerConfig, ClientConfig])
def test_what_describes_a_service_is_no_setting_and_not_worth_a_word(program, environ, caplog):
    loaded = load(program, environ={**environ, "MOONCAKE_STRICT": "1"})
    assert loaded.value == program(strict=True)
    assert loaded.links == tuple(sorted(environ))
    assert warnings(caplog) == []


@pytest.mark.parametrize("name", [*KUBERNETES, *IPV6, *DOCKER])
def test_each_of_them_is_recognised_alone(name):
    environ = KUBERNETES | DOCKER | IPV6
    if name.endswith("_NAME") or "_ENV_" in name:  # only these need what stands beside them
        environ = DOCKER
    else:
        environ = {name: environ[name]}
    loaded = load(WorkerConfig, environ=environ)
    assert loaded.value == WorkerConfig()
    assert not loaded.unknown


def test_a_setting_beside_links_is_still_one():
    environ = KUBERNETES | {"MOONCAKE_MASTER_PORT": "50060", "MOONCAKE_WORKER_NAME": "w1"}
    assert load(MasterConfig, environ=environ).value.port == 50060
    assert load(WorkerConfig, environ=environ).value.name == "w1"


def test_what_has_only_the_name_or_only_the_value_of_a_link_is_judged_as_ours():
    environ = {
        "MOONCAKE_MASTER_SERVICE_HOST": "not an address",
        "MOONCAKE_MASTER_HOTS": "10.96.0.1",
        "MOONCAKE_MASTER_ENV_X": "1",
    }
    assert set(load(MasterConfig, environ=environ).unknown) == set(environ)
    with pytest.raises(ConfigError, match="MOONCAKE_MASTER_PORT in the environment must be"):
        load(MasterConfig, environ={"MOONCAKE_MASTER_PORT": "http://10.96.0.1:50051"})


def test_unknown_variables_are_one_warning_with_the_nearest_name(caplog):
    environ = {"MOONCAKE_MASTER_CONTROL_BASE": "/x", "MOONCAKE_LOG_LEVLE": "info"}
    for program in (MasterConfig, WorkerConfig, ClientConfig):
        assert load(program, environ=environ).value == program()
    (said,) = warnings(caplog)
    assert "MOONCAKE_LOG_LEVLE (did you mean MOONCAKE_LOG_LEVEL?)" in said
    assert "MOONCAKE_MASTER_CONTROL_BASE (did you mean MOONCAKE_" in said
    assert "MOONCAKE_STRICT=1" in said


def test_an_environment_full_of_them_is_not_listed_whole(caplog):
    load(MasterConfig, environ={f"MOONCAKE_MASTER_X{number}": "1" for number in range(100)})
    (said,) = warnings(caplog)
    assert "and 92 more" in said
    assert len(said) < 1000


@pytest.mark.parametrize(
    "switch",
    [{"environ": {"MOONCAKE_STRICT": "1"}}, {"overrides": {"strict": True}}],
)
def test_a_strict_program_refuses_them(switch):
    environ = switch.get("environ", {}) | {"MOONCAKE_MASTER_PROT": "1"}
    with pytest.raises(ConfigError) as refused:
        load(MasterConfig, environ=environ, overrides=switch.get("overrides"))
    assert str(refused.value).startswith(
        "unknown variables in the environment: "
        "MOONCAKE_MASTER_PROT (did you mean MOONCAKE_MASTER_PORT?); "
    )


def test_a_url_in_the_general_variable_is_the_store_and_nonsense_is_refused():
    url = "mooncake://10.0.0.5:50051/a"
    loaded = load(ClientConfig, environ={"MOONCAKE_URL": url})
    assert (loaded.value.url, loaded.origins["url"]) == (url, "environment MOONCAKE_URL")
    own = {"MOONCAKE_URL": url, "MOONCAKE_CLIENT_URL": "mooncake://own:1/b"}
    assert load(ClientConfig, environ=own).value.url == "mooncake://own:1/b"
    with pytest.raises(ConfigError) as refused:
        load(ClientConfig, environ={"MOONCAKE_URL": "foo"})
    said = str(refused.value)
    assert "client.url: 'foo' is not a store URL; write mooncake://host:port/namespace" in said
    assert "(url: environment MOONCAKE_URL)" in said
    assert "client.url is set by --url, MOONCAKE_CLIENT_URL, or url in [client] of a file" in said


@pytest.fixture
def foreign(monkeypatch):
    """An environment like that of a pod, with a variable of another tool."""
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)
    for name, value in {**KUBERNETES, "MOONCAKE_MASTER_CONTROL_BASE": "/x"}.items():
        monkeypatch.setenv(name, value)


def test_a_client_works_in_a_pod(foreign, caplog):
    with LocalCluster(segment="16MiB", in_process=True) as cluster, Client(cluster.url) as client:
        client.put("a", b"1")
        assert client.get("a") == b"1"
    assert len(warnings(caplog)) == 1


def test_the_drop_in_sets_up_in_a_pod(foreign):
    from mooncake_store.compat.store import MooncakeDistributedStore

    with LocalCluster(workers=0, in_process=True) as cluster:
        store = MooncakeDistributedStore()
        settings = ("localhost", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", cluster.address)
        assert store.setup(*settings) == 0
        try:
            assert store.put("a", b"1") == 0
        finally:
            store.close()
