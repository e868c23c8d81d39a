"""Answers to the kernel: the operations of a mounted namespace.

Names, sizes and dates come from the store with every question, but what a directory listing just
told is believed for a second, so that listing a large directory does not ask once per file.
Directories made here get a mark (an object whose name ends with a slash), because a directory of
the store exists only as long as something is in it; permission bits, dates that were set, and
symbolic links are kept in manifests (`fs/parts.py`). Owners are not: everything belongs to who
mounted. Hard links, devices and extended attributes are refused.

libfuse renames files that are removed while open (".fuse_hidden..."); such names never reach
the store.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import mfusepy

from mooncake_store.errors import StoreError
from mooncake_store.fs.files import PoolWriter
from mooncake_store.fs.mount.nodes import Node, Nodes
from mooncake_store.fs.parts import ORDINARY, Attributes, Manifest, is_manifest
from mooncake_store.fs.paths import prefix_of
from mooncake_store.fs.plan import run
from mooncake_store.units import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.fs.filesystem import MooncakeFileSystem

__all__ = ["PoolOperations"]

log = logging.getLogger(__name__)

FILE_MODE, DIRECTORY_MODE, LINK_MODE = 0o644, 0o755, 0o777
BELIEVED_S = 1.0
_HIDDEN = ".fuse_hidden"
_BLOCK = 4096
_REQUEST_BYTES = 1 << 20


class Known(NamedTuple):
    """What a path is."""

    directory: bool
    size: int = 0
    written_ns: int = 0
    attributes: Attributes = ORDINARY

    @property
    def mtime_ns(self) -> int:
        """The date that was set, else when it was written."""
        date_ns = self.attributes.mtime_ns
        return self.written_ns if date_ns is None else date_ns


_NUMBERS: tuple[tuple[type[Exception], int], ...] = (
    (TimeoutError, errno.ETIMEDOUT),
    (ConnectionError, errno.EHOSTDOWN),
    (PermissionError, errno.EACCES),
    (ValueError, errno.EINVAL),
)


def _number_of(error: StoreError) -> int:
    known = getattr(error, "errno", None)
    if known is not None:
        return int(known)
    return next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)


def _answered(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Take a path as the kernel writes it, and raise errors of the store as numbers it knows."""

    @functools.wraps(operation)
    def answer(self: PoolOperations, path: str | None, *args: Any, **kwargs: Any) -> Any:
        try:
            return operation(self, path and path.strip("/"), *args, **kwargs)
        except StoreError as error:
            number = _number_of(error)
            log.warning("%s failed: %s", operation.__name__, error)
            raise OSError(number, os.strerror(number)) from error

    return answer


class PoolOperations(mfusepy.Operations):  # type: ignore[misc]  # not typed to the end
    """What libfuse calls. `ready` is called when the kernel has the mount.

    Paths come without the slash they begin with, see `_answered`.
    """

    use_ns = True

    def __init__(
        self,
        fs: MooncakeFileSystem,
        staging: str | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self._fs = fs
        self._nodes = Nodes(fs, staging)
        self._ready = ready
        self._owner = (os.getuid(), os.getgid())
        self._mounted_ns = time.time_ns()
        self._listed: dict[str, tuple[float, Known]] = {}
        self._marked: set[str] = set()
        self._lock = threading.Lock()

    # Life.

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Ask for large requests, and say that the mount stands."""
        if connection is not None:
            connection.max_write = _REQUEST_BYTES
            connection.max_readahead = _REQUEST_BYTES
        if self._ready is not None:
            self._ready()

    def destroy(self, path: str) -> None:
        """Store what is left when the mount ends."""
        self._nodes.save_all()

    # What a path is.

    def _known(self, path: str) -> Known:
        """What a path is; raises FileNotFoundError."""
        if not path:
            return Known(directory=True, written_ns=self._mounted_ns)
        until, known = self._listed.get(path, (0.0, None))
        if known is None or until <= time.monotonic():
            known = self._ask(path)
            self._believe({path: known})
        return known

    def _ask(self, path: str) -> Known:
        entry = self._fs.info(path)
        if entry["type"] == "file":
            return _of_entry(entry)
        attributes, created = self._mark(path)
        return Known(True, 0, created, attributes)

    def _mark(self, path: str) -> tuple[Attributes, int]:
        """Attributes and date of a directory, from its mark if it has one."""
        client = self._fs.client
        (data,) = client.get_many([prefix_of(path)]).values
        if data is None:
            return ORDINARY, self._mounted_ns
        self._marked.add(path)
        created = client.stat(prefix_of(path)).created_s * SECOND_NS
        if not is_manifest(data):  # others mark directories as well, with anything
            return ORDINARY, created
        return Manifest.decode(data, path).attributes, created

    def _believe(self, news: dict[str, Known]) -> None:
        until = time.monotonic() + BELIEVED_S
        with self._lock:
            if len(self._listed) > 200_000:
                self._listed.clear()
            self._listed.update((path, (until, known)) for path, known in news.items())

    def _forget(self, *paths: str) -> None:
        with self._lock:
            for path in paths:
                self._listed.pop(path, None)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """What `stat` shows."""
        node = self._nodes.of_path(path)
        if node is not None and (node.staged or node.detached):
            known = _of_node(node)
        elif _is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        else:
            known = self._known(path)
        return self._stat(known)

    def _stat(self, known: Known) -> dict[str, Any]:
        mode, _, link = known.attributes
        date_ns = known.mtime_ns
        if known.directory:
            kind, usual = stat.S_IFDIR, DIRECTORY_MODE
        elif link:
            kind, usual = stat.S_IFLNK, LINK_MODE
        else:
            kind, usual = stat.S_IFREG, FILE_MODE
        return {
            "st_mode": kind | (usual if mode is None else mode),
            "st_nlink": 2 if known.directory else 1,
            "st_uid": self._owner[0],
            "st_gid": self._owner[1],
            "st_size": known.size,
            "st_blocks": -(-known.size // 512),
            "st_blksize": _REQUEST_BYTES,
            "st_atime": date_ns,
            "st_mtime": date_ns,
            "st_ctime": date_ns,
        }

    def access(self, path: str, amode: int) -> int:
        """Existence; permission bits are checked by the kernel."""
        self.getattr(path)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """Size and free space of the pool, or of the namespace where that has a quota."""
        shards = self._fs.client.store_stats()
        total = sum(shard.bytes_total for shard in shards)
        # Objects on absent segments take none of this room.
        used = sum(min(shard.bytes_used, shard.bytes_allocated) for shard in shards)
        quota = sum(shard.tenant_quota for shard in shards)
        if quota:
            total, used = min(total, quota), sum(shard.tenant_bytes for shard in shards)
        free = max(0, total - used) // _BLOCK
        return {
            "f_bsize": _BLOCK,
            "f_frsize": _BLOCK,
            "f_blocks": total // _BLOCK,
            "f_bfree": free,
            "f_bavail": free,
            "f_files": 0,  # there is no table of files that could be full
            "f_ffree": 0,
            "f_namemax": 255,
        }

    # Directories.

    def readdir(self, path: str, fh: int) -> list[Any]:
        """The entries of a directory; all of them are known before the first is told."""
        entries: dict[str, Known] = {}
        try:
            listed = self._fs.ls(path)
        except FileNotFoundError:
            if path not in self._marked:
                raise
            listed = []
        skip = len(path) + 1 if path else 0
        for entry in listed:
            name = entry["name"][skip:]
            if entry["type"] == "file":
                entries[name] = _of_entry(entry)
            else:
                entries[name] = Known(directory=True, written_ns=self._mounted_ns)
        lead = path + "/" if path else ""
        self._believe(
            {lead + name: known for name, known in entries.items() if not known.directory}
        )
        for node in self._nodes.below(lead):
            name = node.path[skip:]
            shown = node.staged and not node.refused and not name.startswith(_HIDDEN)
            if shown and "/" not in name:
                with contextlib.suppress(FileNotFoundError):  # it was closed just now, unstored
                    entries[name] = _of_node(node)
        told = [
            (name, {"st_mode": self._stat(known)["st_mode"]}, 0) for name, known in entries.items()
        ]
        return [".", "..", *told]

    def mkdir(self, path: str, mode: int) -> int:
        """Make a directory, that is, its mark."""
        attributes = ORDINARY if mode & 0o7777 == DIRECTORY_MODE else Attributes(mode & 0o7777)
        self._put_mark(path, attributes, exclusive=True)
        return 0

    def _put_mark(self, path: str, attributes: Attributes, *, exclusive: bool) -> None:
        plans = self._fs.plans
        mark = Manifest.make(0, plans.part_bytes, attributes).encode()
        put = self._fs.client.put(prefix_of(path), mark, upsert=not exclusive, **plans.pins)
        if put.already_present:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._marked.add(path)
        self._forget(path)

    def _keep_parent(self, path: str) -> None:
        """Mark the directory of a file that goes, so that the directory stays."""
        parent = path.rpartition("/")[0]
        if parent and parent not in self._marked:
            with contextlib.suppress(FileExistsError):
                self._put_mark(parent, ORDINARY, exclusive=True)
            self._marked.add(parent)

    def rmdir(self, path: str) -> int:
        """Remove an empty directory."""
        if any(not _is_hidden(node.path) for node in self._nodes.below(path + "/")):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._keep_parent(path)
        self._fs.rmdir(path)
        self._marked.discard(path)
        self._forget(path)
        return 0

    # Files.

    def create(self, path: str, mode: int, flags: int = 0) -> int:
        """Make a file and open it. It is stored when it is closed."""
        bits = mode & 0o7777
        attributes = ORDINARY if bits == FILE_MODE else Attributes(bits)
        self._forget(path)
        return self._nodes.open(path, attributes, create=True)

    def open(self, path: str, flags: int) -> int:
        """Open a file that exists."""
        handle = self._handle(path)
        try:
            node = self._nodes.of_handle(handle)
            if flags & os.O_TRUNC:
                node.truncate(0)
            else:
                node.prepare()
        except BaseException:
            self._nodes.release(handle)
            raise
        return handle

    def _handle(self, path: str) -> int:
        """A handle of a file that exists, open already or not."""
        handle = self._nodes.join(path)
        if handle is None:
            known = self._known(path)
            if known.directory:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            handle = self._nodes.open(path, known.attributes)
        return handle

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read at an offset."""
        return self._nodes.of_handle(fh).read(size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Write at an offset."""
        return self._nodes.of_handle(fh).write(data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        """Cut or extend a file; one that nobody has open is stored at once."""
        handle = self._handle(path)
        try:
            self._nodes.of_handle(handle).truncate(length)
        finally:
            self._nodes.release(handle)
            self._forget(path)
        return 0

    def flush(self, path: str, fh: int) -> int:
        """A handle is being closed: store what changed."""
        self._save(self._nodes.of_handle(fh))
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """Store what changed."""
        return self.flush(path, fh)

    def _save(self, node: Node) -> None:
        if node.save():
            self._forget(node.path)

    def release(self, path: str, fh: int) -> int:
        """The last use of a handle has ended; what was changed by path since is stored."""
        node = self._nodes.of_handle(fh)
        if self._nodes.release(fh):
            self._forget(node.path)
        return 0

    def unlink(self, path: str) -> int:
        """Remove a file."""
        if not _is_hidden(path):
            self._remove(path)
        self._nodes.detach(path)
        return 0

    def _remove(self, path: str) -> None:
        """Remove a file from the store; handles that it has go on, and store nothing any more."""
        node = self._nodes.of_path(path)
        if node is not None:
            node.detach()
        try:
            self._keep_parent(path)
            # A file that was made and never closed is not in the store yet.
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)
        except BaseException:
            if node is not None:
                node.attach()
            raise
        self._forget(path)

    def rename(self, old: str, new: str) -> int:
        """Give a file or a directory another name, replacing a file of that name."""
        new = new.strip("/")
        if _is_hidden(new):  # libfuse: it is removed while open
            self._remove(old)
            self._nodes.rename(old, new)
            return 0
        for node in [*self._nodes.below(old + "/"), self._nodes.of_path(old)]:
            if node is not None:
                self._save(node)
        known = self._ask(old)
        if known.directory:
            self._rename_directory(old, new)
        else:
            self._keep_parent(old)
            run(self._fs.client, self._fs.plans.move([(old, new)]))
            self._nodes.rename(old, new)
        self._forget(old, new)
        return 0

    def _rename_directory(self, old: str, new: str) -> None:
        try:
            if not self._ask(new).directory:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), new)
            self._fs.rmdir(new)  # which refuses one that is not empty
        except FileNotFoundError:
            pass
        self._keep_parent(old)
        self._keep_parent(new + "/x")
        with contextlib.suppress(FileNotFoundError):  # nothing in it was stored so far
            run(self._fs.client, self._fs.plans.move_tree(old, new))
        self._marked = {path for path in self._marked if not (path + "/").startswith(old + "/")}
        for node in self._nodes.below(old + "/"):
            self._nodes.rename(node.path, new + node.path[len(old) :])
        with self._lock:
            self._listed.clear()

    # Attributes and links.

    def chmod(self, path: str, mode: int) -> int:
        """Set permission bits."""
        self._dress(path, lambda old: old._replace(mode=mode & 0o7777))
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        """Set the date."""
        mtime_ns = time.time_ns() if times is None else int(times[1])
        self._dress(path, lambda old: old._replace(mtime_ns=mtime_ns))
        return 0

    def _dress(self, path: str, change: Callable[[Attributes], Attributes]) -> None:
        handle = self._nodes.join(path)
        if handle is not None:
            try:
                node = self._nodes.of_handle(handle)
                node.dress(change(node.attributes))
            finally:
                self.release(path, handle)
            return
        if not path:
            return
        known = self._known(path)
        if known.directory:
            self._put_mark(path, change(known.attributes), exclusive=False)
        else:
            run(self._fs.client, self._fs.plans.dress(path, change(known.attributes)))
        self._forget(path)

    def chown(self, path: str, uid: int, gid: int) -> int:
        """Refuse another owner than who mounted."""
        for wanted, owner in zip((uid, gid), self._owner, strict=True):
            if wanted not in (-1, 0xFFFF_FFFF, owner):
                raise PermissionError(errno.EPERM, "files belong to who mounted", path)
        return 0

    def symlink(self, target: str, source: str) -> int:
        """Make a symbolic link at `target` that leads to `source`."""
        link = PoolWriter(self._fs, target, exclusive=True, attributes=Attributes(link=True))
        with link:
            link.write(source.encode("utf-8", "surrogateescape"))
        self._forget(target)
        return 0

    def readlink(self, path: str) -> str:
        """Where a symbolic link leads."""
        data: bytes = self._fs.cat_file(path)
        return data.decode("utf-8", "surrogateescape")


def _is_hidden(path: str) -> bool:
    return path.rpartition("/")[2].startswith(_HIDDEN)


def _of_entry(entry: dict[str, Any]) -> Known:
    attributes = Attributes(
        entry.get("mode"), entry.get("mtime_ns"), bool(entry.get("islink", False))
    )
    return Known(False, entry["size"], int(entry["created"]) * SECOND_NS, attributes)


def _of_node(node: Node) -> Known:
    return Known(False, node.size, node.changed_ns // SECOND_NS * SECOND_NS, node.attributes)


for _name, _operation in list(vars(PoolOperations).items()):
    if not _name.startswith("_") and _name != "init_with_config" and callable(_operation):
        setattr(PoolOperations, _name, _answered(_operation))
