"""What memory of this host is promised already: made to be lent or served, and not filled yet.

    with in_turn():                                # who looks next sees what is made here
        found = promises(Path("/"))
        ...                                     # compare, and make memory

The kernel takes memory from what is available when it is touched and not when it is made. What is
missing is the length of each file of memory without the room that it takes: of memory without a
name that a living process has open and that is called as ours is, and of the files of workers
(`memory_files`), also those that other users have in /dev/shm.

Not seen: memory without a name of other users and of containers with processes of their own, files
that are lent from a tmpfs while their space is reserved, and memory that was closed and is still
read. Cost: a system call for each descriptor of the processes that this user may look at.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.program.locks import taken
from mooncake_store.units import format_size
from mooncake_store.worker.memory_files import FOLDER, by_worker, is_data

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Promise", "in_turn", "promises", "told"]

_NAMELESS = "/memfd:mooncake-"
_DELETED = " (deleted)"
_BLOCK_BYTES = 512
_TOLD_MAX = 3
TURN_S = 5.0
"""How long another one may take. Its memory is seen as soon as it has a length, so this is more
than enough, and who holds the turn for no good reason keeps nobody."""


class Promise(NamedTuple):
    """Memory that its process may fill at any time."""

    nbytes: int
    process: int
    """Who has it open; 0: somebody whom this process cannot see."""
    name: str
    path: str
    """Where a file lies, "" for memory without a name."""
    groups: tuple[str, ...]
    """The control groups of its process, as it is told of them in /proc."""


@contextmanager
def in_turn(folder: str = FOLDER) -> Iterator[None]:
    """Look for room and make memory as the only one of this host, threads of a process included.

    The lock is the folder's own, so it leaves nothing behind. Where there is no such folder, or
    another one keeps the lock for long, this goes on without.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        taken(lock, TURN_S)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy
        os.close(lock)


def promises(root: Path) -> list[Promise]:
    """Return what is promised on the machine below a folder."""
    found: list[Promise] = []
    seen: set[tuple[int, int]] = set()
    for process in sorted(_processes(root / "proc")):
        folder = root / f"proc/{process}"
        mine = list(_open_in(folder / "fd", seen))
        if mine:
            groups = _lines(folder / "cgroup")
            found += [Promise(nbytes, process, name, path, groups) for nbytes, name, path in mine]
    folder = root / FOLDER.lstrip("/")
    with suppress(OSError):
        for names in by_worker(os.listdir(folder)).values():
            for name in filter(is_data, names):
                nbytes = _missing(folder / name, seen)
                if nbytes:
                    found.append(Promise(nbytes, 0, name, f"{FOLDER}/{name}", ()))
    return found


def told(found: list[Promise]) -> str:
    """Return for people who has promised how much, those with most first."""
    sums: dict[int | str, int] = {}
    names: dict[int | str, list[str]] = {}
    for each in found:
        who = each.process or each.path
        sums[who] = sums.get(who, 0) + each.nbytes
        names.setdefault(who, []).append(each.name)
    most = sorted(sums, key=lambda who: -sums[who])
    parts = [f"{format_size(sums[who])} by {_described(who, names[who])}" for who in most]
    more = len(parts) - _TOLD_MAX
    return ", ".join(parts[:_TOLD_MAX]) + (f", and by {more} more" if more > 0 else "")


def _described(who: int | str, names: list[str]) -> str:
    if isinstance(who, str):
        return f"who fills {who}"
    called = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return f"{'this process' if who == os.getpid() else f'process {who}'} ({called})"


def _processes(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def _open_in(folder: Path, seen: set[tuple[int, int]]) -> Iterator[tuple[int, str, str]]:
    """Yield bytes that are missing, name and path of our memory that a process has open."""
    try:
        links = os.listdir(folder)
    except OSError:  # it has ended, or is another user's
        return
    for link in links:
        path = f"{folder}/{link}"  # there are thousands, of which hardly any is ours
        try:
            target = os.readlink(path).removesuffix(_DELETED)
        except OSError:
            continue
        name = target.rpartition("/")[2]
        if target.startswith(_NAMELESS):
            name, target = target.removeprefix(_NAMELESS), ""
        elif not (is_data(name) and by_worker([name])):
            continue
        nbytes = _missing(path, seen)
        if nbytes:
            yield nbytes, name, target


def _missing(path: str | Path, seen: set[tuple[int, int]]) -> int:
    """Return what a file of memory has yet to take; 0 for one that was seen, or is no such file."""
    try:
        found, system = os.stat(path), os.statvfs(path)
    except OSError:
        return 0
    which = (found.st_dev, found.st_ino)
    if which in seen or system.f_bsize > mmap.PAGESIZE:  # huge pages are set aside already
        return 0
    seen.add(which)
    return max(0, found.st_size - _BLOCK_BYTES * found.st_blocks)


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(errors="replace").splitlines())
    except OSError:
        return ()
