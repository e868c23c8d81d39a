"""A pool that outlives the program which started it: closed or killed, as it was or otherwise."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from mooncake_store import (
    AsyncClient,
    Client,
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    local_state,
)
from mooncake_store.errors import NoSpaceError
from mooncake_store.journal import origin
from mooncake_store.journal.ring_file import rings_of
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.worker.memory_files import base_of
from tests.sources import ROOT
from tests.waiting import PATIENCE_S, until

MIB = 1 << 20
SHARED = Path("/dev/shm")
MODES = pytest.mark.parametrize(
    "in_process", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["threads", "processes"]
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def value_of(key: str) -> bytes:
    """Bytes that belong to a key and to no other."""
    seed = int.from_bytes(key.encode()[-8:], "little")
    return np.random.default_rng(seed).bytes(3000 + seed % 5000)


def keys_of(what: str, count: int = 200) -> list[str]:
    return [f"{what}/{number:04d}" for number in range(count)]


def put(client: Client, keys: list[str], **options: int) -> None:
    client.put_many(keys, [value_of(key) for key in keys], **options).check()


def there(client: Client, keys: list[str]) -> list[bool]:
    """Which objects can be read; what can be read has its own bytes."""
    found = client.get_many(keys).values
    for key, value in zip(keys, found, strict=True):
        assert value is None or bytes(value) == value_of(key), f"{key} has other bytes"
    return [value is not None for value in found]


def run_program(body: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a program that has what this file has."""
    text = "import sys\nfrom tests.master.test_local_state import *\n" + textwrap.dedent(body)
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@MODES
def test_the_next_cluster_finds_every_object(state: Path, in_process: bool) -> None:
    keys = keys_of("one")
    with (
        LocalCluster(2, "32MiB", in_process=in_process, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        put(client, keys)
        client.remove_many(keys[:50]).check()
        digests = client.identity.digests(keys).tolist()
        assert rings_of(state / "shard-0")
    assert not rings_of(state / "shard-0"), "memory is taken while no program runs"
    assert [path.stat().st_size for path in (state / "memory").glob("*.mem")] == [32 * MIB] * 2
    with (
        LocalCluster(2, "32MiB", in_process=in_process, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        assert there(client, keys) == [False] * 50 + [True] * 150
        assert client.identity.digests(keys).tolist() == digests
        put(client, keys[:50])
        assert all(there(client, keys))


@pytest.mark.slow
def test_each_life_adds_to_the_ones_before(state: Path) -> None:
    """Also where threads and processes take turns, with several shards and copies."""
    keys: list[str] = []
    for life in range(4):
        with (
            LocalCluster(2, "32MiB", 2, in_process=life % 2 == 1, state=str(state)) as cluster,
            Client(cluster.url) as client,
        ):
            assert all(there(client, keys))
            fresh = keys_of(f"life {life}", 50)
            put(client, fresh, replicas=2, replicas_min=2)
            keys += fresh
    with LocalCluster(2, "32MiB", 2, state=state) as cluster, Client(cluster.url) as client:
        cluster.kill_worker(0)
        assert all(there(client, keys)), "the second copies are not what the first ones are"


PUTTING = """
    cluster = LocalCluster(1, "64MiB", in_process=sys.argv[2] == "True", state=sys.argv[1]).start()
    client = Client(cluster.url)
    print(cluster.pids, flush=True)
    for batch in range(1000):
        keys = keys_of(f"batch {batch}", 5)
        put(client, keys)
        print(batch, flush=True)
    """


@MODES
@pytest.mark.parametrize("batches", [1, 40])
def test_what_was_completed_is_there_when_the_program_is_killed(
    state: Path, in_process: bool, batches: int
) -> None:
    with run_program(PUTTING, state, in_process) as program:
        assert program.stdout is not None
        try:
            for _ in range(1 + batches):
                program.stdout.readline()
        finally:
            os.kill(program.pid, signal.SIGKILL)
        told = program.stdout.read().splitlines()
    done = int(told[-1]) + 1 if told else batches
    # At once: processes that end by themselves are waited for.
    with (
        LocalCluster(1, "64MiB", in_process=in_process, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        for batch in range(done):
            assert all(there(client, keys_of(f"batch {batch}", 5))), f"batch {batch} of {done}"
        put(client, keys_of("after"))
        assert all(there(client, keys_of("after")))


@pytest.mark.slow
def test_processes_of_a_program_that_was_killed_are_waited_for(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_program(PUTTING, state, False) as program:
        assert program.stdout is not None
        _, worker = json.loads(program.stdout.readline().replace("(", "[").replace(")", "]"))
        program.stdout.readline()
        os.kill(worker, signal.SIGSTOP)
        try:
            os.kill(program.pid, signal.SIGKILL)
            program.wait(PATIENCE_S)
            with monkeypatch.context() as patch:
                soon = local_state._PROCESSES._replace(wait_s=0.1)
                patch.setattr(local_state, "_PROCESSES", soon)
                said = f"process {program.pid}, do not end"
                with pytest.raises(ConfigError, match=said):
                    LocalCluster(1, "64MiB", state=state).start()
        finally:
            os.kill(worker, signal.SIGCONT)
    with LocalCluster(1, "64MiB", state=state) as cluster, Client(cluster.url) as client:
        assert all(there(client, keys_of("batch 0", 5)))


@MODES
def test_a_second_program_is_refused_while_the_first_lives(state: Path, in_process: bool) -> None:
    holder = """
        with LocalCluster(0, in_process=True, state=sys.argv[1]):
            print("holds", flush=True)
            sys.stdin.readline()
        """
    with run_program(holder, state) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "holds\n"
        with pytest.raises(ConfigError) as refused:
            LocalCluster(1, "16MiB", in_process=in_process, state=state).start()
        said = str(refused.value)
        assert str(state) in said
        assert f"process {first.pid}" in said
        assert "name another directory" in said
        with pytest.raises(ConfigError, match=f"process {first.pid}"):
            Client("mooncake://local", state=str(state))
        first.communicate("\n", timeout=PATIENCE_S)
    assert not list((state / "memory").glob("*.mem"))
    with LocalCluster(1, "16MiB", in_process=in_process, state=state):
        pass


def test_a_master_that_runs_there_is_named(state: Path) -> None:
    settings = {"state": str(state)}
    with (
        LocalCluster(0, in_process=True, master=settings),
        pytest.raises(ConfigError, match=f"in use by another master, process {os.getpid()}"),
    ):
        LocalCluster(1, "16MiB", in_process=True, state=state).start()


def test_fewer_workers_lose_what_lay_with_the_others(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of("one", 400)
    with (
        LocalCluster(3, "16MiB", in_process=True, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        put(client, keys)
    caplog.clear()
    with (
        LocalCluster(1, "16MiB", in_process=True, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        (told,) = lost_lines(caplog)
        assert "worker-1" in told
        assert "worker-2" in told
        assert "worker-0" not in told
        found = there(client, keys)
        assert 0 < sum(found) < len(keys)
        assert len(list((state / "memory").glob("*.mem"))) == 1
        assert [worker.name for worker in client.status().workers] == ["worker-0"]
        lost = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
        until(lambda: client.put_many(lost, [value_of(key) for key in lost]).ok)
        assert all(there(client, keys))
    caplog.clear()
    with (
        LocalCluster(3, "16MiB", in_process=True, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        assert not lost_lines(caplog)
        assert all(there(client, keys))


@MODES
def test_another_size_loses_what_was_there(
    state: Path, in_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of("one")
    with (
        LocalCluster(1, "16MiB", in_process=in_process, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        put(client, keys)
    caplog.clear()
    with (
        LocalCluster(1, "24MiB", in_process=in_process, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        (told,) = lost_lines(caplog)
        assert "worker-0 lends 24MiB instead of 16MiB" in told
        assert not any(there(client, keys))
        (file,) = (state / "memory").glob("*.mem")
        assert file.stat().st_size == 24 * MIB
        put(client, keys)
        assert all(there(client, keys))


def lost_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of memory that does not fit any more."""
    return [
        record.message
        for record in caplog.records
        if record.name == "mooncake_store.local_state" and record.levelno >= logging.WARNING
    ]


def test_another_number_of_shards_is_refused_and_nothing_is_touched(state: Path) -> None:
    with (
        LocalCluster(1, "16MiB", in_process=True, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        put(client, ["one"])
    with pytest.raises(ConfigError, match="shards"):
        LocalCluster(1, "16MiB", 2, in_process=True, state=state).start()
    with (
        LocalCluster(1, "16MiB", in_process=True, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        assert there(client, ["one"]) == [True]


def test_a_start_of_the_machine_in_between_leaves_nothing_to_believe(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of("one")
    with (
        LocalCluster(1, "16MiB", in_process=True, state=state) as cluster,
        Client(cluster.url) as client,
    ):
        put(client, keys)
    boot = tmp_path / "boot"
    boot.write_text("00000000-0000-4000-8000-000000000001\n")
    monkeypatch.setattr(origin, "_BOOT", boot)
    origin.this_boot.cache_clear()
    for module in ("worker.keeping", "local_state"):
        monkeypatch.setattr(f"mooncake_store.{module}.host_identity", boot.read_text)
    try:
        with (
            LocalCluster(1, "16MiB", in_process=True, state=state) as cluster,
            Client(cluster.url) as client,
        ):
            assert not any(there(client, keys))
            put(client, keys)
            assert all(there(client, keys))
    finally:
        origin.this_boot.cache_clear()
    assert "this host was started anew" in caplog.text


def test_a_worker_and_a_master_that_are_killed_go_on(state: Path) -> None:
    keys = keys_of("one")
    with LocalCluster(1, "16MiB", state=state) as cluster, Client(cluster.url) as client:
        put(client, keys)
        cluster.restart_worker(0)
        assert all(there(client, keys))
        cluster.restart_master()
        assert all(there(client, keys))
        cluster.kill_worker(0)
        cluster.kill_master()
    with LocalCluster(1, "16MiB", state=state) as cluster, Client(cluster.url) as client:
        assert all(there(client, keys))


def test_what_others_left_in_a_folder_that_is_shared_is_no_obstacle(
    state: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    left = {"newer": b'{"version": 99}', "noise": b"{", "linked": b"", "link": b""}
    paths = {name: shared / f"{base_of(name)}.worker" for name in left}
    for name, content in left.items():
        paths[name].write_bytes(content)
    os.link(paths["linked"], tmp_path / "second name")
    paths["link"].unlink()
    paths["link"].symlink_to(tmp_path / "nowhere")
    keys, settings = keys_of("one"), {"memory": str(shared)}
    for life in range(2):
        with (
            LocalCluster(1, "16MiB", in_process=True, state=state, worker=settings) as cluster,
            Client(cluster.url) as client,
        ):
            if not life:
                put(client, keys)
            assert all(there(client, keys))
    assert paths["newer"].read_bytes() == left["newer"]


def test_settings_that_keep_nothing_are_refused(state: Path) -> None:
    for given in (
        {"master": {"journal": "none"}},
        {"master": {"state": "/elsewhere"}},
        {"worker": {"memory": "anonymous"}},
    ):
        with pytest.raises(InvalidArgumentError, match="state"):
            LocalCluster(state=state, **given)
    with pytest.raises(ConfigError, match=r"client\.state.*mooncake://local"):
        Client("mooncake://127.0.0.1:1", state=str(state))
    assert not state.exists()


def said_of(state: Path, segment: str = "16MiB") -> str:
    """The sentence that a pool is refused with."""
    with pytest.raises((ConfigError, NoSpaceError)) as refused:
        LocalCluster(1, segment, in_process=True, state=state).start()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_directory_that_will_not_do_is_one_sentence(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert str(file / "below") in said_of(file / "below")
    assert "space" in said_of(state, "1024PiB") or "free" in said_of(state, "1024PiB")
    assert not list((state / "memory").iterdir())
    with LocalCluster(1, "16MiB", in_process=True, state=state):
        pass
    identity = state / "identity.json"
    kept = identity.read_text()
    identity.write_text(json.dumps(json.loads(kept) | {"version": 99}))
    assert "version 99" in said_of(state)
    identity.write_text(kept)
    (record,) = (state / "memory").glob("*.worker")
    record.write_text(json.dumps(json.loads(record.read_bytes().rstrip(b"\0")) | {"version": 99}))
    assert "version 99" in said_of(state)
    state.chmod(0o777)
    assert "other users can write" in said_of(state)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs the right to it")
    try:
        assert str(disk) in said_of(disk / "pool", "1MiB")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_local_store_is_there_for_the_next_program(state: Path) -> None:
    """One that nobody closed as well."""
    body = """
        store = Client("mooncake://local/mine", segment="16MiB", state=sys.argv[1])
        put(store, keys_of("one"))
        """
    with run_program(body, state) as program:
        program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0
    with Client("mooncake://local/mine", segment="16MiB", state=str(state)) as store:
        assert all(there(store, keys_of("one")))
        assert store.config.state == ""
    with (
        Client("mooncake://local", segment="16MiB", state=str(state)) as store,
        pytest.raises(NotFoundError),
    ):
        store.get("one/0000")
    assert len(list((state / "memory").glob("*.mem"))) == 1


def test_a_store_of_asyncio_keeps_its_pool_too(state: Path) -> None:
    async def use(first: bool) -> bytes:
        async with AsyncClient("mooncake://local", segment="16MiB", state=str(state)) as store:
            if first:
                await store.put("key", b"value")
            return await store.get("key")

    assert [asyncio.run(use(first)) for first in (True, False)] == [b"value", b"value"]


def test_a_forked_child_does_not_hold_the_pool_of_its_parent(state: Path) -> None:
    body = """
        store = Client("mooncake://local", segment="16MiB", state=sys.argv[1])
        put(store, ["one"])
        child = os.fork()
        if not child:
            signal.pause()
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    with run_program(body, state) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        try:
            program.wait(PATIENCE_S)
            with Client("mooncake://local", segment="16MiB", state=str(state)) as store:
                assert there(store, ["one"]) == [True]
        finally:
            os.kill(child, signal.SIGKILL)


def test_without_a_state_nothing_is_left(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the pool anywhere, and a program that names a state later finds nothing."""
    state.parent.joinpath("tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(state.parent / "tmp"))
    name = f"worker-{secrets.token_hex(4)}"
    named = {"master": {"journal": "written"}, "worker": {"name": name}}
    with LocalCluster(1, "16MiB", **named) as cluster:
        with Client(cluster.url) as client:
            client.put("key", b"value")
        (folder,) = (state.parent / "tmp").iterdir()
        cluster.kill_worker(0)
        cluster.kill_master()
        assert rings_of(folder / "shard-0")
    assert not rings_of(folder / "shard-0")
    assert not list((state.parent / "tmp").iterdir())
    assert not list(SHARED.glob(f"{base_of(name)}*"))
