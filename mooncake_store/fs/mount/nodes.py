"""Open files of a mount. One node per path that is open; all handles of the path share it.

A node that is only read has a `PoolReader`. With the first change it gets a staging file: an
unlinked temporary file with the whole content, which takes writes anywhere. `save` stores it as a
new object under its name, at once and whole; that is done when a handle is closed (so `close`
reports errors), on fsync, before a rename, and with the last handle: the kernel sends a release
some time after `close` returned, and what was changed by path in between is stored then. Nobody
outside sees half of a file.

A change that makes a file larger than the store could hold is refused when it is made, and the
file is not stored any more: whoever closes it is told again, and what had its name before stays.
Cutting it to a size that fits makes it good again.

A node whose name was removed is detached: its handles go on, nothing is stored.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
import threading
import time
from typing import TYPE_CHECKING

from mooncake_store.errors import NoSpaceError, StoreError
from mooncake_store.fs.files import PoolReader, PoolWriter
from mooncake_store.fs.parts import ORDINARY, Attributes
from mooncake_store.fs.plan import run

if TYPE_CHECKING:
    from mooncake_store.fs.filesystem import MooncakeFileSystem

__all__ = ["Node", "Nodes"]

log = logging.getLogger(__name__)

_COPY_BYTES = 8 << 20


class Node:
    """One open path, as all its handles see it. Every method takes the node's lock."""

    def __init__(
        self, fs: MooncakeFileSystem, path: str, staging: str | None, attributes: Attributes
    ) -> None:
        self.path = path
        self.handles = 0
        self.detached = False
        self.attributes = attributes
        self.changed_ns = 0
        self._fs = fs
        self._staging = staging
        self._lock = threading.RLock()
        self._reader: PoolReader | None = None
        self._fd = -1
        self._size = 0
        self._dirty = False
        self._refusal: NoSpaceError | None = None

    @property
    def unsaved(self) -> bool:
        """Whether something is here that must still be stored."""
        return self._dirty and not self.detached

    @property
    def staged(self) -> bool:
        """Whether the content is here rather than in the store."""
        return self._fd >= 0

    @property
    def refused(self) -> bool:
        """Whether the file became larger than the store could hold, so that nobody will see it."""
        return self._refusal is not None

    @property
    def size(self) -> int:
        """The size of the file as its handles see it."""
        with self._lock:
            return self._size if self.staged else self._opened().size

    def _opened(self) -> PoolReader:
        if self._reader is None:
            self._reader = PoolReader(self._fs, self.path)
        return self._reader

    def prepare(self) -> None:
        """Find out now whether there is anything to read; raises FileNotFoundError."""
        with self._lock:
            if not self.staged:
                self._opened()

    def stage(self, *, empty: bool = False) -> None:
        """Have the content here, unless it is already; an `empty` one is a change to be stored."""
        with self._lock:
            if self.staged:
                return
            with tempfile.TemporaryFile(dir=self._staging) as file:
                if not empty:
                    reader = self._opened()
                    reader.seek(0)
                    shutil.copyfileobj(reader, file, _COPY_BYTES)
                    file.flush()  # which raises, as a write does, where not all of it has room
                self._size = file.tell()
                self._fd = os.dup(file.fileno())
            if empty:
                self._change()
            self._close_reader()

    def _change(self) -> None:
        self._dirty = True
        self.changed_ns = time.time_ns()
        self.attributes = self.attributes._replace(mtime_ns=None)

    def read(self, size: int, offset: int) -> bytes:
        """Bytes at an offset, fewer at the end."""
        with self._lock:
            if self.staged:
                return os.pread(self._fd, size, offset)
            reader = self._opened()
            reader.seek(offset)
            return reader.read(size)

    def _make_fit(self, size: int) -> None:
        """Raise NoSpaceError, and remember it, if the store could not hold a file of this size."""
        if self._refusal is not None:
            raise self._refusal.again()
        plans = self._fs.plans
        if size <= plans.part_bytes:
            return
        try:
            run(self._fs.client, plans.room.require_growth(size, self.path, plans.pins))
        except NoSpaceError as error:
            self._refusal = error.again()
            raise
        except StoreError as error:
            # Whoever closes the file is told, if the store is still away then.
            log.debug("nobody could say whether %s fits: %s", self.path, error)

    def write(self, data: bytes, offset: int) -> int:
        """Write at an offset; a gap reads as zeros."""
        with self._lock:
            self.stage()
            if offset + len(data) > self._size:
                self._make_fit(offset + len(data))
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, memoryview(data)[done:], offset + done)
            self._size = max(self._size, offset + done)
            self._change()
            return done

    def truncate(self, size: int) -> None:
        """Cut or extend."""
        with self._lock:
            self.stage(empty=size == 0)
            self._refusal = None
            self._make_fit(size)
            os.ftruncate(self._fd, size)
            self._size = size
            self._change()

    def dress(self, attributes: Attributes) -> None:
        """Give it other attributes; they are stored with the content."""
        with self._lock:
            self.stage()
            self.attributes = attributes
            self._dirty = True

    def save(self) -> bool:
        """Store what changed; return whether there was anything to store."""
        with self._lock:
            if not self.unsaved:
                return False
            if self._refusal is not None:
                raise self._refusal.again()
            # Changes that come while this runs wait for the lock, so none is overlooked.
            writer = PoolWriter(self._fs, self.path, attributes=self.attributes)
            with writer:
                if self._size:
                    with (
                        mmap.mmap(self._fd, self._size, access=mmap.ACCESS_READ) as content,
                        memoryview(content) as view,
                    ):
                        writer.write(view)
            self._dirty = False
            return True

    def rename(self, path: str) -> None:
        """Be known by another path from now on."""
        with self._lock:
            self.path = path

    def detach(self) -> None:
        """Go on without a name."""
        with self._lock:
            if not self.detached:
                self.stage()
                self.detached = True

    def attach(self) -> None:
        """Go on with the name that could not be taken away."""
        with self._lock:
            self.detached = False

    def close(self) -> None:
        """Free the staging file and the lease."""
        with self._lock:
            self._close_reader()
            if self.staged:
                os.close(self._fd)
                self._fd = -1

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


class Nodes:
    """The table of open paths and handles."""

    def __init__(self, fs: MooncakeFileSystem, staging: str | None) -> None:
        self._fs = fs
        self._staging = staging
        self._lock = threading.Lock()
        self._by_path: dict[str, Node] = {}
        self._by_handle: dict[int, Node] = {}
        self._last = 0

    def open(self, path: str, attributes: Attributes = ORDINARY, *, create: bool = False) -> int:
        """A new handle of a path."""
        with self._lock:
            node = self._by_path.get(path)
            if node is None:
                node = Node(self._fs, path, self._staging, attributes)
                if create:
                    node.stage(empty=True)
                self._by_path[path] = node
            return self._hand(node)

    def join(self, path: str) -> int | None:
        """One more handle of a path that is open, or None."""
        with self._lock:
            node = self._by_path.get(path)
            return None if node is None else self._hand(node)

    def _hand(self, node: Node) -> int:
        self._last += 1
        node.handles += 1
        self._by_handle[self._last] = node
        return self._last

    def of_handle(self, handle: int) -> Node:
        """The node behind a handle."""
        return self._by_handle[handle]

    def of_path(self, path: str) -> Node | None:
        """The node of a path, if it is open."""
        return self._by_path.get(path)

    def below(self, prefix: str) -> list[Node]:
        """Open nodes whose path begins with a prefix."""
        with self._lock:
            return [node for path, node in self._by_path.items() if path.startswith(prefix)]

    def release(self, handle: int) -> bool:
        """Forget a handle; the last one stores what is left, and says so, and frees the node."""
        saved = False
        try:
            while not self._let_go(handle):
                saved = self._by_handle[handle].save()
        except BaseException:
            self._let_go(handle, unsaved=True)
            raise
        return saved

    def _let_go(self, handle: int, *, unsaved: bool = False) -> bool:
        """Forget a handle, unless it is the last one of a node that must be stored first.

        Who changes a node holds a handle of it: nothing can come after what the last one stores.
        """
        with self._lock:
            node = self._by_handle[handle]
            if node.handles == 1 and node.unsaved and not unsaved:
                return False
            del self._by_handle[handle]
            node.handles -= 1
            last = not node.handles
            if last and self._by_path.get(node.path) is node:
                del self._by_path[node.path]
        if last:
            node.close()
        return True

    def rename(self, old: str, new: str) -> None:
        """Let an open node follow its file; one that was at the new path loses its name."""
        with self._lock:
            lost = self._by_path.pop(new, None)
            node = self._by_path.pop(old, None)
            if node is not None:
                self._by_path[new] = node
                node.rename(new)
        if lost is not None:
            lost.detach()

    def detach(self, path: str) -> None:
        """Take the name from an open node."""
        with self._lock:
            node = self._by_path.pop(path, None)
        if node is not None:
            node.detach()

    def save_all(self) -> None:
        """Store whatever is not yet; at unmount."""
        with self._lock:
            nodes = list(self._by_path.values())
        for node in nodes:
            try:
                node.save()
            except (StoreError, OSError) as error:  # the others are still to be stored
                log.error("%s could not be stored: %s", node.path, error)
