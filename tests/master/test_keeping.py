"""What a worker with a name leaves to its next run, and what of it that run takes up."""

import errno
import fcntl
import json
import logging
import os
import re

import pytest

from mooncake_store.cli.main import main
from mooncake_store.config.settings import WorkerConfig
from mooncake_store.errors import (
    AuthError,
    ConfigError,
    NoSpaceError,
    StoreError,
    UnavailableError,
)
from mooncake_store.worker.cleaning import clean
from mooncake_store.worker.keeping import memory_folder
from mooncake_store.worker.lasting import LastingFile
from mooncake_store.worker.memory_files import FOLDER, base_of, by_worker
from mooncake_store.worker.segments import WorkerSegments

MIB = 1 << 20


class Run:
    """A run of a worker, without a server: its segments and who it is."""

    def __init__(self, folder, cluster="c1", life=1, **settings):
        given = {"name": "w", "memory": str(folder), "segments_bytes": (2 * MIB,)} | settings
        config = WorkerConfig(**given)
        self.lent = WorkerSegments(config, config.name)
        self.uuid, self.epoch = self.lent.hold(cluster, life)
        try:
            self.lent.make()
        except BaseException:
            self.lent.close()
            raise

    @property
    def segments(self):
        return self.lent.segments

    @property
    def uuids(self):
        return [segment.uuid for segment in self.segments]

    def die(self):
        """End as a process does that is killed: its descriptors are closed, and nothing else."""
        self.lent.close()


@pytest.fixture
def run(tmp_path):
    """Begin runs of a worker in a folder; what still runs dies with the test."""
    folder, begun = tmp_path / "memory", []
    folder.mkdir()

    def begin(cluster="c1", life=1, **settings):
        begun.append(Run(folder, cluster, life, **settings))
        return begun[-1]

    begin.folder = folder
    yield begin
    for each in begun:
        each.die()


def files(run):
    return {path.name: path.read_bytes() for path in run.folder.iterdir()}


def record(run):
    (path,) = run.folder.glob("*.worker")
    return path


def test_the_next_run_is_the_same_worker_with_the_same_bytes(run):
    first = run(segments_bytes=(2 * MIB, 4 * MIB))
    first.segments[0].buffer[5:8] = b"abc"
    first.segments[1].buffer[-3:] = b"xyz"
    first.die()
    second = run(segments_bytes=(2 * MIB, 4 * MIB))
    second.lent.populate()
    assert (second.uuid, second.uuids) == (first.uuid, first.uuids)
    assert second.epoch > first.epoch
    assert bytes(second.segments[0].view(5, 3)) == b"abc"
    assert bytes(second.segments[1].view(4 * MIB - 3, 3)) == b"xyz"
    assert not second.lent.new


def test_epochs_count_up_when_the_clock_goes_back(run, monkeypatch):
    first = run()
    first.die()
    monkeypatch.setattr("time.time_ns", lambda: 1)
    second = run()
    second.die()
    assert second.epoch == first.epoch + 1
    assert run().epoch == first.epoch + 2


def test_files_are_of_their_user_alone_and_have_all_their_pages(run):
    run()
    for path in run.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    (data,) = run.folder.glob("*.mem")
    assert data.stat().st_blocks * 512 >= 2 * MIB


@pytest.mark.parametrize(
    "changed",
    [{"segments_bytes": (3 * MIB,)}, {"hugepages": "never"}, {"life": 2}],
    ids=["size", "pages", "life"],
)
def test_what_is_not_as_before_is_made_anew_under_another_uuid(run, changed, caplog):
    first = run()
    first.segments[0].buffer[:3] = b"abc"
    (inode,) = [path.stat().st_ino for path in run.folder.glob("*.mem")]
    with open(next(run.folder.glob("*.mem")), "rb") as reader:
        first.die()
        with caplog.at_level(logging.INFO, logger="mooncake_store"):
            second = run(**changed)
        # Somebody who still reads the old memory keeps it.
        assert reader.read(3) == b"abc"
        (path,) = run.folder.glob("*.mem")
        assert path.stat().st_ino != inode
    assert second.uuid == first.uuid
    assert second.uuids != first.uuids
    assert bytes(second.segments[0].view(0, 3)) == bytes(3)
    assert second.lent.new
    assert len([line for line in caplog.messages if "anew" in line]) == 1


def test_memory_from_before_the_machine_was_started_means_nothing(run, monkeypatch):
    first = run()
    first.segments[0].buffer[:3] = b"abc"
    first.die()
    monkeypatch.setattr("mooncake_store.worker.keeping.host_identity", lambda: "another boot")
    second = run()
    assert second.uuids != first.uuids
    assert bytes(second.segments[0].view(0, 3)) == bytes(3)


def test_a_segment_that_is_not_wanted_any_more_goes(run):
    first = run(segments_bytes=(2 * MIB, 2 * MIB))
    first.die()
    run(segments_bytes=(2 * MIB,))
    assert len(list(run.folder.glob("*.mem"))) == 1


def test_a_file_that_was_shortened_is_not_taken_up(run):
    first = run()
    first.die()
    (path,) = run.folder.glob("*.mem")
    os.truncate(path, MIB)
    second = run()
    assert second.uuids != first.uuids
    assert second.segments[0].size == 2 * MIB


def test_a_file_with_a_second_name_is_refused_and_stays(run, tmp_path):
    first = run()
    first.die()
    (path,) = run.folder.glob("*.mem")
    os.link(path, tmp_path / "second name")
    with pytest.raises(AuthError, match="2 names"):
        run()
    os.unlink(tmp_path / "second name")
    assert run().uuids == first.uuids


def test_a_link_in_the_place_of_memory_is_not_followed(run, tmp_path):
    first = run()
    first.die()
    (path,) = run.folder.glob("*.mem")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic links"):
        run()
    assert (tmp_path / "elsewhere").stat().st_size == 2 * MIB


def test_a_second_run_is_refused_while_the_first_lives(run):
    first = run()
    with pytest.raises(ConfigError, match=f"machine already, as process {os.getpid()}"):
        run()
    first.die()
    assert run().uuids == first.uuids


def test_memory_of_another_cluster_is_left_as_it_is(run):
    first = run()
    first.die()
    before = files(run)
    with pytest.raises(ConfigError, match="cluster c1, and this is c2") as refused:
        run("c2")
    assert "mooncake worker --clean --name w --memory" in refused.value.advice
    assert files(run) == before


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"version": 99}', b"\xff\xfe", b"[" * 10_000],
    ids=["cut", "newer", "noise", "deep"],
)
def test_a_record_that_cannot_be_read_is_left_as_it_is(run, content):
    run().die()
    record(run).write_bytes(content)
    before = files(run)
    with pytest.raises(ConfigError, match=r"is damaged|is of version 99") as refused:
        run()
    assert "mooncake worker --clean" in refused.value.advice
    assert files(run) == before


def test_a_record_with_a_uuid_cut_short_is_damaged(run):
    run().die()
    told = json.loads(record(run).read_bytes())
    told["uuid"] = told["uuid"][:-2]
    record(run).write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="cut short"):
        run()


def test_a_run_that_died_before_it_wrote_anything_is_no_obstacle(run):
    (run.folder / f"{base_of('w')}.worker").touch(0o600)
    (run.folder / f"{base_of('w')}-7.mem").write_bytes(b"half made")
    assert run().lent.new
    assert len(list(run.folder.glob("*.mem"))) == 1


def test_who_leaves_takes_the_files_along_and_goes_on_serving_them(run):
    first = run()
    first.segments[0].buffer[:3] = b"abc"
    first.lent.leave()
    assert list(run.folder.glob("*.mem")) == []
    assert bytes(first.segments[0].view(0, 3)) == b"abc"
    fd = first.segments[0].share(writable=False)
    assert os.pread(fd, 3, 0) == b"abc"
    os.close(fd)
    with pytest.raises(ConfigError, match="already"):  # its readers are not gone yet
        run()
    with pytest.raises(UnavailableError, match="leaves"):
        first.lent.replace("c1", 2, first.epoch + 1)
    first.die()
    assert list(run.folder.iterdir()) == []


def test_memory_is_replaced_by_other_memory_for_a_new_master(run):
    first = run()
    first.segments[0].buffer[:3] = b"abc"
    uuids = first.uuids
    with open(next(run.folder.glob("*.mem")), "rb") as reader:
        first.lent.replace("c2", 7, first.epoch + 1)
        assert reader.read(3) == b"abc"
    assert first.uuids != uuids
    assert bytes(first.segments[0].view(0, 3)) == bytes(3)
    first.die()
    assert run("c2", 7).uuids == first.uuids


def test_the_next_run_knows_where_the_one_before_was_mounted(run):
    first = run()
    assert first.lent.run == 0
    for mounted in (7, 7, (1 << 64) - 1):
        first.lent.note_run(mounted)
    first.die()
    second = run()
    assert (second.lent.run, second.uuids) == ((1 << 64) - 1, first.uuids)
    second.lent.replace("c1", 1, second.epoch + 1)
    assert second.lent.run == 0
    second.die()
    assert run().lent.run == 0


def test_a_record_from_before_there_were_runs_is_read(run):
    first = run()
    first.die()
    told = json.loads(record(run).read_bytes())
    del told["run"]
    record(run).write_text(json.dumps(told))
    second = run()
    assert (second.lent.run, second.uuids) == (0, first.uuids)


def test_memory_that_is_disowned_is_made_anew(run, caplog):
    first = run()
    first.segments[0].buffer[:3] = b"abc"
    first.lent.note_run(7)
    first.die()

    class Disowning(WorkerSegments):
        def make(self):
            self.disown("the master is older")
            super().make()

    lent = Disowning(first.lent._config, "w")
    uuid, epoch = lent.hold("c1", 1)
    lent.make()
    try:
        assert uuid == first.uuid
        assert epoch > first.epoch
        assert lent.run == 0
        assert lent.segments[0].uuid not in first.uuids
        assert bytes(lent.segments[0].view(0, 3)) == bytes(3)
        assert "lends memory anew: the master is older" in caplog.text
    finally:
        lent.close()


def test_a_run_that_cannot_be_written_down_is_tried_again(run, monkeypatch):
    first = run()
    with monkeypatch.context() as patched:

        def full(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr("os.fsync", full)
        for _ in range(2):
            with pytest.raises(StoreError):
                first.lent.note_run(7)
    assert first.lent.run == 0
    first.lent.note_run(7)
    first.die()
    assert run().lent.run == 7


def test_a_record_that_finds_room_for_a_part_only_takes_no_place(run, monkeypatch):
    """As on a full tmpfs, where one of more than a page may find its first page."""
    first = run()
    before = record(run).read_bytes()
    pwrite = os.pwrite

    def nearly_full(fd, content, offset):
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content[:10], offset)

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", nearly_full)
        with pytest.raises(NoSpaceError):
            first.lent.note_run(7)
    assert record(run).read_bytes() == before
    first.die()
    assert run().uuids == first.uuids


def test_a_record_is_whole_however_little_the_system_takes_at_once(run, monkeypatch):
    pwrite = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
        first = run()
    first.die()
    assert run().uuids == first.uuids


def test_a_record_that_the_disk_does_not_give_is_refused_in_one_sentence(run, monkeypatch):
    first = run()
    first.die()
    before = files(run)

    def broken(fd, nbytes, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("os.pread", broken)
        with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
            run()
    assert files(run) == before
    assert run().uuids == first.uuids


def test_a_forked_child_holds_nothing_and_removes_nothing(run):
    """As in a child: what it does not hold it cannot give up for its parent."""
    first = run()
    keeper = first.lent._keeper
    lock = os.dup(keeper._lock)
    try:
        keeper.after_fork()
        keeper.leave()
        keeper.close()
        assert len(list(run.folder.glob("*.mem"))) == 1
        with pytest.raises(ConfigError, match="already"):
            run()
    finally:
        os.close(lock)


def test_lent_files_are_found_again_unless_they_are_others(run, tmp_path):
    path = tmp_path / "pool"
    lent = {"segments_bytes": (), "files": (f"{path}:1MiB",)}
    first = run(**lent)
    first.die()
    second = run(**lent)
    assert second.uuids == first.uuids
    second.die()
    path.rename(tmp_path / "other")
    assert run(**lent).uuids != first.uuids


def test_a_lent_file_outlives_a_worker_that_leaves_and_means_nothing_then(run, tmp_path):
    path = tmp_path / "pool"
    lent = {"segments_bytes": (), "files": (f"{path}:1MiB",)}
    first = run(**lent)
    first.lent.leave()
    first.die()
    assert path.stat().st_size == MIB
    assert run(**lent).uuids != first.uuids


@pytest.fixture
def next_boot(run, monkeypatch):
    """Let the machine be started anew: memory goes, with what is said of it, and disks stay."""

    def start():
        for path in run.folder.iterdir():
            path.unlink()
        monkeypatch.setattr("mooncake_store.worker.keeping.host_identity", lambda: "another boot")

    return start


@pytest.mark.parametrize("end", ["die", "stop"])
def test_lent_files_are_found_again_after_a_start_of_the_machine(run, tmp_path, next_boot, end):
    path = tmp_path / "disk" / "pool"
    path.parent.mkdir()
    lent = {"segments_bytes": (2 * MIB,), "files": (f"{path}:1MiB",)}
    first = run(**lent)
    first.lent.note_run(77)
    if end == "stop":
        assert first.lent.leave_memory() == first.uuids[:1]
    first.die()
    next_boot()
    second = run(**lent)
    assert (second.uuid, second.lent.run) == (first.uuid, 77)
    assert second.epoch > first.epoch
    assert second.uuids[1:] == first.uuids[1:]
    assert second.uuids[:1] != first.uuids[:1]


def test_a_worker_that_is_stopped_leaves_its_files_in_the_same_boot_too(run, tmp_path):
    lent = {"segments_bytes": (2 * MIB,), "files": (f"{tmp_path / 'pool'}:1MiB",)}
    first = run(**lent)
    first.lent.leave_memory()
    first.die()
    assert not list(run.folder.glob("*.mem"))
    second = run(**lent)
    assert second.uuids[1:] == first.uuids[1:]
    assert second.uuids[:1] != first.uuids[:1]
    second.lent.leave()
    second.die()
    assert run(**lent).uuids[1:] != first.uuids[1:]


def test_what_was_cleaned_away_is_not_found_again(run, tmp_path, next_boot):
    path = tmp_path / "disk" / "pool"
    path.parent.mkdir()
    lent = {"segments_bytes": (), "files": (f"{path}:1MiB",)}
    first = run(**lent)
    first.die()
    assert [found.worker for found in clean(str(run.folder), "w")] == ["w"]
    next_boot()
    assert run(**lent).uuids != first.uuids


@pytest.mark.parametrize("other", ["file", "life", "cluster"])
def test_after_a_start_of_the_machine_other_files_and_contents_mean_nothing(
    run, tmp_path, next_boot, other
):
    path = tmp_path / "disk" / "pool"
    path.parent.mkdir()
    lent = {"segments_bytes": (), "files": (f"{path}:1MiB",)}
    first = run(**lent)
    first.die()
    next_boot()
    if other == "file":
        path.rename(path.with_name("kept"))  # so that its number is not given to the next one
    contents = {"life": {"life": 2}, "cluster": {"cluster": "c2"}}.get(other, {})
    assert run(**lent, **contents).uuids != first.uuids


def test_a_record_that_no_disk_takes_is_told_once(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = run(segments_bytes=(), files=(f"{tmp_path / 'pool'}:1MiB",))
    first.lent.note_run(5)
    told = [line for line in caplog.messages if "what lies in them is lost" in line]
    assert len(told) == 1


def test_a_record_can_lie_where_files_are_written_through_memory_only(run, monkeypatch):
    """As on hugetlbfs."""

    def refuse(fd, content, offset):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("os.pwrite", refuse)
    first = run()
    first.die()
    assert run().uuids == first.uuids


def test_a_folder_that_will_not_do_is_said(run, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot keep its memory in .*No such file") as refused:
        Run(tmp_path / "none")
    assert "--memory anonymous" in refused.value.advice
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        Run(tmp_path / "file")
    run.folder.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody can replace files"):
        run()


def test_memory_is_kept_where_the_settings_say_so():
    def folder(**settings):
        return memory_folder(WorkerConfig(**settings))

    assert folder() is None
    assert folder(name="w") == FOLDER
    assert folder(name="w", memory="anonymous") is None
    assert folder(name="w", hugepages="require") is None
    assert folder(name="w", memory="/mnt") == "/mnt"
    with pytest.raises(ConfigError, match="by its name"):
        folder(memory="/mnt")


def test_any_name_makes_file_names_that_are_safe_and_its_own():
    names = ["w", "w-0", "w.worker", "w-0.mem", "h:7/a b", "h:7_a b", "x" * 300, "y" * 300, ".."]
    bases = [base_of(name) for name in names]
    assert len(set(bases)) == len(names)
    assert not any("/" in base or len(base) > 128 for base in bases)
    made = [f"{base}{ending}" for base in bases for ending in ("-0.mem", "-12.mem", ".worker")]
    assert {base: len(found) for base, found in by_worker(made).items()} == dict.fromkeys(bases, 3)
    assert by_worker(["mooncake-w.mem", "other", "mooncake-1-w-.mem", "x-mooncake-1-w-0.mem"]) == {}


def test_cleaning_removes_what_nobody_holds(run):
    dead = run(name="dead/1")
    dead.die()
    run(name="alive")
    run(name="broken").die()
    (run.folder / f"{base_of('broken')}.worker").write_bytes(b"{")
    (run.folder / f"{base_of('orphan')}-0.mem").write_bytes(bytes(MIB))
    (run.folder / "mooncake-of-others").touch()
    found = {each.worker: each for each in clean(str(run.folder))}
    assert found.keys() == {"dead/1", "alive", "broken", "orphan"}
    assert found["dead/1"].nbytes >= 2 * MIB
    assert (found["alive"].held, found["alive"].holder) == (True, os.getpid())
    left = {path.name for path in run.folder.iterdir()}
    kept = {f"{base_of('alive')}-0.mem", f"{base_of('alive')}.worker", "mooncake-of-others"}
    assert left == kept


def test_cleaning_can_be_limited_to_a_name(run, capsys):
    run(name="one").die()
    run(name="two").die()
    words = ["worker", "--clean", "--name", "one", "--memory", str(run.folder)]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["worker"] for each in told["found"]] == ["one"]
    assert told["freed_bytes"] >= 2 * MIB
    assert main(words) == 0
    assert "freed" in capsys.readouterr().out
    assert set(by_worker(os.listdir(run.folder))) == {base_of("two")}


def test_cleaning_tells_who_holds_what_it_leaves(run, capsys):
    run()
    assert main(["worker", "--clean", "--memory", str(run.folder)]) == 0
    assert f"kept, process {os.getpid()} holds it" in capsys.readouterr().out
    with open(record(run), "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lasting_record_that_the_disk_does_not_give_names_itself(tmp_path, monkeypatch):
    file = LastingFile(str(tmp_path), "w1")
    file.write(b"content")

    def fail(fd, nbytes):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(ConfigError, match=re.escape(file.path) + r" cannot be read: Input/output"):
        file.read()
