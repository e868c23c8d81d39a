"""What the page of a master asks of its port, as a table. No I/O.

The documents are for the page, and change with it; programs read the port's other paths.
"""

from __future__ import annotations

from typing import Any

from mooncake_store.page.assets import file_operations
from mooncake_store.program.openapi import Answer, Failed, Operation, Parameter

__all__ = ["LIVE", "OPERATIONS", "OWN"]

LIVE = "text/event-stream"
OWN = (
    "changes.js", "events.js", "index.html", "journal.js", "keys.js", "overview.js", "page.css",
    "page.js", "places.js", "words.js",
)  # fmt: skip


_REFUSED = (Answer(503, "the master is starting, or does not answer", Failed),)
OPERATIONS = (
    *file_operations(OWN),
    Operation(
        "live", "GET", "/page/live", "Tell figures, the history and events as they change",
        (Answer(200, "server-sent events, without an end", kind=LIVE),
         Answer(503, "the master is starting, or too many watch", Failed)),
        access="public",
    ),
    Operation(
        "objects", "GET", "/page/objects", "List objects whose keys begin with a text",
        (Answer(200, "a page of them", dict[str, Any]),
         Answer(400, "that is no place in a list", Failed), *_REFUSED),
        parameters=(Parameter("prefix", "how keys begin"), Parameter("after", "where to go on")),
        access="public",
    ),
    Operation(
        "object", "GET", "/page/object", "Tell all that is known of an object",
        (Answer(200, "that, and what happened to it lately", dict[str, Any]),
         Answer(400, "that is no key", Failed), *_REFUSED),
        parameters=(Parameter("key", "its key", required=True),),
        access="public",
    ),
    Operation(
        "heat", "GET", "/page/heat", "Tell what is read most, of a sample",
        (Answer(200, "objects, and beginnings of keys", dict[str, Any]), *_REFUSED),
        access="public",
    ),
)  # fmt: skip
