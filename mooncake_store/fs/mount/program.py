"""Mounting and unmounting.

`mount` serves until the directory is unmounted or a signal comes, in this process or, without
`foreground`, in one of its own: the call then returns when the directory can be used, or raises
what kept it from that.
"""

from __future__ import annotations

import ctypes.util
import errno
import os
import select
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import InvalidArgumentError, StoreError, UnavailableError
from transfer_engine.wire.faults import decode_error, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["mount", "unmount"]

_READY = b"ready"
_READY_S = 120.0
_UNMOUNT_S = 30.0
_THREADS = 8


def check_machine(directory: str, staging: str | None) -> None:
    """Raise with what to do when this machine cannot mount, or not there."""
    if not os.path.exists("/dev/fuse"):
        raise UnavailableError(
            "there is no /dev/fuse",
            operation="mount",
            advice="load the module (modprobe fuse); in a container, pass --device /dev/fuse "
            "and --cap-add SYS_ADMIN",
        )
    if not any(ctypes.util.find_library(name) for name in ("fuse3", "fuse")):
        raise UnavailableError(
            "libfuse is not installed", operation="mount", advice="apt install fuse3"
        )
    try:
        import mfusepy  # noqa: F401
    except ImportError:
        raise UnavailableError(
            "mfusepy is not installed",
            operation="mount",
            advice="pip install 'mooncake-store[fuse]'",
        ) from None
    if _is_dead(directory):
        raise InvalidArgumentError(
            f"{directory} is a mount whose process has ended",
            operation="mount",
            advice=f"`mooncake umount {directory}`, then mount again",
        )
    if not os.path.isdir(directory):
        raise InvalidArgumentError(
            f"{directory} is not a directory", operation="mount", advice="make it first"
        )
    if staging is not None and not os.access(staging, os.W_OK | os.X_OK):
        raise InvalidArgumentError(
            f"files cannot be staged in {staging}: not a directory, or not writable",
            operation="mount",
            advice="name another one with --staging",
        )
    if os.path.ismount(directory):
        raise InvalidArgumentError(
            f"{directory} is a mount already",
            operation="mount",
            advice=f"`mooncake umount {directory}`, or name another directory",
        )


def _is_dead(directory: str) -> bool:
    """Whether a directory is a mount of FUSE that nobody serves any more."""
    try:
        os.statvfs(directory)  # the kernel answers a plain stat from memory for a while
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def mount(
    directory: str,
    *,
    foreground: bool,
    staging: str | None = None,
    allow_other: bool = False,
    read_only: bool = False,
    **filesystem: Any,
) -> None:
    """Mount a namespace; `filesystem` are arguments of `MooncakeFileSystem`.

    `staging` is where files lie while they are written. Raises StoreError.
    """
    directory = os.path.abspath(directory)
    check_machine(directory, staging)
    options = {"allow_other": allow_other, "ro": read_only}

    def serve(ready: Callable[[], None]) -> None:
        _serve(directory, staging, options, filesystem, ready)

    if foreground:
        serve(lambda: None)
    else:
        _in_background(serve)


def _serve(
    directory: str,
    staging: str | None,
    options: dict[str, bool],
    filesystem: dict[str, Any],
    ready: Callable[[], None],
) -> None:
    import mfusepy

    from mooncake_store.fs.filesystem import MooncakeFileSystem
    from mooncake_store.fs.mount.operations import PoolOperations

    stood = False

    def on_ready() -> None:
        nonlocal stood
        stood = True
        ready()

    fs = MooncakeFileSystem(skip_instance_cache=True, **filesystem)
    fs.client.status()  # a wrong address is told before anything is mounted
    try:
        mfusepy.FUSE(
            PoolOperations(fs, staging, on_ready),
            directory,
            foreground=True,
            default_permissions=True,
            **_threads(mfusepy),
            # Its options are one text, in which commas stand between them.
            fsname=fs.config.url.replace(",", "\\,"),
            subtype="mooncake",
            **{name: True for name, wanted in options.items() if wanted},
        )
    except RuntimeError as error:
        # libfuse answers the same to "could not mount" and "ended by a signal".
        if not stood:
            raise UnavailableError(
                f"libfuse could not mount {directory} (status {error})",
                operation="mount",
                advice="see the line above; allow_other needs user_allow_other in /etc/fuse.conf",
            ) from None
    finally:
        fs.close()


def _threads(mfusepy: Any) -> dict[str, int]:
    """Bound the threads of libfuse, where it knows how: from 3.12 on it complains otherwise."""
    version = (mfusepy.fuse_version_major, mfusepy.fuse_version_minor)
    if version < (3, 12):
        return {}
    return {"max_threads": _THREADS, "max_idle_threads": _THREADS}


def _in_background(serve: Callable[[Callable[[], None]], None]) -> None:
    """Serve in a process of its own; return when it is ready, raise what it says otherwise."""
    readable, writable = os.pipe()
    between = os.fork()
    if not between:
        os.close(readable)
        os.setsid()
        if os.fork():
            os._exit(0)
        _child(serve, writable)
    os.close(writable)
    os.waitpid(between, 0)  # the process between us and the one that serves: it ends at once
    with os.fdopen(readable, "rb") as pipe:
        if not select.select([pipe], [], [], _READY_S)[0]:
            raise UnavailableError(
                f"the directory was not mounted within {_READY_S:g} s",
                operation="mount",
                advice="see what holds it up with --foreground",
            )
        told = pipe.read()
    if not told:
        raise UnavailableError(
            "the mount ended before it was ready",
            operation="mount",
            advice="see what ends it with --foreground",
        )
    if told != _READY:
        raise decode_error(told)


def _child(serve: Callable[[Callable[[], None]], None], pipe: int) -> None:
    status = 1
    try:

        def ready() -> None:
            os.write(pipe, _READY)
            os.close(pipe)
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)

        serve(ready)
        status = 0
    except StoreError as error:
        os.write(pipe, encode_error(error))
    except OSError as error:
        os.write(pipe, encode_error(UnavailableError(str(error), operation="mount", advice="")))
    finally:
        os._exit(status)


def unmount(directory: str, *, lazy: bool = False) -> None:
    """Unmount; files that are open keep it busy unless `lazy`. Raises StoreError."""
    program = shutil.which("fusermount3") or shutil.which("fusermount")
    command = [program, "-u"] if program else ["umount"]
    if lazy:
        command.append("-z" if program else "-l")
    done = subprocess.run(
        [*command, "--", directory], capture_output=True, text=True, timeout=_UNMOUNT_S, check=False
    )
    if done.returncode:
        reason = done.stderr.strip() or f"{command[0]} answered {done.returncode}"
        mounted = os.path.ismount(directory) or _is_dead(directory)
        raise StoreError(
            f"cannot unmount {directory}: {reason}",
            operation="umount",
            advice="close what is open there, or --lazy" if mounted else "nothing is mounted there",
        )
