"""The segments of a worker, made from its settings: memory, files, block and DAX devices.

A file or device is lent by one worker at a time: it holds a lock (flock) while it lends it. What
lay there before is not looked at. A file that does not exist yet is created with its space
reserved; it stays when the worker ends.

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

from mooncake_store.units import parse_size
from transfer_engine.errors import ConfigError
from transfer_engine.segments.file import FileSegment
from transfer_engine.segments.memory import Segment

if TYPE_CHECKING:
    from mooncake_store.config.settings import WorkerConfig

__all__ = ["WorkerSegments", "Place", "parse_place"]

log = logging.getLogger(__name__)


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


class WorkerSegments:
    """Makes, replaces and closes the segments of one worker."""

    def __init__(self, config: WorkerConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._places = [parse_place(text) for text in config.files]
        self._locks: list[int] = []
        self.segments: list[Segment | FileSegment] = []

    def make(self) -> None:
        """Make all segments. After an error `close` gives back what was made before it."""
        config, self.segments = self._config, []
        count = len(config.segments_bytes) + len(self._places)
        names = iter([self._name] if count == 1 else [f"{self._name}-{n}" for n in range(count)])
        for nbytes in config.segments_bytes:
            memory = Segment.create(
                nbytes,
                name=next(names),
                hugepages=config.hugepages,
                numa_node=None if config.numa < 0 else config.numa,
            )
            self.segments.append(memory)
            memory.prefault()
        for place in self._places:
            self.segments.append(self._open(place, next(names)))

    def _open(self, place: Place, name: str) -> Segment | FileSegment:
        path, nbytes = place
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
        if stat.S_ISCHR(os.stat(path).st_mode):
            return Segment.map(path, nbytes, name=name)
        return FileSegment.open(path, size=nbytes, name=name)

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

    def replace(self) -> None:
        """Replace what can be replaced; nobody who still holds the old reaches the new."""
        self.close()
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

    def close(self) -> None:
        """Give all up. Files stay. Idempotent."""
        for segment in self.segments:
            segment.close()
        while self._locks:
            os.close(self._locks.pop())
