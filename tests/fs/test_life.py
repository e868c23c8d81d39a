"""Processes, threads, event loops and failures around a filesystem."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys

import pytest

from mooncake_store import LocalCluster
from mooncake_store.errors import UnavailableError
from mooncake_store.fs import MooncakeFileSystem
from tests.waiting import long_before


def read_in_child(fs, path, results):
    results.put((os.getpid(), fs.cat_file(path), fs.ls("")))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_use_the_filesystem_of_their_parent(fs, method):
    fs.pipe_file("file", b"parent")
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    children = [context.Process(target=read_in_child, args=(fs, "file", results)) for _ in range(2)]
    for child in children:
        child.start()
    answers = [results.get() for _ in children]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert {data for _, data, _ in answers} == {b"parent"}
    assert fs.cat_file("file") == b"parent"


def test_pickles_hold_what_makes_the_filesystem_and_no_secret(url, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    fs = MooncakeFileSystem(url, secret_file=str(secret), part_size="1MiB")
    data = pickle.dumps(fs)
    assert b"0123456789abcdef" not in data
    assert "0123456789abcdef" not in repr(fs) + fs.to_json()
    assert pickle.loads(data) is fs  # the instance cache knows it
    assert MooncakeFileSystem.from_json(fs.to_json()) is fs


def test_many_threads_share_one_instance(fs):
    def work(number):
        fs.pipe_file(f"t/{number}", str(number).encode() * 5000)
        return fs.cat_file(f"t/{number}") == str(number).encode() * 5000

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert len(fs.ls("t")) == 64


def test_two_writers_of_one_path_leave_one_whole_file(fs):
    values = [bytes([number]) * 20_000 for number in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda value: fs.pipe_file("file", value), values * 4))
    assert fs.cat_file("file") in values


def test_coroutines_do_the_same(url):
    async def work():
        fs = MooncakeFileSystem(url, part_size="4KiB", asynchronous=True, skip_instance_cache=True)
        try:
            await fs._pipe({"a/1": b"one", "a/2": b"2" * 10_000, "a/3": b""})
            with pytest.raises(FileExistsError):
                await fs._pipe_file("a/1", b"other", mode="create")
            assert await fs._cat_file("a/2", start=-3) == b"222"
            assert await fs._cat(["a/1", "a/3"]) == {"a/1": b"one", "a/3": b""}
            got = await fs._cat_ranges(["a/2", "none"], [4000, 0], [5000, 1])
            assert got[0] == b"2" * 1000
            assert isinstance(got[1], FileNotFoundError)
            assert sorted(await fs._ls("a", detail=False)) == ["a/1", "a/2", "a/3"]
            assert (await fs._info("a/2"))["size"] == 10_000
            assert await fs._find("") == ["a/1", "a/2", "a/3"]
            await asyncio.gather(*(fs._pipe_file(f"b/{n}", b"x") for n in range(50)))
            assert len(await fs._ls("b")) == 50
            await fs._cp_file("a/2", "c")
            await fs._mv_file("c", "d")
            assert await fs._exists("d")
            assert not await fs._exists("c")
            assert await fs._isdir("a")
            await fs._rm("a", recursive=True)
            assert not await fs._exists("a")
        finally:
            await fs.aclose()

    asyncio.run(work())


def test_nothing_there_is_said_at_once(free_port):
    fs = MooncakeFileSystem(
        f"mooncake://127.0.0.1:{free_port}/ns",
        connect_timeout="60s",
        deadline="60s",
        skip_instance_cache=True,
    )
    with long_before(60), pytest.raises(UnavailableError, match=str(free_port)):
        fs.ls("")


def test_coroutines_meet_a_store_that_was_not_there_before(free_port):
    async def work():
        url = f"mooncake://127.0.0.1:{free_port}/ns"
        fs = MooncakeFileSystem(url, asynchronous=True, skip_instance_cache=True)
        with pytest.raises(UnavailableError):
            await fs._cat_file("file")
        with LocalCluster(1, "32MiB", in_process=True, master={"port": free_port}):
            await fs._pipe_file("file", b"content")
            assert await fs._cat_file("file") == b"content"
            await fs.aclose()

    asyncio.run(work())


def test_misspelt_options_are_named_at_once(url):
    with pytest.raises(ValueError, match="deadline"):
        MooncakeFileSystem(url, dedline="1s")


WRITER = """
import sys
from mooncake_store.fs import MooncakeFileSystem
fs = MooncakeFileSystem(sys.argv[1], part_size="1MiB")
file = fs.open("file", "wb")
file.write(bytes(32 << 20))
print("written", flush=True)
sys.stdin.read()
"""


def test_a_killed_writer_leaves_nothing_visible_and_its_space_returns(cluster, fs, url):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with writer:
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
    assert fs.ls("") == []
    assert fs.find("") == []
    # Its parts go under pressure: twice the pool is written after them.
    other = MooncakeFileSystem(url + "-after", part_size="8MiB")
    for number in range(64):
        other.pipe_file(f"file-{number}", bytes(16 << 20))
    assert fs.client.list("\0") == []
    other.rm("file-63")
    other.close()
