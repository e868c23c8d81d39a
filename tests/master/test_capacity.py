"""Memory that is not there is not lent: on machines made of files, and with the real program."""

import asyncio
import os
import subprocess
import sys

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.config.settings import WorkerConfig
from mooncake_store.errors import ConfigError
from mooncake_store.worker import capacity
from mooncake_store.worker.capacity import Machine, check_room
from mooncake_store.worker.memory_files import base_of
from mooncake_store.worker.worker import Worker
from serving.system import ServingSystem, SystemSettings

MIB = 1 << 20
GIB = 1 << 30

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
# A container without a namespace of its own for groups: its folder is mounted where the top was.
V1_DOCKER = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"


@pytest.fixture
def machine(tmp_path):
    """Make a machine of files, and return it."""

    def make(available="24GiB", *, mounts="", groups="", **files):
        kilobytes = int(available.removesuffix("GiB")) * MIB
        content = {
            "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {kilobytes} kB\nBuffers: 0 kB",
            "proc/self/mountinfo": f"22 1 0:1 / / rw - ext4 /dev/vda rw\n{mounts}",
            "proc/self/cgroup": groups,
        } | {path: str(text) for path, text in files.items()}
        for path, text in content.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        return Machine(tmp_path)

    return make


def group(folder, limit, usage, *, cache=0, version=2, **more):
    """The files of one control group."""
    if version == 2:
        files = {"memory.max": limit, "memory.current": usage}
        files["memory.stat"] = f"anon 1\ninactive_file {cache}\nactive_file 0"
    else:
        files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage}
        files["memory.stat"] = f"cache 9\ntotal_inactive_file {cache}\ntotal_active_file 0"
    return {f"{folder}/{name}": text for name, text in (files | more).items()}


def refusal(machine, *segments, **settings):
    with pytest.raises(ConfigError) as refused:
        check_room(WorkerConfig(segments_bytes=segments, **settings), machine=machine)
    return str(refused.value)


def fits(machine, *segments, **settings):
    check_room(WorkerConfig(segments_bytes=segments, **settings), machine=machine)


def test_more_than_the_machine_has_is_refused_with_the_numbers_and_the_next_step(machine):
    found = machine("24GiB")
    fits(found, 24 * GIB)
    said = refusal(found, 500 * GIB)
    assert said.startswith(
        "500GiB are to be lent, and there is only room for 24GiB (MemAvailable of /proc/meminfo); "
    )
    assert "--segment" in said
    assert "--overcommit" in said


def test_the_sum_of_segments_and_of_workers_counts(machine):
    found = machine("24GiB")
    fits(found, 12 * GIB, 12 * GIB)
    assert "25GiB are to be lent" in refusal(found, 12 * GIB, 13 * GIB)
    one = WorkerConfig(segments_bytes=(9 * GIB,))
    check_room(one, names=["a", "b"], machine=found)
    with pytest.raises(ConfigError, match="27GiB are to be lent"):
        check_room(one, names=["a", "b", "c"], machine=found)


def test_overcommit_is_the_way_to_insist(machine):
    fits(machine("1GiB"), 500 * GIB, overcommit=True)


def test_a_machine_that_tells_nothing_refuses_nothing(tmp_path):
    fits(Machine(tmp_path), 500 * GIB)


def test_the_limit_of_a_group_counts_without_what_can_be_dropped(machine):
    files = group("sys/fs/cgroup/pod/c1", 8 * GIB, 5 * GIB, cache=2 * GIB)
    found = machine(mounts=V2, groups="0::/pod/c1", **files)
    fits(found, 5 * GIB)
    assert (
        "6GiB are to be lent, and there is only room for 5GiB "
        "(/sys/fs/cgroup/pod/c1/memory.max allows 8GiB, 3GiB are used)"
    ) in refusal(found, 6 * GIB)


def test_every_level_of_groups_counts(machine):
    files = (
        group("sys/fs/cgroup/pod/c1", "max", GIB, **{"memory.high": 20 * GIB})
        | group("sys/fs/cgroup/pod", 10 * GIB, 4 * GIB)
        | {"sys/fs/cgroup/memory.stat": "anon 1"}
    )
    found = machine(mounts=V2, groups="0::/pod/c1", **files)
    fits(found, 6 * GIB)
    assert "room for 6GiB (/sys/fs/cgroup/pod/memory.max" in refusal(found, 7 * GIB)
    said = refusal(found, 30 * GIB)
    assert "/sys/fs/cgroup/pod/c1/memory.high allows 20GiB" in said
    assert "MemAvailable" in said


@pytest.mark.parametrize("groups", ["0::/", "0::/../other"])
def test_a_container_sees_its_own_group_at_the_top(machine, groups):
    files = group("sys/fs/cgroup", 2 * GIB, 0)
    found = machine(mounts=V2, groups=groups, **files)
    assert "/sys/fs/cgroup/memory.max allows 2GiB" in refusal(found, 3 * GIB)


@pytest.mark.parametrize(
    ("mount", "groups", "folder"),
    [
        (V1, "4:memory:/docker/abc\n0::/", "sys/fs/cgroup/memory/docker/abc"),
        (V1, "3:cpu,memory:/docker/abc/deep", "sys/fs/cgroup/memory/docker/abc"),
        (V1_DOCKER, "4:memory:/docker/abc", "sys/fs/cgroup/memory"),
        (V1_DOCKER, "4:memory:/elsewhere", "sys/fs/cgroup/memory"),
    ],
)
def test_groups_of_version_1_count(machine, mount, groups, folder):
    files = group(folder, 3 * GIB, GIB, version=1)
    if folder.endswith("abc"):
        files |= group("sys/fs/cgroup/memory", 9223372036854771712, 9 * GIB, version=1)
    found = machine(mounts=mount, groups=groups, **files)
    fits(found, 2 * GIB)
    said = refusal(found, 3 * GIB)
    assert f"room for 2GiB (/{folder}/memory.limit_in_bytes allows 3GiB, 1GiB are used)" in said


def test_huge_pages_that_are_set_aside_count_instead_of_memory(machine):
    pages = {capacity._HUGE_PAGES: 512}
    found = machine("0GiB", **pages)
    fits(found, GIB, hugepages="require")
    assert "512 free huge pages" in refusal(found, 2 * GIB, hugepages="require")
    shared = machine("0GiB", **pages, **{capacity._THP: "always [advise] never"})
    assert "MemAvailable" in refusal(shared, GIB, hugepages="require")


def test_a_new_file_on_tmpfs_is_memory_and_must_fit_its_mount(machine, tmp_path):
    tmpfs = "40 22 0:50 / /pool rw - tmpfs tmpfs rw,size=1g"
    found = machine("2GiB", mounts=tmpfs)
    (tmp_path / "pool").mkdir()
    assert "MemAvailable" in refusal(found, GIB, files=("/pool/new:2GiB",))
    assert "free on the tmpfs /pool" in refusal(found, files=("/pool/new:2048PiB",))
    fits(found, GIB, files=("/pool/new:1GiB", "/elsewhere/new:64GiB"))


@pytest.fixture
def small(machine, monkeypatch):
    """Let this process believe that it is on a machine with 1 GiB to spare."""
    monkeypatch.setattr(capacity, "MACHINE", machine("1GiB"))


def test_a_worker_a_cluster_and_a_client_refuse_alike(small):
    with pytest.raises(ConfigError, match="2GiB are to be lent"):
        Worker(WorkerConfig(segments_bytes=(2 * GIB,))).start()
    for in_process in (True, False):
        cluster = LocalCluster(3, "512MiB", in_process=in_process)
        with pytest.raises(ConfigError, match=r"1\.5GiB are to be lent"):
            cluster.start()
        assert cluster.pids == ()
    with pytest.raises(ConfigError, match="2GiB are to be lent"):
        Client("mooncake://local", segment="2GiB")
    with LocalCluster(segment="16MiB", in_process=True) as cluster:
        with pytest.raises(ConfigError, match="2GiB are to be lent"):
            Client(cluster.url, segment="2GiB")
        with Client(cluster.url) as client:
            assert len(client.status().segments) == 1


def test_a_serving_system_refuses_too(small):
    system = ServingSystem(SystemSettings(port=0, segment="2GiB"))
    with pytest.raises(ConfigError, match="2GiB are to be lent"):
        asyncio.run(system.start())


def test_what_overcommits_lends(machine, monkeypatch):
    monkeypatch.setattr(capacity, "MACHINE", machine("0GiB"))
    with (
        LocalCluster(segment="16MiB", in_process=True, worker={"overcommit": True}) as cluster,
        Client(cluster.url, segment="16MiB", overcommit=True) as client,
    ):
        assert len(client.status().segments) == 2


def test_the_program_refuses_before_it_looks_for_a_master():
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_store", "worker", "--segment", "2048PiB",
         "--master", "127.0.0.1:1"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout == ""
    assert "error: 2048PiB are to be lent, and there is only room for " in done.stderr
    assert "MemAvailable" in done.stderr
    assert "--overcommit" in done.stderr


def test_memory_that_outlives_its_worker_must_fit_the_tmpfs_where_it_lies(machine, tmp_path):
    (tmp_path / "shm").mkdir()
    found = machine("1GiB", mounts="40 22 0:50 / /shm rw - tmpfs shm rw,size=64m")
    kept = {"name": "w", "memory": "/shm"}
    said = refusal(found, 2048 << 50, **kept)
    assert "free on the tmpfs /shm" in said
    assert "--memory anonymous" in said
    assert "--shm-size" in said
    assert "MemAvailable" in refusal(found, 2 * GIB, **kept)
    fits(found, GIB, **kept)
    fits(found, 64 * GIB, name="w", memory="/on a disk")


def test_what_the_run_before_left_is_room(machine, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    found = machine("0GiB", mounts=f"40 22 0:50 / {folder} rw - tmpfs shm rw,size=64m")
    (tmp_path / str(folder).lstrip("/")).mkdir(parents=True)
    kept = {"name": "w", "memory": str(folder)}
    assert "MemAvailable" in refusal(found, MIB, **kept)
    with open(folder / f"{base_of('w')}-0.mem", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    fits(found, 2 * MIB, **kept)
    assert "MemAvailable" in refusal(found, 3 * MIB, **kept)


def test_memory_on_hugetlbfs_takes_pages_that_were_set_aside(machine, tmp_path):
    (tmp_path / "huge").mkdir()
    mounts = "41 22 0:51 / /huge rw - hugetlbfs none rw,pagesize=2M"
    found = machine("0GiB", mounts=mounts)
    kept = {"name": "w", "memory": "/huge"}
    fits(found, MIB, **kept)  # what the mount is bounded by is that of a disk in this test
    assert "free on the hugetlbfs /huge" in refusal(found, 2048 << 50, **kept)
