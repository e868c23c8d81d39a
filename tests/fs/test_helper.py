"""`mount.mooncake`: called as mount(8) calls it, and by mount(8) itself."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_store.errors import InvalidArgumentError
from mooncake_store.fs.mount.helper import read_options

fuse = pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or not shutil.which("fusermount3"),
    reason="this machine has no /dev/fuse, or no fuse3",
)
HELPER = [sys.executable, "-c", "from mooncake_store.fs.mount.helper import main; exit(main())"]


def helper(*arguments):
    return subprocess.run([*HELPER, *arguments], capture_output=True, text=True, timeout=100)


def test_options_of_fstab_are_ours_or_somebody_elses():
    text = "rw,_netdev,noauto,nofail,x-systemd.automount,comment=pool,nosuid"
    assert read_options(text) == {"read_only": False}
    text = "ro,allow_other,pin=none,part-size=16MiB,staging=/var/tmp,secret_file=/etc/s"
    assert read_options(text) == {
        "read_only": True,
        "allow_other": True,
        "pin": None,
        "part_size": "16MiB",
        "staging": "/var/tmp",
        "secret_file": "/etc/s",
    }


@pytest.mark.parametrize("option", ["remount", "suid", "pin", "ro=1", "partsize=1MiB", "uid=5"])
def test_options_that_nobody_knows_are_refused_unless_told_otherwise(option):
    with pytest.raises(InvalidArgumentError, match=f"unknown option '{option}'"):
        read_options(option)
    assert read_options(option, tolerant=True) == {}


def test_wrong_calls_are_told_with_the_numbers_of_mount(tmp_path, free_port):
    alone = helper("mooncake://10.0.0.5:50051/ns")
    assert (alone.returncode, alone.stdout) == (1, "")
    assert "usage" in alone.stderr or "mount.mooncake mooncake://" in alone.stderr
    odd = helper("mooncake://10.0.0.5:50051/ns", str(tmp_path), "-o", "part_sise=1MiB")
    assert odd.returncode == 1
    assert "did you mean 'part_size='" in odd.stderr


AMONG_CHILDREN = """
import os, subprocess
from mooncake_store.fs.mount.program import _in_background

other = subprocess.Popen(["sh", "-c", "exit 7"])
os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
_in_background(lambda ready: ready())
assert other.wait() == 7
"""


def test_serving_in_the_background_leaves_other_children_to_who_has_them():
    command = [sys.executable, "-c", AMONG_CHILDREN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@fuse
def test_a_failed_mount_is_told_with_the_number_of_mount(tmp_path, free_port):
    pytest.importorskip("mfusepy", reason="the fuse extra is not installed")
    none = helper(f"mooncake://127.0.0.1:{free_port}/ns", str(tmp_path), "-o", "rw")
    assert none.returncode == 32
    assert str(free_port) in none.stderr
    assert not os.path.ismount(tmp_path)
    missing = helper(f"mooncake://127.0.0.1:{free_port}/ns", str(tmp_path / "none"), "-f")
    assert missing.returncode == 32
    assert "not a directory" in missing.stderr


@fuse
def test_the_calls_of_mount_mount(url, fs, tmp_path, free_port):
    pytest.importorskip("mfusepy", reason="the fuse extra is not installed")
    fs.pipe_file("file", b"content")
    fake = helper(url, str(tmp_path), "-f", "-n", "-v", "-o", "rw")
    assert fake.returncode == 0, fake.stderr
    assert not os.path.ismount(tmp_path)
    try:
        # Of two masters, the second of which would be another one's to take over.
        url = url.replace("/default", f",127.0.0.1:{free_port}/default")
        done = helper(
            url, str(tmp_path), "-v", "-o", "ro,_netdev,part_size=64KiB", "-t", "mooncake"
        )
        assert done.returncode == 0, done.stderr
        assert "is mounted" in done.stdout
        assert f"\n{url} {tmp_path} " in Path("/proc/mounts").read_text(encoding="utf-8")
        assert (tmp_path / "file").read_bytes() == b"content"
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "new").write_bytes(b"x")
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(tmp_path)], check=False, timeout=30)


@fuse
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount by mount(8)")
def test_mount_finds_and_calls_the_helper(url, fs, tmp_path):
    """In a mount namespace of its own, whose /sbin has the helper and what finds libraries."""
    pytest.importorskip("mfusepy", reason="the fuse extra is not installed")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespace")
    fs.pipe_file("file", b"content")
    programs, directory = tmp_path / "sbin", tmp_path / "pool"
    programs.mkdir()
    directory.mkdir()
    program = programs / "mount.mooncake"
    paths = shlex.quote(os.pathsep.join(path for path in sys.path if path))
    program.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {shlex.join(HELPER)} "$@"\n')
    program.chmod(0o755)
    shutil.copy("/sbin/ldconfig", programs)
    steps = [
        f"mount --bind {shlex.quote(str(programs))} $(readlink -f /sbin)",
        f"mount -t mooncake {url} {directory} -o _netdev,noatime,part_size=64KiB",
        f"cat {directory}/file",
        f"echo new > {directory}/new",
        f"umount {directory}",
    ]
    command = ["unshare", "--mount", "sh", "-e", "-c", "\n".join(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "content"), done.stderr
    assert fs.cat_file("new") == b"new\n"
    assert not os.path.ismount(directory)
