"""The files of a page: documents, style sheets, modules of JavaScript, icons.

    files = read_files("mooncake_store.page", "master", ("index.html", "page.js"))
    files["/page/page.js"].body

Nothing is built, and nothing comes from anybody else; the policy that goes with them (`HEADERS`)
has browsers enforce that, and run no script that is not one of these files, whatever names a page
shows. They tell nothing of what is served, so they need no token. In `shared` is what all pages
have: colours, charts, tables, words. Files are read once, and browsers ask each time whether theirs
are still the same. No I/O but that.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.program.openapi import Answer, Operation

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HEADERS", "File", "file_operations", "paths_of", "read_files"]

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
DOCUMENT = "index.html"
SHARED = ("base.css", "charts.js", "icon.svg", "parts.js", "rows.js")
_KINDS = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


class File(NamedTuple):
    """A file as it is sent."""

    body: bytes
    kind: str
    etag: str


def paths_of(own: Iterable[str]) -> dict[str, str]:
    """Where a page has its own files and those that all have: names by path."""
    return {"/" if name == DOCUMENT else f"/page/{name}": name for name in (*sorted(own), *SHARED)}


def file_operations(own: Iterable[str]) -> tuple[Operation, ...]:
    """Describe what sends them; an operation has the name of its file."""
    found = []
    for path, name in paths_of(own).items():
        kind = _kind_of(name)
        told = (Answer(200, "the file", kind=kind), Answer(304, "it is still the same", kind=kind))
        operation = Operation(name, "GET", path, "Send a file of the page", told, access="public")
        found.append(operation)
    return tuple(found)


def read_files(package: str, folder: str, own: Iterable[str]) -> dict[str, File]:
    """Read them, by path: its own ones from a folder of a package."""
    homes = {name: resources.files(package) / folder for name in own}
    shared = resources.files("mooncake_store.page") / "shared"
    found = {}
    for path, name in paths_of(homes).items():
        body = (homes.get(name, shared) / name).read_bytes()
        etag = hashlib.sha256(body).hexdigest()[:16]
        found[path] = File(body, _kind_of(name), etag)
    return found


def _kind_of(name: str) -> str:
    return _KINDS[name.rpartition(".")[2]]
