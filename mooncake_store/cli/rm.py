"""`mooncake rm`: remove objects."""

from typing import TYPE_CHECKING, Annotated

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, agreed, command, emit, note
from mooncake_store.cli.shared.client import connected, key_of, store_options, text_of
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from mooncake_store.client import Client


@command(
    ("mooncake rm greeting farewell", "remove two objects"),
    ("mooncake rm --prefix models/old/", "remove all whose names begin so"),
    ("mooncake rm --all", "remove every object of the namespace, after a question"),
    ("mooncake rm --all --yes", "the same in a script"),
)
@store_options
def rm(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Names of objects.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Remove all whose names begin so.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all of the namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what is being read.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove objects by key, by prefix, or all. Objects that are read just now need --force.

    --all asks at the terminal; without one, it needs --yes.
    """
    from mooncake_store.errors import InvalidArgumentError, StoreError

    if bool(keys) + (prefix is not None) + everything != 1:
        raise InvalidArgumentError("name keys, or --prefix, or --all: exactly one of them")
    if prefix == "":
        raise InvalidArgumentError("an empty prefix is every object", advice="say --all")
    failed: list[tuple[int, StoreError]] = []
    with connected() as store:
        if prefix is not None:
            removed = store.remove_prefix(prefix, force=force)
        elif everything:
            if not yes and not agreed(_question(store), instead="--yes"):
                note("nothing was removed")
                return ExitCode.FAILED
            removed = store.clear(force=force)
        else:
            result = store.remove_many([key_of(key) for key in keys or []], force=force)
            failed = list(result.errors())
            removed = len(result) - len(failed)
    if removed == 0 and len(failed) == 1:
        raise failed[0][1]
    value = {"removed": removed, "failed": {text_of(e.key or ""): e.what for _, e in failed}}

    def human() -> str:
        lines = [f"removed {removed} objects" if removed != 1 else "removed 1 object"]
        return "\n".join([*lines, *(printable(f"not removed: {error}") for _, error in failed)])

    emit(value, as_json=as_json, human=human)
    return ExitCode.FAILED if failed else ExitCode.OK


def _question(store: "Client") -> str:
    from mooncake_store.units import format_size

    figures = store.store_stats()
    objects = sum(shard.tenant_objects for shard in figures)
    size = format_size(sum(shard.tenant_bytes for shard in figures))
    return f"remove all {objects:,} objects ({size}) of {store.config.url}?"
