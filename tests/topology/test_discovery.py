"""Topology from /sys trees of machines of many shapes."""

import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store.cli.main import main
from tests.topology import machines
from transfer_engine.topology.machine import Device, Distance, Node, Preference, Topology, distance
from transfer_engine.topology.scan import discover, gpu_addresses


@pytest.fixture
def eight(tmp_path):
    machines.eight_gpus(tmp_path)
    return discover(tmp_path)


def test_each_gpu_prefers_the_card_of_its_switch(eight):
    matrix = eight.matrix()
    for number in range(8):
        assert matrix[f"cuda:{number}"]["rdma"].preferred == (f"mlx5_{number}",)
    # The rest of its socket comes before the other socket.
    assert set(matrix["cuda:5"]["rdma"].secondary[:3]) == {"mlx5_4", "mlx5_6", "mlx5_7"}
    assert set(matrix["cuda:5"]["rdma"].secondary[3:]) == {f"mlx5_{n}" for n in range(4)}


def test_host_memory_prefers_the_cards_of_its_socket(eight):
    matrix = eight.matrix()
    near = tuple(f"mlx5_{n}" for n in range(4))
    far = tuple(f"mlx5_{n}" for n in range(4, 8))
    assert matrix["cpu:0"]["rdma"] == Preference(near, far)
    assert matrix["cpu:1"]["rdma"] == Preference(far, near)
    assert matrix["cpu:1"]["disk"] == Preference(("nvme2n1", "nvme3n1"), ("nvme0n1", "nvme1n1"))


def test_real_interfaces_stand_before_slow_ones_and_virtual_ones_are_left_out(eight):
    cell = eight.matrix()["cpu:0"]["ethernet"]
    assert cell.preferred == ("eth0", "eth1", "eth2", "eth3", "eno1")
    assert not {"docker0", "veth12ab", "lo"} & set(cell.all)
    found = eight.device("veth12ab")
    assert found is not None
    assert found.virtual


def test_nodes_have_processors_memory_and_distances(eight):
    assert [node.cpus for node in eight.nodes] == ["0-55,112-167", "56-111,168-223"]
    assert [node.memory_bytes for node in eight.nodes] == [1008 << 30] * 2
    assert eight.nodes[1].distances == (21, 10)


def test_gpus_are_numbered_as_cuda_does_where_that_is_known(tmp_path):
    machines.eight_gpus(tmp_path)
    order = ["0000:83:00.0", "0000:13:00.0"]
    found = discover(tmp_path, gpus=order)
    assert [gpu.pci for gpu in found.of_kind("gpu")][:3] == [*order, "0000:23:00.0"]
    assert found.matrix()["cuda:0"]["rdma"].preferred == ("mlx5_7",)


def test_a_gpu_far_from_every_card_takes_the_nearest_and_never_one_that_is_down(tmp_path):
    machines.two_hosts_apart(tmp_path)
    found = discover(tmp_path)
    for gpu in ("cuda:0", "cuda:1", "cuda:2", "cpu:1"):
        assert found.matrix()[gpu]["rdma"] == Preference(("mlx5_0",), ())
    card, *gpus = found.device("mlx5_0"), *found.of_kind("gpu")
    assert [distance(gpu, card) for gpu in gpus] == [
        Distance.HOST_BRIDGE, Distance.NODE, Distance.SYSTEM
    ]  # fmt: skip
    assert distance(found.device("mlx5_1"), card) is Distance.SAME


def test_a_kernel_without_numa_has_one_node(tmp_path):
    machines.no_numa(tmp_path)
    found = discover(tmp_path)
    assert [(node.number, node.cpus) for node in found.nodes] == [(0, "0-7")]
    assert found.matrix()["cuda:0"]["ethernet"].preferred == ("enp3s0",)
    assert found.matrix()["cpu:0"]["disk"].preferred == ("nvme0n1",)
    assert found.device("nvme0n1").bytes == 931 << 30


def test_a_virtual_machine_has_what_its_kernel_tells(tmp_path):
    machines.virtual_machine(tmp_path)
    found = discover(tmp_path)
    assert found.device("eth0").gbps == 0
    assert found.device("eth0").pci == "0000:00:03.0"
    assert found.device("rxe0").netdev == "eth0"
    assert found.matrix()["cpu:0"] == {
        "rdma": Preference(("rxe0",), ()),
        "ethernet": Preference(("eth0",), ()),
        "disk": Preference(("vda",), ()),
    }


def test_virtual_functions_count_only_where_their_card_is_not_there(tmp_path):
    machines.with_virtual_functions(tmp_path / "host")
    host = discover(tmp_path / "host")
    assert host.device("mlx5_2").parent == "0000:3b:00.0"
    assert host.matrix()["cpu:0"]["rdma"] == Preference(("mlx5_0",), ())
    assert host.matrix()["cpu:1"]["ethernet"] == Preference(("ens1",), ())
    machines.with_virtual_functions(tmp_path / "guest", physical=False)
    guest = discover(tmp_path / "guest")
    assert guest.matrix()["cpu:0"]["rdma"].preferred == tuple(f"mlx5_{n}" for n in range(1, 5))


def test_an_empty_tree_is_a_machine_with_nothing(tmp_path):
    found = discover(tmp_path)
    assert found.locations == ("cpu:0",)
    assert found.matrix()["cpu:0"]["rdma"] == Preference((), ())


def test_links_that_lead_out_of_the_tree_are_not_followed(tmp_path):
    outside = machines.Tree(tmp_path / "outside")
    outside.write("devices/pci0000:00/0000:00:09.0/numa_node", 7)
    tree = machines.Tree(tmp_path / "sys")
    tree.write("class/net/eth9/type", 1)
    (tmp_path / "sys/class/net/eth9/device").symlink_to(
        tmp_path / "outside/devices/pci0000:00/0000:00:09.0"
    )
    found = discover(tmp_path / "sys").device("eth9")
    assert (found.pci, found.node) == ("", 0)


def test_this_machine_can_be_described():
    plain = discover().to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert "cpu:0" in plain["matrix"]


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("00000000:3B:00.0\n00000000:17:00.0\n", ("0000:3b:00.0", "0000:17:00.0")),
        ("", ()),
        ("NVIDIA-SMI has failed\n", ()),
    ],
)
def test_the_order_of_gpus_is_asked_of_nvidia_smi(monkeypatch, says, expected):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess([], 0, stdout=says)
    monkeypatch.setattr("subprocess.run", lambda *_args, **_options: done)
    assert gpu_addresses() == expected


def test_a_driver_that_does_not_answer_gives_no_order(monkeypatch):
    def fail(*_args, **_options):
        raise subprocess.TimeoutExpired("nvidia-smi", 5)

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", fail)
    assert gpu_addresses() == ()


bridges = st.lists(st.sampled_from(["pci0000:00", "a", "b", "c"]), max_size=4).map(tuple)
device = st.builds(
    Device,
    name=st.uuids().map(str),
    kind=st.just("rdma"),
    node=st.integers(-1, 2),
    pci=st.sampled_from(["", "0000:01:00.0", "0000:01:00.1", "0000:02:00.0"]),
    bridges=bridges,
    gbps=st.sampled_from([0.0, 100.0]),
    up=st.booleans(),
    virtual=st.booleans(),
)


@given(device, device)
def test_distance_has_no_direction(one, other):
    assert distance(one, other) == distance(other, one)


@given(st.lists(device, max_size=6))
def test_a_cell_holds_every_usable_device_once(devices):
    found = Topology((Node(0, "0", 0), Node(1, "1", 0)), tuple(devices))
    cell = found.preference("cpu:0", "rdma")
    assert sorted(cell.all) == sorted(device.name for device in found.usable("rdma"))
    assert bool(cell.preferred) == bool(found.usable("rdma"))


def test_the_command_shows_another_machine(tmp_path, capsys):
    machines.eight_gpus(tmp_path)
    assert main(["topology", "--sys", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["matrix"]["cuda:3"]["rdma"][0] == ["mlx5_3"]
    assert main(["topology", "--sys", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "node 1: cpus 56-111,168-223" in text
    assert "cuda:7" in text


def test_the_command_names_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["topology", "--sys", str(tmp_path / "none")]) == 5
    assert str(tmp_path / "none") in capsys.readouterr().err
