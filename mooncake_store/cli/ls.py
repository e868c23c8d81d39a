"""`mooncake ls`: list objects by name."""

import time
from typing import Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, table
from mooncake_store.cli.shared.client import connected, key_of, shown, store_options, text_of


@command(
    ("mooncake ls", "every named object"),
    ("mooncake ls models/ -l", "those below models/, with size, age and copies"),
)
@store_options
def ls(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="How the names begin.")] = "",
    long: Annotated[bool, typer.Option("-l", "--long", help="Also size, age, copies.")] = False,
    limit: Annotated[int | None, typer.Option(help="Most objects to list.", min=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """List objects by name, sorted. Objects put by digest have none and are not listed."""
    from mooncake_store.units import format_duration, format_size

    with connected() as store:
        found = sorted(store.list(key_of(prefix), limit=limit), key=lambda item: text_of(item.key))
    value = {
        "objects": [
            {
                "key": text_of(item.key),
                "size": item.size,
                "created_s": item.created_s,
                "replicas": item.replicas,
                "digest": item.digest.hex(),
            }
            for item in found
        ]
    }

    def human() -> Any:
        if not long:
            return "\n".join(shown(item.key) for item in found) or "no objects"
        now = time.time()
        columns = {"size": "right", "age": "right", "copies": "right", "key": "left"}
        rows = [
            (
                format_size(item.size),
                format_duration(max(0, int(now - item.created_s))),
                str(item.replicas),
                text_of(item.key),
            )
            for item in found
        ]
        total = format_size(sum(item.size for item in found))
        objects = "1 object" if len(found) == 1 else f"{len(found)} objects"
        return table(columns, rows, caption=f"{objects}, {total}")

    emit(value, as_json=as_json, human=human)
