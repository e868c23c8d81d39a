"""Whether memory that is to be lent is there, asked before any is taken.

    check_room(config)          # raises ConfigError with the numbers, or returns

The kernel promises memory that it has not got and, when it is touched, kills somebody for it. So
what is to be lent is compared with what the machine has available, with the limits of the control
groups this process is in (version 1 and 2, every level), and, for files on tmpfs, with the room of
their mount. Memory without a name (memfd) is not bound by the size of /dev/shm; that of a worker
that keeps it in files is, but for what the run before left, which is taken up or gives way. Huge
pages that were set aside (hugetlb) are compared with those that are free and not reserved, and with
nothing else: they are taken already.

What was made before and nobody has filled yet is promised (`promises`), and no room for others:
what this process made, and what others of this host did. Who asks in turn (`in_turn`) and makes its
memory meanwhile is seen by whoever asks next. A control group bounds the promises of its own
processes alone.

Page cache counts as room, as in MemAvailable, and swap does not. Everything is read below a folder,
so that a recorded machine can be asked like this one. Cost: a dozen small files, and what it takes
to find the promises.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.units import KIB, VALUE_MAX, format_size
from mooncake_store.worker.keeping import kept_bytes, memory_folder
from mooncake_store.worker.memory_files import base_of, by_worker
from mooncake_store.worker.promises import Promise, promises, told
from mooncake_store.worker.segments import parse_place
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mooncake_store.config.settings import WorkerConfig

__all__ = ["Machine", "Room", "check_room"]

_HUGE_PAGE_BYTES = 2048 * KIB
_HUGE_PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
_RESERVED_PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages"
_THP = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_THP_SHARED = ("[always]", "[within_size]", "[advise]")
_LEND_LESS = (
    "lend less (worker.segments, client.segment, --segment), or set overcommit (--overcommit) if "
    "that memory will be free by the time it is filled; who touches what is not there is killed"
)
_ROOM_OF_FOLDER = (
    "the memory of a worker with a name lies there, so that it outlives the process: say --memory "
    "anonymous to do without, name a folder with more room (--memory), or give this one more (a "
    "container has 64MiB unless it says --shm-size)"
)


class _Group(NamedTuple):
    """A control group that this process is in."""

    line: str
    """What /proc says of this process and the groups of that hierarchy."""
    path: PurePosixPath

    def holds(self, lines: Iterable[str]) -> bool:
        """Return whether it is around a process of which /proc says that."""
        which = self.line.split(":", 2)[:2]
        for line in lines:
            *other, path = line.split(":", 2)
            if other == which and PurePosixPath(path).is_relative_to(self.path):
                return True
        return self.line in lines  # where the namespaces do not tell the path of the group


class Room(NamedTuple):
    """How much more fits somewhere, where that is, and in which control group."""

    nbytes: int
    where: str
    group: _Group | None = None

    def less(self, promised: Iterable[Promise]) -> Room:
        """Return what is left of it when all who have a part in it take what they were promised."""
        mine = [p for p in promised if self.group is None or self.group.holds(p.groups)]
        if not mine:
            return self
        nbytes = sum(each.nbytes for each in mine)
        where = f"{self.where}, less {format_size(nbytes)} promised already: {told(mine)}"
        return Room(max(0, self.nbytes - nbytes), where)


class _Mount(NamedTuple):
    root: str
    point: str
    kind: str
    options: tuple[str, ...]


class _Version(NamedTuple):
    """How a version of control groups is mounted, its files, and counters of what can go."""

    kind: str
    options: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_VERSION_1 = _Version(
    "cgroup",
    ("memory",),
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = _Version(
    "cgroup2",
    (),
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
)


@dataclass(frozen=True)
class Machine:
    """Where to look: the folders of this machine, or of a recorded one."""

    root: Path = Path("/")

    def memory(self) -> Iterator[Room]:
        """Yield what bounds memory that is touched from now on."""
        for line in self._read("proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                yield Room(int(line.split()[1]) * KIB, "MemAvailable of /proc/meminfo")
        mounts = self._mounts()
        for line in self._read("proc/self/cgroup").splitlines():
            _, controllers, _ = line.split(":", 2)
            version = _VERSION_1 if controllers else _VERSION_2
            if not set(version.options) <= set(controllers.split(",")):
                continue  # a group of another controller
            for mount in mounts:
                if mount.kind == version.kind and set(version.options) <= set(mount.options):
                    yield from self._groups(mount, line, version)

    def huge_pages(self) -> Room:
        """Return the room in huge pages that were set aside."""
        # What was mapped and not touched is reserved: the kernel keeps that promise itself.
        free = max(0, (self._number(_HUGE_PAGES) or 0) - (self._number(_RESERVED_PAGES) or 0))
        return Room(free * _HUGE_PAGE_BYTES, f"{free} free huge pages in /{_HUGE_PAGES}")

    def has_shared_huge_pages(self) -> bool:
        """Return whether the kernel gives huge pages to shared memory without setting any aside."""
        return any(word in self._read(_THP) for word in _THP_SHARED)

    def mount_of(self, path: str) -> tuple[str, str]:
        """Return the kind of file system where `path` would be, and where that is mounted."""
        found = [m for m in self._mounts() if PurePosixPath(path).is_relative_to(m.point)]
        # Of mounts at one place the last one is seen.
        best = max(enumerate(found), key=lambda each: (len(each[1].point), each[0]), default=None)
        return ("", "") if best is None else (best[1].kind, best[1].point)

    def room_of_mount(self, kind: str, point: str) -> Room | None:
        """Return what fits on a mount, or None if nothing bounds it."""
        found = os.statvfs(self._place(point))
        if not found.f_blocks:
            return None
        return Room(found.f_bavail * found.f_frsize, f"free on the {kind} {point}")

    def promised(self, names: Iterable[str]) -> list[Promise]:
        """Return what is promised already, but for what workers of these names left in files."""
        own = {base_of(name) for name in names}
        return [
            each
            for each in promises(self.root)
            if not each.path
            or (
                self.mount_of(each.path)[0] == "tmpfs"
                and (each.process or not own & by_worker([each.name]).keys())
            )
        ]

    def _groups(self, mount: _Mount, line: str, version: _Version) -> Iterator[Room]:
        """Yield the room in a control group and in each that contains it, as far as it is seen."""
        inside = PurePosixPath(line.split(":", 2)[2])
        if ".." in inside.parts or not inside.is_relative_to(mount.root):
            inside = PurePosixPath(mount.root)  # of another namespace: its top is what we see
        relative = inside.relative_to(mount.root)
        for group in (relative, *relative.parents):
            folder = self._place(mount.point) / group
            usage = self._number(folder / version.usage)
            if usage is None:
                continue
            counters = dict(
                line.split(" ", 1) for line in self._read(folder / "memory.stat").splitlines()
            )
            used = max(0, usage - sum(int(counters.get(name, 0)) for name in version.cache))
            for name in version.limits:
                limit = self._number(folder / name)
                if limit is not None and limit < VALUE_MAX:
                    where = PurePosixPath(mount.point) / group / name
                    said = f"{where} allows {format_size(limit)}, {format_size(used)} are used"
                    around = _Group(line, PurePosixPath(mount.root) / group)
                    yield Room(max(0, limit - used), said, around)

    def _mounts(self) -> list[_Mount]:
        found = []
        for line in self._read("proc/self/mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            fields, kind = before.split(), after.split()
            if len(fields) > 4 and len(kind) > 2:
                found.append(_Mount(fields[3], fields[4], kind[0], tuple(kind[2].split(","))))
        return found

    def _place(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _read(self, path: str | Path) -> str:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def _number(self, path: str | Path) -> int | None:
        text = self._read(path)
        return int(text) if text.isdigit() else None


MACHINE = Machine()


def check_room(
    config: WorkerConfig, *, names: Sequence[str] | None = None, machine: Machine | None = None
) -> None:
    """Refuse to lend what there is no room for, unless `overcommit` is set.

    `names` are those of several workers that lend the same; without them it is one.

    Raises:
        ConfigError: it does not fit; names each number that says so.
    """
    if config.overcommit:
        return
    machine = MACHINE if machine is None else machine
    names = (config.name,) if names is None else names
    memory_bytes = len(names) * sum(config.segments_bytes)
    folder = memory_folder(config)
    if folder is not None:
        memory_bytes = max(0, memory_bytes - sum(kept_bytes(folder, name) for name in names))
        memory_bytes = _check_folder(machine, folder, memory_bytes)
    elif config.hugepages == "require" and not machine.has_shared_huge_pages():
        _compare(memory_bytes, [machine.huge_pages()])
        memory_bytes = 0
    mounts: Counter[str] = Counter()
    for path, nbytes in map(parse_place, config.files):
        kind, point = machine.mount_of(path)
        if kind == "tmpfs" and nbytes is not None and not os.path.exists(path):
            mounts[point] += nbytes
    for point, nbytes in mounts.items():
        room = machine.room_of_mount("tmpfs", point)
        _compare(nbytes, [] if room is None else [room])
    wanted = memory_bytes + mounts.total()
    if wanted:
        # First what is promised: what is touched in between is then counted twice, and not lost.
        promised = machine.promised(names)
        _compare(wanted, [room.less(promised) for room in machine.memory()])


def _check_folder(machine: Machine, folder: str, nbytes: int) -> int:
    """Refuse memory in files for which a folder has no room; return what it takes of the machine's.

    A disk refuses by itself when the files are made, and what lies there takes no memory for good.
    """
    kind, point = machine.mount_of(os.path.realpath(folder))
    if kind not in ("tmpfs", "hugetlbfs"):
        return 0
    room = machine.room_of_mount(kind, point)
    if room is None and kind == "hugetlbfs":
        room = machine.huge_pages()
    _compare(nbytes, [] if room is None else [room], _ROOM_OF_FOLDER)
    return nbytes if kind == "tmpfs" else 0


def _compare(wanted_bytes: int, rooms: list[Room], advice: str = _LEND_LESS) -> None:
    small = sorted((r for r in rooms if r.nbytes < wanted_bytes), key=lambda room: room.nbytes)
    if not small:
        return
    reasons = "; ".join(f"room for {format_size(room.nbytes)} ({room.where})" for room in small)
    raise ConfigError(
        f"{format_size(wanted_bytes)} are to be lent, and there is only {reasons}", advice=advice
    )
