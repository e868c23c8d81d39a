"""The registers of a cluster as a file: the same again, whole or not at all, nothing guessed."""

import errno
import os
import stat
import threading

import msgspec
import pytest

from mooncake_store.config.settings import MasterConfig
from mooncake_store.errors import ConfigError, UnavailableError
from mooncake_store.master import registers as module
from mooncake_store.master.lineage import Lineage
from mooncake_store.master.registers import (
    RUNS_KEPT,
    VERSION,
    KeptSegment,
    KeptWorker,
    RegisterFile,
    Registers,
)
from mooncake_store.master.roster import Roster
from mooncake_store.master.server import Master
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio

WORKER = KeptWorker(b"w" * 16, 3, "wörker", "host")
SEGMENT = KeptSegment(
    4, b"s" * 16, 'a "segment"', 1 << 40, b"\0\xff", WORKER.uuid, 1, 2, b"k" * 16, "team-a"
)
FULL = Registers(VERSION, (1 << 64) - 1, 7, (WORKER,), (SEGMENT,), (9, (1 << 64) - 1), "here")
EMPTY = Registers(VERSION, 5, -1, (), ())


async def test_the_next_run_finds_what_was_kept(tmp_path):
    first = RegisterFile(tmp_path)
    assert first.read() is None
    for registers in (EMPTY, FULL):
        await first.keep(registers)
        assert RegisterFile(tmp_path).read() == registers
    assert os.listdir(tmp_path) == ["cluster.json"]
    assert stat.S_IMODE((tmp_path / "cluster.json").stat().st_mode) == 0o600


async def test_all_that_is_kept_of_a_segment_is_kept_once_more():
    roster = Roster()
    roster.restore(FULL)
    again = roster.registers(FULL.life, Lineage(FULL.place), ())
    assert (again.segments, again.workers) == (FULL.segments, FULL.workers)


async def test_what_the_file_says_already_is_not_written_again(tmp_path):
    file = RegisterFile(tmp_path)
    await file.keep(FULL)
    written = (tmp_path / "cluster.json").stat().st_ino
    await file.keep(FULL)
    again = RegisterFile(tmp_path)
    again.read()
    await again.keep(FULL)
    assert (tmp_path / "cluster.json").stat().st_ino == written


async def test_without_a_directory_nothing_is_kept():
    file = RegisterFile()
    await file.keep(FULL)
    await file.settle()
    assert not file.keeps
    assert file.read() is None


def changed(**fields):
    """The file of `FULL` with some fields of its only segment replaced."""
    segment = {name: getattr(SEGMENT, name) for name in SEGMENT.__struct_fields__} | fields
    return msgspec.json.encode(Registers(1, 5, 7, (WORKER,), (KeptSegment(**segment),)))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "damaged"),
        (b"\0" * 100, "damaged"),
        (b"[" * 5000, "damaged"),
        (b'{"version": 1, "life": 5}', "damaged"),
        (msgspec.json.encode(FULL)[:-20], "damaged"),
        (msgspec.json.encode(Registers(1, 5, 32_000, (), ())), "out of range"),
        (msgspec.json.encode(Registers(1, 5, 7, (WORKER, WORKER), ())), "there twice"),
        (msgspec.json.encode(Registers(1, 5, 7, (WORKER,), (SEGMENT,) * 2)), "there twice"),
        (changed(number=32_000), "segment 32000 cannot be"),
        (changed(worker=b"x" * 16), "segment 4 cannot be"),
        (changed(uuid=b"short"), "segment 4 cannot be"),
        (changed(nbytes=0), "segment 4 cannot be"),
        (msgspec.json.encode(Registers(1, 5, 7, (), (), (0,))), "a run is out of range"),
        (msgspec.json.encode(Registers(1, 5, 7, (), (), (1,) * (RUNS_KEPT + 1))), "too many"),
        (b'{"version": 4, "anything": "else"}', "is of version 4"),
    ],
)
async def test_what_is_not_understood_is_refused_and_stays(tmp_path, content, complaint):
    path = tmp_path / "cluster.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        RegisterFile(tmp_path).read()
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


async def test_registers_from_before_there_were_runs_are_read(tmp_path):
    content = b'{"version": 1, "life": 5, "last_number": -1, "workers": [], "segments": []}'
    (tmp_path / "cluster.json").write_bytes(content)
    assert RegisterFile(tmp_path).read() == Registers(1, 5, -1, (), ())


async def test_what_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "cluster.json").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be used"):
        RegisterFile(tmp_path).read()


async def test_a_write_that_was_cut_off_leaves_what_there_was(tmp_path):
    await RegisterFile(tmp_path).keep(FULL)
    (tmp_path / "cluster.json.new").write_bytes(b'{"version": 1, "li')
    file = RegisterFile(tmp_path)
    assert file.read() == FULL
    await file.keep(EMPTY)
    assert RegisterFile(tmp_path).read() == EMPTY


async def test_a_full_disk_is_told_once_and_then_that_it_works_again(tmp_path, monkeypatch, caplog):
    file = RegisterFile(tmp_path)
    await file.keep(EMPTY)

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_whole", full)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="No space left") as caught:
                await file.keep(FULL)
            assert caught.value.retryable
    assert RegisterFile(tmp_path).read() == EMPTY
    with caplog.at_level("INFO", module.__name__):
        await file.keep(FULL)
    assert RegisterFile(tmp_path).read() == FULL
    told = [(record.levelname, record.message) for record in caplog.records]
    assert [level for level, _ in told] == ["ERROR", "INFO"]
    assert str(tmp_path) in told[0][1]
    assert "No space left" in told[0][1]


async def test_a_disk_that_hangs_holds_nobody_up_and_no_older_state_comes_late(
    tmp_path, monkeypatch
):
    file, release, write = RegisterFile(tmp_path), threading.Event(), module.write_whole

    def slow(path, content):
        release.wait(PATIENCE_S)
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_whole", slow)
        with pytest.raises(UnavailableError, match="nothing was written within"):
            await file.keep(EMPTY, within_s=0.05)
        with pytest.raises(UnavailableError, match="an earlier write has not ended"):
            await file.keep(FULL)
    release.set()
    await file.settle()
    assert RegisterFile(tmp_path).read() == EMPTY
    await file.keep(FULL)
    assert RegisterFile(tmp_path).read() == FULL


async def test_a_master_that_begins_waits_for_its_disk(tmp_path, monkeypatch):
    """However slow it is: nobody is held up by that, and ending would help nobody."""
    monkeypatch.setattr(module, "KEEP_S", 1e-9)  # no disk is as quick as that
    master = Master(MasterConfig(port=0, state=str(tmp_path)))
    await master.start()
    await master.stop(1.0)
    assert RegisterFile(tmp_path).read() is not None
