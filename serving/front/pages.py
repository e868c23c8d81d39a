"""The files of the page that shows a front at work.

They are in the folder `page`; what all pages of the project have comes from `mooncake_store.page`,
and so does the policy that goes with them. They tell nothing of what is served, so they need no
token: the page asks for it and sends it to `/stats`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from mooncake_store.page.assets import HEADERS, File, file_operations, paths_of, read_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["OWN", "PAGE_OPERATIONS", "page_handlers"]

OWN = ("index.html", "kinds.js", "page.css", "page.js", "tables.js")
PAGE_OPERATIONS = file_operations(OWN)


def page_handlers() -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """Handlers for `PAGE_OPERATIONS`, by their names."""
    files, names = read_files("serving.front", "page", OWN), paths_of(OWN)
    return {names[path]: partial(_send, file) for path, file in files.items()}


async def _send(file: File, request: web.Request) -> web.Response:
    known = any(each.value == file.etag for each in request.if_none_match or ())
    response = web.Response(
        status=304 if known else 200,
        body=None if known else file.body,
        content_type=file.kind,
        charset="utf-8",
        headers=HEADERS,
    )
    response.etag = file.etag
    return response
