"""`mooncake get`: read an object into a file or a pipe, or with -r all below a prefix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit, progress
from mooncake_store.cli.shared.client import (
    Stopwatch,
    connected,
    key_of,
    shown,
    store_options,
    text_of,
)
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from mooncake_store.client import Client


@command(
    ("mooncake get greeting", "write the object to standard output"),
    ("mooncake get greeting hello.txt", "write it to a file"),
    ("mooncake get -r runs/1 ./copy", "every object below a prefix, into a folder"),
)
@store_options
def get(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Name of the object; with -r a prefix.")
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="File to write, - for standard output; with -r a folder."
        ),
    ] = "-",
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="Read every object below a prefix.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Read an object, or all below a prefix. Its checksum is verified before a byte is written.

    With -r: `mooncake get -r PREFIX DIR` writes what lies below PREFIX into DIR, and nothing
    outside of it: a name that would lead there is told, and the command then ends with 1. With
    --json the object goes into a file, and what is printed tells of it.
    """
    from mooncake_store.units import format_size

    if target == "-" and (as_json or recursive):
        raise InvalidArgumentError(
            "standard output takes one object and nothing else", advice="name a file or a folder"
        )
    if recursive:
        with connected() as store:
            written = _get_folder(store, key, target)
        emit(written, as_json=as_json, human=lambda: _told(written))
        return ExitCode.FAILED if written["failed"] else ExitCode.OK
    name = text_of(key_of(key))
    with connected() as store, progress(f"reading {shown(name)}"):
        watch = Stopwatch()
        value = store.get(key_of(key))
        seconds, rate = watch.seconds, watch.rate(len(value))
    if target == "-":
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
        return ExitCode.OK
    Path(target).write_bytes(value)
    emit(
        {"key": name, "size": len(value), "file": target, "seconds": seconds},
        as_json=as_json,
        human=lambda: f"wrote {format_size(len(value))} to {target}, read at {rate}",
    )
    return ExitCode.OK


def _get_folder(store: Client, prefix: str, folder: str) -> dict[str, Any]:
    from mooncake_store.cli.shared.bulk import Remote, fetch
    from mooncake_store.cli.shared.folder import Folder

    with progress(f"reading {shown(prefix)}") as say:
        watch = Stopwatch()
        remote = Remote(store, prefix)
        sizes = remote.files()
        failed = fetch(remote, Folder(folder), sizes, say)
    return {
        "prefix": remote.prefix,
        "folder": folder,
        "written": len(sizes) - len(failed),
        "size": sum(size for name, size in sizes.items() if name not in failed),
        "failed": failed,
        "seconds": watch.seconds,
    }


def _told(value: dict[str, Any]) -> str:
    from mooncake_store.units import format_rate, format_size

    lines = [printable(f"not written: {name}: {why}") for name, why in value["failed"].items()]
    rate = format_rate(value["size"] / value["seconds"])
    done = f"wrote {value['written']:,} files to {value['folder']}: {format_size(value['size'])}"
    return "\n".join([*lines, f"{done}, {rate}"])
