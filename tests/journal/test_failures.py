"""Disks that are full, broken, read-only or silent: nothing false is believed, and it mends."""

import errno
import fcntl
import logging
import os

import pytest

from mooncake_store.core.ring import HEAD, VOID, WRITTEN
from mooncake_store.journal import writer
from mooncake_store.journal.ring_file import RingFile
from tests.journal.streams import CELLS, ORIGIN, TroubledDisk, at, covered, files_in
from tests.waiting import PATIENCE_S, until, until_idle


@pytest.fixture
def disk():
    return TroubledDisk()


@pytest.fixture
def shard(run, disk):
    """One whose files are kept, small and synced."""
    shard = run(disk=disk, level="synced", file_bytes=8192)
    shard.keep()
    return shard


def marks(shard):
    return {"VALID", "VOID"} & set(os.listdir(shard.folder))


def publish_until(shard, condition):
    """Publish as long as there is room, until something is true."""

    def met():
        if shard.writer.make_room(64, 0.0):
            shard.publish(64)
        return condition()

    until(met)


def assert_it_recovers(shard):
    """What it wrote down in the end is whole and believed."""

    def kept():
        # The files are void before the writer says so.
        shard.keep()
        return marks(shard) == {"VALID"}

    until(kept)
    assert not at(shard.ring, VOID)
    shard.publish(100)
    shard.close()
    contents = shard.read()
    assert contents.complete
    ((begin, end),) = covered(contents)
    assert begin <= contents.facts.snapshot
    assert end == shard.head


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["create", "write", "fdatasync"])
def test_when_a_call_fails_nothing_is_believed_and_the_shard_goes_on(
    shard, disk, caplog, call, number
):
    disk.fails(**{call: number})
    publish_until(shard, lambda: marks(shard) == {"VOID"})
    until(lambda: shard.writer.synced(shard.head), what="no answer waits for a broken disk")
    assert at(shard.ring, VOID)
    assert not shard.writer.refusing
    for _ in range(10):
        shard.publish(CELLS // 2)
    assert marks(shard) == {"VOID"}
    disk.fails()
    assert_it_recovers(shard)
    assert "has failed" not in caplog.text


def test_a_burst_goes_on_while_the_disk_stands_still(run, disk, folder, shared_memory):
    """Beside a program that fills the disk a write waits for up to a second."""
    made = RingFile.create(folder, ORIGIN, events=1)
    shard = run(made.ring, disk=disk)
    shard.keep()
    disk.hanging.add("write")
    try:
        shard.publish(8)
        assert disk.reached.wait(PATIENCE_S)
        for _ in range(30):  # MiB, as 1,000 batches of 128 puts and removals have them
            assert shard.writer.make_room(1 << 17, 0.0)
            shard.publish(1 << 17)
    finally:
        disk.hanging.clear()
        disk.released.set()
    shard.settle()
    assert covered(shard.read(shard.ring)) == [(1, shard.head)]


def test_what_is_void_is_not_believed_by_the_next_run(run, disk):
    shard = run(disk=disk, retry_s=3600.0)
    shard.keep()
    end = shard.publish(100)
    shard.settle()
    disk.fails(write=errno.ENOSPC)
    publish_until(shard, lambda: shard.writer.state == "void")
    assert "No space left on device" in shard.writer.told
    contents = shard.read(shard.ring)
    assert contents.void
    assert contents.runs == []
    assert contents.end >= end
    shard.close()
    assert shard.read().void, "without its ring as well"


def test_when_the_disk_cannot_even_say_so_changes_are_refused_and_nothing_is_lost(shard, disk):
    disk.fails(write=errno.EIO, rename=errno.EROFS)
    publish_until(shard, lambda: shard.writer.refusing)
    assert marks(shard) == {"VALID"}
    assert not at(shard.ring, VOID)
    assert not shard.writer.synced(shard.head)
    assert not shard.writer.make_room(CELLS, PATIENCE_S), "it is not waited for what cannot come"
    contents = shard.read(shard.ring)
    assert covered(contents) == [(1, shard.head)]
    assert contents.complete
    assert "changes are refused" in shard.writer.told
    disk.fails(write=errno.EIO)
    until(lambda: not shard.writer.refusing)
    assert marks(shard) == {"VOID"}
    disk.fails()
    assert_it_recovers(shard)


def test_a_renaming_that_may_not_be_on_the_disk_is_none(shard, disk):
    disk.fails(fsync_folder=errno.EIO)
    publish_until(shard, lambda: shard.writer.refusing)
    assert not at(shard.ring, VOID)
    disk.fails()
    until(lambda: not shard.writer.refusing)
    assert_it_recovers(shard)


def test_old_files_that_cannot_be_deleted_keep_it_void(shard, disk):
    disk.fails(write=errno.EIO, unlink=errno.EIO)
    publish_until(shard, lambda: marks(shard) == {"VOID"})
    disk.fails(unlink=errno.EIO)
    tries = disk.calls.count("unlink")
    until(lambda: disk.calls.count("unlink") > tries + 3)
    assert not shard.writer.wants_snapshot
    disk.fails()
    assert_it_recovers(shard)


def test_needless_files_that_cannot_be_deleted_are_only_told(shard, disk, caplog):
    shard.publish(1000)
    shard.settle()
    shard.publish(1000)
    shard.settle()
    disk.fails(unlink=errno.EPERM)
    shard.snapshot()
    until(lambda: "files that nobody needs stay: Operation not permitted" in caplog.text)
    assert shard.writer.state == "kept"
    count = len(files_in(shard.folder))
    disk.fails()
    shard.snapshot()
    until(lambda: len(files_in(shard.folder)) < count)
    shard.close()
    assert shard.read().complete


def test_a_disk_that_takes_nothing_at_the_start_is_void_from_the_start(run, disk):
    disk.fails(create=errno.EROFS)
    shard = run(disk=disk)
    assert shard.writer.state != "kept"
    assert at(shard.ring, VOID)
    for _ in range(5):
        shard.publish(CELLS // 2)
    disk.fails()
    assert_it_recovers(shard)


def test_a_next_run_on_such_a_disk_is_void_too(run, disk):
    first = run()
    first.keep()
    first.close()
    disk.fails(create=errno.EIO)
    second = run(first.ring, believed=True, disk=disk)
    assert second.writer.state != "kept"
    assert marks(second) == {"VOID"}
    disk.fails()
    assert_it_recovers(second)


def test_a_failure_is_told_once_however_often_it_is_tried_again(shard, disk, caplog):
    caplog.set_level(logging.INFO, "mooncake_store.journal")
    disk.fails(write=errno.ENOSPC)
    publish_until(shard, lambda: marks(shard) == {"VOID"})
    tries = disk.calls.count("create")
    until(lambda: disk.calls.count("create") > tries + 5)
    (told,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    message = told.getMessage()
    assert str(shard.folder) in message
    assert "kept -> void" in message
    assert "No space left on device" in message
    assert "what the shard holds is lost" in message
    assert "tries again every 0.01 s" in message
    disk.fails()
    assert_it_recovers(shard)
    assert "void -> kept" in caplog.text


def test_a_mistake_of_ours_is_told_and_believed_as_little(shard, disk, caplog):
    disk.failing = {"write": ValueError("not foreseen")}
    publish_until(shard, lambda: marks(shard) == {"VOID"})
    assert "the thread that writes it has failed" in caplog.text
    assert "ValueError: not foreseen" in caplog.text
    disk.fails()
    assert_it_recovers(shard)


def test_nobody_to_tell_is_no_failure_of_the_disk(run, caplog):
    def gone(position):
        raise RuntimeError("the loop is closed")

    shard = run(level="synced", on_synced=gone)
    shard.keep()
    head = shard.publish(100)
    until(lambda: shard.writer.synced(head))
    until(lambda: "nobody could be told" in caplog.text)
    assert shard.writer.state == "kept"


def test_a_disk_that_hangs_is_given_up_and_used_again_when_it_comes_back(shard, disk, monkeypatch):
    monkeypatch.setattr(writer, "GIVE_UP_S", PATIENCE_S)
    shard.settle()
    disk.hanging = {"write"}
    shard.publish(64)
    assert disk.reached.wait(PATIENCE_S)
    assert not shard.writer.make_room(CELLS, 0.01)
    disk.hanging.clear()  # only the call that hangs already does
    assert shard.writer.give_up("its files take nothing")
    assert marks(shard) == {"VOID"}
    assert at(shard.ring, VOID)
    assert shard.writer.give_up("nor later")
    for _ in range(10):
        shard.publish(CELLS // 2)
    assert shard.writer.synced(shard.head)
    assert "its files take nothing" in shard.writer.told
    disk.released.set()
    assert_it_recovers(shard)


def test_where_the_renaming_hangs_too_changes_are_refused_until_it_is_done(
    shard, disk, monkeypatch
):
    monkeypatch.setattr(writer, "GIVE_UP_S", 0.01)
    shard.settle()
    disk.hanging = {"write", "rename"}
    shard.publish(64)
    assert disk.reached.wait(PATIENCE_S)
    assert not shard.writer.give_up("its files take nothing")
    assert not shard.writer.give_up("nor later")
    assert shard.writer.refusing
    assert not at(shard.ring, VOID)
    assert at(shard.ring, HEAD) - at(shard.ring, WRITTEN) == 64
    assert not shard.writer.make_room(CELLS, PATIENCE_S)
    disk.hanging = set()
    disk.released.set()
    until(lambda: not shard.writer.refusing)
    assert_it_recovers(shard)


def test_what_is_being_made_valid_when_it_is_given_up_is_void_in_the_end(run, disk):
    shard = run(disk=disk)
    disk.hanging = {"fsync_folder"}
    shard.snapshot()
    assert disk.reached.wait(PATIENCE_S)
    assert marks(shard) == {"VALID"}
    assert not shard.writer.give_up("its files take nothing")
    assert shard.writer.refusing
    assert at(shard.ring, VOID), "nobody believes it meanwhile"
    disk.hanging = set()
    disk.released.set()
    until(lambda: not shard.writer.refusing)
    until(lambda: marks(shard) == {"VOID"})
    assert_it_recovers(shard)


def test_an_orderly_end_does_not_wait_for_a_disk_that_hangs(shard, disk):
    shard.settle()
    disk.hanging = {"write"}
    shard.publish(64)
    assert disk.reached.wait(PATIENCE_S)
    assert not shard.writer.close(0.01)
    disk.released.set()
    assert shard.writer.close(PATIENCE_S)
    assert shard.read().complete


@pytest.mark.parametrize("failing", [["write"], ["write", "rename"]])
def test_waiting_for_a_disk_to_mend_costs_nothing(run, disk, failing):
    shard = run(disk=disk, retry_s=3600.0)
    shard.keep()
    disk.fails(**dict.fromkeys(failing, errno.EIO))
    publish_until(shard, lambda: shard.writer.state in ("void", "refusing"))
    until_idle()
    assert shard.writer.sound


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_a_file_system_that_only_writes_through_the_page_cache_is_as_good(run, monkeypatch, call):
    real = getattr(os, call)

    def refusing(first, second, *more, **options):
        flags = second if call == "open" else fcntl.fcntl(first, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(first, second, *more, **options)

    refused = []
    shard = run()
    monkeypatch.setattr(os, call, refusing)
    shard.keep()
    shard.publish(100)
    shard.close()
    assert refused
    contents = shard.read()
    assert contents.complete
    assert covered(contents)[-1][1] == shard.head
