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

from aiohttp import web

__all__ = ["PAGE_PATHS", "page_routes"]

FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/charts.js": ("charts.js", "text/javascript"),
    "/page/tables.js": ("tables.js", "text/javascript"),
    "/page/parts.js": ("parts.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = FILES.keys()
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[web.RouteDef]:
    """Routes for `PAGE_PATHS`."""
    folder = resources.files(__package__).joinpath("page")
    return [
        web.get(path, partial(_send, body, hashlib.sha256(body).hexdigest()[:16], kind))
        for path, (name, kind) in FILES.items()
        for body in (folder.joinpath(name).read_bytes(),)
    ]


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
