"""`mooncake stat`: everything the store knows of one object."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, table
from mooncake_store.cli.shared.client import connected, key_of, store_options, text_of

if TYPE_CHECKING:
    from mooncake_store.client.results import Replica


@command(
    ("mooncake stat greeting", "size, checksum, lease, pins and replicas"),
)
@store_options
def stat(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Name of the object.")],
    as_json: JsonOption = False,
) -> None:
    """Show an object's size, state, checksum, lease, pins and where its copies are."""
    from mooncake_store.units import format_duration, format_size

    with connected() as store:
        found = store.stat(key_of(key))
    value = dataclasses.asdict(found) | {"key": text_of(found.key)}

    def human() -> Any:
        rows = [
            ("key", text_of(found.key)),
            ("state", found.state),
            ("size", f"{format_size(found.size)} ({found.size} bytes)"),
            ("checksum", f"xxh3:{found.checksum:016x}"),
            ("generation", str(found.generation)),
            ("age", format_duration(round(found.age_s))),
            ("hits", str(found.hits)),
            ("lease", format_duration(found.lease_s) if found.lease_s else "none"),
            ("soft pin", format_duration(round(found.soft_pin_s)) if found.soft_pin_s else "no"),
            ("hard pin", "yes" if found.hard_pin else "no"),
            ("group", found.group or "none"),
        ]
        rows += [
            (f"copy {number}", f"{_place(copy)} at offset {copy.offset}")
            for number, copy in enumerate(found.replicas, 1)
        ]
        return table({"": "left", " ": "left"}, rows)

    emit(value, as_json=as_json, human=human)


def _place(copy: "Replica") -> str:
    kind = f" ({copy.tier})" if copy.tier else ""
    return f"{copy.segment}{kind} on {copy.host}"
