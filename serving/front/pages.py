"""The files of the page that shows a front at work.

They are in the folder `page`: one document, a style sheet, modules of JavaScript, an icon. Nothing
is built, and nothing comes from anybody else; the policy that goes with them has browsers enforce
that, and run no script that is not one of these files, whatever names the page shows. They tell
nothing of what is served, so they need no token: the page asks for it and sends it to `/stats`.

They are read once, and browsers ask each time whether theirs are still the same.
"""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

from mooncake_store.program.openapi import Answer, Operation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["PAGE_OPERATIONS", "page_handlers"]

FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/charts.js": ("charts.js", "text/javascript"),
    "/page/tables.js": ("tables.js", "text/javascript"),
    "/page/parts.js": ("parts.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_OPERATIONS = tuple(
    Operation(
        name, "GET", path, "Send a file of the page",
        (Answer(200, "the file", kind=kind), Answer(304, "it is still the same", kind=kind)),
        access="public",
    )
    for path, (name, kind) in FILES.items()
)  # fmt: skip
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_handlers() -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """Handlers for `PAGE_OPERATIONS`, by their names."""
    folder = resources.files(__package__).joinpath("page")
    return {
        name: partial(_send, body, hashlib.sha256(body).hexdigest()[:16], kind)
        for name, kind in FILES.values()
        for body in (folder.joinpath(name).read_bytes(),)
    }


async def _send(body: bytes, etag: str, kind: str, request: web.Request) -> web.Response:
    known = any(each.value == etag for each in request.if_none_match or ())
    response = web.Response(
        status=304 if known else 200,
        body=None if known else body,
        content_type=kind,
        charset="utf-8",
        headers=HEADERS,
    )
    response.etag = etag
    return response
