"""What the doctor says of machines that are recorded, broken in one way each, and of this one."""

import json
import os
import resource

import pytest

from mooncake_store.cli.main import main
from mooncake_store.doctor import Host, Severity, examine, routes
from tests.topology import machines
from transfer_engine import Segment, TransferServer

GOOD = {
    "proc/sys/kernel/osrelease": "6.8.0-45-generic",
    "proc/sys/vm/overcommit_memory": "0",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/sys/kernel/io_uring_disabled": "0",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "proc/net/tcp": "header",
}
UNLIMITED = {"memlock": resource.RLIM_INFINITY, "nofile": 1 << 20}


@pytest.fixture
def machine(tmp_path):
    """A recorded machine with eight GPUs on which everything is as it should be."""
    tree = machines.eight_gpus(tmp_path / "sys")
    for number in range(8):
        port = f"class/infiniband/mlx5_{number}/ports/1"
        tree.write(f"{port}/link_layer", "Ethernet")
        tree.write(f"{port}/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001")
        tree.write(f"{port}/gid_attrs/types/0", "IB/RoCE v1")
        tree.write(f"{port}/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001")
        tree.write(f"{port}/gid_attrs/types/3", "RoCE v2")
        tree.write(f"{port}/gids/4", "0000:0000:0000:0000:0000:0000:0000:0000")
    tree.write("class/net/eno1/mtu", 9000)
    for path, text in GOOD.items():
        write(tmp_path, path, text)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def look(root, **limits):
    found = examine(Host(root, UNLIMITED | limits))
    return {item.name: item for item in found}


def test_a_good_machine_has_nothing_to_complain_of(machine, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found = look(machine)
    assert [item for item in found.values() if item.severity > Severity.NOTE] == []
    assert found["rdma mlx5_0"].found == "Ethernet, 400 Gb/s, 2 GIDs, index 3"
    assert "cuda:7 near mlx5_7" in found["cuda"].found
    assert found["port 50051"].found == "free"


@pytest.mark.parametrize(
    ("path", "text", "name", "severity", "advice"),
    [
        ("proc/sys/kernel/osrelease", "4.18.0-553", "kernel", "WARNING", "5.14"),
        ("proc/sys/vm/overcommit_memory", "2", "overcommit", "PROBLEM", "vm.overcommit_memory=0"),
        ("proc/sys/kernel/numa_balancing", "1", "numa balancing", "WARNING", "numa_balancing=0"),
        ("proc/sys/kernel/io_uring_disabled", "2", "io_uring", "NOTE", "io_uring_disabled=0"),
        ("proc/sys/net/ipv4/ip_local_port_range", "60000 60999", "outgoing ports", "WARNING",
         "ip_local_port_range"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]",
         "huge pages of buffers", "WARNING", "echo madvise"),
        ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]",
         "huge pages of segments", "WARNING", "echo advise"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet",
         "clock source", "WARNING", "tsc"),
        ("sys/fs/cgroup/memory.max", str(8 << 30), "memory limit", "NOTE", "--segment"),
        ("sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN", "rdma mlx5_2", "WARNING", "eth2"),
        ("sys/class/infiniband/mlx5_2/ports/1/gid_attrs/types/3", "IB/RoCE v1", "rdma mlx5_2",
         "WARNING", "IP address"),
        ("sys/class/net/eno1/mtu", "1500", "mtu", "WARNING", "one mtu"),
        ("proc/net/tcp6", "h\n0: 0:C383 0:0 0A", "port 50051", "NOTE", "--port"),
    ],
)  # fmt: skip
def test_each_thing_that_is_wrong_is_named_with_what_to_do(
    machine, path, text, name, severity, advice
):
    write(machine, path, text)
    found = look(machine)[name]
    assert found.severity is Severity[severity]
    assert advice in found.advice


def test_limits_matter_where_there_is_rdma(machine, tmp_path_factory):
    found = look(machine, memlock=65_536, nofile=1024)
    assert found["memlock"].severity is Severity.PROBLEM
    assert "64KiB" in found["memlock"].found
    assert found["open files"].severity is Severity.WARNING
    small = tmp_path_factory.mktemp("small")
    machines.no_numa(small / "sys")
    assert look(small, memlock=65_536)["memlock"].severity is Severity.OK


def test_a_machine_that_tells_nothing_is_examined_all_the_same(tmp_path):
    found = look(tmp_path)
    assert found["kernel"].found == "unknown"
    assert found["rdma"].severity is Severity.NOTE
    assert found["/dev/shm"].severity is Severity.WARNING
    assert found["network"].severity is Severity.NOTE


def test_memory_that_killed_workers_left_is_named_and_what_is_held_is_not(machine):
    assert "memory of workers" not in look(machine)
    shm = machine / "dev/shm"
    for worker in ("dead", "alive"):
        (shm / f"mooncake-1000-{worker}-0.mem").write_bytes(bytes(1 << 20))
        (shm / f"mooncake-1000-{worker}.worker").write_text("{}")
    (shm / "of others").touch()
    held = (shm / "mooncake-1000-alive.worker").stat().st_ino
    write(machine, "proc/locks", f"1: FLOCK  ADVISORY  WRITE 4711 00:19:{held} 0 EOF")
    found = look(machine)["memory of workers"]
    assert found.severity is Severity.NOTE
    assert found.found.startswith("1 that were killed left ")
    assert "mooncake worker --clean" in found.advice


def test_a_device_this_user_may_not_open_is_a_problem(machine, monkeypatch):
    write(machine, "dev/infiniband/uverbs0", "")
    monkeypatch.setattr("os.access", lambda path, mode: "uverbs" not in str(path))
    found = look(machine)["/dev/infiniband/uverbs0"]
    assert found.severity is Severity.PROBLEM


def test_every_complaint_says_what_to_do(machine, tmp_path):
    for root in (machine, tmp_path / "empty"):
        for item in examine(Host(root, {"memlock": 1, "nofile": 1})):
            if item.severity >= Severity.WARNING:
                assert item.advice, item


def test_gpus_without_torch_are_a_warning(machine, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = look(machine)["cuda"]
    assert (found.severity, found.advice) == (Severity.WARNING, "pip install torch")


def test_routes_say_what_is_chosen_and_why_not_the_others():
    told = routes()
    here = {route.transport: route for route in told if route.peer == "a process of this host"}
    elsewhere = {route.transport: route for route in told if route.peer == "another host"}
    assert here["shm"].chosen
    assert not elsewhere["shm"].chosen
    assert elsewhere["shm"].reason
    for paths in (here, elsewhere):
        assert sum(path.chosen for path in paths.values()) == 1


def test_the_command_examines_this_machine(capsys):
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == {"ok": 0, "note": 0, "warning": 10, "problem": 11}[told["worst"]]
    assert {"kernel", "memlock", "/dev/shm", "clock", "numpy"} <= {
        item["name"] for item in told["findings"]
    }
    assert main(["doctor", "--all"]) == code
    text = capsys.readouterr().out
    assert "numpy" in text
    assert "a process of this host" in text


@pytest.mark.parametrize(
    ("severity", "code"), [("OK", 0), ("NOTE", 0), ("WARNING", 10), ("PROBLEM", 11)]
)
def test_the_exit_code_is_the_worst_severity(monkeypatch, capsys, severity, code):
    from mooncake_store import doctor

    found = [doctor.Finding("a", doctor.Severity[severity], "found", "do this")]
    monkeypatch.setattr(doctor, "examine", lambda host: found)
    monkeypatch.setattr(doctor, "routes", list)
    assert main(["doctor"]) == code
    assert ("do this" in capsys.readouterr().out) == (severity != "OK")


def test_a_peer_says_who_it_is_and_how_its_memory_is_reached(tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of enough bytes\n")
    secret.chmod(0o600)
    with (
        Segment.create(1 << 20, name="pool") as segment,
        TransferServer(secret=secret.read_bytes().strip()) as server,
    ):
        server.publish(segment)
        address = "{}:{}".format(*server.tcp_address)
        options = ["doctor", "--json", "--peer", address]
        main([*options, "--secret-file", str(secret)])
        told = json.loads(capsys.readouterr().out)
        (found,) = [item for item in told["findings"] if item["name"] == f"peer {address}"]
        assert found["severity"] == "ok"
        assert f"process {os.getpid()} on this host, 1 segments" in found["found"]
        paths = [route for route in told["routes"] if route["peer"] == f"pool of {address}"]
        assert [route["transport"] for route in paths if route["chosen"]] == ["local"]
        assert "packets of up to" in json.dumps(told)
        # Without the secret it is a problem, and said so.
        assert main(options) == 11
        assert "secret" in capsys.readouterr().out
    assert main(options) == 11
    assert "cannot connect" in capsys.readouterr().out


def test_an_address_that_is_none_is_refused(capsys):
    assert main(["doctor", "--peer", "nowhere"]) == 3
    assert "write host:port" in capsys.readouterr().err
