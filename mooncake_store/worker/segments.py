"""The segments of a worker, made from its settings: memory, files and devices, a store elsewhere.

A file or device is lent by one worker at a time: it holds a lock (flock) while it lends it. A file
that does not exist yet is created with its space reserved; it stays when the worker ends.

Memory is anonymous and ends with its process, or lies in files of a folder (`keeping`): then a run
finds the memory, files and devices of the one before it that was killed, as they were, under the
same uuids; files and block devices also of one that was stopped, or that ended with the machine.
Nothing else of what lay somewhere before is looked at. What lies in a store elsewhere (`cold_url`)
is found again likewise, in a folder of this worker of this cluster.

When the master has lost its objects, readers and writers of before may still be under way.
They keep what they have: memory and files are replaced by new ones. A device cannot be; it
is left out until the worker is started again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.core.records import Tier
from mooncake_store.sealing_keys import ring_at
from mooncake_store.units import format_size, parse_size
from mooncake_store.worker.keeping import Kept, MemoryKeeper, Wanted, identity_of, memory_folder
from mooncake_store.worker.lasting import LastingCold, LastingFile
from mooncake_store.worker.memory_files import base_of
from transfer_engine.errors import ConfigError
from transfer_engine.segments.cold import ColdSegment
from transfer_engine.segments.file import FileSegment
from transfer_engine.segments.memory import Segment

if TYPE_CHECKING:
    from mooncake_store.config.settings import WorkerConfig
    from mooncake_store.worker.errands import Lent
    from transfer_engine.segments.blockfile import BlockFile

__all__ = ["WorkerSegments", "Place", "parse_place", "tier_of"]

log = logging.getLogger(__name__)

_COLD = "cold:"
"""How the path of what lies in a store elsewhere begins in records; the URL follows."""


class Place(NamedTuple):
    """A file or device, and how much of it is lent; None: all there is."""

    path: str
    nbytes: int | None


def parse_place(text: str) -> Place:
    """Read "path" or "path:size". Raises ConfigError."""
    path, colon, size = text.rpartition(":")
    try:
        found = Place(path, parse_size(size)) if colon else Place(text, None)
    except ValueError:
        found = Place(text, None)  # a colon of the path's own
    if not os.path.isabs(found.path):
        raise ConfigError(
            f"worker.files: {text!r} is no absolute path",
            advice="for example /mnt/nvme/pool:64GiB, or /dev/dax0.0",
        )
    return found


def tier_of(segment: Lent) -> Tier:
    """Return what a segment is made of: what is mapped is memory, also where a device is."""
    if isinstance(segment, ColdSegment):
        return Tier.COLD
    return Tier.DISK if isinstance(segment, FileSegment) else Tier.MEMORY


class WorkerSegments:
    """Makes, takes up, replaces and closes the segments of one worker."""

    def __init__(self, config: WorkerConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._places = [parse_place(text) for text in config.files]
        self._keys = ring_at(config.cold_keys) if config.cold_keys else None
        self._locks: list[int] = []
        self._keeper: MemoryKeeper | None = None
        self._found: list[Segment] = []
        self.folder = memory_folder(config)
        """Where memory outlives its process; None: it does not."""
        self.new = False
        """Whether all that is lent was made by this run."""
        self.run = 0
        """The run of the master in which what is lent was mounted last, 0 for none."""
        self._cluster = ""
        self.segments: list[Lent] = []

    def hold(self, cluster: str, life: int) -> tuple[bytes, int]:
        """Take the place of the run before; return the uuid and epoch to go on with.

        To be called before `make` where there is a folder. Raises ConfigError as
        `MemoryKeeper.hold` does.
        """
        assert self.folder is not None
        self._cluster = cluster
        paths = [place.path for place in self._places if not _is_memory(place.path)]
        lasting: LastingFile | LastingCold | None = LastingFile.beside(paths, base_of(self._name))
        if lasting is None and self._config.cold_url:
            lasting = LastingCold(self._config.cold_url, self._cold_folder())
        self._keeper = keeper = MemoryKeeper.hold(self.folder, self._name, cluster, life, lasting)
        self.run = keeper.run
        return keeper.uuid, keeper.epoch

    def disown(self, why: str) -> None:
        """Take up nothing of what the run before lent. To be called before `make`."""
        assert self._keeper is not None
        self._keeper.disown(why)
        self.run = 0

    def note_run(self, run: int) -> None:
        """Know, and keep for the next run, in which run of the master all is mounted.

        To be called before the master hears of it: what lies there may change from then on.
        """
        if self._keeper is not None:
            self._keeper.note_run(run)
        self.run = run

    def make(self) -> None:
        """Make all segments, or take up those of the run before.

        After an error `close` gives back what was made before it.
        """
        self.segments, self._found = [], []
        keeper, wanted = self._keeper, self._wanted()
        former = [None if keeper is None else keeper.former(each) for each in wanted]
        taken = [kept for kept in former if kept is not None]
        self.new = not taken
        if keeper is not None:
            keeper.begin(taken)
        for each, kept in zip(wanted, former, strict=True):
            self.segments.append(self._open(each, kept))
        if keeper is not None:
            keeper.keep(
                Kept(
                    segment.uuid.hex(), segment.name, segment.size, each.path, each.made,
                    identity_of(keeper.place(each.path)), not isinstance(segment, Segment),
                )
                for each, segment in zip(wanted, self.segments, strict=True)
            )  # fmt: skip

    def _wanted(self) -> list[Wanted]:
        config, keeper, sizes = self._config, self._keeper, self._config.segments_bytes
        count = len(sizes) + len(self._places) + bool(config.cold_url)
        names = [self._name] if count == 1 else [f"{self._name}-{n}" for n in range(count)]
        made = f"huge pages {config.hugepages}, node {config.numa}"
        memory = [
            Wanted(names[n], nbytes, "" if keeper is None else keeper.data_name(n), made)
            for n, nbytes in enumerate(sizes)
        ]
        lent = [
            Wanted(name, nbytes, path)
            for name, (path, nbytes) in zip(names[len(sizes) :], self._places, strict=False)
        ]
        cold = [Wanted(names[-1], config.cold_bytes, _COLD + config.cold_url)]
        return memory + lent + (cold if config.cold_url else [])

    def _open(self, wanted: Wanted, kept: Kept | None) -> Lent:
        uuid = None if kept is None else bytes.fromhex(kept.uuid)
        if wanted.path.startswith(_COLD):
            url, folder = wanted.path.removeprefix(_COLD), self._cold_folder()
            assert wanted.nbytes is not None
            smaller = self._config.cold_codec == "planes"
            return ColdSegment.open(
                url,
                folder,
                wanted.nbytes,
                name=wanted.name,
                uuid=uuid,
                smaller=smaller,
                keys=self._keys,
            )
        if not wanted.made:
            if kept is not None:
                wanted = wanted._replace(nbytes=kept.nbytes)
            return self._lend(wanted, uuid)
        assert wanted.nbytes is not None
        path = None if self._keeper is None else self._keeper.place(wanted.path)
        if path is not None and uuid is not None:
            found = Segment.attach(path, uuid=uuid, name=wanted.name, size=wanted.nbytes)
            self._found.append(found)
            log.info("%s is found again, with %s", wanted.name, format_size(wanted.nbytes))
            return found
        memory = Segment.create(
            wanted.nbytes,
            name=wanted.name,
            path=path,
            hugepages=self._config.hugepages,
            numa_node=None if self._config.numa < 0 else self._config.numa,
        )
        _touch(memory)
        return memory

    def populate(self) -> None:
        """Map what was found again in the background; nobody has to wait for it."""
        for memory in self._found:
            _touch(memory)

    def _cold_folder(self) -> str:
        """Return the folder below the URL that is this worker's, whoever else uses that."""
        return f"{base_of(self._name)}-{self._cluster}"

    def _lend(self, wanted: Wanted, uuid: bytes | None) -> Segment | FileSegment:
        name, nbytes, path = wanted.name, wanted.nbytes, wanted.path
        if not os.path.exists(path):
            if nbytes is None:
                raise ConfigError(
                    f"worker.files: there is no {path}",
                    advice=f"say how large it is to become: {path}:64GiB",
                )
            made = FileSegment.create(path, nbytes, name=name)
            self._claim(path)
            return made
        self._claim(path)
        if _is_memory(path):
            return Segment.map(path, nbytes, name=name, uuid=uuid)
        return FileSegment.open(path, size=nbytes, name=name, uuid=uuid)

    def _claim(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"worker.files: cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"worker.files: another process lends {path}", advice="let one worker lend it"
            ) from error
        self._locks.append(fd)

    def replace(self, cluster: str, life: int, epoch: int) -> None:
        """Replace what can be replaced, for another life of the master and a run of that epoch.

        Nobody who still holds the old reaches the new.
        """
        self._give_up()
        self._cluster = cluster
        if self._keeper is not None:
            self._keeper.renew(cluster, life, epoch)
        kept = []
        for place in self._places:
            if not os.path.isfile(place.path):
                log.warning(
                    "%s is not lent any more: processes that used it under the former master may "
                    "still write to it; start the worker again to lend it",
                    place.path,
                )
                continue
            size = os.stat(place.path).st_size if place.nbytes is None else place.nbytes
            os.unlink(place.path)
            kept.append(Place(place.path, size))
        self._places = kept
        self.make()
        self.run = 0  # not before: what fails on the way is done once more

    def faults(self) -> tuple[tuple[bytes, str], ...]:
        """What is wrong with disks and stores, by the uuids of their segments."""
        told = [(uuid, file.health.fault) for uuid, file in self._disks()]
        stores = [each for each in self.segments if isinstance(each, ColdSegment)]
        told += [(store.uuid, store.health.fault) for store in stores]
        return tuple((uuid, fault) for uuid, fault in told if fault)

    def _disks(self) -> list[tuple[bytes, BlockFile]]:
        lent = [(s.uuid, s.held_staged()) for s in self.segments if isinstance(s, FileSegment)]
        return [(uuid, file) for uuid, file in lent if file is not None]

    def leave(self) -> None:
        """Leave nothing to a next run; what is lent stays so until `close`. Idempotent."""
        if self._keeper is not None:
            self._keeper.leave()

    def leave_memory(self) -> list[bytes]:
        """Leave all but memory to a next run, and return the uuids of all else. Idempotent."""
        if self._keeper is not None:
            self._keeper.leave_memory()
        kept = self._keeper is not None
        return [s.uuid for s in self.segments if not kept or isinstance(s, Segment)]

    def close(self) -> None:
        """Give all up. Files stay, those of memory too unless `leave` was called. Idempotent."""
        self._give_up()
        if self._keeper is not None:
            self._keeper.close()

    def _give_up(self) -> None:
        for segment in self.segments:
            segment.close()
        while self._locks:
            os.close(self._locks.pop())


def _is_memory(path: str) -> bool:
    """Whether a device is mapped: what lies in it is looked after like memory."""
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def _touch(memory: Segment) -> None:
    if memory.page_kind != "file":  # a disk would have to write all of it
        memory.prefault()
