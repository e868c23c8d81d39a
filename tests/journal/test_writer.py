"""The writer's thread: all that is published reaches files, and only what is needed stays there."""

import itertools
import threading

import numpy as np
import pytest

from mooncake_store.core.ring import HEAD, SNAPSHOT, SYNCED, VOID, WRITTEN
from mooncake_store.journal.disk import Disk
from mooncake_store.journal.files import JournalFiles
from mooncake_store.journal.layout import BlockHeader, Facts, read_file_header
from tests.journal.streams import (
    CELLS,
    ORIGIN,
    Kept,
    TroubledDisk,
    at,
    covered,
    files_in,
    fresh_ring,
    publish,
)
from tests.waiting import PATIENCE_S, until, until_idle


def names(folder):
    return {path.name for path in files_in(folder)}


def begins(path):
    return read_file_header(memoryview(path.read_bytes())).first


@pytest.mark.parametrize("level", ["written", "synced"])
def test_what_is_published_can_be_read_after_an_orderly_end(run, level):
    shard = run(level=level)
    shard.keep()
    for count in range(1, 500):
        shard.publish(count)
    shard.close()
    contents = shard.read()
    assert shard.head > 20 * CELLS
    assert covered(contents) == [(1, shard.head)]
    assert contents.complete, "the last block says that nothing is missing behind it"
    assert contents.same_boot
    assert contents.facts.snapshot == at(shard.ring, SNAPSHOT)


def test_all_that_is_written_is_noted_first_and_on_the_thread_of_the_writer(run):
    noted = []

    def note(start, stop):
        written = at(ring, WRITTEN)
        noted.append((start, stop, written, threading.current_thread().name))

    ring = fresh_ring()
    shard = run(ring, note=note)
    shard.keep()
    for count in range(1, 200):
        shard.publish(count)
    shard.settle()
    starts, stops, written, threads = zip(*noted, strict=True)
    assert set(threads) == {"mooncake-journal-3"}
    assert starts == written, "what was noted was in files already"
    assert (starts[0], *stops) == (*starts, shard.head)


def test_blocks_are_whole_however_few_bytes_a_disk_takes_at_a_time(run):
    disk = TroubledDisk()
    disk.bytes_at_once = 1000
    shard = run(disk=disk)
    shard.keep()
    for _ in range(10):
        shard.publish(CELLS // 3)
    shard.close()
    contents = shard.read()
    assert covered(contents) == [(1, shard.head)]
    assert contents.complete


def test_nothing_is_believed_before_a_whole_snapshot_is_in_the_files(run):
    shard = run()
    assert shard.writer.wants_snapshot
    assert shard.writer.state == "renewing"
    shard.publish(100)
    shard.settle()
    assert shard.read(shard.ring).void
    assert shard.read(shard.ring).runs == []
    shard.snapshot()
    assert not shard.writer.wants_snapshot
    assert shard.writer.wait_kept(PATIENCE_S)
    assert not at(shard.ring, VOID)
    assert shard.read(shard.ring).complete
    assert str(shard.folder) in shard.writer.told


def test_a_snapshot_that_began_too_early_does_not_do(run):
    ring = fresh_ring()
    ring.header[[HEAD, WRITTEN, SYNCED]] = 1000
    shard = run(ring)
    shard.publish(10)
    ring.header[SNAPSHOT] = 999
    shard.writer.wake()
    assert shard.writer.wants_snapshot
    shard.publish(10)
    shard.close()
    assert shard.writer.state == "renewing"
    assert shard.read().void


def test_an_answer_waits_for_the_disk_at_synced(run):
    disk = TroubledDisk()
    shard = run(level="synced", disk=disk)
    shard.keep()
    disk.hanging = {"fdatasync"}
    head = shard.publish(10)
    assert disk.reached.wait(PATIENCE_S)
    assert not shard.writer.synced(head)
    disk.hanging = set()
    disk.released.set()
    until(lambda: shard.synced and shard.synced[-1] >= head)
    assert shard.writer.synced(head)
    assert at(shard.ring, SYNCED) >= head
    assert shard.synced == sorted(shard.synced)


def test_no_answer_waits_for_the_disk_at_written(run):
    disk = TroubledDisk()
    shard = run(disk=disk)
    shard.keep()
    before = disk.calls.count("fdatasync")
    head = shard.publish(10)
    assert shard.writer.synced(head)
    shard.settle()
    assert disk.calls.count("fdatasync") == before


@pytest.mark.parametrize("level", ["written", "synced"])
def test_old_files_go_once_a_snapshot_is_on_the_disk_and_what_is_needed_stays(run, level):
    disk = TroubledDisk()
    shard = run(disk=disk, level=level, file_bytes=8192)
    shard.keep()
    while len(files_in(shard.folder)) < 5:
        shard.publish(300)
        shard.settle()
    assert "unlink" not in disk.calls
    first = shard.snapshot(300)
    until(lambda: "unlink" in disk.calls and disk.calls[-1] == "fsync_folder")
    shard.settle()
    moved = [call for call in disk.calls[: disk.calls.index("unlink")] if call != "fsync_folder"]
    assert moved[-1] == "fdatasync"
    kept = files_in(shard.folder)
    assert begins(kept[0]) <= first
    assert all(begins(path) > first for path in kept[1:])
    shard.publish(300)
    shard.close()
    contents = shard.read()
    assert covered(contents) == [(begins(kept[0]), shard.head)]
    assert contents.complete


def test_files_stay_while_the_end_of_their_snapshot_is_not_written(run):
    disk = TroubledDisk()
    shard = run(disk=disk, file_bytes=8192)
    shard.keep()
    shard.publish(1000)
    shard.settle()
    shard.publish(1000)
    shard.settle()
    disk.hanging = {"write"}
    shard.snapshot(1000)
    assert disk.reached.wait(PATIENCE_S)
    assert "unlink" not in disk.calls
    disk.hanging = set()
    disk.released.set()
    until(lambda: "unlink" in disk.calls)
    shard.close()
    assert shard.read().complete


def test_a_snapshot_that_fills_files_keeps_all_since_its_beginning(run):
    disk = TroubledDisk()
    shard = run(disk=disk, file_bytes=8192)
    shard.keep()
    shard.publish(1000)
    shard.settle()
    first = shard.head
    for _ in range(3):  # each behind the end of a file
        shard.publish(1000)
        shard.settle()
    shard.ring.header[SNAPSHOT] = first
    shard.writer.wake()
    until(lambda: "unlink" in disk.calls and disk.calls[-1] == "fsync_folder")
    shard.close()
    contents = shard.read()
    assert covered(contents) == [(first, shard.head)]
    assert contents.complete


def test_files_stay_while_a_snapshot_that_ended_during_a_write_is_not_written(run):
    disk = TroubledDisk()
    begins_at, written = [], []

    def end_snapshot(start, stop):
        if start in begins_at:  # the writer has looked where the stream ends already
            publish(shard.ring, 1000)
            shard.ring.header[SNAPSHOT] = start

    def unlink(path):
        written.append(at(shard.ring, WRITTEN))
        Disk.unlink(disk, path)

    disk.unlink = unlink
    shard = run(disk=disk, file_bytes=8192, note=end_snapshot)
    shard.keep()
    shard.publish(1000)
    shard.settle()
    begins_at.append(shard.head)
    shard.publish(1000)
    until(lambda: written)
    assert min(written) == shard.head
    shard.close()
    assert shard.read().complete


def test_a_next_run_goes_on_in_another_file_with_the_ring_as_it_was(run):
    first = run()
    first.keep()
    first.publish(100)
    first.close()
    before = names(first.folder)
    publish(first.ring, 50)  # that nobody wrote any more
    second = run(first.ring, believed=True)
    assert second.writer.state == "kept"
    assert not second.read().complete, "the one before ended in good order, but this one began"
    second.publish(100)
    second.close()
    added = names(second.folder) - before
    assert min(added) > max(before)
    contents = second.read()
    assert covered(contents) == [(1, second.head)]
    assert contents.complete


def test_files_of_former_runs_go_with_the_first_snapshot(run):
    first = run()
    first.keep()
    first.close()
    second = run(first.ring, believed=True)
    before = names(second.folder)
    second.snapshot()
    until(lambda: len(names(second.folder)) < len(before))
    second.close()
    assert names(second.folder) == {max(before)}
    assert second.read().complete


def test_what_is_not_believed_is_replaced(run):
    first = run()
    first.keep()
    first.publish(500)
    first.close()
    second = run()
    assert second.read().void
    assert len(files_in(second.folder)) == 1
    second.keep()
    second.close()
    assert second.read().complete


def test_positions_go_on_over_a_boot(run):
    first = run()
    first.keep()
    first.publish(500)
    first.close()
    contents = first.read()
    ring = fresh_ring()
    ring.header[[HEAD, WRITTEN, SYNCED]] = contents.end
    ring.header[SNAPSHOT] = contents.facts.snapshot
    second = run(ring, believed=True)
    second.publish(100)
    second.close()
    contents = second.read()
    assert covered(contents) == [(1, second.head)]
    assert contents.complete


def test_room_is_what_files_have_taken(run):
    disk = TroubledDisk()
    shard = run(disk=disk)
    shard.keep()
    shard.settle()
    assert not shard.writer.make_room(CELLS + 1, PATIENCE_S), "there is never as much"
    disk.hanging = {"write"}
    shard.publish(CELLS)
    assert disk.reached.wait(PATIENCE_S)
    assert not shard.writer.make_room(1, 0.01)
    disk.hanging = set()
    disk.released.set()
    assert shard.writer.make_room(CELLS, PATIENCE_S)
    assert at(shard.ring, WRITTEN) == at(shard.ring, HEAD)


def test_a_writer_with_nothing_to_do_costs_nothing(run):
    shard = run()
    shard.keep()
    shard.settle()
    until_idle()
    assert shard.writer.sound


def test_closing_twice_is_as_good_as_once(run):
    shard = run()
    shard.keep()
    shard.close()
    shard.close()
    assert shard.read().complete


def test_numbers_of_blocks_and_positions_only_rise(run):
    shard = run(file_bytes=8192)
    shard.keep()
    for _ in range(20):
        shard.publish(200)
        shard.settle()
    shard.close()
    firsts = [begins(path) for path in files_in(shard.folder)]
    assert len(firsts) > 3
    assert all(one < other for one, other in itertools.pairwise(firsts))


def test_words_that_look_like_an_end_in_good_order_stay_as_they_are(folder):
    """Clients choose names; one that a killed writer wrote last is not taken for its end."""
    kept = Kept(folder)
    kept.block(100)
    forged = BlockHeader(1, 0, 1, 9, Facts(0, 0, 0, 0, 0, 0), (1, 2), 0, closing=True)
    cells = np.frombuffer(forged.pack(), np.int64)
    head = at(kept.ring, HEAD)
    kept.ring.cells[head : head + len(cells)] = cells
    kept.ring.header[HEAD] = head + len(cells)
    kept.write()
    (file,) = files_in(folder)
    before = file.read_bytes()
    JournalFiles(folder, ORIGIN, Disk()).adopt(at(kept.ring, HEAD))
    assert file.read_bytes() == before
