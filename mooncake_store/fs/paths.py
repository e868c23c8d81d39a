"""Paths of the filesystem and keys of the store; pure functions.

A path is the name of an object: no leading or trailing slash, single slashes between its parts,
"" for the root. A directory is a prefix: "a" is one as long as some name begins with "a/". A
name that ends with a slash marks a directory that may be empty; only the mount makes such marks.
Names are UTF-8; other bytes travel as surrogate escapes, as everywhere in Python.

A URL of fsspec is that of a store, with the path behind its namespace.

Names that begin with NUL belong to this package (`parts.py`) and are in no listing. "." and ".."
are refused: the store has no use for them, and a download that followed them would write outside
of its target.
"""

from __future__ import annotations

from mooncake_store.endpoint import ETCD_SCHEME, is_local, split_url
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.ids import KEY_BYTES_MAX

__all__ = ["HIDDEN", "PROTOCOL", "clean", "key_of", "name_of", "options_of", "prefix_of"]

PROTOCOL = ("mooncake", "mooncake+etcd")
HIDDEN = "\0"
_SCHEME = "mooncake://"


def clean(path: str) -> str:
    """The canonical form of a path or URL; raises ValueError for what can be no name."""
    path = _split(path)[1]
    parts = [part for part in path.split("/") if part]
    for part in parts:
        if part in (".", ".."):
            raise InvalidArgumentError(
                f"{path!r} contains {part!r}, which names nothing in a store",
                advice="use the path it leads to",
            )
    if parts and parts[0].startswith(HIDDEN):
        raise InvalidArgumentError(f"{path!r} begins with NUL, which is reserved")
    return "/".join(parts)


def options_of(url: str) -> dict[str, str]:
    """Storage options in a URL; a bare path and "mooncake:///path" have none."""
    root = _split(url)[0]
    if not root:
        return {}
    if not is_local(root):
        split_url(root)  # a wrong address is named here rather than at the first read
    return {"url": root}


def _split(url: str) -> tuple[str, str]:
    """Return the URL of a store and the path in it; "" and the path where it names no store."""
    scheme = next((each for each in (_SCHEME, ETCD_SCHEME) if url.startswith(each)), None)
    if scheme is None:
        return "", url
    authority, _, path = url[len(scheme) :].partition("/")
    if not authority:
        return "", path
    # The namespace comes before the path, and the pool before that where an etcd is asked.
    parts = []
    for _ in range(1 if scheme == _SCHEME else 2):
        part, _, path = path.partition("/")
        parts.append(part or "default")
    return f"{scheme}{authority}/{'/'.join(parts)}", path


def key_of(path: str) -> bytes:
    """The store's key of a clean path."""
    key = path.encode("utf-8", "surrogateescape")
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise InvalidArgumentError(
            f"a path has 1 to {KEY_BYTES_MAX} bytes, this one {len(key)}", key=path[:80]
        )
    return key


def prefix_of(path: str) -> bytes:
    """What the names of everything below a directory begin with; also the key of its mark."""
    return (path + "/").encode("utf-8", "surrogateescape") if path else b""


def name_of(key: str | bytes) -> str:
    """The path of a listed key."""
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")
