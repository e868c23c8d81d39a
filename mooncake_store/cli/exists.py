"""`mooncake exists`: ask whether objects can be read, for scripts."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit
from mooncake_store.cli.shared.client import connected, key_of, shown, store_options, text_of


@command(
    ("mooncake exists greeting && echo yes", "ends with 0 if it exists, with 5 if not"),
    ("mooncake exists a b c --json", "which of several do"),
)
@store_options
def exists(
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Names of objects.")],
    as_json: JsonOption = False,
) -> int:
    """Say which objects can be read; ends with 5 unless all can. Leases nothing."""
    with connected() as store:
        there = store.exists_many([key_of(key) for key in keys]).tolist()
    names = [text_of(key_of(key)) for key in keys]
    value = {"exists": dict(zip(names, there, strict=True))}

    def human() -> str:
        return "\n".join(
            f"{shown(name)}: {'yes' if found else 'no'}"
            for name, found in zip(names, there, strict=True)
        )

    emit(value, as_json=as_json, human=human)
    return ExitCode.OK if all(there) else ExitCode.NOT_FOUND
