"""Open files: `PoolReader` and `PoolWriter`.

A reader holds a lease on all objects of its file, taken in one request when the file is opened
and prolonged as long as the file is read. Small reads look at one object at a time through a view:
where memory is shared with its owner nothing is copied but what the caller asks for. Large reads
take whole parts, many at once, straight to where the caller gets them. When a file rested for
longer than its lease, the next read asks the store whether the objects are still the same, and
raises FileNotFoundError if they are not. It never returns other bytes.

A writer collects one part at a time and stores it; nothing is visible before `close`, which puts
the object that carries the name. It stops where the file has become larger than the store could
hold, and where later parts took the place of the first. Leaving a `with` block by an exception
gives the file up, and so does the garbage collector: only `close` (or the end of a transaction)
stores a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from mooncake_store.client.extension import new_bytes
from mooncake_store.errors import LeaseExpiredError, NotFoundError, StoreError
from mooncake_store.fs.gather import Gather
from mooncake_store.fs.parts import ORDINARY, Attributes, Manifest, needs_parts
from mooncake_store.fs.paths import key_of
from mooncake_store.fs.plan import Call, copy_of, run
from mooncake_store.fs.plans import evicted_error, missing_error
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from types import TracebackType

    from mooncake_store.client import Client, View
    from mooncake_store.fs.plan import Plan
    from mooncake_store.fs.plans import Plans

__all__ = ["Files", "PoolReader", "PoolWriter"]

_PEEK_BYTES = 64 << 10
_LEASE_S = 30.0
"""How long an open file may rest without losing its hold on its objects."""
_RENEW_BELOW_S = _LEASE_S / 3
# Parts written by one call are stored in batches of this many bytes.
_BATCH_BYTES = 64 << 20


class Files(Protocol):
    """What open files belong to: a filesystem, or who does without one."""

    @property
    def client(self) -> Client:
        """Who moves their bytes."""

    @property
    def plans(self) -> Plans:
        """How they are stored."""


class PoolReader(io.BufferedIOBase):
    """A file open for reading; seekable. Made by `MooncakeFileSystem.open`."""

    closed = False  # not a property as elsewhere: caches of fsspec set it
    cache: Any = None
    """Where reads go instead, if fsspec put something here: blocks on a local disk."""

    def __init__(self, fs: Files, path: str) -> None:
        self.fs = fs
        self.path = path
        self.mode = "rb"
        self.blocksize = fs.plans.part_bytes
        self._client = client = fs.client
        self._plans = plans = fs.plans
        self._position = 0
        self._view: View | None = None
        self._number = -1
        self._leased_until = 0.0
        self._manifest: Manifest | None = None
        self.size, self._manifest = run(client, plans.manifest(path))
        if self._manifest is None:
            # The object may be another one than the one that was measured: take this one's size.
            self.size = len(self._open_part(0))
        else:
            self._lease()

    def _lease(self) -> None:
        """Have all parts leased for a while longer; raises FileNotFoundError if any is gone."""
        assert self._manifest is not None
        began = time.monotonic()
        if began < self._leased_until - _RENEW_BELOW_S:
            return
        leased = self._client.lease_many(self._manifest.all_keys(), ttl=_LEASE_S)
        self._plans.readers.setdefault(self._manifest.file, set()).add(id(self))
        for _, error in leased.errors():
            self._end_leases()
            raise self._failure(error)
        self._leased_until = began + _LEASE_S

    def _end_leases(self) -> None:
        """Give the leases of the parts back, unless another reader here has the file open."""
        assert self._manifest is not None
        readers = self._plans.readers.get(self._manifest.file, set())
        readers.discard(id(self))
        if not readers:
            self._plans.readers.pop(self._manifest.file, None)
            self._client.release_many(self._manifest.all_keys())

    def _open_part(self, number: int) -> memoryview:
        """Show one part, or the only object; the one before is given back."""
        self._give_back()
        try:
            if self._manifest is None:
                self._view = self._client.view(key_of(self.path), ttl=_LEASE_S)
            else:
                self._view = self._client.view(self._manifest.key(number))
        except (NotFoundError, LeaseExpiredError):
            raise self._lost() from None
        self._number = number
        return self._view.data

    def _lost(self) -> OSError:
        return missing_error(self.path, "evicted, removed or replaced while it was open")

    def _failure(self, error: Exception) -> Exception:
        """What is raised for an error of the store: only what is gone is a missing file."""
        gone = isinstance(error, NotFoundError | LeaseExpiredError)
        return self._lost() if gone else copy_of(error)

    def _give_back(self) -> None:
        view, self._view, self._number = self._view, None, -1
        if view is not None:
            view.release()

    def _window(self) -> memoryview:
        """What can be read from the position on without opening another part."""
        if self._manifest is None:
            number, start = 0, 0
        else:
            number = self._position // self._manifest.part_bytes
            start = number * self._manifest.part_bytes
            self._lease()
        if number == self._number:
            assert self._view is not None
            if self._view.zero_copy and self._view.remaining_s < _RENEW_BELOW_S:
                self._renew()
            data = self._view.data
        else:
            data = self._open_part(number)
        return data[self._position - start :]

    def _renew(self) -> None:
        assert self._view is not None
        try:
            self._view.renew()
        except (LeaseExpiredError, NotFoundError):
            self._give_back()
            raise self._lost() from None

    def _still_good(self) -> None:
        """Call after bytes were copied out of the window, before anybody gets them."""
        view = self._view
        if view is not None and view.zero_copy and view.remaining_s <= 0:
            self._renew()

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position."""
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, beyond the end too."""
        self._check_open()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}.get(whence)
        if base is None:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the file goes; return the number of bytes."""
        self._check_open()
        target = memoryview(buffer).cast("B")
        wanted = max(0, min(len(target), self.size - self._position))
        if self.cache is not None:
            target[:wanted] = self.read(wanted)
        elif wanted:
            self._fill(target[:wanted], address_of(target, writable=True)[0])
        return wanted

    def _fill(self, target: memoryview, address: int) -> None:
        """Read as many bytes as `target` has; `address` is where it lies."""
        gather, wanted, done = Gather(), len(target), 0
        began = self._position
        if self._manifest is not None:
            self._lease()
        while done < wanted:
            whole = self._whole_part(wanted - done)
            if whole:
                key, count = whole
                gather.want(key, 0, count, count, address + done)
            else:
                window = self._window()
                count = min(wanted - done, len(window))
                target[done : done + count] = window[:count]
                self._still_good()
            done += count
            self._position += count
        run(self._client, gather.fetch())
        for error in gather.failures.values():
            self._position = began
            raise self._failure(error)

    def _whole_part(self, wanted: int) -> tuple[str, int] | None:
        """Key and size of the part that begins here, if all of it is wanted."""
        manifest = self._manifest
        if manifest is None:
            return None
        number, within = divmod(self._position, manifest.part_bytes)
        start, stop = manifest.span(number)
        if within or wanted < stop - start or number == self._number:
            return None
        return manifest.key(number), stop - start

    def readinto1(self, buffer: Any) -> int:
        """Do what `readinto` does: no part is further away than the next one."""
        return self.readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, fewer only at the end of the file; all that is left without it."""
        self._check_open()
        left = max(0, self.size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        if self.cache is None:
            return self._read(wanted)
        cached = bytes(self.cache._fetch(self._position, self._position + wanted))
        self._position += wanted
        return cached

    def _read(self, wanted: int) -> bytes:
        """Read that many bytes, which are there, from the store."""
        if self._whole_part(wanted) is None:
            window = self._window()
            if wanted <= len(window):
                data = bytes(window[:wanted])
                self._still_good()
                self._position += wanted
                return data
        data, address = new_bytes(wanted)
        content = (ctypes.c_ubyte * wanted).from_address(address)
        self._fill(memoryview(content).cast("B"), address)
        return data

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Bytes from the store for a cache of fsspec, wherever the position is."""
        place, self._position = self._position, start
        try:
            return self._read(min(end, self.size) - start)
        finally:
            self._position = place

    def read1(self, size: int = -1) -> bytes:
        """Read what is at hand, at most `size` bytes."""
        return self.read(_PEEK_BYTES if size < 0 else size)

    def peek(self, size: int = 0) -> bytes:
        """Bytes from the position on, which does not move; this is what makes lines fast."""
        self._check_open()
        if self._position >= self.size:
            return b""
        if self.cache is not None:
            last = min(self.size, self._position + max(size, _PEEK_BYTES))
            return bytes(self.cache._fetch(self._position, last))
        data = bytes(self._window()[: max(size, _PEEK_BYTES)])
        self._still_good()
        return data

    def close(self) -> None:
        """Give the lease back. Idempotent."""
        if not self.closed:
            try:
                self._give_back()
                if self._manifest is not None:
                    self._end_leases()
            except StoreError:
                pass  # leases end by themselves when the store cannot be told
            finally:
                super().close()
                self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the path anew where it is unpickled, and go on from the same position."""
        return _reopen, (self.fs, self.path, self._position)

    def __del__(self) -> None:
        """Do nothing: a lease that nobody gives back ends by itself."""

    def __repr__(self) -> str:
        return f"<PoolReader {self.path!r}, {self.size} bytes>"


def _reopen(fs: Files, path: str, position: int) -> PoolReader:
    reader = PoolReader(fs, path)
    reader.seek(position)
    return reader


class PoolWriter(io.BufferedIOBase):
    """A file being written, from its beginning to its end. Made by `MooncakeFileSystem.open`."""

    def __init__(
        self,
        fs: Files,
        path: str,
        *,
        exclusive: bool = False,
        pins: dict[str, Any] | None = None,
        autocommit: bool = True,
        attributes: Attributes = ORDINARY,
    ) -> None:
        self.path = path
        self.mode = "xb" if exclusive else "wb"
        self.autocommit = autocommit
        self.blocksize = fs.plans.part_bytes
        self.size = 0
        self._client = fs.client
        self._plans = plans = fs.plans
        self._exclusive = exclusive
        self._pins = plans.pins if pins is None else pins
        self._buffer = bytearray()
        self._manifest = Manifest.make(0, plans.part_bytes, attributes)
        self._stored = 0
        self._settled = False

    def writable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """How many bytes were written."""
        return self.size

    def write(self, data: Any) -> int:
        """Append to the file; large writes are stored from where they lie."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._settled:
            raise ValueError("the file was given up, or is complete")
        view = memoryview(data).cast("B")
        part, done = self.blocksize, 0
        if len(self._buffer) + len(view) >= part:
            self._do(self._fitting(self.size + len(view)))
        while done < len(view):
            if not self._buffer and len(view) - done >= part:
                count = min((len(view) - done) // part, max(1, _BATCH_BYTES // part))
                self._store([view[done + n * part : done + (n + 1) * part] for n in range(count)])
                done += count * part
                continue
            count = min(part - len(self._buffer), len(view) - done)
            self._buffer += view[done : done + count]
            done += count
            if len(self._buffer) == part and done < len(view):
                self._store([self._buffer])
                self._buffer = bytearray()
        self.size += len(view)
        return len(view)

    def _store(self, values: list[Any]) -> None:
        keys = [self._manifest.key(self._stored + at) for at in range(len(values))]
        self._do(self._plans.put_parts(keys, values))
        self._stored += len(values)

    def _do(self, plan: Plan[None]) -> None:
        try:
            run(self._client, plan)
        except BaseException:
            self.discard()
            raise

    def _fitting(self, size: int) -> Plan[None]:
        """Raise NoSpaceError when the file cannot have this size, or has begun to evict itself."""
        large = yield from self._plans.room.require_growth(size, self.path, self._pins)
        if large and self._stored and not (yield Call("exists", (self._manifest.key(0),))):
            raise evicted_error(
                f"the beginning of the file was evicted while its byte {self.size} was written"
            )

    def flush(self) -> None:
        """Do nothing: a part is stored when it is full, the file when it is closed."""

    def close(self) -> None:
        """Store the file under its name, unless a transaction does that later."""
        if self.closed:
            return
        try:
            if self.autocommit and not self._settled:
                self.commit()
        finally:
            super().close()

    def commit(self) -> None:
        """Make the file visible, at once and whole."""
        if self._settled:
            return
        self._settled = True
        data = memoryview(self._buffer)
        manifest = replace(self._manifest, size=self.size)
        single = (
            manifest.attributes == ORDINARY
            and not self._stored
            and not needs_parts(data, self.blocksize)
        )
        try:
            if single:
                head: Any = data
            else:
                if len(data):
                    self._store([data])
                head = manifest.encode()
            run(
                self._client,
                self._plans.commit(
                    [self.path],
                    [head],
                    {} if single else {0: manifest},
                    exclusive=self._exclusive,
                    pins=self._pins,
                ),
            )
        except BaseException:
            self._remove_parts()
            raise

    def discard(self) -> None:
        """Give the file up; the parts that were stored are removed."""
        if not self._settled:
            self._settled = True
            self._remove_parts()

    def _remove_parts(self) -> None:
        stored, self._stored = self._stored, 0
        self._buffer = bytearray()
        if stored:
            keys = [self._manifest.key(number) for number in range(stored)]
            with contextlib.suppress(StoreError):  # what led here is told; they go by themselves
                self._client.remove_many(keys, force=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.discard()
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Raise TypeError: nobody else can go on with a file that is being written."""
        raise TypeError(f"{self!r} cannot be pickled: it is being written; close it first")

    def __del__(self) -> None:
        """Do nothing: a file that nobody closed was not finished. Its parts are unpinned."""

    def __repr__(self) -> str:
        return f"<PoolWriter {self.path!r}, {self.size} bytes so far>"
