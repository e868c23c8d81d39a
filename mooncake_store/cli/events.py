"""`mooncake events`: what happens to objects, as it happens."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, note
from mooncake_store.cli.shared.client import connected, shown, store_options, text_of

if TYPE_CHECKING:
    from mooncake_store.admin.pool import Event

WAIT_S = 0.5
BATCH = 1024
NAMES_MAX = 65_536
"""Of how many objects the names are remembered, for when they go."""


@command(
    ("mooncake events", "follow the pool until Ctrl-C"),
    ("mooncake events --json", "a JSON object a line, for a program"),
    ("mooncake events --count 100", "the next hundred"),
)
@store_options
def events(
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="End after so many.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which objects can be read from now on, and which no longer, as it happens.

    An event names a digest. The key is shown where it can be asked for: of objects that are there,
    or were when they were shown before. Those of other namespaces are seen by who may see them.
    """
    from mooncake_store.admin.pool import events_after, names_of

    names: dict[str, str | bytes] = {}
    left = sys.maxsize if count is None else count
    with connected() as store:
        place = store._run(events_after(store._core, "", limit=1)).after
        while left > 0:
            wanted = min(left, BATCH)
            steps = events_after(store._core, place, limit=wanted, wait_s=WAIT_S)
            found = store._run(steps)
            place = found.after
            if found.gap:
                note("some events were missed: they came faster than they were asked for")
            told = found.events[:left]
            names |= store._run(names_of(store._core, told))
            for event in told:
                _tell(event, names.get(event.digest), as_json=as_json)
            sys.stdout.flush()
            left -= len(told)
            while len(names) > NAMES_MAX:
                del names[next(iter(names))]


def _tell(event: "Event", key: str | bytes | None, *, as_json: bool) -> None:
    value: dict[str, Any] = {
        "shard": event.shard,
        "number": event.number,
        "kind": event.kind,
        "digest": event.digest,
        "key": None if key is None else text_of(key),
    }
    name = "" if key is None else f"  {shown(key)}"
    emit(value, as_json=as_json, human=lambda: f"{event.kind:<8}{event.digest}{name}")
