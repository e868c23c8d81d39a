"""Directories as plans: what lies below a prefix, and what a path is.

A listing is one scan of names; the store answers it from its own table, so nothing is cached here
and what was written a moment ago is in it. Cost: O(names below the path), even for the listing of
one level, because a directory is nothing but what its names have in common.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import NotFoundError
from mooncake_store.fs.parts import MANIFEST_BYTES, ORDINARY, Manifest, is_manifest
from mooncake_store.fs.paths import HIDDEN, key_of, name_of, prefix_of
from mooncake_store.fs.plan import Call
from mooncake_store.fs.plans import missing_error

if TYPE_CHECKING:
    from mooncake_store.client import ListedColumns
    from mooncake_store.fs.plan import Plan
    from mooncake_store.fs.plans import Plans

__all__ = [
    "directory_entry",
    "exists",
    "files_among",
    "find",
    "info",
    "is_directory",
    "is_file",
    "ls",
    "remove_directory",
]

Entry = dict[str, Any]


def directory_entry(path: str) -> Entry:
    """What is told of a directory."""
    return {"name": path, "size": 0, "type": "directory"}


def _dressed(entry: Entry, manifest: Manifest) -> Entry:
    """The entry of a file whose manifest says more than its object."""
    entry["size"] = manifest.size
    if manifest.attributes != ORDINARY:
        mode, mtime_ns, link = manifest.attributes
        entry.update(mode=mode, mtime_ns=mtime_ns, islink=link)
    return entry


def _entries(plans: Plans, listed: ListedColumns, chosen: list[int]) -> Plan[list[Entry]]:
    """The entries of the chosen ones among listed objects."""
    names = listed.keys
    out = [
        {
            "name": key if type(key := names[at]) is str else name_of(key),
            "size": listed.sizes[at],
            "type": "file",
            "created": float(listed.created_s[at]),
            "replicas": listed.replicas[at],
        }
        for at in chosen
    ]
    sizes = [listed.sizes[at] for at in chosen]
    manifests = yield from plans.decode([names[at] for at in chosen], sizes)
    for at, manifest in manifests.items():
        _dressed(out[at], manifest)
    return out


def info(path: str) -> Plan[Entry]:
    """What a path is: a file with all that is known of it, or a directory."""
    if not path:
        return directory_entry("")
    try:
        stat = yield Call("stat", (key_of(path),))
    except NotFoundError:
        stat = None
    if stat is not None and stat.state == "readable":
        entry = {
            "name": path,
            "size": stat.size,
            "type": "file",
            "created": float(stat.created_s),
            "replicas": len(stat.replicas),
            "checksum": stat.checksum,
            "generation": stat.generation,
            "tier": "memory",
            "segments": [replica.segment for replica in stat.replicas],
        }
        if stat.size == MANIFEST_BYTES:
            (data,) = (yield Call("get_many", ([key_of(path)],))).values
            if data is not None and is_manifest(data):
                _dressed(entry, Manifest.decode(data, path))
        return entry
    if (yield from is_directory(path)):
        return directory_entry(path)
    raise missing_error(path)


def is_directory(path: str) -> Plan[bool]:
    """Whether any name lies below a path."""
    if not path:
        return True
    return bool((yield Call("list", (prefix_of(path),), {"limit": 1})))


def is_file(path: str) -> Plan[bool]:
    """Whether a path names a file."""
    return bool(path) and bool((yield Call("exists", (key_of(path),))))


def exists(path: str) -> Plan[bool]:
    """Whether a path names a file or a directory."""
    return (yield from is_file(path)) or (yield from is_directory(path))


def files_among(paths: list[str]) -> Plan[list[str]]:
    """The paths that name files."""
    if not paths:
        return []
    present = yield Call("exists_many", ([key_of(path) for path in paths],))
    return [path for path, there in zip(paths, present.tolist(), strict=True) if there]


def remove_directory(path: str) -> Plan[None]:
    """Remove the mark of an empty directory; raises OSError for one that is none or not empty."""
    listed = yield Call("list", (prefix_of(path),), {"limit": 2})
    if not listed:
        raise missing_error(path)
    if len(listed) > 1 or not path or name_of(listed[0].key) != path + "/":
        raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
    yield Call("remove", (prefix_of(path),), {"force": True})


def ls(plans: Plans, path: str) -> Plan[list[Entry]]:
    """The entries of a directory, or the one entry of a file; raises FileNotFoundError."""
    listed = yield Call("list_columns", (prefix_of(path),))
    if not listed.keys:
        if not path:
            return []
        return [(yield from info(path))]
    skip = len(path) + 1 if path else 0
    directories: dict[str, None] = {}
    files = []
    for at, key in enumerate(listed.keys):
        name = key if type(key) is str else name_of(key)
        below = name.find("/", skip)
        if below >= 0:
            directories[name[skip:below]] = None
        elif len(name) > skip:  # else it is the mark of the directory itself
            files.append(at)
    if not path:
        directories.pop(f"{HIDDEN}parts", None)
    lead = path + "/" if path else ""
    out = [directory_entry(lead + name) for name in directories]
    out += yield from _entries(plans, listed, files)
    return out


def find(
    plans: Plans, path: str, maxdepth: int | None, *, withdirs: bool
) -> Plan[dict[str, Entry]]:
    """Every file below a path, or the file it names; `withdirs` adds the directories between."""
    if maxdepth is not None and maxdepth < 1:
        raise ValueError("maxdepth must be at least 1")
    listed = yield Call("list_columns", (prefix_of(path),))
    if path and not listed.keys:
        try:
            return {path: (yield from info(path))}
        except FileNotFoundError:
            return {}
    skip = len(path) + 1 if path else 0
    directories: dict[str, Entry] = {}
    files = []
    for at, key in enumerate(listed.keys):
        name = key if type(key) is str else name_of(key)
        if name.startswith(HIDDEN):
            continue
        if withdirs:
            _note_parents(directories, name, skip, maxdepth)
        deep = maxdepth is not None and name.count("/", skip) >= maxdepth
        if len(name) > skip and name[-1] != "/" and not deep:
            files.append(at)
    found = {entry["name"]: entry for entry in (yield from _entries(plans, listed, files))}
    if withdirs and path:
        directories.setdefault(path, directory_entry(path))
    return dict(sorted((found | directories).items()))


def _note_parents(
    directories: dict[str, Entry], name: str, skip: int, maxdepth: int | None
) -> None:
    """Add the directories between `skip` characters and the end of a name."""
    at, depth = name.find("/", skip), 1
    while at >= 0 and (maxdepth is None or depth <= maxdepth):
        parent = name[:at]
        if parent not in directories:
            directories[parent] = directory_entry(parent)
        at, depth = name.find("/", at + 1), depth + 1
