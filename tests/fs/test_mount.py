"""The mount on the real kernel: programs that know nothing of us work on it."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
import time

import pytest

from mooncake_store import LocalCluster
from mooncake_store.errors import UnavailableError
from mooncake_store.fs import MooncakeFileSystem
from tests.waiting import long_before, until

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="this machine has no /dev/fuse"),
    pytest.mark.skipif(not shutil.which("fusermount3"), reason="fuse3 is not installed"),
]
pytest.importorskip("mfusepy", reason="the fuse extra is not installed")


def mooncake(*arguments, **options):
    command = [sys.executable, "-m", "mooncake_store", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def mounted(url, tmp_path):
    """A mounted namespace."""
    directory = tmp_path / "pool"
    directory.mkdir()
    done = mooncake("mount", url, str(directory), "--part-size", "64KiB")
    assert done.returncode == 0, done.stderr
    yield directory
    subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False, timeout=30)


def test_files_and_directories(mounted, fs):
    (mounted / "dir" / "sub").mkdir(parents=True)
    file = mounted / "dir" / "sub" / "file"
    data = os.urandom(200_000)
    file.write_bytes(data)
    assert file.read_bytes() == data
    assert fs.cat_file("dir/sub/file") == data
    assert sorted(os.listdir(mounted / "dir")) == ["sub"]
    status = file.stat()
    assert status.st_size == len(data)
    assert stat.S_IMODE(status.st_mode) == 0o644
    assert abs(status.st_mtime - time.time()) < 60
    with pytest.raises(OSError, match="not empty") as caught:
        (mounted / "dir" / "sub").rmdir()
    assert caught.value.errno == errno.ENOTEMPTY
    file.unlink()
    assert os.listdir(mounted / "dir" / "sub") == []  # the directory stays
    (mounted / "dir" / "sub").rmdir()
    assert os.listdir(mounted / "dir") == []
    with pytest.raises(FileNotFoundError):
        (mounted / "none").read_bytes()


def test_changes_anywhere_in_a_file(mounted):
    file = mounted / "file"
    model = bytearray(os.urandom(300_000))
    file.write_bytes(model)
    with file.open("r+b") as opened:
        opened.seek(100_000)
        opened.write(b"middle")
        model[100_000:100_006] = b"middle"
        opened.seek(400_000)
        opened.write(b"end")
        model += bytes(100_000) + b"end"
        opened.flush()
        opened.seek(99_998)
        assert opened.read(10) == bytes(model[99_998:100_008])
    assert file.read_bytes() == model
    os.truncate(file, 5)
    assert file.read_bytes() == model[:5]
    with file.open("ab") as opened:
        opened.write(b"more")
    assert file.read_bytes() == bytes(model[:5]) + b"more"


def test_what_others_store_is_seen(mounted, fs):
    assert os.listdir(mounted) == []
    fs.pipe({"from/elsewhere": b"x" * 1000, "top": b"y"})
    assert sorted(os.listdir(mounted)) == ["from", "top"]
    assert (mounted / "from" / "elsewhere").read_bytes() == b"x" * 1000
    fs.pipe_file("top", b"changed")
    until(lambda: (mounted / "top").stat().st_size == 7)
    assert (mounted / "top").read_bytes() == b"changed"


def test_renames_replace_and_follow(mounted):
    (mounted / "a").write_bytes(b"a" * 100_000)
    (mounted / "b").write_bytes(b"b")
    os.rename(mounted / "a", mounted / "b")
    assert (mounted / "b").read_bytes() == b"a" * 100_000
    assert os.listdir(mounted) == ["b"]
    (mounted / "d" / "e").mkdir(parents=True)
    os.rename(mounted / "b", mounted / "d" / "e" / "c")
    (mounted / "d" / "empty").mkdir()
    os.rename(mounted / "d", mounted / "moved")
    assert (mounted / "moved" / "e" / "c").read_bytes() == b"a" * 100_000
    assert sorted(os.listdir(mounted / "moved")) == ["e", "empty"]
    assert not (mounted / "d").exists()
    with (mounted / "open").open("wb") as opened:
        opened.write(b"before ")
        os.rename(mounted / "open", mounted / "renamed")
        opened.write(b"and after")
    assert (mounted / "renamed").read_bytes() == b"before and after"


def test_a_removed_file_lives_on_for_who_has_it_open(mounted, fs):
    (mounted / "file").write_bytes(b"x" * 200_000)
    with (mounted / "file").open("r+b") as opened:
        (mounted / "file").unlink()
        assert os.listdir(mounted) == []
        assert fs.find("") == []
        opened.write(b"still here")
        opened.seek(0)
        assert opened.read(12) == b"still herexx"
    assert os.listdir(mounted) == []
    assert fs.find("") == []


def test_attributes_and_links(mounted, fs):
    file = mounted / "script"
    file.write_bytes(b"#!/bin/sh\necho ran\n")
    file.chmod(0o755)
    os.utime(file, (1_000_000_000, 1_234_567_890))
    assert subprocess.run([str(file)], capture_output=True, check=True).stdout == b"ran\n"
    status = file.stat()
    assert stat.S_IMODE(status.st_mode) == 0o755
    assert status.st_mtime == 1_234_567_890
    os.symlink("script", mounted / "link")
    assert os.readlink(mounted / "link") == "script"
    assert (mounted / "link").read_bytes() == file.read_bytes()
    os.rename(file, mounted / "other")
    assert stat.S_IMODE((mounted / "other").stat().st_mode) == 0o755
    (mounted / "dir").mkdir(mode=0o700)
    assert stat.S_IMODE((mounted / "dir").stat().st_mode) == 0o700
    with pytest.raises(PermissionError):
        os.chown(mounted / "other", 12345, 12345)
    with pytest.raises(OSError, match=r".") as caught:
        os.link(mounted / "other", mounted / "hard")
    assert caught.value.errno in (errno.ENOSYS, errno.EPERM, errno.ENOTSUP, errno.EROFS)
    assert fs.info("other")["size"] == 19


def test_the_space_shown_is_that_of_the_pool(mounted, cluster):
    space = os.statvfs(mounted)
    total = space.f_blocks * space.f_frsize
    assert 400 << 20 < total < 600 << 20  # two workers of 256 MB
    (mounted / "file").write_bytes(bytes(8 << 20))
    less = os.statvfs(mounted).f_bavail
    (mounted / "file").unlink()
    # Before, others may have filled the pool, so that the file took the place of theirs.
    assert os.statvfs(mounted).f_bavail > less


def test_two_handles_of_one_file_agree(mounted):
    one = os.open(mounted / "file", os.O_RDWR | os.O_CREAT)
    other = os.open(mounted / "file", os.O_RDWR)
    os.pwrite(one, b"from one", 0)
    assert os.pread(other, 100, 0) == b"from one"
    os.pwrite(other, b"two", 5)
    os.close(one)
    assert os.pread(other, 100, 0) == b"from two"
    os.close(other)
    assert (mounted / "file").read_bytes() == b"from two"


def test_a_hundred_thousand_entries_are_listed_in_seconds(mounted, fs):
    names = [f"{number:06d}" for number in range(100_000)]
    for first in range(0, len(names), 10_000):
        fs.pipe({f"many/{name}": b"x" for name in names[first : first + 10_000]})
    with long_before(60):
        assert sorted(os.listdir(mounted / "many")) == names
    with os.scandir(mounted / "many") as found:
        entries = list(found)
    fs.rm("many", recursive=True)
    assert all(entry.is_file() for entry in entries)  # the listing said so: nobody was asked
    assert not (mounted / "many").exists()


def test_programs_of_the_system(mounted, tmp_path):
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    for number in range(30):
        (source / "deep" / f"file {number}").write_bytes(os.urandom(number * 5000))
    (source / "deep" / "er" / "tool").write_text("#!/bin/sh\n")
    (source / "deep" / "er" / "tool").chmod(0o755)
    os.symlink("er/tool", source / "deep" / "link")

    def shell(command):
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, timeout=120)

    shell("cp -a source pool/copy && diff -r --no-dereference source pool/copy")
    shell("tar cf - source | tar xf - -C pool --no-same-owner && diff -r source pool/source")
    if shutil.which("git"):
        shell(
            "git init -q origin && cp -r source origin/ && cd origin && git add -A &&"
            " git -c user.name=n -c user.email=e@example.org commit -q -m all"
        )
        shell("git clone -q origin pool/clone && cd pool/clone && git fsck && git status --short")
        shell("diff -r source pool/clone/source")
    if shutil.which("rsync"):
        shell("rsync -a --no-owner --no-group source/ pool/synced/")
        shell(
            "rsync -an --no-owner --no-group -i source/ pool/synced/ | tee /dev/stderr | (! grep .)"
        )


@pytest.fixture
def operations(fs):
    """What the kernel calls, called in the order of our choice."""
    from mooncake_store.fs.mount.operations import PoolOperations  # needs mfusepy

    return PoolOperations(fs)


def test_the_space_shown_is_that_of_the_quota():
    from mooncake_store.fs.mount.operations import PoolOperations  # needs mfusepy

    settings = {"quotas": ["mine=8MiB"]}
    with LocalCluster(1, "64MiB", in_process=True, namespace="mine", master=settings) as running:
        fs = MooncakeFileSystem(running.url)
        fs.pipe_file("file", bytes(2 << 20))
        space = PoolOperations(fs).statfs("/")
        fs.close()
    assert space["f_blocks"] * space["f_frsize"] == 8 << 20
    assert space["f_bavail"] * space["f_frsize"] == 6 << 20


def test_a_directory_that_others_marked_is_a_directory(operations, store):
    store.put("dir/", b"\0")
    known = operations.getattr("/dir")
    assert stat.S_ISDIR(known["st_mode"])
    assert known["st_mtime"] // 10**9 == store.stat("dir/").created_s
    assert [name for name, *_ in operations.readdir("/", 0)[2:]] == ["dir"]


def test_a_directory_keeps_the_date_it_was_given(operations):
    operations.mkdir("/dir", 0o755)
    operations.utimens("/dir", (0, 0))
    assert operations.getattr("/dir")["st_mtime"] == 0


def test_changes_between_close_and_the_kernels_release_are_kept(operations, fs):
    """`close` is a flush; the release of the handle comes later, after other calls by path."""
    handle = operations.create("/file", 0o644)
    operations.write("/file", b"content", 0, handle)
    operations.flush("/file", handle)
    operations.truncate("/file", 4)
    operations.utimens("/file", (5, 1_234_567_890))
    operations.chmod("/file", 0o600)
    operations.release("/file", handle)
    known = operations.getattr("/file")
    assert (known["st_mtime"], stat.S_IMODE(known["st_mode"])) == (1_234_567_890, 0o600)
    assert fs.cat_file("file") == b"cont"
    assert fs.info("file")["mtime_ns"] == 1_234_567_890


def test_a_file_that_cannot_be_staged_whole_is_not_changed(operations, fs):
    fs.pipe_file("file", bytes(150_000))
    handle = operations.open("/file", os.O_RDWR)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # as a disk that is nearly full
    try:
        with pytest.raises(OSError, match="File too large"):
            operations.write("/file", b"x", 0, handle)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    operations.release("/file", handle)
    assert fs.cat_file("file") == bytes(150_000)


@pytest.mark.parametrize("way", ["unlink", "rename"])
def test_a_file_that_could_not_be_removed_is_stored_as_before(operations, fs, monkeypatch, way):
    handle = operations.create("/file", 0o644)
    operations.write("/file", b"before", 0, handle)
    operations.flush("/file", handle)
    # What libfuse makes of the removal of a file that is open.
    names = ["/file"] if way == "unlink" else ["/file", "/.fuse_hidden1"]

    def away(path):
        raise UnavailableError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(fs, "rm_file", away)
        with pytest.raises(OSError, match="down"):
            getattr(operations, way)(*names)
    operations.write("/file", b"behind", 0, handle)
    operations.flush("/file", handle)
    operations.release("/file", handle)
    assert fs.cat_file("file") == b"behind"


def test_a_file_opened_while_its_last_handle_goes_keeps_its_attributes(operations, fs):
    first = operations.create("/file", 0o750)
    operations.flush("/file", first)
    second = operations.open("/file", os.O_RDWR)
    operations.release("/file", first)
    operations.write("/file", b"more", 0, second)
    operations.flush("/file", second)
    operations.release("/file", second)
    assert stat.S_IMODE(operations.getattr("/file")["st_mode"]) == 0o750
    assert fs.cat_file("file") == b"more"


def test_what_the_last_handle_cannot_store_is_told_and_frees_it(operations, fs, monkeypatch):
    handle = operations.create("/file", 0o644)

    def full(self):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr("mooncake_store.fs.mount.nodes.Node.save", full)
        with pytest.raises(OSError, match="full"):
            operations.release("/file", handle)
    with pytest.raises(FileNotFoundError):
        operations.getattr("/file")


def test_what_could_not_be_stored_is_told_until_it_is(operations, fs, monkeypatch):
    handle = operations.create("/file", 0o644)
    operations.write("/file", b"content", 0, handle)

    def away(*_, **__):
        raise UnavailableError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(fs.client, "put_many", away)
        for _ in range(2):
            with pytest.raises(OSError, match="down"):
                operations.fsync("/file", 0, handle)
        with pytest.raises(OSError, match="down"):
            operations.flush("/file", handle)  # `close`
    operations.fsync("/file", 0, handle)
    assert fs.cat_file("file") == b"content"
    operations.release("/file", handle)


def test_a_file_that_took_the_place_of_another_is_seen_at_once(operations, fs):
    fs.pipe({"file": b"former content", "other": b"new"})
    assert operations.getattr("/file")["st_size"] == len(b"former content")
    operations.rename("/other", "/file")
    assert operations.getattr("/file")["st_size"] == len(b"new")
    with pytest.raises(FileNotFoundError):
        operations.getattr("/other")


def test_a_file_that_lost_its_name_to_another_is_not_stored_on_top_of_it(operations, fs):
    fs.pipe({"file": b"former", "other": b"new"})
    handle = operations.open("/file", os.O_RDWR)
    operations.write("/file", b"changed", 0, handle)
    operations.rename("/other", "/file")
    assert operations.read("/file", 100, 0, handle) == b"changed"  # it lives on for who has it open
    operations.flush("/file", handle)
    operations.release("/file", handle)
    assert fs.cat_file("file") == b"new"


@pytest.fixture
def tight(tmp_path):
    """A mounted pool of 64 MiB with a file worth keeping, and its filesystem."""
    directory = tmp_path / "tight"
    directory.mkdir()
    with LocalCluster(2, "32MiB", in_process=True) as running:
        fs = MooncakeFileSystem(running.url, skip_instance_cache=True)
        done = mooncake("mount", running.url, str(directory))
        assert done.returncode == 0, done.stderr
        (directory / "kept").write_bytes(b"k" * 1_000_000)
        yield directory, fs
        subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False, timeout=30)
        fs.close()


def evicted(fs):
    return sum(shard.evicted_objects for shard in fs.client.store_stats())


@pytest.mark.parametrize("before", [None, b"old"])
def test_cp_of_what_cannot_fit_fails_while_it_writes_and_evicts_nothing(tight, tmp_path, before):
    directory, fs = tight
    source = tmp_path / "source"
    source.write_bytes(bytes(100 << 20))
    if before is not None:
        (directory / "copy").write_bytes(before)
    copy = ["cp", "--sparse=never", str(source), str(directory / "copy")]
    done = subprocess.run(copy, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error writing" in done.stderr
    assert "No space left on device" in done.stderr
    assert evicted(fs) == 0
    names = [".", "..", "kept"] if before is None else [".", "..", "copy", "kept"]
    # The kernel tells of the last handle a moment after `cp` closed it.
    until(lambda: (directory / "copy").exists() == (before is not None))
    listed = subprocess.run(["ls", "-a", str(directory)], capture_output=True, text=True)
    assert listed.stdout.split() == names
    assert (directory / "kept").read_bytes() == b"k" * 1_000_000
    if before is not None:
        until(lambda: (directory / "copy").stat().st_size == len(before))
        assert (directory / "copy").read_bytes() == before


def test_a_file_that_was_refused_is_good_again_once_it_is_cut(tight):
    directory, fs = tight
    with (directory / "file").open("wb", buffering=0) as file:
        file.write(b"start")
        with pytest.raises(OSError, match="No space") as caught:
            os.truncate(file.fileno(), 1 << 30)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="No space"):
            os.pwrite(file.fileno(), b"x", 10)
        os.truncate(file.fileno(), 3)
    assert (directory / "file").read_bytes() == b"sta"
    with pytest.raises(OSError, match="No space"):
        os.truncate(directory / "kept", 1 << 40)
    assert evicted(fs) == 0


def test_inodes_are_not_counted(mounted):
    (mounted / "file").write_bytes(b"x")
    shown = os.statvfs(mounted)
    assert (shown.f_files, shown.f_ffree) == (0, 0)  # `df -i` shows "-" as it does for btrfs


def test_a_store_that_is_away_is_a_host_that_is_down(tmp_path):
    directory = tmp_path / "pool"
    directory.mkdir()
    with LocalCluster(1, "32MiB", in_process=True) as running:
        done = mooncake("mount", running.url, str(directory))
        assert done.returncode == 0, done.stderr
        (directory / "file").write_bytes(b"x")
    try:
        for use in (os.listdir, os.statvfs, lambda path: (path / "file").stat()):
            with pytest.raises(OSError, match="down") as caught:
                use(directory)
            assert caught.value.errno == errno.EHOSTDOWN
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False, timeout=30)


def test_a_mount_whose_process_died_is_told_and_can_be_ended(url, tmp_path):
    directory = tmp_path / "pool"
    directory.mkdir()
    serving = subprocess.Popen(
        [sys.executable, "-m", "mooncake_store", "mount", url, str(directory), "--foreground"],
        stderr=subprocess.DEVNULL,
    )
    try:
        with serving:
            until(lambda: os.path.ismount(directory))
            serving.kill()
        again = mooncake("mount", url, str(directory))
        assert again.returncode == 2
        assert "a mount whose process has ended" in again.stderr
        assert f"`mooncake umount {directory}`" in again.stderr
        assert mooncake("umount", str(directory)).returncode == 0
        assert os.listdir(directory) == []
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False, timeout=30)


def test_unmounting_and_signals_leave_nothing(url, tmp_path, fs):
    directory = tmp_path / "pool"
    directory.mkdir()
    serving = subprocess.Popen(
        [sys.executable, "-m", "mooncake_store", "mount", url, str(directory), "--foreground"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with serving:
        until(lambda: os.path.ismount(directory))
        (directory / "file").write_bytes(b"kept")
        held = os.open(directory / "open", os.O_CREAT | os.O_WRONLY)
        os.write(held, b"not closed")
        serving.terminate()
        assert serving.wait(30) == 0
    assert not os.path.ismount(directory)
    assert fs.cat_file("file") == b"kept"
    assert fs.cat_file("open") == b"not closed"
    with pytest.raises(OSError, match="not connected"):
        os.close(held)


def test_busy_and_missing_things_are_told(mounted, url, tmp_path, free_port):
    with (mounted / "file").open("wb"):
        done = mooncake("umount", str(mounted))
        assert done.returncode != 0
        assert "busy" in done.stderr
    assert mooncake("umount", str(mounted)).returncode == 0
    assert not os.path.ismount(mounted)
    nothing = mooncake("umount", str(mounted))
    assert nothing.returncode == 1
    assert nothing.stderr.endswith("nothing is mounted there\n")
    missing = mooncake("mount", url, str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "not a directory" in missing.stderr
    unstaged = mooncake("mount", url, str(mounted), "--staging", str(tmp_path / "none"))
    assert unstaged.returncode == 2
    assert "--staging" in unstaged.stderr
    wrong = mooncake("mount", f"mooncake://127.0.0.1:{free_port}/ns", str(mounted))
    assert wrong.returncode == 4
    assert str(free_port) in wrong.stderr
    assert wrong.stderr.count("check the address") == 1
    odd = mooncake("mount", url, str(mounted), "--part-size", "large")  # found in the background
    assert odd.returncode == 2
    assert "'large' is not a size" in odd.stderr
    assert not os.path.ismount(mounted)
