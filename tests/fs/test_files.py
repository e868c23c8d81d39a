"""Reading and writing files: what users expect of them, whatever objects they become."""

import errno
import io
import os

import fsspec
import pytest

from mooncake_store.errors import NoSpaceError, UnavailableError
from mooncake_store.fs import MooncakeFileSystem, plans
from mooncake_store.fs.plan import run

PART = 4096
SIZES = [0, 1, 250, 251, 252, PART - 1, PART, PART + 1, 3 * PART, 10 * PART + 17]


def content(size, seed=1):
    return bytes((seed * 31 + at * 7) & 0xFF for at in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(fs, size):
    data = content(size)
    with fs.open("dir/file", "wb") as file:
        assert file.write(data) == size
    assert fs.cat_file("dir/file") == data
    assert fs.info("dir/file")["size"] == size
    assert [entry["size"] for entry in fs.ls("dir")] == [size]
    assert fs.find("dir", detail=True)["dir/file"]["size"] == size
    with fs.open("dir/file", "rb") as file:
        assert file.size == size
        assert file.read() == data


@pytest.mark.parametrize("piece", [1, 100, PART, PART + 1, 3 * PART + 5])
def test_pieces_of_any_size_make_one_file(fs, piece):
    data = content(7 * PART + 3)
    with fs.open("file", "wb") as file:
        for at in range(0, len(data), piece):
            file.write(data[at : at + piece])
    with fs.open("file", "rb") as file:
        read = b"".join(iter(lambda: file.read(piece), b""))
    assert read == data


def test_content_that_looks_like_a_manifest_is_content(fs, store):
    fs.pipe_file("large", content(3 * PART))
    manifest = store.get("large")
    fs.pipe_file("copy of its bytes", manifest)
    assert fs.cat_file("copy of its bytes") == manifest
    assert fs.info("copy of its bytes")["size"] == len(manifest)


@pytest.mark.parametrize("size", [100, 5 * PART + 9])
def test_seeking_reads_what_is_there(fs, size):
    data = content(size)
    fs.pipe_file("file", data)
    with fs.open("file") as file:
        for offset in (0, size // 3, size - 1, size // 2):
            assert file.seek(offset) == offset
            assert file.read(PART) == data[offset : offset + PART]
        assert file.seek(-5, io.SEEK_END) == size - 5
        assert file.read() == data[-5:]
        assert file.read() == b""
        file.seek(size + 10)
        assert file.read(1) == b""
        with pytest.raises(ValueError, match="-1"):
            file.seek(-1)
        target = bytearray(size + 50)
        file.seek(0)
        assert file.readinto(target) == size
        assert target[:size] == data


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (0, 1),
        (5, None),
        (-7, None),
        (None, -7),
        (-20, -3),
        (PART - 1, PART + 1),
        (9, 3),
        (0, 10**9),
    ],
)
@pytest.mark.parametrize("size", [200, 3 * PART + 40])
def test_slices_are_those_of_bytes(fs, size, start, end):
    data = content(size)
    fs.pipe_file("file", data)
    assert fs.cat_file("file", start=start, end=end) == data[start:end]


def test_cat_ranges_answers_each_and_says_what_failed(fs):
    files = {"small": content(300), "large": content(4 * PART), "empty": b""}
    fs.pipe(files)
    paths = ["small", "large", "none", "empty", "large"]
    got = fs.cat_ranges(paths, [10, PART - 5, 0, 0, -9], [20, 2 * PART + 5, 5, 5, None])
    assert got[0] == files["small"][10:20]
    assert got[1] == files["large"][PART - 5 : 2 * PART + 5]
    assert isinstance(got[2], FileNotFoundError)
    assert got[3] == b""
    assert got[4] == files["large"][-9:]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["none"], 0, 1, on_error="raise")


class OnlySlices:
    """A client that can read slices of objects at the moment, and no whole ones."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)

    def get_many(self, keys, **options):
        return self.client.get_many([f"not {number}" for number in range(len(keys))], **options)


def test_a_slice_of_a_file_whose_manifest_cannot_be_read_is_an_error(fs, store):
    fs.pipe_file("large", content(3 * PART))
    (got,) = run(OnlySlices(store), fs.plans.read_ranges(["large"], [0], [10]))
    assert isinstance(got, FileNotFoundError)


def test_lines_and_text(fs):
    lines = [f"line {number} ü\n" for number in range(3000)]
    with fs.open("text", "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
    with fs.open("text", "r", encoding="utf-8", newline="") as file:
        assert list(file) == lines
    with fs.open("text", "rb") as file:
        assert file.readline() == lines[0].encode()
        assert list(file) == [line.encode() for line in lines[1:]]


def test_compression_goes_through(fs):
    with fs.open("packed.gz", "wb", compression="infer") as file:
        file.write(b"x" * 10_000)
    with fs.open("packed.gz", "rb", compression="infer") as file:
        assert file.read() == b"x" * 10_000


@pytest.mark.parametrize("before", [0, 100, 3 * PART])
@pytest.mark.parametrize("after", [0, 100, 5 * PART])
def test_overwriting_leaves_nothing_of_the_old_file(fs, store, before, after):
    fs.pipe_file("file", content(before, 1))
    fs.pipe_file("file", content(after, 2))
    assert fs.cat_file("file") == content(after, 2)
    fs.rm("file")
    assert not fs.exists("file")
    assert store.list() == []  # parts included


def test_a_reader_goes_on_with_what_it_opened(fs):
    fs.pipe_file("file", content(100, 1))
    with fs.open("file") as file:
        assert file.read(10) == content(100, 1)[:10]
        fs.pipe_file("file", content(100, 2))
        assert file.read() == content(100, 1)[10:]
    assert fs.cat_file("file") == content(100, 2)


def test_a_reader_whose_parts_are_gone_says_so(fs):
    fs.pipe_file("file", content(3 * PART))
    with fs.open("file") as file:
        file.read(10)
        fs.rm("file")
        file.seek(2 * PART)
        with pytest.raises(FileNotFoundError, match="while it was open"):
            file.read(10)
        file.seek(PART)
        with pytest.raises(FileNotFoundError, match="while it was open"):
            file.read()  # several parts at once
        assert file.tell() == PART


@pytest.mark.parametrize("size", [100, 3 * PART])
def test_a_closed_reader_reads_nothing_more(fs, size):
    fs.pipe_file("file", content(size))
    file = fs.open("file")
    assert file.read(10) == content(size)[:10]
    file.close()
    room = bytearray(size)
    for use in (
        file.read,
        file.read1,
        file.readline,
        file.peek,
        file.tell,
        lambda: file.seek(0),
        lambda: file.readinto(room),
        lambda: file.readinto1(room),
    ):
        with pytest.raises(ValueError, match="closed file"):
            use()
    assert not any(room)


def test_exclusive_create(fs):
    fs.pipe_file("file", b"first")
    with pytest.raises(FileExistsError):
        fs.open("file", "xb")
    with fs.open("other", "xb") as file:
        file.write(b"mine")
        fs.pipe_file("other", b"theirs")
        with pytest.raises(FileExistsError):
            file.close()
    assert fs.cat_file("other") == b"theirs"


@pytest.mark.parametrize("mode", ["ab", "r+b", "a"])
def test_appending_is_refused_with_a_reason(fs, mode):
    fs.pipe_file("file", b"x")
    with pytest.raises(ValueError, match="written once"):
        fs.open("file", mode)


def test_leaving_by_an_exception_stores_nothing(fs, store):
    def fail():
        with fs.open("file", "wb") as file:
            file.write(content(3 * PART))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not fs.exists("file")
    assert store.list() == []


def test_giving_a_file_up_tells_what_led_to_it_though_the_store_is_away(fs, store, monkeypatch):
    def away(*_, **__):
        raise UnavailableError("the store is away")

    def fail(file):
        with file:
            file.write(content(3 * PART))
            monkeypatch.setattr(store, "remove_many", away)
            raise RuntimeError

    file = fs.open("file", "wb")
    with pytest.raises(RuntimeError):
        fail(file)
    assert file.closed


def test_of_a_file_that_loses_a_part_before_it_is_complete_nothing_is_left(fs, store, monkeypatch):
    pin = store.pin_many

    def evicted_before(keys, *arguments, **options):
        monkeypatch.undo()
        store.remove(keys[1], force=True)
        return pin(keys, *arguments, **options)

    monkeypatch.setattr(store, "pin_many", evicted_before)
    with pytest.raises(NoSpaceError, match="1 of 3 parts were evicted"):
        fs.pipe_file("file", content(3 * PART))
    assert not fs.exists("file")
    assert store.list() == []


def test_a_transaction_shows_all_files_at_its_end_or_none(fs):
    with fs.transaction:
        for name in ("a", "b"):
            with fs.open(name, "wb") as file:
                file.write(content(2 * PART))
        assert not fs.exists("a")
    assert fs.cat(["a", "b"]) == {"a": content(2 * PART), "b": content(2 * PART)}

    def fail():
        with fs.transaction:
            with fs.open("c", "wb") as file:
                file.write(content(2 * PART))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not fs.exists("c")


def test_moves_keep_parts_where_they_are(fs, store):
    fs.pipe({"large": content(5 * PART), "small": b"s"})
    parts = {item.key for item in store.list("\0")}
    fs.mv("large", "dir/renamed")
    fs.mv("small", "dir/")
    assert fs.cat("dir", recursive=True) == {"dir/renamed": content(5 * PART), "dir/small": b"s"}
    assert {item.key for item in store.list("\0")} == parts
    assert not fs.exists("large")
    assert not fs.exists("small")


@pytest.mark.parametrize("size", [1, 5 * PART])
def test_a_file_moved_to_where_it_is_stays(fs, store, size):
    fs.pipe_file("dir/file", content(size))
    parts = {item.key for item in store.list("\0")}
    for target in ("dir/", "dir/file"):
        fs.mv("dir/file", target)
        assert fs.cat_file("dir/file") == content(size)
        assert {item.key for item in store.list("\0")} == parts


def test_a_copy_is_a_file_of_its_own(fs):
    fs.pipe_file("large", content(5 * PART))
    fs.cp("large", "other")
    fs.rm("large")
    assert fs.cat_file("other") == content(5 * PART)
    with pytest.raises(FileNotFoundError):
        fs.cp("large", "third")


def test_a_copy_that_is_interrupted_ends_quietly(fs, store, monkeypatch):
    monkeypatch.setattr(plans, "COPY_BYTES", PART)
    fs.pipe_file("large", content(5 * PART))
    copying = fs.plans.copy("large", "other")
    call = next(copying)
    while call.method != "put_many":
        call = copying.send(getattr(store, call.method)(*call.args, **call.options))
    copying.send(store.put_many(*call.args, **call.options))
    copying.close()  # as the interpreter does with what Ctrl-C left
    assert not fs.exists("other")


def test_download_is_whole_or_absent(fs, tmp_path):
    fs.pipe_file("file", content(3 * PART))
    fs.get("file", str(tmp_path / "sub" / "file"))
    assert (tmp_path / "sub" / "file").read_bytes() == content(3 * PART)
    manifest_parts = fs.client.list("\0")
    fs.client.remove(sorted(item.key for item in manifest_parts)[-1])
    with pytest.raises(FileNotFoundError):
        fs.get("file", str(tmp_path / "broken"))
    assert sorted(os.listdir(tmp_path)) == ["sub"]


def test_upload_reports_progress(fs, tmp_path):
    (tmp_path / "file").write_bytes(content(3 * PART))
    progress = fsspec.callbacks.Callback()
    fs.put_file(str(tmp_path / "file"), "file", callback=progress)
    assert progress.size == progress.value == 3 * PART
    assert fs.cat_file("file") == content(3 * PART)


def test_pins_are_those_asked_for(fs, store):
    fs.pipe_file("default", b"x")
    fs.pipe_file("hard", b"x", pin="hard")
    fs.pipe_file("plain", b"x", pin=None)
    with fs.open("short", "wb", ttl="5s") as file:
        file.write(content(3 * PART))
    assert store.stat("default").soft_pin_s > 60
    assert store.stat("hard").hard_pin
    assert store.stat("plain").soft_pin_s == 0
    assert 0 < store.stat("short").soft_pin_s <= 5
    for part in store.list("\0"):
        assert 0 < store.stat(part.key).soft_pin_s <= 5
    with pytest.raises(ValueError, match="soft"):
        fs.pipe_file("x", b"x", pin="iron")


def test_a_full_pool_is_an_os_error_and_leaves_nothing(fs, store):
    def fill():
        with MooncakeFileSystem(fs.config.url, part_size="8MiB").open("huge", "wb") as file:
            for _ in range(40):
                file.write(bytes(64 << 20))
                store.pin_many([item.key for item in store.list("\0")], hard=True)

    with pytest.raises(NoSpaceError) as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert not fs.exists("huge")
    assert store.list("\0") == []
