"""`MooncakeFileSystem`: the store behind fsspec's interface, blocking and asynchronous.

    fs = fsspec.filesystem("mooncake", url="mooncake://127.0.0.1:50051/default")
    fs.pipe({"a/1": b"one", "a/2": b"two"})       # one batch
    fs.cat(["a/1", "a/2"]); fs.ls("a"); fs.rm("a", recursive=True)

Blocking calls use blocking sockets on the caller's thread: there is no event loop behind them
that could be the wrong one, and nothing is left over by a fork. Coroutines (`_cat_file` and so on)
use an `AsyncClient` of the running loop. Both carry out the same plans (`plans.py`, `listing.py`).

A cache, not an archive: files are soft-pinned for a while and then evictable under pressure, so
reading may raise FileNotFoundError for what was written; never are other bytes returned.
Connections are made when first needed; instances can be pickled and hold no secret, only the name
of the file with it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from glob import has_magic
from typing import TYPE_CHECKING, Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.spec import AbstractFileSystem
from fsspec.utils import isfilelike, other_paths, stringify_path

from mooncake_store.config.settings import load_client
from mooncake_store.fs.arguments import part_bytes, pin_options, pins_of_call
from mooncake_store.fs.calls import PlannedCalls
from mooncake_store.fs.files import PoolReader, PoolWriter
from mooncake_store.fs.listing import files_among, remove_directory
from mooncake_store.fs.paths import PROTOCOL, clean, options_of
from mooncake_store.fs.plans import Plans, exists_error, missing_error

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MooncakeFileSystem"]


class MooncakeFileSystem(PlannedCalls):
    """A namespace of a store as a filesystem.

    `url` names both: mooncake://host:port/namespace. `pin` says how files that are written are
    kept under pressure: "soft" (for `ttl`, the store's default without it), "hard" or None. Files
    above `part_size` are stored in parts. `settings` are those of `Client`.
    """

    protocol = PROTOCOL
    root_marker = ""
    cachable = True
    mirror_sync_methods = False  # fsspec's would send blocking calls through an event loop

    def __init__(
        self,
        url: str | None = None,
        *,
        pin: str | None = "soft",
        ttl: float | str | None = None,
        part_size: int | str = "8MiB",
        asynchronous: bool = False,
        loop: Any = None,
        batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        # fsspec keeps what these four mean to itself; what is left configures the client.
        own = ("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache")
        foreign = {name: settings.pop(name) for name in own if name in settings}
        AbstractFileSystem.__init__(self, **foreign)
        self._prepare(asynchronous, loop, batch_size)
        self.config = load_client(url, settings)
        self._settings = settings | {"url": self.config.url}
        self.plans = Plans(part_bytes(part_size), pin_options(pin, ttl))
        self.blocksize = self.plans.part_bytes

    # What fsspec asks of the class.

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(entry) for entry in path]
        return clean(stringify_path(path))

    @staticmethod
    def _get_kwargs_from_urls(path: Any) -> dict[str, str]:
        return options_of(stringify_path(path))

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        return f"{self.config.url.rstrip('/')}/{self._strip_protocol(name)}"

    @property
    def fsid(self) -> str:
        """What two instances for the same files have in common."""
        return self.config.url

    # Looking.

    def created(self, path: str) -> datetime.datetime:
        """When a file was written."""
        entry = self.info(path)
        if entry["type"] != "file":
            raise IsADirectoryError(path)
        return datetime.datetime.fromtimestamp(entry["created"], datetime.UTC)

    modified = created
    """A file is written once, so when it was made is when it was changed."""

    def checksum(self, path: str) -> int:
        """A number that changes with the content of a file."""
        entry = self.info(path)
        return int(entry.get("checksum", 0))

    def ukey(self, path: str) -> str:
        """A text that changes whenever a file is written anew."""
        entry = self.info(path)
        return f"{entry.get('generation', 0):x}-{entry.get('checksum', 0):x}"

    # Reading.

    def get_file(
        self,
        rpath: str,
        lpath: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        """Copy a file to the local disk; a copy that fails leaves nothing behind."""
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        if outfile is None and self.isdir(rpath) and not self.isfile(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        if outfile is None:
            os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        with self.open(rpath, "rb") as source, contextlib.ExitStack() as stack:
            if outfile is None:
                outfile = stack.enter_context(_fresh_file(lpath))
            callback.set_size(source.size)
            while data := source.read(self.blocksize):
                outfile.write(data)
                callback.relative_update(len(data))

    # Writing.

    def put_file(
        self,
        lpath: Any,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Copy a file from the local disk; refused at once when the store could not hold it."""
        if os.path.isfile(lpath):
            pins = pins_of_call(self.plans, kwargs.get("pin", "default"), kwargs.get("ttl"))
            size, path = os.path.getsize(lpath), self._strip_protocol(rpath)
            if size > self.plans.part_bytes:
                self._do(self.plans.room.require(size, path, pins))
        super().put_file(lpath, rpath, callback=callback, mode=mode, **kwargs)

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Rename a file, with `recursive` a directory, or what is chosen as in `cp`.

        No bytes move within a shard.
        """
        one, other = self._strip_protocol(path1), self._strip_protocol(path2)
        whole = isinstance(one, str) and isinstance(other, str) and not has_magic(one)
        if one == other:
            return
        if not whole or maxdepth is not None:
            chosen = self._chosen(path1, path2, recursive, maxdepth)
            self._do(self.plans.move(chosen))
            return
        a_file = self.isfile(one)
        a_tree = recursive and self.isdir(one)
        if not a_file and not a_tree:
            raise missing_error(one)
        content_only = a_tree and stringify_path(path1).endswith("/")
        into = stringify_path(path2).endswith("/") or self.isdir(other)
        if into and not content_only:
            other = f"{other}/{one.rpartition('/')[2]}".lstrip("/")
        if a_file:
            self._do(self.plans.move([(one, other)]))
        if a_tree and one != other:
            self._do(self.plans.move_tree(one, other))

    def _chosen(
        self, path1: Any, path2: Any, recursive: bool, maxdepth: int | None
    ) -> list[tuple[str, str]]:
        """The files that a list or pattern chooses, each with its new name."""
        found = self.expand_path(path1, recursive=recursive, maxdepth=maxdepth)
        if isinstance(path2, list):
            pairs = list(zip(self._strip_protocol(path1), self._strip_protocol(path2), strict=True))
        else:
            into = stringify_path(path2).endswith("/") or self.isdir(path2)
            one_match = isinstance(path1, str) and has_magic(path1) and len(found) == 1
            names = other_paths(found, path2, exists=isinstance(path1, str) and (into or one_match))
            pairs = list(zip(found, self._strip_protocol(names), strict=True))
        files = set(self._do(files_among([source for source, _ in pairs])))
        return [pair for pair in pairs if pair[0] in files]

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file, or with truncate=False give one that exists the date of now."""
        if truncate or not self.exists(path):
            super().touch(path, truncate=True, **kwargs)
        elif self.isfile(path):
            self._do(self.plans.touch(self._strip_protocol(path)))

    def rmdir(self, path: str) -> None:
        """Remove the mark of an empty directory; raises OSError when it is not empty."""
        self._do(remove_directory(self._strip_protocol(path)))

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Any = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file; modes r, w and x, text and binary. `pin` and `ttl` as in `pipe`."""
        if compression is None or "b" not in mode:
            return super().open(
                path, mode, block_size, cache_options, compression=compression, **kwargs
            )
        kind = get_compression(path, compression)
        file = super().open(path, mode, block_size, cache_options, **kwargs)
        packed = compr[kind](file, mode=mode[0])
        if packed is not file:
            # These leave the file below to the garbage collector, which stores nothing here.
            both = contextlib.ExitStack()
            both.callback(file.close)
            both.callback(packed.close)  # which is the first to be called
            packed.close = both.close
        return packed

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        pin: str | None = "default",
        ttl: float | str | None = None,
        **kwargs: Any,
    ) -> PoolReader | PoolWriter:
        path = self._strip_protocol(path)
        if mode == "rb":
            return PoolReader(self, path)
        if mode not in ("wb", "xb"):
            raise ValueError(
                f"mode {mode!r} is not possible: objects are written once; "
                "read the file and write it anew, or use modes r, w and x"
            )
        exclusive = mode == "xb"
        if exclusive and self.isfile(path):
            raise exists_error(path)
        return PoolWriter(
            self,
            path,
            exclusive=exclusive,
            pins=pins_of_call(self.plans, pin, ttl),
            autocommit=autocommit,
        )


@contextlib.contextmanager
def _fresh_file(path: str) -> Iterator[Any]:
    """A local file that takes its name when it is complete."""
    partial = f"{path}.{os.getpid():x}-{threading.get_ident():x}.part"
    try:
        with open(partial, "xb") as out:
            yield out
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
