"""What the filesystem does, as plans: generators that yield client calls and receive the answers.

The blocking and the asynchronous filesystem run the same plans with their own clients, so there
is one logic for both. A batch of any size is a fixed number of requests. Errors of the store pass
through, but "not found" and "exists" become the built-in exceptions that callers of a filesystem
catch. No I/O here: `plan.py` carries plans out.

Overwriting is one upsert: readers see the old file or the new one. Parts of what was replaced
or removed go at once (memory that somebody reads just then is kept by the store until its lease
ends). Parts are pinned for a minute while they are written, and as the file asks when it is
complete, so what a dead writer leaves behind does not stay for long.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.client.extension import NOT_RENAMED, new_bytes
from mooncake_store.errors import InvalidArgumentError, NoSpaceError, NotFoundError
from mooncake_store.fs.gather import Gather, bounded
from mooncake_store.fs.parts import MANIFEST_BYTES, Attributes, Manifest, is_manifest, needs_parts
from mooncake_store.fs.paths import HIDDEN, key_of, prefix_of
from mooncake_store.fs.plan import Call, copy_of
from mooncake_store.fs.room import Room

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike

    from mooncake_store.client.results import BatchResult
    from mooncake_store.fs.plan import Plan

__all__ = ["Plans", "evicted_error", "exists_error", "missing_error"]

COMMIT_ATTEMPTS = 100
"""How often a file is put again while other writers of the same path keep cutting in."""
WHILE_WRITING = {"soft_pin": True, "pin_ttl": "60s"}
"""Parts are kept while the others are written; what a dead writer leaves is soon evictable."""
COPY_BYTES = 64 << 20
"""How much of a large file is in flight while it is copied."""


def missing_error(path: str, why: str = "no such file or directory in the store") -> OSError:
    """What callers of a filesystem expect when a name leads to nothing."""
    return FileNotFoundError(errno.ENOENT, why, path)


def exists_error(path: str) -> OSError:
    """What an exclusive create raises."""
    return FileExistsError(errno.EEXIST, "the file exists already", path)


def contended_error(path: str) -> OSError:
    """What a write raises that others of the same path overtook again and again."""
    return OSError(errno.EBUSY, "others keep writing the file", path)


def evicted_error(what: str) -> NoSpaceError:
    """What a writer raises whose parts had to go before the file was complete."""
    return NoSpaceError(
        what,
        operation="write",
        advice="add a segment, remove or unpin other objects, or write a smaller file",
    )


class Plans:
    """The plans of one filesystem. `pins` are the put options of finished files."""

    def __init__(self, part_bytes: int, pins: dict[str, Any]) -> None:
        self.part_bytes = part_bytes
        self.pins = pins
        self.room = Room()
        self.readers: dict[bytes, set[int]] = {}
        """Who has files in parts open, by the parts' name: the last one gives the leases back."""

    # Reading.

    def manifest(self, path: str) -> Plan[tuple[int, Manifest | None]]:
        """The size of a file, and its manifest when it is in parts."""
        try:
            found = yield Call("query", (key_of(path),))
            if found.size != MANIFEST_BYTES:
                return found.size, None
            data = yield Call("get", (key_of(path),))
        except NotFoundError:
            raise missing_error(path) from None
        if not is_manifest(data):
            return len(data), None
        manifest = Manifest.decode(data, path)
        return manifest.size, manifest

    def manifests(self, keys: Sequence[Any]) -> Plan[dict[int, Manifest]]:
        """The manifests among keys, by position; keys that name nothing are left out."""
        found = yield Call("query_many", (keys,))
        return (yield from self.decode(keys, found.sizes))

    def decode(self, keys: Sequence[Any], sizes: ArrayLike) -> Plan[dict[int, Manifest]]:
        """The manifests among objects of these sizes, by position."""
        suspects = np.flatnonzero(np.asarray(sizes) == MANIFEST_BYTES).tolist()
        if not suspects:
            return {}
        got = yield Call("get_many", ([keys[at] for at in suspects],))
        return {
            at: Manifest.decode(value, str(keys[at]))
            for at, value in zip(suspects, got.values, strict=True)
            if value is not None and is_manifest(value)
        }

    def read(self, path: str, start: int | None, end: int | None) -> Plan[bytes]:
        """A file, or what a slice [start:end] of it holds."""
        if not start and end is None:
            (value,) = yield from self.read_many([path])
        else:
            (value,) = yield from self.read_ranges([path], [start], [end])
        if isinstance(value, Exception):
            raise copy_of(value)
        return value

    def read_many(self, paths: Sequence[str]) -> Plan[list[bytes | Exception]]:
        """Whole files, or why not: one request for all heads, one for all parts."""
        out: list[Any] = yield from self._heads(paths)
        cut = [at for at, head in enumerate(out) if isinstance(head, Manifest)]
        joined = yield from self._gather([(paths[at], out[at], 0, out[at].size) for at in cut])
        for at, value in zip(cut, joined, strict=True):
            out[at] = value
        return out

    def _heads(self, paths: Sequence[str]) -> Plan[list[bytes | Manifest | Exception]]:
        """What carries the name of each file: its bytes or its manifest, or why it is not read."""
        got = yield Call("get_many", ([key_of(path) for path in paths],))
        heads: list[bytes | Manifest | Exception] = []
        for at, (path, value) in enumerate(zip(paths, got.values, strict=True)):
            if value is None:
                heads.append(_failure(got.error(at), path))
            else:
                heads.append(Manifest.decode(value, path) if is_manifest(value) else value)
        return heads

    def read_ranges(
        self, paths: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None]
    ) -> Plan[list[bytes | Exception]]:
        """Slices of files, or why not.

        One request finds and leases all files, so that reading needs no other; files in parts
        take one more for all manifests and one for all parts.
        """
        unique = list(dict.fromkeys(paths))
        found = yield Call("lease_many", ([key_of(path) for path in unique],))
        files: dict[str, Any] = dict(zip(unique, found.sizes.tolist(), strict=True))
        files.update((unique[at], _failure(error, unique[at])) for at, error in found.errors())
        suspects = [path for path, size in files.items() if size == MANIFEST_BYTES]
        if suspects:
            heads = zip(suspects, (yield from self._heads(suspects)), strict=True)
            files.update((path, head) for path, head in heads if not isinstance(head, bytes))
        out: list[bytes | Exception] = [b""] * len(paths)
        spans, places = [], []
        for at, (path, start, end) in enumerate(zip(paths, starts, ends, strict=True)):
            file = files[path]
            if isinstance(file, Exception):
                out[at] = file
                continue
            total = file.size if isinstance(file, Manifest) else file
            first, last, _ = slice(start, end).indices(total)
            if first < last:
                spans.append((path, file, first, last))
                places.append(at)
        for at, value in zip(places, (yield from self._gather(spans)), strict=True):
            out[at] = value
        return out

    def _gather(
        self, spans: Sequence[tuple[str, Manifest | int, int, int]]
    ) -> Plan[list[bytes | Exception]]:
        """Bytes [first, last) of files, each in parts or an object of a known size."""
        gather = Gather()
        values: list[bytes | Exception] = []
        used: list[list[Any]] = []
        for path, file, first, last in spans:
            value, address = new_bytes(last - first)
            values.append(value)
            if not isinstance(file, Manifest):
                used.append([key_of(path)])
                gather.want(used[-1][0], first, last - first, file, address)
                continue
            numbers = range(first // file.part_bytes, -(-last // file.part_bytes))
            used.append([file.key(number) for number in numbers])
            for number, key in zip(numbers, used[-1], strict=True):
                start, stop = file.span(number)
                low, high = max(first, start), min(last, stop)
                gather.want(key, low - start, high - low, stop - start, address + low - first)
        yield from gather.fetch()
        for at, keys in enumerate(used):
            failed = [key for key in keys if key in gather.failures]
            if failed:
                values[at] = _failure(gather.failures[failed[0]], spans[at][0])
        return values

    # Writing.

    def write_many(
        self, files: dict[str, Any], *, exclusive: bool, pins: dict[str, Any] | None = None
    ) -> Plan[None]:
        """Store files, each at once and whole. Raises for the first one that could not be."""
        pins = self.pins if pins is None else pins
        paths = list(files)
        size = sum(memoryview(value).nbytes for value in files.values())
        if size > self.part_bytes:
            yield from self.room.require(size, paths[0], pins)
        heads: list[Any] = []
        fresh: dict[int, Manifest] = {}
        part_keys: list[str] = []
        part_values: list[memoryview] = []
        for at, path in enumerate(paths):
            data = memoryview(files[path]).cast("B")
            if not needs_parts(data, self.part_bytes):
                heads.append(files[path] if type(files[path]) is bytes else data)
                continue
            manifest = fresh[at] = Manifest.make(data.nbytes, self.part_bytes)
            heads.append(manifest.encode())
            for number in range(manifest.count):
                first, last = manifest.span(number)
                part_keys.append(manifest.key(number))
                part_values.append(data[first:last])
        if part_keys:
            yield from self.put_parts(part_keys, part_values)
        yield from self.commit(paths, heads, fresh, exclusive=exclusive, pins=pins)

    def put_parts(self, keys: list[str], values: Sequence[Any]) -> Plan[None]:
        """Store parts that no manifest names yet; all or none of them."""
        put = yield Call("put_many", (keys, values), WHILE_WRITING)
        if not put.ok:
            yield Call("remove_many", (keys,), {"force": True})
            put.check()

    def commit(
        self,
        paths: Sequence[str],
        heads: Sequence[Any],
        fresh: dict[int, Manifest],
        *,
        exclusive: bool,
        pins: dict[str, Any],
    ) -> Plan[None]:
        """Put the objects that carry the files' names; the parts of `fresh` stand already."""
        parts = [key for manifest in fresh.values() for key in manifest.all_keys()]
        yield from self._secure(parts, pins)
        waiting = list(range(len(paths)))
        for _ in range(COMMIT_ATTEMPTS):
            keys = [key_of(paths[at]) for at in waiting]
            replaced = {} if exclusive else (yield from self.manifests(keys))
            values = [heads[at] for at in waiting]
            put = yield Call("put_many", (keys, values), {"upsert": not exclusive, **pins})
            lost = put.already_present | put.superseded | (put.statuses != 0)
            refused = np.flatnonzero(lost).tolist()
            kept = set(refused)
            yield from self.remove_parts(old for at, old in replaced.items() if at not in kept)
            if not refused:
                return
            path, error = paths[waiting[refused[0]]], put[refused[0]].error
            waiting = [waiting[at] for at in refused]
            if exclusive or not put.superseded[refused[0]]:
                break
            # Another writer began the same file meanwhile; the one who ends last has it.
        yield from self.remove_parts(fresh[at] for at in waiting if at in fresh)
        raise copy_of(error or (exists_error(path) if exclusive else contended_error(path)))

    def _secure(self, parts: list[str], pins: dict[str, Any]) -> Plan[None]:
        """Pin the parts of finished files, or unpin them; raises if one was evicted meanwhile."""
        if not parts:
            return
        # The pin of the time of writing ends here, also where none takes its place.
        soft, hard = pins.get("soft_pin", False), pins.get("hard_pin")
        options = {"soft": soft, "hard": hard, "ttl": pins.get("pin_ttl")}
        pinned = yield Call("pin_many", (parts,), options)
        missing = len(pinned.failed)
        if missing:
            yield Call("remove_many", (parts,), {"force": True})
            raise evicted_error(
                f"{missing} of {len(parts)} parts were evicted before the file was complete"
            )

    def dress(self, path: str, attributes: Attributes) -> Plan[None]:
        """Give a file other attributes; its bytes move only if it had no manifest so far."""
        head = yield from self._head(path)
        if is_manifest(head):
            dressed = replace(Manifest.decode(head, path), attributes=attributes).encode()
            put = yield Call("put_many", ([key_of(path)], [dressed]), {"upsert": True, **self.pins})
            put.check()
            return
        fresh = Manifest.make(len(head), max(len(head), self.part_bytes), attributes)
        yield from self.put_parts(fresh.all_keys(), [head])
        yield from self.commit(
            [path], [fresh.encode()], {0: fresh}, exclusive=False, pins=self.pins
        )

    def touch(self, path: str) -> Plan[None]:
        """Give a file the date of now; the parts of a large one stay where they are."""
        head = yield from self._head(path)
        if is_manifest(head):
            attributes = Manifest.decode(head, path).attributes
            yield from self.dress(path, attributes._replace(mtime_ns=None))
        else:
            yield from self.commit([path], [head], {}, exclusive=False, pins=self.pins)

    def _head(self, path: str) -> Plan[bytes]:
        """The object that carries a file's name: all of its bytes, or its manifest."""
        try:
            head: bytes = yield Call("get", (key_of(path),))
        except NotFoundError:
            raise missing_error(path) from None
        return head

    def remove_parts(self, manifests: Iterable[Manifest]) -> Plan[None]:
        """Remove the parts of files that are no more."""
        keys = [key for manifest in manifests for key in manifest.all_keys()]
        if keys:
            yield Call("remove_many", (keys,), {"force": True})

    def remove(self, paths: Sequence[str], *, strict: bool) -> Plan[None]:
        """Remove files; `strict` raises FileNotFoundError for the first one that was none."""
        gone = yield from self._take([key_of(path) for path in paths])
        if strict and not gone.ok:
            raise missing_error(paths[int(gone.failed[0])])

    def _take(self, keys: Sequence[bytes]) -> Plan[BatchResult]:
        """Remove objects and the parts they name; raises for one that is there and stays."""
        manifests = yield from self.manifests(keys)
        gone: BatchResult = yield Call("remove_many", (keys,), {"force": True})
        yield from self.remove_parts(manifests.values())
        for _, error in gone.errors():
            if not isinstance(error, NotFoundError):
                raise copy_of(error)
        return gone

    def remove_tree(self, path: str) -> Plan[None]:
        """Remove a file, or everything below a directory; raises FileNotFoundError for neither."""
        listed = yield Call("list", (prefix_of(path),))
        keys = [key for item in listed if not _hidden(key := item.key)]
        if path:
            keys.append(key_of(path))
        if not keys:
            return
        gone = yield from self._take(keys)
        if len(gone.failed) == len(keys):
            raise missing_error(path)

    def move(self, pairs: Sequence[tuple[str, str]]) -> Plan[None]:
        """Give files other names, replacing what has them; no bytes move within a shard."""
        sources, targets = ([key_of(pair[side]) for pair in pairs] for side in (0, 1))
        yield from self.move_keys(sources, targets)

    def move_tree(self, source: str, target: str) -> Plan[None]:
        """Give all below a directory, marks of empty ones too, names below another one."""
        prefix, other = prefix_of(source), prefix_of(target)
        if other.startswith(prefix):
            raise InvalidArgumentError(
                f"{source!r} cannot be moved into itself, to {target!r}", operation="move"
            )
        listed = (yield Call("list_columns", (prefix,))).keys
        if not listed:
            raise missing_error(source)
        keys = [key.encode() if isinstance(key, str) else key for key in listed]
        yield from self.move_keys(keys, [other + key[len(prefix) :] for key in keys])

    def move_keys(self, sources: Sequence[bytes], targets: Sequence[bytes]) -> Plan[None]:
        """Give objects other keys; raises for the first that could not be, after all others.

        Each is at its new name before it leaves the old one, or at both ends at once.
        """
        replaced = yield from self.manifests(targets)
        renamed = yield Call("rename_many", (sources, targets), {"overwrite": True, "force": True})
        status = renamed.statuses
        copied = np.flatnonzero(status == NOT_RENAMED).tolist()
        done = set(np.flatnonzero(status == 0).tolist()) | set(copied)
        if copied:
            yield from self._move_bytes([(sources[at], targets[at]) for at in copied])
        yield from self.remove_parts(
            old for at, old in replaced.items() if at in done and sources[at] != targets[at]
        )
        for at, error in renamed.errors():
            if at not in done:
                raise copy_of(_failure(error, os.fsdecode(sources[at])))

    def _move_bytes(self, pairs: Sequence[tuple[bytes, bytes]]) -> Plan[None]:
        """Move objects to another shard: put anew, then removed, a bounded batch at a time."""
        found = yield Call("query_many", ([source for source, _ in pairs],))
        for step in bounded(found.sizes.tolist(), COPY_BYTES):
            sources = [source for source, _ in pairs[step]]
            targets = [target for _, target in pairs[step]]
            got = yield Call("get_many", (sources,), {"copy": False})
            for at, error in got.errors():
                raise copy_of(_failure(error, os.fsdecode(sources[at])))
            put = yield Call("put_many", (targets, got.values), {"upsert": True, **self.pins})
            put.check()
            yield Call("remove_many", (sources,), {"force": True})

    def copy(self, source: str, target: str) -> Plan[None]:
        """Copy one file, a bounded piece at a time; a directory needs no copy of itself."""
        (value,) = (yield Call("get_many", ([key_of(source)],), {"copy": False})).values
        if value is None:
            if (yield Call("list", (prefix_of(source),), {"limit": 1})):
                return
            raise missing_error(source)
        if not is_manifest(value):
            yield from self.commit([target], [value], {}, exclusive=False, pins=self.pins)
            return
        old = Manifest.decode(value, source)
        yield from self.room.require(old.size, target, self.pins)
        new = Manifest.make(old.size, old.part_bytes, old.attributes)
        sources, targets, stored = old.all_keys(), new.all_keys(), list[str]()
        step = max(1, COPY_BYTES // old.part_bytes)
        try:
            for first in range(0, old.count, step):
                piece = slice(first, first + step)
                got = yield Call("get_many", (sources[piece],), {"copy": False})
                for _, error in got.errors():
                    raise copy_of(_failure(error, source))
                yield from self.put_parts(targets[piece], got.values)
                stored += targets[piece]
        except Exception:
            if stored:
                yield Call("remove_many", (stored,), {"force": True})
            raise
        yield from self.commit([target], [new.encode()], {0: new}, exclusive=False, pins=self.pins)


def _hidden(key: str | bytes) -> bool:
    return key[:1] in (HIDDEN, HIDDEN.encode())


def _failure(error: Exception | None, path: str) -> Exception:
    """The exception a filesystem raises for an error of the store."""
    if error is None or isinstance(error, NotFoundError):
        return missing_error(path)
    return error
