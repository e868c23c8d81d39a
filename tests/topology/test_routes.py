"""How near a network is to memory: interfaces found by routing, weights from the matrix."""

import numpy as np
import pytest

from transfer_engine import TransferEngine
from transfer_engine.errors import ConfigError
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.topology import Device, Node, Preference, Topology
from transfer_engine.topology_routes import FAR, NEAR, interface_of, weight

SIZE = 8 << 20


@pytest.fixture
def machine():
    """Two sockets; the loopback interface stands for a card of the second one."""
    nodes = (Node(0, "0", 1, (10, 21)), Node(1, "1", 1, (21, 10)))
    devices = (Device("lo", "ethernet", node=1), Device("none0", "ethernet", node=0))
    return Topology(nodes, devices)


def test_the_interface_of_a_route_is_the_kernels_choice(machine):
    assert interface_of("127.0.0.1", machine) == "lo"
    assert interface_of("::1", machine) == ""


def test_networks_of_another_socket_weigh_more(machine):
    assert machine.preference("cpu:0", "ethernet") == Preference(("none0",), ("lo",))
    assert weight("127.0.0.1", machine, "cpu:1") == NEAR
    assert weight("127.0.0.1", machine, "cpu:0") == FAR
    assert weight("127.0.0.1", machine, "") == NEAR


def test_an_engine_takes_its_weights_from_the_topology(machine):
    owner = OwnerProcess(rails=["127.0.0.2:0"], unix=None)
    try:
        descriptor = owner.publish(SIZE, 2)
        memory = np.zeros(SIZE, np.uint8)
        with TransferEngine(topology=machine) as engine:
            with pytest.raises(ConfigError, match="cpu:0, cpu:1"):
                engine.open(descriptor, location="cpu:9")
            target = engine.open(descriptor, location="cpu:0")
            region = engine.register(memory)
            engine.read_batch(target, [0], [SIZE], [region.address]).check()
            assert np.array_equal(memory, content(2, SIZE))
    finally:
        owner.close()
