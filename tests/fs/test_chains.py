"""URLs chained by fsspec, and what else it does with a filesystem and its open files.

`make test-interop` runs this file with the oldest fsspec that we support as well.
"""

import io
import json
import pickle
import tarfile
import zipfile

import fsspec
import pytest

from mooncake_store.fs import MooncakeFileSystem
from mooncake_store.fs.parts import Attributes
from mooncake_store.fs.plan import run
from tests.fs.test_files import PART, content

# The cache of blocks leaves closing its local file to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

LARGE = content(20 * PART + 5)


@pytest.fixture
def files(fs, url):
    """Files of all forms, and the options a chain passes on."""
    fs.pipe({"d/large": LARGE, "d/small": b"s" * 300, "d/empty": b"", "d/text": b"one\ntwo\n"})
    return {"mooncake": {"part_size": "4KiB"}}


@pytest.mark.parametrize("kind", ["simplecache", "filecache", "blockcache", "cached"])
@pytest.mark.parametrize("name", ["large", "small", "text"])
def test_a_cache_in_front_reads_what_is_stored(fs, url, files, tmp_path, kind, name):
    want = fs.cat_file(f"d/{name}")
    options = files | {kind: {"cache_storage": str(tmp_path)}}
    for _ in range(2):  # the second time from the local disk
        with fsspec.open(f"{kind}::{url}/d/{name}", "rb", **options) as file:
            assert file.read(10) == want[:10]
            assert file.read(2 * PART) == want[10 : 10 + 2 * PART]
            file.seek(-7, io.SEEK_END)
            assert file.read() == want[-7:]
            file.seek(0)
            target = bytearray(len(want) + 5)
            assert file.readinto(target) == len(want)
            assert target[: len(want)] == want
    with fsspec.open(f"{kind}::{url}/d/text", "r", **options) as file:
        assert list(file) == ["one\n", "two\n"]


def test_a_cache_of_blocks_reads_each_of_them_once(url, files, tmp_path):
    target = {"target_options": files["mooncake"] | {"url": url}}
    options = {"target_protocol": "mooncake", **target}
    cached = fsspec.filesystem("blockcache", cache_storage=str(tmp_path), **options)
    with cached.open("d/large") as file:
        file.seek(3 * PART + 1)
        assert file.read(10) == LARGE[3 * PART + 1 :][:10]
        assert file.peek(5)[:5] == LARGE[3 * PART + 11 :][:5]
        before = sum(cached.fs.client.stats().bytes_read.values())
        file.seek(3 * PART)
        assert file.read(PART) == LARGE[3 * PART : 4 * PART]
        assert sum(cached.fs.client.stats().bytes_read.values()) == before
    assert file.closed


@pytest.mark.parametrize("kind", ["simplecache", "filecache", "blockcache"])
def test_a_cache_in_front_writes_through(fs, url, files, tmp_path, kind):
    options = files | {kind: {"cache_storage": str(tmp_path)}}
    with fsspec.open(f"{kind}::{url}/new/{kind}", "wb", **options) as file:
        file.write(LARGE)
    assert fs.cat_file(f"new/{kind}") == LARGE


def test_a_directory_as_a_filesystem(fs, files):
    inner = fsspec.filesystem("dir", path="d", fs=fs)
    assert sorted(inner.ls("", detail=False)) == ["empty", "large", "small", "text"]
    assert inner.cat_file("small") == b"s" * 300
    inner.pipe_file("sub/new", b"new")
    inner.mv("sub", "other", recursive=True)
    assert fs.cat_file("d/other/new") == b"new"
    with inner.open("large") as file:
        assert file.read() == LARGE


def test_archives_are_read_where_they_lie(fs, url, files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("inside/file", LARGE)
    fs.pipe_file("a.zip", packed.getvalue())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("inside/file")
        entry.size = len(LARGE)
        archive.addfile(entry, io.BytesIO(LARGE))
    fs.pipe_file("a.tar", packed.getvalue())
    for kind in ("zip", "tar"):
        with fsspec.open(f"{kind}://inside/file::{url}/a.{kind}", "rb", **files) as file:
            assert file.read() == LARGE


def test_an_archive_is_written_where_it_is_to_lie(fs):
    # In a chain fsspec leaves the file to the garbage collector, which stores nothing here.
    with fs.open("new.zip", "wb") as file:
        archive = fsspec.filesystem("zip", fo=file, mode="w", skip_instance_cache=True)
        with archive.open("inside/file", "wb") as member:
            member.write(LARGE)
        archive.close()
    with zipfile.ZipFile(io.BytesIO(fs.cat_file("new.zip"))) as stored:
        assert stored.read("inside/file") == LARGE


def test_references_lead_into_files(fs, url, files, tmp_path):
    references = {"part": [f"{url}/d/large", 5, 100], "whole": [f"{url}/d/small"]}
    (tmp_path / "references.json").write_text(json.dumps({"version": 1, "refs": references}))
    made = fsspec.filesystem(
        "reference",
        fo=str(tmp_path / "references.json"),
        remote_protocol="mooncake",
        remote_options=files["mooncake"] | {"url": url},
    )
    assert made.cat(["part", "whole"]) == {"part": LARGE[5:105], "whole": b"s" * 300}
    assert made.cat_file("part", 10, 20) == LARGE[15:25]


@pytest.mark.parametrize("name", ["d/large", "d/small"])
def test_an_open_file_goes_on_where_it_is_unpickled(fs, files, name):
    want = fs.cat_file(name)
    with fs.open(name) as file:
        file.read(7)
        with pickle.loads(pickle.dumps(file)) as copy:
            assert (copy.path, copy.size, copy.tell()) == (name, len(want), 7)
            assert copy.read() == want[7:]
        assert file.read() == want[7:]


def test_a_file_that_is_written_cannot_be_pickled(fs):
    with fs.open("file", "wb") as file, pytest.raises(TypeError, match="being written"):
        pickle.dumps(file)


def test_a_directory_moves_with_all_that_is_in_it(fs, store, files):
    parts = {item.key for item in store.list("\0")}
    fs.mv("d", "e", recursive=True)
    assert not fs.exists("d")
    assert sorted(fs.find("e")) == ["e/empty", "e/large", "e/small", "e/text"]
    assert fs.cat_file("e/large") == LARGE
    fs.pipe_file("target/x", b"x")
    fs.mv("e", "target", recursive=True)  # into what is there, as `cp -r` does
    assert fs.cat_file("target/e/large") == LARGE
    fs.mv("target/e/", "target", recursive=True)
    assert fs.cat("target", recursive=True).keys() == {
        f"target/{name}" for name in ("x", "empty", "large", "small", "text")
    }
    assert {item.key for item in store.list("\0")} == parts  # no byte moved
    with pytest.raises(ValueError, match="into itself"):
        fs.mv("target", "target/inner", recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.mv("none", "elsewhere", recursive=True)
    fs.mv("target", "target", recursive=True)
    fs.mv("target/x", "target/")
    assert fs.cat_file("target/x") == b"x"


def test_what_is_chosen_among_files_and_directories_moves(fs, files):
    fs.pipe({"d/deep/er/file": b"1", "d/deep/other": b"2"})
    fs.mv("d/s*", "chosen/")
    assert fs.find("chosen") == ["chosen/small"]
    fs.mv("d", "shallow", recursive=True, maxdepth=1)
    assert "shallow/large" in fs.find("shallow")
    assert fs.cat_file("d/deep/er/file") == b"1"
    fs.mv(["d/deep/other"], ["listed"], recursive=True)
    assert fs.cat_file("listed") == b"2"


def test_a_directory_is_copied_and_a_missing_one_is_told(fs, files):
    fs.cp("d", "copy", recursive=True)
    assert fs.cat_file("copy/large") == LARGE
    fs.cp("d", "strict", recursive=True, on_error="raise")
    assert fs.cat_file("strict/large") == LARGE
    with pytest.raises(FileNotFoundError):
        fs.cp_file("none", "copy")


@pytest.mark.parametrize("name", ["d/large", "d/small", "d/empty"])
def test_touching_gives_a_date_or_empties(fs, files, name):
    before, data = fs.info(name), fs.cat_file(name)
    fs.touch(name, truncate=False)
    assert fs.cat_file(name) == data
    assert fs.info(name)["created"] >= before["created"]
    assert fs.info(name)["generation"] != before["generation"]
    fs.touch("d", truncate=False)  # a directory has no date
    assert fs.isdir("d")
    assert not fs.isfile("d")
    fs.touch("fresh", truncate=False)
    assert fs.cat_file("fresh") == b""
    fs.touch(name)
    assert fs.cat_file(name) == b""


def test_touching_puts_an_own_date_in_the_place_of_one_that_was_given(fs, files):
    run(fs.client, fs.plans.dress("d/large", Attributes(0o600, mtime_ns=1)))
    assert fs.info("d/large")["mtime_ns"] == 1
    fs.touch("d/large", truncate=False)
    found = fs.info("d/large")
    assert (found["mode"], found["mtime_ns"]) == (0o600, None)


def test_what_a_cache_fetches_does_not_move_the_file(fs, files):
    with fs.open("d/large") as file:
        file.seek(7)
        assert file._fetch_range(PART - 10, PART + 10) == LARGE[PART - 10 : PART + 10]
        assert file.tell() == 7
        assert file.read(3) == LARGE[7:10]


class Overtaken:
    """The client of a filesystem, before whose first reading another writer replaces a file."""

    def __init__(self, fs, replace):
        self.fs, self.replace = fs, replace

    def __getattr__(self, name):
        return getattr(self.fs.client, name)

    def get(self, key):
        replace, self.replace = self.replace, lambda: None
        replace()
        return self.fs.client.get(key)


@pytest.mark.parametrize("change", [lambda p: p.touch("f"), lambda p: p.dress("f", Attributes(7))])
def test_a_file_that_is_replaced_while_it_is_changed_stays_whole(fs, change):
    fs.pipe_file("f", b"small")
    run(Overtaken(fs, lambda: fs.pipe_file("f", LARGE)), change(fs.plans))
    assert fs.cat_file("f") == LARGE


def test_the_class_is_found_by_its_protocol(url):
    fs, path = fsspec.core.url_to_fs(url + "/a/b")
    assert isinstance(fs, MooncakeFileSystem)
    assert path == "a/b"
