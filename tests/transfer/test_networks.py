"""Where a descriptor may send a process: which addresses are connected to, and which are not."""

import socket

import msgspec
import numpy as np
import pytest

from transfer_engine import TransferEngine
from transfer_engine.errors import ConfigError, UnavailableError
from transfer_engine.rpc.networks import Networks
from transfer_engine.testing import content

SIZE = 4096
GETADDRINFO = socket.getaddrinfo


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "fe80::1", "fe80::1%1", "::ffff:169.254.169.254", "224.0.0.1", "ff02::1",
        "0.0.0.0", "0.1.2.3", "::", "255.255.255.255",
    ],
)  # fmt: skip
def test_an_address_where_no_worker_can_be_is_not_connected_to(host):
    told = Networks().objection(host, near=True)
    assert host in told
    assert "data_networks" in told
    assert Networks(["0.0.0.0/0", "::/0"]).objection(host, near=False) is None  # meant so


@pytest.mark.parametrize(
    "host", ["10.0.0.7", "192.168.1.1", "8.8.8.8", "100.64.0.1", "2001:db8::1", "fd00::1", "name"]
)
def test_an_address_where_a_worker_can_be_is(host):
    assert Networks().objection(host, near=False) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_a_loopback_is_that_of_the_owner(host):
    assert Networks().objection(host, near=True) is None
    assert "another host" in Networks().objection(host, near=False)


def test_networks_that_are_given_are_the_only_ones():
    networks = Networks(["10.1.0.0/16", "2001:db8::/32"])
    for host in ("10.1.2.3", "::ffff:10.1.2.3", "2001:db8::5"):
        assert networks.objection(host, near=False) is None
    for host in ("10.2.0.1", "127.0.0.1", "::1", "2001:db9::1"):
        assert networks.objection(host, near=True).startswith(f"{host} is in none of the networks")


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "everywhere", "", "::/0/0"])
def test_what_is_no_network_is_refused(text):
    with pytest.raises(ConfigError, match="is not a network"):
        TransferEngine(networks=[text])


@pytest.fixture
def named(monkeypatch):
    """Say what addresses the name worker.test stands for."""

    def stand_for(*hosts):
        def found(host, port, *_args, **_kwargs):
            if host != "worker.test":
                return GETADDRINFO(host, port, *_args, **_kwargs)
            return [each for one in hosts for each in GETADDRINFO(one, port, *_args, **_kwargs)]

        monkeypatch.setattr(socket, "getaddrinfo", found)

    return stand_for


def over_tcp(descriptor, **change):
    return msgspec.structs.replace(descriptor, transports=("tcp",), **change)


@pytest.mark.parametrize(
    ("networks", "host", "stands_for"),
    [
        ([], "169.254.169.254", None),
        (["10.0.0.0/8"], "127.0.0.1", None),
        ([], "worker.test", "169.254.169.254"),
        (["10.0.0.0/8"], "worker.test", "127.0.0.1"),
        (["10.0.0.0/8"], "127.1", "127.0.0.1"),
    ],
)
def test_what_is_not_allowed_is_not_connected_to(owner, named, networks, host, stands_for):
    """Not even for a moment: somebody who listens there hears nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        TransferEngine(networks=networks) as engine,
    ):
        named(stands_for or "127.0.0.1")
        place = listener.getsockname()[1]
        descriptor = over_tcp(owner.publish(SIZE, 1), tcp_host=host, tcp_port=place)
        with pytest.raises(UnavailableError) as caught:
            engine.open(descriptor)
        for said in (host, str(place), stands_for or host, "data_networks"):
            assert said in str(caught.value)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_name_is_reached_at_those_of_its_addresses_that_are_allowed(owner, named):
    named("169.254.169.254", "127.0.0.1")
    data = np.zeros(SIZE, np.uint8)
    with TransferEngine() as engine:
        target = engine.open(over_tcp(owner.publish(SIZE, 1), tcp_host="worker.test"))
        engine.read_into(target, 0, data)
    assert np.array_equal(data, content(1, SIZE))


def test_a_rail_that_is_not_allowed_leaves_the_others(owner):
    descriptor = over_tcp(owner.publish(SIZE, 1), rails=("169.254.1.1:1",))
    data = np.zeros(SIZE, np.uint8)
    with TransferEngine() as engine:
        assert engine.explain(descriptor)[-1].chosen
        engine.read_into(engine.open(descriptor), 0, data)
    assert np.array_equal(data, content(1, SIZE))


def test_a_segment_that_is_not_allowed_is_explained(owner):
    descriptor = over_tcp(owner.publish(SIZE, 1), tcp_host="169.254.1.1")
    with TransferEngine() as engine:
        tcp = engine.explain(descriptor)[-1]
    assert not tcp.chosen
    assert tcp.reason.startswith("169.254.1.1 is an address of one link")
