"""What a front served, recorded as a trace: what prompts share, and nothing of what they say."""

import asyncio
import errno
import logging
import os
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest

from mooncake_store.errors import ConfigError
from serving.engine.sampling import Sampling
from serving.program import EngineSettings, run
from serving.scheduling.requests import Failure, Finish, Piece, Request
from serving.system import SystemSettings
from serving.traces import recording
from serving.traces.reading import Lines
from serving.traces.recording import BlockNames, Recorder
from tests.serving.fakes import Fleet
from tests.serving.front.conftest import http as http
from tests.serving.front.conftest import serving
from tests.waiting import until_async


class Clock:
    """Seconds that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def rows_of(path):
    """The requests of a trace in which nothing is wrong."""
    lines = Lines()
    rows = list(lines.rows(path.read_bytes().splitlines()))
    assert lines.faults == []
    return rows


def request(tokens):
    return Request("r", tokens, Sampling(), 8)


async def answered(*outcomes):
    for outcome in outcomes:
        yield outcome


async def go(recorder, tokens, *outcomes):
    async for _ in recorder.recorded(request(tokens), answered(*outcomes)):
        pass


DONE = (Piece((1, 2)), Finish("stop", 3, 0, 3))


@pytest.mark.asyncio
async def test_what_a_front_answers_is_recorded_without_a_word_of_it(path, http):
    recorder = Recorder(path)
    async with serving(Fleet(1, 1), recorder=recorder) as (url, _):
        recorder.start()
        shared = "the secret of the house " * 30
        for tail, more in (("one", {}), ("two", {"n": 2}), ("x" * 400, {"stream": True})):
            body = {"prompt": shared + tail, "max_tokens": 6} | more
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                await answer.read()
        async with http.post(f"{url}/v1/completions", json={"prompt": 7}) as answer:
            assert answer.status == 400
        await recorder.close()
    rows = rows_of(path)
    assert [row.hash_ids for row in rows] == [[0, 1], [0, 2], [0, 2], [0, 3, 4]]
    assert [row.input_length for row in rows] == [724, 724, 724, 1121]
    assert [row.output_length for row in rows] == [6, 6, 6, 6]
    assert b"secret" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.asyncio
async def test_rows_are_in_the_order_in_which_requests_came(path):
    clock = Clock()
    recorder = Recorder(path, clock)
    recorder.start()
    held, go_on = asyncio.Event(), asyncio.Event()

    async def slow():
        yield Piece((1,))
        held.set()
        await go_on.wait()
        yield Finish("stop", 3, 0, 9)

    async def first():
        async for _ in recorder.recorded(request([1] * 10), slow()):
            pass

    running = asyncio.ensure_future(first())
    await held.wait()
    clock.now += 1.5
    await go(recorder, [2] * 10, *DONE)
    recorder.write()
    assert rows_of(path) == []
    go_on.set()
    await running
    recorder.write()
    rows = rows_of(path)
    assert [(row.timestamp, row.output_length) for row in rows] == [(0, 9), (1500, 3)]
    await recorder.close()


@pytest.mark.asyncio
async def test_a_request_is_recorded_as_far_as_it_was_served(path):
    recorder = Recorder(path)
    recorder.start()
    await go(recorder, [1] * 5, Failure("queue_full", "full", 429))
    await go(recorder, [1] * 6, Piece((1, 2)), Failure("lost", "gone"))
    async with aclosing(recorder.recorded(request([1] * 7), answered(*DONE))) as outcomes:
        await anext(outcomes)  # and the client goes away
    await recorder.close()
    await recorder.close()
    assert [(row.input_length, row.output_length) for row in rows_of(path)] == [(6, 2), (7, 2)]


@pytest.mark.asyncio
async def test_rows_come_into_the_file_while_it_goes_on(path, monkeypatch):
    monkeypatch.setattr(recording, "WRITE_S", 0.01)
    recorder = Recorder(path)
    recorder.start()
    await go(recorder, [1] * 5, *DONE)
    await until_async(lambda: path.stat().st_size)
    await recorder.close()


@pytest.mark.asyncio
async def test_a_full_disk_is_told_once_and_serving_goes_on(caplog):
    recorder = Recorder(Path("/dev/full"))
    recorder.start()
    for _ in range(3):
        await go(recorder, [1] * 5, *DONE)
        recorder.write()
    await recorder.close()
    assert recorder.lost == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text


@pytest.mark.asyncio
async def test_a_disk_that_was_full_has_whole_rows_only(path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    recorder = Recorder(path)
    recorder.start()
    write = os.write

    def half(file, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    await go(recorder, [1] * 5, *DONE)
    recorder.write()
    monkeypatch.setattr(recording.os, "write", half)
    await go(recorder, [1] * 600, *DONE)
    recorder.write()
    monkeypatch.undo()
    assert len(rows_of(path)) == 1
    await go(recorder, [1] * 5, *DONE)
    await recorder.close()
    assert [row.hash_ids for row in rows_of(path)] == [[0], [0]]
    assert "takes rows again; 1 requests are missing" in caplog.text


@pytest.mark.asyncio
async def test_what_waits_to_be_written_is_bounded(path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "PENDING_MAX", 2)
    recorder = Recorder(path)
    recorder.start()
    for _ in range(4):
        await go(recorder, [1] * 5, *DONE)
    assert recorder.lost == 2
    assert len(caplog.records) == 1
    await recorder.close()
    assert len(rows_of(path)) == 2


def test_names_that_were_forgotten_are_given_anew_and_what_is_written_stays_a_trace(path):
    from eviction.trace import Row
    from serving.traces.writing import write_rows

    random = Random(3)
    names = BlockNames(most=6)
    rows = []
    for at in range(300):
        tokens = [0] * 512
        for _ in range(random.randrange(4)):
            tokens += [random.randrange(3)] * 512
        rows.append(Row(at, len(tokens), 1, names.of(names.digests(tokens))))
        assert len(names._names) <= 6
    write_rows(path, rows)
    assert len(rows_of(path)) == 300
    # The block that all have is used last each time, so it is never forgotten.
    assert {row.hash_ids[0] for row in rows} == {0}
    assert max(max(row.hash_ids) for row in rows) > 40


def test_blocks_have_one_name_where_all_before_them_is_alike():
    names = BlockNames()
    one = names.of(names.digests([*[1] * 512, *[2] * 512, 3]))
    assert one == [0, 1, 2]
    assert names.of(names.digests([*[1] * 512, *[2] * 512, 4])) == [0, 1, 3]
    assert names.of(names.digests([*[9] * 512, *[2] * 512, 3])) == [4, 5, 6]
    assert names.of(names.digests([*[1] * 512, *[2] * 512, 3])) == one


def test_a_file_that_has_something_is_not_overwritten(path, tmp_path):
    path.write_text("precious")
    with pytest.raises(ConfigError, match="there already"):
        Recorder(path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="No such file"):
        Recorder(tmp_path / "none" / "trace.jsonl")


def test_engines_elsewhere_are_not_recorded(path):
    settings = SystemSettings(record=str(path))
    with pytest.raises(ConfigError, match="not recorded"):
        run(settings, EngineSettings({"a": "http://127.0.0.1:1"}), print, None)
    assert not path.exists()
