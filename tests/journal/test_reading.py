"""What is read back: every word that was written or word of its loss, and never another one."""

import dataclasses
import errno
import os
import random

import numpy as np
import pytest

from mooncake_store.core.ring import HEAD, SNAPSHOT, VOID, WRITTEN
from mooncake_store.errors import ConfigError
from mooncake_store.journal import files as journal_files
from mooncake_store.journal import reading
from mooncake_store.journal.layout import (
    BLOCK_HEADER_BYTES,
    FILE_HEADER_BYTES,
    WORD_BYTES,
    BlockHeader,
    FileHeader,
    facts_of,
)
from mooncake_store.journal.reading import read_journal
from tests.journal.streams import (
    ANOTHER_BOOT,
    CELLS,
    ORIGIN,
    Kept,
    at,
    covered,
    files_in,
    publish,
    words,
)

BLOCK_BYTES = BLOCK_HEADER_BYTES + 8 * 4
"""Of one with four words."""


@pytest.fixture
def kept(folder):
    return Kept(folder)


def lost(contents):
    return [(damage.first, damage.end) for damage in contents.damages]


def test_words_come_back_in_order_however_often_the_ring_went_round(kept):
    chance = random.Random(1)
    for _ in range(40):
        kept.block(chance.randrange(1, CELLS // 2))
    end = kept.block(CELLS)
    contents = kept.read()
    assert end > 5 * CELLS
    assert covered(contents) == [(1, end)]
    assert contents.complete
    assert (contents.end, contents.torn, contents.void) == (end, None, "")
    assert contents.same_boot


def test_what_is_not_in_files_yet_comes_from_the_ring_and_stays_when_that_is_used_again(kept):
    kept.block(CELLS - 10)
    end = publish(kept.ring, 100)
    contents = kept.read()
    kept.write()
    publish(kept.ring, CELLS)
    assert covered(contents) == [(1, end)]
    assert contents.complete


def test_facts_are_those_of_the_ring_else_of_the_newest_block(kept):
    kept.ring.header[3:7] = 11, 12, 13, 14
    kept.block(10)
    kept.ring.header[3:7] = 21, 22, 23, 24
    assert kept.read().facts[:5] == (23, 24, 21, 22, 1)
    assert read_journal(kept.folder, ORIGIN, None).facts[:5] == (13, 14, 11, 12, 1)


def test_an_empty_folder_has_nothing_that_may_be_believed(folder):
    contents = read_journal(folder, ORIGIN, None)
    assert (contents.runs, contents.damages, contents.end) == ([], [], 0)
    assert not contents.complete
    assert contents.void
    assert contents.facts is contents.boot is None
    assert not contents.same_boot


def test_a_folder_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_journal(tmp_path / "missing", ORIGIN, None)


def torn(folder, origin):
    """A journal whose last block has four words; returns it, its last file and where that stands.

    The block is written, and its writer ended before it noted that.
    """
    kept = Kept(folder, origin)
    for count in (30, 40, 50):
        kept.block(count)
        path = kept.next_file()
    kept.block(60)
    size = kept.files.size
    begin = at(kept.ring, WRITTEN)
    kept.block(4)
    kept.ring.header[WRITTEN] = begin
    assert kept.files.size == size + BLOCK_BYTES
    return kept, path, size


def test_a_tail_that_is_cut_at_any_byte_loses_only_itself(folder):
    kept, path, size = torn(folder, ANOTHER_BOOT)
    begin, end = at(kept.ring, WRITTEN), at(kept.ring, HEAD)
    for length in range(BLOCK_BYTES, -1, -1):
        os.truncate(path, size + length)
        contents = read_journal(folder, ORIGIN, None)
        whole = length == BLOCK_BYTES
        assert covered(contents) == [(1, end if whole else begin)], length
        assert not contents.same_boot
        assert contents.complete
        assert (contents.torn is None) == (whole or length == 0), length


def test_a_tail_that_is_cut_at_any_byte_comes_from_the_ring_of_the_same_boot(folder):
    kept, path, size = torn(folder, ORIGIN)
    for length in range(BLOCK_BYTES, -1, -1):
        os.truncate(path, size + length)
        contents = kept.read()
        assert covered(contents) == [(1, at(kept.ring, HEAD))], length
        assert contents.complete
        without = read_journal(folder, ORIGIN, None)
        assert without.same_boot
        assert not without.complete, "the ring had more, for all anybody knows"


def test_a_file_that_was_only_begun_holds_nothing(kept):
    end = kept.block(100)
    path = kept.next_file()
    for length in range(FILE_HEADER_BYTES, -1, -64):
        os.truncate(path, length)
        contents = kept.read()
        assert covered(contents) == [(1, end)], length
        assert contents.complete
    path.write_bytes(bytes(2 * FILE_HEADER_BYTES))
    assert kept.read().complete, "so a host that ended may leave it"


def test_a_torn_tail_is_forgotten_when_the_next_run_goes_on_where_it_begins(folder):
    kept, path, size = torn(folder, ANOTHER_BOOT)
    os.truncate(path, size + BLOCK_BYTES - 1)
    kept.restart()
    end = kept.block(20)
    contents = read_journal(folder, ORIGIN, None)
    assert covered(contents) == [(1, end)]
    assert contents.complete
    assert contents.torn is None


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_may_write_the_last_block_of_the_one_before_again(kept, times):
    kept.block(30)
    begin = at(kept.ring, WRITTEN)
    kept.block(40)
    for more in range(times):
        kept.ring.header[WRITTEN] = begin
        kept.restart()
        kept.block(more)
    end = kept.block(50)
    contents = kept.read()
    assert covered(contents) == [(1, end)]
    assert contents.complete


def test_a_run_that_only_began_after_another_was_killed_changes_nothing(kept):
    kept.block(30)
    begin = at(kept.ring, WRITTEN)
    end = kept.block(40)
    kept.ring.header[WRITTEN] = begin
    kept.restart()
    kept.restart()
    contents = kept.read()
    assert covered(contents) == [(1, end)]
    assert contents.complete


def test_other_words_in_place_of_what_was_read_are_a_damage(kept):
    kept.block(30)
    begin = at(kept.ring, WRITTEN)
    end = kept.block(40)
    kept.ring.header[WRITTEN] = begin
    kept.ring.cells[begin + 39] += 1
    kept.restart()
    kept.block(50)
    contents = read_journal(kept.folder, ORIGIN, None)
    assert covered(contents) == [(1, end)]
    assert [damage.reason for damage in contents.damages] == [
        f"a block begins at {begin}, which was read"
    ]


def test_a_run_that_begins_elsewhere_than_at_a_block_is_a_damage(kept):
    kept.block(30)
    end = kept.block(40)
    kept.ring.header[WRITTEN] = end - 7
    kept.restart()
    kept.block(50)
    contents = kept.read()
    assert contents.damages
    assert not contents.complete
    assert covered(contents)[0][0] == 1


def test_a_damaged_block_is_told_and_the_others_are_read(kept):
    path = files_in(kept.folder)[0]
    kept.block(30)
    places = []
    for place in (BLOCK_HEADER_BYTES + 3, 50):  # the words of one, the header of the other
        begin, offset = at(kept.ring, WRITTEN), kept.files.size
        places.append((offset, offset + place, begin, kept.block(20)))
        kept.block(10)
    for offset, damaged, begin, end in places:
        content = bytearray(path.read_bytes())
        content[damaged] ^= 0x10
        path.write_bytes(content)
        contents = kept.read()
        damage = contents.damages[-1]
        assert (damage.file, damage.offset) == (path.name, offset)
        assert (damage.first, damage.end) == (begin, end)
    assert len(covered(contents)) == 3
    assert not contents.complete


@pytest.mark.parametrize("zeros", [WORD_BYTES, FILE_HEADER_BYTES - WORD_BYTES])
def test_the_rest_of_a_page_is_no_damage_and_more_zeros_are_what_was_cut_off(kept, zeros):
    end = kept.block(100)
    path = files_in(kept.folder)[0]
    os.truncate(path, kept.files.size + zeros)
    contents = read_journal(kept.folder, ANOTHER_BOOT, None)
    assert covered(contents) == [(1, end)]
    assert contents.torn is None
    os.truncate(path, kept.files.size + FILE_HEADER_BYTES)
    contents = read_journal(kept.folder, ANOTHER_BOOT, None)
    assert covered(contents) == [(1, end)]
    assert contents.torn is not None


def test_blocks_of_any_size_are_read_as_they_were_written(kept, monkeypatch):
    monkeypatch.setattr(journal_files, "STAGE_BYTES", 2 * FILE_HEADER_BYTES)
    for count in (1, 400, 496, 511, 512, 1024, 3000, CELLS, 0, 7):
        end = kept.block(count)
        assert covered(kept.read()) == [(1, end)]
        assert kept.read().complete


def test_a_missing_file_is_told_wherever_it_was(kept):
    ends = [1]
    for count in (30, 40, 50, 60):
        ends.append(kept.block(count))
        kept.next_file()
    names = files_in(kept.folder)
    for number in range(4):
        content = names[number].read_bytes()
        names[number].unlink()
        contents = kept.read()
        assert (ends[number], ends[number + 1]) in lost(contents)
        assert not contents.complete
        names[number].write_bytes(content)
    assert kept.read().complete


def test_files_that_a_snapshot_begins_in_are_missed_without_a_ring_too(kept):
    kept.block(30)
    kept.next_file()
    kept.block(40)
    files_in(kept.folder)[0].unlink()
    contents = read_journal(kept.folder, ANOTHER_BOOT, None)
    assert lost(contents) == [(1, 31)]
    assert not contents.complete


def test_words_in_front_of_the_snapshot_are_not_missed(kept):
    kept.block(30)
    kept.next_file()
    kept.ring.header[SNAPSHOT] = 31
    end = kept.block(40)
    files_in(kept.folder)[0].unlink()
    contents = kept.read()
    assert covered(contents) == [(31, end)]
    assert contents.complete
    assert contents.facts.snapshot == 31


def test_files_that_end_before_what_was_noted_have_lost_words(kept):
    kept.block(30)
    size = kept.files.size
    begin, noted = at(kept.ring, WRITTEN), kept.block(40)
    end = publish(kept.ring, 50)
    os.truncate(files_in(kept.folder)[0], size)
    contents = kept.read()
    assert lost(contents) == [(begin, noted)]
    assert covered(contents) == [(1, begin), (noted, end)]
    assert not contents.complete


def test_files_that_go_on_where_the_ring_ends_are_a_damage(kept):
    end = kept.block(30)
    kept.ring.header[[HEAD, WRITTEN]] = 20
    contents = kept.read()
    assert covered(contents) == [(1, end)]
    assert contents.damages[0].file == "the ring"
    assert not contents.complete


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cluster": "fedcba9876543210"}, "another cluster or shard"),
        ({"shard": 4}, "another cluster or shard"),
        ({"shards": 4}, "one of 8 shards, not of 4"),
    ],
)
def test_the_journal_of_another_is_refused_and_stays(kept, change, complaint):
    kept.block(30)
    before = {path: path.read_bytes() for path in files_in(kept.folder)}
    with pytest.raises(ConfigError, match=complaint) as caught:
        kept.read(dataclasses.replace(ORIGIN, **change))
    assert str(files_in(kept.folder)[0]) in str(caught.value)
    assert caught.value.advice
    assert before == {path: path.read_bytes() for path in files_in(kept.folder)}


def test_a_later_version_is_refused_even_where_nothing_may_be_believed(folder):
    header = FileHeader(2, ORIGIN.cluster_word, 3, 8, 1, ORIGIN.boot, 5)
    (folder / "journal-0000000007.log").write_bytes(header.pack())
    with pytest.raises(ConfigError, match="is of version 2, this program reads up to 1"):
        read_journal(folder, ORIGIN, None)


def test_what_is_no_plain_file_is_refused(folder, tmp_path):
    place = folder / "journal-0000000001.log"
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_journal(folder, ORIGIN, None)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(ConfigError, match="is no plain file"):
        read_journal(folder, ORIGIN, None)


def test_other_files_of_the_folder_are_none_of_its_business(kept):
    end = kept.block(30)
    for name in ("journal-1.log", "journal-0000000001.log.new", "lost+found"):
        (kept.folder / name).write_text("anything")
    assert covered(kept.read()) == [(1, end)]


@pytest.mark.parametrize("how", ["no mark", "marked void", "void ring"])
def test_nothing_of_what_is_void_is_handed_out(kept, how):
    end = kept.block(30)
    if how == "void ring":
        kept.ring.header[VOID] = 1
    else:
        kept.files.make_void()
        if how == "no mark":
            (kept.folder / "VOID").unlink()
    contents = kept.read()
    assert contents.runs == contents.positions == []
    assert contents.void
    assert not contents.complete
    assert contents.end == end
    assert contents.facts


def test_a_block_in_a_name_is_not_taken_for_one(kept):
    kept.block(30)
    path = files_in(kept.folder)[0]
    offset, begin = kept.files.size, at(kept.ring, WRITTEN)
    forged = BlockHeader(
        0, 1, begin + 1000, 1000, facts_of(kept.ring.header, 1, 0), ORIGIN.boot, 0, False
    )
    end = kept.block(40)
    kept.block(50)
    content = bytearray(path.read_bytes())
    content[offset] ^= 1  # its header, so that the next is searched for in its payload
    place = offset + BLOCK_HEADER_BYTES
    content[place : place + BLOCK_HEADER_BYTES] = forged.pack()
    path.write_bytes(content)
    contents = kept.read()
    assert covered(contents) == [(1, begin), (end, end + 50)]
    assert lost(contents) == [(begin, end)]


def test_what_the_disk_does_not_give_is_a_damage(kept, monkeypatch):
    first = kept.block(1000)
    end = kept.block(1000)
    monkeypatch.setattr(reading, "_READ_BYTES", 4096)
    preadv = os.preadv

    def failing(fd, buffers, offset):
        if offset >= 16384:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    contents = kept.read()
    assert covered(contents) == [(1, first)]
    assert contents.end == end
    assert "the disk does not give the rest" in contents.damages[0].reason
    assert lost(contents)[-1] == (first, end)
    assert not contents.complete


class Image:
    """The files of a journal in pieces: the header page of each, and its blocks."""

    def __init__(self, folder, chance):
        self.kept = Kept(folder)
        self.sizes = {}
        path = files_in(folder)[0]
        for _ in range(3):
            self.sizes[path.name] = [self.kept.files.size]
            for _ in range(4):
                self.kept.block(chance.randrange(1, 60))
                self.sizes[path.name].append(self.kept.files.size)
            path = self.kept.next_file()
        path.unlink()
        self.kept.files.drop()

    def files(self):
        """Copies of the pieces, by the names of their files."""
        pieces = {}
        for name, sizes in self.sizes.items():
            content = (self.kept.folder / name).read_bytes()
            begins = [0, *sizes[:-1]]
            pieces[name] = [
                bytearray(content[begin:end]) for begin, end in zip(begins, sizes, strict=True)
            ]
        return pieces


def flip(files, chance):
    piece = chance.choice(chance.choice(list(files.values())))
    if piece:
        piece[chance.randrange(len(piece))] ^= 1 << chance.randrange(8)


def cut(files, chance):
    pieces = chance.choice(list(files.values()))
    left = chance.randrange(sum(map(len, pieces)) + 1)
    for piece in pieces:
        del piece[left:]
        left -= min(left, len(piece))


def swap(files, chance):
    one, other = (chance.choice(list(files.values())) for _ in range(2))
    a, b = chance.randrange(1, len(one)), chance.randrange(1, len(other))
    one[a], other[b] = other[b], one[a]


def lose(files, chance):
    if len(files) > 1:
        del files[chance.choice(list(files))]


def double(files, chance):
    pieces = files[chance.choice(list(files))]
    files[f"journal-{100 + len(files):010}.log"] = [bytearray(piece) for piece in pieces]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_files_what_is_read_is_right_and_what_is_lost_is_told(
    tmp_path, folder, seed
):
    chance = random.Random(seed)
    image = Image(folder, chance)
    whole = [(1, at(image.kept.ring, HEAD))]
    assert covered(image.kept.read()) == whole
    for fault in range(30):
        damaged = tmp_path / f"fault-{fault}"
        damaged.mkdir()
        (damaged / "VALID").touch()
        files = image.files()
        done = chance.choices([flip, cut, swap, lose, double], k=chance.randrange(1, 4))
        for each in done:
            each(files, chance)
        for name, pieces in files.items():
            (damaged / name).write_bytes(b"".join(pieces))
        contents = read_journal(damaged, ORIGIN, image.kept.ring)
        if covered(contents) != whole:
            assert contents.damages, done
            assert not contents.complete, done


def test_reading_keeps_no_mapping_that_nobody_holds_words_of(kept):
    kept.block(30)
    kept.next_file()
    end = kept.block(40)
    contents = kept.read()
    run = contents.runs[-1]
    del contents

    def mapped():
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return {line.split()[-1] for line in maps if str(kept.folder) in line}

    assert mapped() == {str(files_in(kept.folder)[1])}
    assert np.array_equal(run, words(31, end))
    del run
    assert not mapped()
