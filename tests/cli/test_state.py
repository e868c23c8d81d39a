"""`mooncake state`: what a master knows, out of its directory and into another one."""

import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_store import Client, NotFoundError
from mooncake_store.cli.shared.tree import run
from mooncake_store.errors import ConfigError
from mooncake_store.journal.disk import Disk
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.local_cluster import LocalCluster
from tests.master.test_stale_state import KEYS, Pool, assert_there, move_on, put
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture
def command(capfd):
    """Run `mooncake state`; returns the exit code, standard output and standard error."""

    def call(*words):
        capfd.readouterr()
        code = run(["state", *map(str, words)])
        out, err = capfd.readouterr()
        return int(code), out, err

    return call


@pytest.fixture
def pool(tmp_path, start_program, free_port):  # in this order: its folder is there to the end
    return Pool(start_program, tmp_path, free_port)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """The directory of a master of two shards that has ended."""
    path = tmp_path_factory.mktemp("pool") / "state"
    settings = {"state": str(path), "journal": "written"}
    with LocalCluster(1, "16MiB", 2, master=settings) as cluster, Client(cluster.url) as client:
        put(client, KEYS, "first")
        os.kill(cluster.pids[0], signal.SIGTERM)
        cluster._master_process().process.wait(PATIENCE_S)
    return path


@pytest.fixture
def exported(state, tmp_path, command):
    """A file that was exported from it."""
    assert command("export", tmp_path / "pool.state", "--state", state)[0] == 0
    return tmp_path / "pool.state"


def content(folder):
    """All that is in a folder, with when it was changed."""
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def rings(state):
    """What shards of the cluster of a state directory have in memory."""
    cluster = json.loads((state / "identity.json").read_text())["cluster"]
    return list(Path("/dev/shm").glob(f"mooncake-{cluster}-*.ring"))


def test_all_objects_are_there_in_a_directory_that_was_imported(pool, command, tmp_path):
    pool.start_master()
    pool.start_worker()
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.end_master()
        code, out, _ = command("export", tmp_path / "file", "--state", pool.state, "--json")
        assert code == 0
        assert json.loads(out)["objects"] == len(KEYS)
        shutil.rmtree(pool.state)
        code, out, _ = command("import", tmp_path / "file", "--state", pool.state, "--json")
        assert code == 0
        assert json.loads(out)["objects"] == len(KEYS)
        assert stat.S_IMODE(pool.state.stat().st_mode) == 0o700
        pool.start_master()
        pool.met()
        assert_there(client, KEYS, "first")
        with Client(pool.url) as fresh:
            assert_there(fresh, KEYS, "first")
            put(fresh, KEYS[:3], "second")
            assert_there(fresh, KEYS[:3], "second")
        pool.end_master(signal.SIGKILL)
        pool.start_master()
        pool.met()
        assert_there(client, KEYS[3:], "first")


def test_nothing_of_an_export_is_believed_that_memory_has_moved_on_from(pool, command, tmp_path):
    pool.start_master()
    pool.start_worker()
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.end_master()
        assert command("export", tmp_path / "file", "--state", pool.state)[0] == 0
        move_on(pool, client)
        assert command("import", tmp_path / "file", "--state", tmp_path / "other")[0] == 0
        master = pool.start_master(tmp_path / "other")
        while "is older than that worker's memory" not in master.output:
            for key in KEYS[:4]:
                with pytest.raises(NotFoundError):
                    client.get(key)
        pool.met()
        for key in KEYS:
            with pytest.raises(NotFoundError):
                client.get(key)
        put(client, KEYS, "again")
        assert_there(client, KEYS, "again")


def test_an_export_is_for_its_user_alone_and_changes_nothing(state, command, tmp_path):
    before = content(state)
    file = tmp_path / "file"
    file.write_text("what was there before")
    file.chmod(0o644)
    code, out, _ = command("export", file, "--state", state)
    assert code == 0
    assert out.startswith(f"{file}: what 2 shards knew of 40 objects")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]
    assert content(state) == before


def test_a_state_that_is_in_use_or_not_there_is_not_exported(command, tmp_path):
    settings = {"state": str(tmp_path / "state"), "journal": "written"}
    with LocalCluster(0, master=settings) as cluster:
        code, _, err = command("export", tmp_path / "file", "--state", tmp_path / "state")
        assert code == 3
        assert f"in use by another master, process {cluster.pids[0]}" in err
    code, _, err = command("export", tmp_path / "file", "--state", tmp_path / "none")
    assert (code, err.count("\n")) == (3, 1)
    assert os.listdir(tmp_path) == ["state"]


def test_what_a_killed_master_left_in_memory_is_exported_too(command, tmp_path):
    settings = {"state": str(tmp_path / "state"), "journal": "written"}
    with LocalCluster(1, "16MiB", master=settings) as cluster, Client(cluster.url) as client:
        put(client, KEYS, "first")
        cluster.kill_master()
        code, out, _ = command("export", tmp_path / "file", "--state", tmp_path / "state", "--json")
        assert code == 0
        assert json.loads(out)["objects"] == len(KEYS)
    remove_rings(tmp_path / "state" / "shard-0")


def test_a_state_that_is_not_whole_is_not_exported(state, command, tmp_path):
    broken = tmp_path / "state"
    shutil.copytree(state, broken)
    file = min((broken / "shard-1").glob("journal-*.log"))
    data = bytearray(file.read_bytes())
    data[4096 + 128 + 8] ^= 1  # in the words of the first block
    file.write_bytes(data)
    code, _, err = command("export", tmp_path / "file", "--state", broken)
    assert code == 1
    assert "the state of shard 1 is not whole: the journal is not whole" in err
    assert "mooncake journal verify" in err
    assert os.listdir(tmp_path) == ["state"]


def test_a_disk_without_room_leaves_the_file_that_was_there(state, command, tmp_path):
    file = tmp_path / "file"
    file.write_text("what was there before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        code, _, err = command("export", file, "--state", state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert f"{file} cannot be written: File too large" in err
    assert file.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_holds_anything_is_left_alone(exported, command, tmp_path):
    for name in ("identity.json", "shard-0", "notes"):
        target = tmp_path / f"with-{name}"
        (target / name).mkdir(parents=True)
        code, _, err = command("import", exported, "--state", target)
        assert code == 2
        assert f"{target} holds something already: {name}" in err
        assert os.listdir(target) == [name]


def test_a_directory_that_is_empty_is_used(exported, command, tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    assert command("import", exported, "--state", target)[0] == 0
    assert sorted(os.listdir(target)) == [
        "cluster.json", "identity.json", "lock", "shard-0", "shard-1",
    ]  # fmt: skip
    assert run(["journal", "verify", "--state", str(target)]) == 0
    assert command("import", exported, "--state", target)[0] == 2


def damaged(data):
    """Ways in which a file is not what was exported, and what is said of each."""
    cut = data[: len(data) // 2]
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    newer = data.replace(b"\xa7version\x01", b"\xa7version\x02", 1)
    return {
        "cut": (cut, "is damaged: "),
        "without its end": (data[:-20], "is damaged: "),
        "flipped": (bytes(flipped), "is damaged: its checksum is another one"),
        "longer": (data + b"\0", "is damaged: no record begins"),
        "newer": (newer, "is of version 2, this program reads up to 1"),
        "empty": (b"", "is no exported state"),
        "other": (b"\xce\0\0\0\x01\x80", "is no exported state"),
        "text": (b"something else", "is no exported state"),
    }


def test_a_file_that_is_not_as_it_was_written_is_refused_and_nothing_made(
    exported, command, tmp_path
):
    for name, (data, said) in damaged(exported.read_bytes()).items():
        file = tmp_path / name
        file.write_bytes(data)
        code, _, err = command("import", file, "--state", tmp_path / "target")
        assert (code, err.count("\n")) == (1, 1), name
        assert f"{file} {said}" in err, name
        assert not (tmp_path / "target").exists(), name


def test_a_disk_without_room_leaves_nothing_of_an_import(
    state, exported, command, tmp_path, monkeypatch
):
    def full(disk, fd, pages, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "write", full)
        code, _, err = command("import", exported, "--state", tmp_path / "target")
    assert code == 1
    assert "cannot be written: not kept: No space left on device" in err
    assert not (tmp_path / "target").exists()
    assert rings(state) == []
    assert command("import", exported, "--state", tmp_path / "target")[0] == 0


DIES = """
import os, signal, sys
from mooncake_store.cli.shared.tree import run
from mooncake_store.master import {module} as module

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

module.{name} = die
run(sys.argv[1:])
"""


def killed(module, name, *words):
    """Run a command that is killed when it comes to a function."""
    code = DIES.format(module=module, name=name)
    done = subprocess.run(
        [sys.executable, "-c", code, "state", *map(str, words)],
        capture_output=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("module", "name"), [("state_file", "StateWriter.end"), ("state_file", "StateWriter.add")]
)
def test_an_export_that_is_killed_leaves_no_file(state, command, tmp_path, module, name):
    file = tmp_path / "file"
    killed(module, name, "export", file, "--state", state)
    assert not file.exists()
    for left in tmp_path.iterdir():
        assert command("import", left, "--state", tmp_path / "target")[0] == 1
    assert command("export", file, "--state", state)[0] == 0
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["objects_in", "write_kept", "_put_in_place"])
def test_an_import_that_is_killed_leaves_nothing_that_is_believed(
    state, exported, command, tmp_path, name
):
    target = tmp_path / "target"
    killed("importing", name, "import", exported, "--state", target)
    shutil.copytree(target, tmp_path / "copy")
    settings = {"state": str(tmp_path / "copy"), "journal": "written"}
    with LocalCluster(0, shards=2, master=settings) as cluster, Client(cluster.url) as client:
        assert client.store_stats()[0].objects == 0
    assert command("import", exported, "--state", target)[0] == 0
    assert rings(state) == []


def test_a_master_of_another_number_of_shards_is_refused(exported, command, tmp_path):
    target = tmp_path / "target"
    assert command("import", exported, "--state", target)[0] == 0
    with pytest.raises(ConfigError, match="shards"):
        LocalCluster(0, shards=1, master={"state": str(target), "journal": "written"}).start()
