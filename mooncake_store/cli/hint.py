"""`mooncake hint`: tell the store what is known of the future of objects."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit
from mooncake_store.cli.shared.client import connected, key_of, store_options, text_of
from mooncake_store.printable import printable


@command(
    (
        "mooncake hint pin system-prompt --ttl 1h",
        "evict it after the ordinary objects, for an hour",
    ),
    ("mooncake hint retain a b c", "as if they were read just now"),
    ("mooncake hint demote finished", "nobody needs it soon: it may leave first"),
    ("mooncake hint share popular", "one copy more, on another segment"),
)
@store_options
def hint(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="pin, retain, prefetch, demote or share.")
    ],
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Names of objects.")],
    ttl: Annotated[
        str | None, typer.Option(help="For how long, as 10m; of pin and retain.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="1 to 3, of pin and retain: lower ones are evicted first.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Say what to expect of objects. A hint is a wish; ends with 5 unless all keys name objects.

    Hints that were rejected do not fail the command: it says which, and why.
    """
    names = [key_of(key) for key in keys]
    with connected() as store:
        result = store.hint(names, action, ttl=ttl, priority=priority)
    outcomes = ["accepted"] * len(names)
    for outcome in ("clipped", "missing", "rejected"):
        for at in getattr(result, outcome).nonzero()[0].tolist():
            outcomes[at] = outcome
    reasons = {at: error.what for at, error in result.errors()}
    value = {
        "hints": [
            {"key": text_of(name), "outcome": outcome, "reason": reasons.get(at, "")}
            for at, (name, outcome) in enumerate(zip(names, outcomes, strict=True))
        ]
    }

    def human() -> str:
        return "\n".join(
            printable(f"{text_of(name)}: {outcome}")
            + (f" ({reasons[at]})" if at in reasons else "")
            for at, (name, outcome) in enumerate(zip(names, outcomes, strict=True))
        )

    emit(value, as_json=as_json, human=human)
    return ExitCode.NOT_FOUND if result.missing.any() else ExitCode.OK
