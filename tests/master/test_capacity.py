"""Memory that is not there is not lent: on machines made of files, and with the real program."""

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.config.settings import WorkerConfig
from mooncake_store.errors import ConfigError
from mooncake_store.worker import capacity, promises, segments
from mooncake_store.worker.capacity import Machine, check_room
from mooncake_store.worker.memory_files import base_of
from mooncake_store.worker.promises import in_turn
from mooncake_store.worker.worker import Worker
from serving.system import ServingSystem, SystemSettings
from transfer_engine.segments.memory import Segment

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


def refusal(machine, *sizes, **settings):
    with pytest.raises(ConfigError) as refused:
        check_room(WorkerConfig(segments_bytes=sizes, **settings), machine=machine)
    return str(refused.value)


def fits(machine, *sizes, **settings):
    check_room(WorkerConfig(segments_bytes=sizes, **settings), machine=machine)


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


# -- what is promised already


@pytest.fixture(autouse=True)
def nothing_promised(monkeypatch):
    """Overlook memory that other tests have left open in this process."""
    before, missing = set(), promises._missing
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found = os.fstat(int(fd))
            before.add((found.st_dev, found.st_ino))

    def missing_of_new(path, seen):
        seen |= before
        return missing(path, seen)

    monkeypatch.setattr(promises, "_missing", missing_of_new)


def linked(machine, *processes):
    """Let a machine of files have these living processes."""
    (machine.root / "proc").mkdir(exist_ok=True)
    for process in processes:
        (machine.root / f"proc/{process}").symlink_to(f"/proc/{process}")
    return machine


@pytest.fixture
def lender():
    """Start a process that makes memory and does not touch it; return its number."""
    started = []

    def start(name, nbytes):
        process = subprocess.Popen(
            [sys.executable, "-c", LENDER, name, str(nbytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "made\n"
        return process.pid

    yield start
    for process in started:
        process.communicate(timeout=60)


LENDER = """
import sys
from transfer_engine.segments.memory import Segment

made = Segment.create(int(sys.argv[2]), name=sys.argv[1])
print("made", flush=True)
sys.stdin.read()
"""


def test_memory_that_was_made_and_not_filled_is_no_room_for_others(machine, lender):
    other = lender("w1", 3 * GIB)
    found = linked(machine("10GiB"), os.getpid(), other)
    with Segment.create(2 * GIB, name="w2-0"), Segment.create(GIB, name="w2-1"):
        fits(found, 4 * GIB)
        assert refusal(found, 5 * GIB).startswith(
            "5GiB are to be lent, and there is only room for 4GiB (MemAvailable of /proc/meminfo, "
            "less 6GiB promised already: 3GiB by "
        )
        assert f"3GiB by process {other} (w1)" in refusal(found, 5 * GIB)
        assert "3GiB by this process (w2-0 and 1 more)" in refusal(found, 5 * GIB)
        fits(found, 500 * GIB, overcommit=True)
    fits(found, 7 * GIB)


def test_what_is_filled_is_not_counted_twice(machine):
    found = linked(machine("1GiB"), os.getpid())
    with Segment.create(64 * MIB, name="w") as segment:
        assert "room for 960MiB" in refusal(found, GIB)
        segment.buffer[: 48 * MIB] = bytes(48 * MIB)
        assert "less 16MiB promised already" in refusal(found, GIB)
        fits(found, GIB - 16 * MIB)


def test_memory_that_two_processes_have_open_is_promised_once(machine):
    found = linked(machine("1GiB"), os.getpid())
    with Segment.create(64 * MIB, name="w") as segment:
        again = segment.share(writable=False)
        fits(found, GIB - 64 * MIB)
        os.close(again)


def test_a_group_is_bounded_by_the_promises_of_its_own_processes(machine, lender):
    groups = group("sys/fs/cgroup/pod/c1", 8 * GIB, 0) | group("sys/fs/cgroup/pod", 20 * GIB, 0)
    found = machine("99GiB", mounts=V2, groups="0::/pod/c1", **groups)
    for name, where in (("inside", "0::/pod/c1/deep"), ("beside", "0::/pod/c2")):
        process = found.root / f"proc/{lender(name, 3 * GIB)}"
        process.mkdir()
        (process / "fd").symlink_to(f"/proc/{process.name}/fd")
        (process / "cgroup").write_text(f"1:cpu:/pod/c1\n{where}\n")
    fits(found, 5 * GIB)
    said = refusal(found, 6 * GIB)
    assert "room for 5GiB (/sys/fs/cgroup/pod/c1/memory.max allows 8GiB" in said
    assert "(inside)" in said
    assert "beside" not in said
    assert "less 6GiB promised already" in refusal(found, 15 * GIB)


def test_files_of_others_that_are_being_filled_are_promised(machine):
    found = machine("1GiB", mounts="40 22 0:50 / /dev/shm rw - tmpfs shm rw")
    folder = found.root / "dev/shm"
    folder.mkdir(parents=True)
    for name in ("mooncake-4711-w-0.mem", f"{base_of('mine')}-0.mem", "somebody.mem"):
        with open(folder / name, "wb") as file:
            file.truncate(512 * MIB)
    assert "room for 0B" in refusal(found, GIB)
    said = refusal(found, GIB, name="mine", memory="anonymous")
    assert (
        "less 512MiB promised already: 512MiB by who fills /dev/shm/mooncake-4711-w-0.mem" in said
    )


def test_huge_pages_that_are_reserved_are_not_free(machine):
    found = machine("0GiB", **{capacity._HUGE_PAGES: 512, capacity._RESERVED_PAGES: 256})
    fits(found, 512 * MIB, hugepages="require")
    assert "256 free huge pages" in refusal(found, GIB, hugepages="require")


def test_of_workers_that_start_at_once_only_those_lend_for_which_there_is_room(
    machine, monkeypatch
):
    """Each finds the room free, unless one looks and takes before the next one looks."""
    monkeypatch.setattr(capacity, "MACHINE", linked(machine("1GiB"), os.getpid()))
    monkeypatch.setattr(segments, "_touch", lambda memory: None)
    make, together = segments.WorkerSegments.make, threading.Barrier(3)

    def make_together(self):
        with suppress(threading.BrokenBarrierError):
            together.wait(0.3)
        make(self)

    with LocalCluster(workers=0, in_process=True) as cluster:
        monkeypatch.setattr(segments.WorkerSegments, "make", make_together)
        settings = WorkerConfig(master=cluster.address, segments_bytes=(600 * MIB,))
        workers = [Worker(settings) for _ in range(3)]
        try:
            with ThreadPoolExecutor(3) as pool:
                started = [pool.submit(worker.start) for worker in workers]
            errors = [error for each in started if (error := each.exception())]
            assert [type(error) for error in errors] == [ConfigError, ConfigError]
            assert all("600MiB by this process" in str(error) for error in errors)
        finally:
            for worker in workers:
                worker.stop(leases_s=0.0)


def test_a_turn_is_given_back_also_by_who_has_copies_of_it(tmp_path):
    with in_turn(str(tmp_path)):
        copies = [os.dup(fd) for fd in _descriptors_of(tmp_path)]  # as forked children have
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for fd in (*copies, folder):
        os.close(fd)
    assert copies
    assert list(tmp_path.iterdir()) == []


def test_who_keeps_the_turn_keeps_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(promises, "TURN_S", 0.0)
    with in_turn(str(tmp_path)), in_turn(str(tmp_path)), in_turn(str(tmp_path / "none")):
        pass


def _descriptors_of(path):
    links = Path("/proc/self/fd").iterdir()
    return [int(link.name) for link in links if os.path.realpath(link) == str(path)]
