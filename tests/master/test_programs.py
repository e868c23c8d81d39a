"""`mooncake master` and `mooncake worker` as programs: ready, told, refused, ended."""

import ctypes
import json
import os
import signal
import socket
import stat

import pytest

from mooncake_store import Client
from mooncake_store.compat import MooncakeDistributedStore
from tests.ground.test_environment import DOCKER, KUBERNETES
from tests.master.wires import numbered
from tests.processes import children, gone, processor_s
from tests.waiting import until

MASTER = ("-m", "mooncake_store", "master")
# Whatever name they get and however they end, they leave nothing behind.
WORKER = ("-m", "mooncake_store", "worker", "--memory", "anonymous")
LIBC = ctypes.CDLL(None)


def ready(program):
    # The first program on a machine compiles its kernels.
    return json.loads(program.wait_for_line('"ready": true', 100))


def test_a_master_tells_where_it_is_and_removes_the_note_when_it_ends(
    start_program, wire_to, tmp_path
):
    note = tmp_path / "master.json"
    master = start_program(*MASTER, "--port", 0, "--port-file", note, "--json")
    facts = ready(master)
    told = json.loads(note.read_text())
    assert {"ready": True, **told} == facts
    assert told["pid"] == master.process.pid
    assert os.listdir(tmp_path) == ["master.json"]
    wire = wire_to(told["address"])
    assert wire.map().shards == tuple(told["shards"])
    assert wire.map().liveness == told["liveness"]
    # A connected client does not hold the end up.
    master.signal(signal.SIGTERM)
    assert master.wait() == 0
    assert not note.exists()


@pytest.mark.cold
def test_a_warm_master_is_ready_not_much_later_than_its_packages(start_program):
    """Which are a good half of it, on any machine.

    In processor time, the least of three in turn: other programs may run meanwhile.
    """

    def start_s():
        master = start_program(*MASTER, "--port", 0, "--json")
        ready(master)
        with open(f"/proc/{master.process.pid}/stat", encoding="ascii") as file:
            ticks = file.read().rpartition(")")[2].split()[11:13]
        master.signal(signal.SIGTERM)
        assert master.wait() == 0
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    start_s()  # which compiles kernels if need be, and leaves them for the others
    packages = "import numba, uvloop, typer, msgspec"
    times = [(start_s(), processor_s("-c", packages)) for _ in range(3)]
    started_s, packages_s = map(min, zip(*times, strict=True))
    assert started_s < 2 * packages_s


def test_a_worker_serves_and_leaves_in_order(start_program, wire_to, tmp_path):
    master = start_program(*MASTER, "--port", 0, "--json")
    address = ready(master)["address"]
    note = tmp_path / "worker.json"
    worker = start_program(
        *WORKER, "--master", address, "--segment", "16MiB", "--segment", "32MiB",
        "--name", "w", "--port-file", note, "--json",
    )  # fmt: skip
    facts = ready(worker)
    assert facts["name"] == "w"
    assert json.loads(note.read_text())["address"] == facts["address"]
    wire = wire_to(address)
    assert sorted(s.nbytes for s in wire.segments()) == [16 << 20, 32 << 20]
    shard = wire.shard()
    shard.put(numbered(b"p", 10), 1000)
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0
    assert not note.exists()
    assert wire.segments() == ()
    master.signal(signal.SIGINT)
    assert master.wait() == 0


def test_master_worker_put_and_get_work_in_a_pod(start_program, tmp_path):
    """Beside services of the same names, and variables of other tools."""
    pod = KUBERNETES | DOCKER | {"MOONCAKE_MASTER_CONTROL_BASE": "/x"}
    master = start_program(*MASTER, "--port", 0, "--json", **pod)
    address = ready(master)["address"]
    worker = start_program(*WORKER, "--master", address, "--segment", "16MiB", "--json", **pod)
    ready(worker)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(100_000))
    programs = [master, worker]
    for words in (["put", "key", source], ["get", "key", target]):
        programs.append(start_program("-m", "mooncake_store", *words, "--master", address, **pod))
        assert programs[-1].wait() == 0, programs[-1].output
    assert target.read_bytes() == source.read_bytes()
    for program in programs:
        (said,) = [line for line in program.output.splitlines() if "MOONCAKE_" in line]
        assert "MOONCAKE_MASTER_CONTROL_BASE (did you mean" in said
        assert "TCP" not in said


def test_a_worker_ends_whichever_of_its_threads_is_given_the_signal(start_program):
    """Meant for a process, any thread may get it: one that starts or ends takes it with it."""
    address = ready(master := start_program(*MASTER, "--port", 0, "--json"))["address"]
    worker = start_program(*WORKER, "--master", address, "--segment", "16MiB", "--json")
    ready(worker)
    pid = worker.process.pid
    others = [int(thread) for thread in os.listdir(f"/proc/{pid}/task") if int(thread) != pid]
    assert LIBC.tgkill(pid, others[0], signal.SIGTERM) == 0
    assert worker.wait() == 0
    assert "leaves without" not in worker.output
    master.kill()


def test_a_port_in_use_is_one_sentence(start_program, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        note = tmp_path / "master.json"
        master = start_program(*MASTER, "--port", port, "--port-file", note)
        assert master.wait() == 3
    (line,) = master.output.strip().splitlines()
    assert line == (
        f"error: 127.0.0.1:{port} is in use by another process; "
        "stop that process, or choose another port"
    )
    assert not note.exists()


@pytest.mark.parametrize(
    ("program", "extra"), [(MASTER, ()), (WORKER, ("--segment", "16MiB"))], ids=["master", "worker"]
)
def test_other_machines_need_a_secret(start_program, program, extra):
    started = start_program(*program, "--host", "0.0.0.0", "--port", 0, *extra)
    assert started.wait() == 3
    assert "secret" in started.output
    assert "insecure" in started.output


@pytest.mark.slow
@pytest.mark.cold  # it is looked for in command lines
def test_a_secret_is_asked_for_and_shown_to_nobody(start_program, wire_to, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(stat.S_IRUSR | stat.S_IWUSR)
    master = start_program(*MASTER, "--port", 0, "--shards", 2, "--json", "--secret-file", secret)
    facts = ready(master)
    stranger = start_program(*WORKER, "--master", facts["address"], "--segment", "16MiB")
    assert stranger.wait() != 0
    assert "secret" in stranger.output
    worker = start_program(
        *WORKER, "--master", facts["address"], "--segment", "16MiB", "--secret-file", secret,
        "--json",
    )  # fmt: skip
    ready(worker)
    assert len(wire_to(facts["address"], secret=secret.read_bytes()).segments()) == 1
    shards = children(master.process.pid)
    for pid in (master.process.pid, worker.process.pid, *shards):
        for source in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{source}", "rb") as file:
                assert secret.read_bytes() not in file.read()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    master.signal(signal.SIGTERM)
    assert master.wait() == 0
    assert secret.read_text() not in master.output + worker.output + stranger.output
    assert all(gone(pid) for pid in shards)


def test_a_worker_that_waits_for_its_master_can_be_interrupted(start_program, free_port):
    worker = start_program(*WORKER, "--master", f"127.0.0.1:{free_port}", "--segment", "16MiB")
    worker.wait_for_line("unreachable")
    worker.signal(signal.SIGINT)
    assert worker.wait() == 130
    assert "Traceback" not in worker.output


def test_a_second_interrupt_does_not_wait_for_leases(start_program, wire_to):
    master = start_program(*MASTER, "--port", 0, "--json")
    address = ready(master)["address"]
    worker = start_program(*WORKER, "--master", address, "--segment", "16MiB", "--json")
    ready(worker)
    shard = wire_to(address).shard()
    shard.put([b"x"], 1000)
    shard.get([b"x"], ttl_ms=100_000)
    worker.signal(signal.SIGINT)
    worker.wait_for_line("readers hold leases")
    assert worker.process.poll() is None
    worker.signal(signal.SIGINT)
    assert worker.wait() == 130  # it would be 0 if it had waited for as long as it may
    assert "Traceback" not in worker.output


@pytest.mark.parametrize("shards", [1, 2])
def test_a_worker_does_not_wait_for_leases_that_were_given_back(start_program, shards):
    master = start_program(*MASTER, "--port", 0, "--shards", shards, "--json")
    address = ready(master)["address"]
    worker = start_program(*WORKER, "--master", address, "--segment", "16MiB", "--json")
    ready(worker)
    keys = [f"key {number}" for number in range(20)]
    with Client(f"mooncake://{address}/default", lease_ttl="300s") as client:
        assert client.put_many(keys, [b"value"] * len(keys)).ok
        assert client.get_many(keys).ok
        with client.view("key 0", ttl="300s") as view:
            assert view.data == b"value"
        assert client.get("key 1") == b"value"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert "readers hold leases" not in worker.output


def test_the_lease_flag_of_the_original_decides_for_who_asks_for_none(start_program):
    master = start_program(*MASTER, "--port=0", "--default_kv_lease_ttl=200000", "--json")
    address = ready(master)["address"]
    worker = start_program(*WORKER, "--master", address, "--segment", "16MiB", "--json")
    ready(worker)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address) == 0
    try:
        for key in ("one", "several", "there"):
            assert store.put(key, b"value") == 0
        assert store.get("one") == b"value"
        assert store.get_batch(["several"]) == [b"value"]
        assert store.is_exist("there") == 1
        for key in ("one", "several", "there"):
            assert 100 < store.client.stat(key).lease_s <= 200
        with Client(f"mooncake://{address}/default", lease_ttl="50s") as client:
            client.put("asked", b"value")
            assert client.get("asked") == b"value"
            assert client.stat("asked").lease_s <= 50
    finally:
        store.close()


@pytest.mark.slow
def test_a_dead_shard_ends_the_master_with_a_reason(start_program):
    master = start_program(*MASTER, "--port", 0, "--shards", 2, "--json")
    ready(master)
    shards = children(master.process.pid)
    assert len(shards) == 2
    os.kill(shards[1], signal.SIGKILL)
    assert master.wait() == 4
    assert "shard 1 of 2" in master.output
    assert "ended with code -9" in master.output
    until(lambda: all(gone(pid) for pid in shards))


@pytest.mark.slow
def test_shards_end_when_their_master_is_killed(start_program):
    master = start_program(*MASTER, "--port", 0, "--shards", 2, "--json")
    assert len(ready(master)["shards"]) == 2
    shards = children(master.process.pid)
    master.signal(signal.SIGKILL)
    assert master.wait() == -9
    until(lambda: all(gone(pid) for pid in shards), what="no shard is left")
