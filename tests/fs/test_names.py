"""Paths and URLs, directories, listings."""

import fsspec
import pytest

from mooncake_store.errors import InvalidArgumentError
from mooncake_store.fs import MooncakeFileSystem


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("a/b", "a/b"),
        ("/a/b", "a/b"),
        ("a//b///c", "a/b/c"),
        ("a/b/", "a/b"),
        ("", ""),
        ("/", ""),
        ("with space/ü/日本", "with space/ü/日本"),
        ("a.b/..c/d..", "a.b/..c/d.."),
    ],
)
def test_spellings_of_one_path_are_one_file(fs, path, canonical):
    assert fs._strip_protocol(path) == canonical
    if canonical:
        fs.pipe_file(path, b"x")
        assert fs.find("") == [canonical]
        assert fs.cat_file("/" + canonical) == b"x"


@pytest.mark.parametrize("path", ["a/../b", "..", "./a", "a/.", "\0parts/x"])
def test_paths_that_name_nothing_are_refused(fs, path):
    for call in (fs.info, fs.ls, fs.cat_file, fs.rm_file, lambda p: fs.pipe_file(p, b"x")):
        with pytest.raises(InvalidArgumentError):
            call(path)


def test_a_path_longer_than_a_key_is_refused(fs):
    with pytest.raises(InvalidArgumentError, match="4096"):
        fs.pipe_file("x" * 4097, b"x")
    fs.pipe_file("x" * 4096, b"x")
    assert fs.isfile("x" * 4096)


def test_urls_name_store_namespace_and_path(url, fs):
    with fsspec.open(f"{url}/dir/file.txt", "w") as file:
        file.write("hello")
    assert fs.cat_file("dir/file.txt") == b"hello"
    other, path = fsspec.url_to_fs(f"{url}/dir/file.txt")
    assert path == "dir/file.txt"
    assert other.unstrip_protocol(path) == f"{url}/dir/file.txt"
    assert other.cat_file(f"{url}/dir/file.txt") == b"hello"
    assert other.fsid == fs.fsid
    mapper = fsspec.get_mapper(f"{url}/dir")
    assert dict(mapper) == {"file.txt": b"hello"}


def test_namespaces_do_not_see_each_other(cluster):
    one = MooncakeFileSystem(f"mooncake://{cluster.address}/names-one")
    other = MooncakeFileSystem(f"mooncake://{cluster.address}/names-other")
    assert one is not other
    assert one is MooncakeFileSystem(f"mooncake://{cluster.address}/names-one")
    one.pipe_file("file", b"x")
    assert other.ls("") == []
    for made in (one, other):
        made.close()


def test_directories_are_what_names_have_in_common(fs):
    fs.pipe({"a/b/c": b"1", "a/b/d": b"2", "a/e": b"3", "f": b"4"})
    assert sorted(fs.ls("", detail=False)) == ["a", "f"]
    assert sorted(fs.ls("a", detail=False)) == ["a/b", "a/e"]
    assert fs.isdir("a/b")
    assert not fs.isdir("a/e")
    assert fs.isfile("a/e")
    assert not fs.isfile("a")
    assert fs.exists("a")
    assert not fs.exists("a/x")
    assert fs.find("a", withdirs=True) == ["a", "a/b", "a/b/c", "a/b/d", "a/e"]
    assert fs.find("a", maxdepth=1) == ["a/e"]
    assert fs.find("a/e") == ["a/e"]
    assert fs.glob("a/*/c") == ["a/b/c"]
    assert fs.du("a") == 3
    assert [entry[0] for entry in fs.walk("")] == ["", "a", "a/b"]
    fs.rm("a/b/c")
    fs.rm("a/b/d")
    assert not fs.exists("a/b")
    fs.rm("a", recursive=True)
    assert fs.find("") == ["f"]
    with pytest.raises(FileNotFoundError):
        fs.rm("a", recursive=True)


def test_patterns_are_patterns_when_trees_are_removed(fs):
    fs.pipe({"a1/x": b"1", "a2/x": b"2", "bc/x": b"3"})
    fs.rm("a?", recursive=True)
    assert fs.find("") == ["bc/x"]
    fs.rm("[b]*", recursive=True)
    assert fs.find("") == []


def test_a_missing_path_is_a_file_not_found_error(fs):
    for call in (fs.info, fs.ls, fs.cat_file, fs.rm_file, fs.open, fs.ukey, fs.created):
        with pytest.raises(FileNotFoundError, match="nothing/here"):
            call("nothing/here")
    assert fs.find("nothing/here") == []


def test_own_writes_are_listed_at_once(fs):
    for number in range(20):
        fs.pipe_file(f"dir/{number}", b"x")
        assert len(fs.ls("dir")) == number + 1


def test_info_tells_what_the_store_knows(fs):
    fs.pipe_file("file", b"content")
    entry = fs.info("file")
    assert entry["type"] == "file"
    assert entry["size"] == 7
    assert entry["replicas"] == 1
    assert entry["tier"] == "memory"
    before = fs.ukey("file")
    assert fs.ukey("file") == before
    assert fs.checksum("file") == entry["checksum"]
    assert fs.created("file") == fs.modified("file")
    fs.pipe_file("file", b"changed")
    assert fs.ukey("file") != before


def test_an_empty_directory_mark_is_a_directory(fs, store):
    store.put("dir/", b"\0")
    assert fs.isdir("dir")
    assert fs.ls("dir") == []
    assert fs.ls("")[0]["type"] == "directory"
    assert fs.find("") == []
    fs.rmdir("dir")
    assert not fs.exists("dir")
    fs.pipe_file("full/file", b"x")
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("full")


def test_signing_is_refused(fs):
    with pytest.raises(NotImplementedError):
        fs.sign("file")
