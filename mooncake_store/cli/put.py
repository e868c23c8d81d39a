"""`mooncake put`: store a file, what comes through a pipe, or with -r all files of a folder."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, note, progress
from mooncake_store.cli.shared.client import (
    Stopwatch,
    connected,
    key_of,
    shown,
    store_options,
    text_of,
)
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.client import Client, PutResult


PIECE_BYTES = 64 << 20
"""A larger file is stored piece by piece: it need not fit in memory, and one sees it go."""
OTHERS_SHOWN = 5


@command(
    ("mooncake put greeting hello.txt", "store a file under the key `greeting`"),
    ("mooncake put greeting -", "store what a pipe brings"),
    ("mooncake put model weights.bin --replicas 2 --hard-pin", "two copies, never evicted"),
    ("mooncake put -r ./models models", "every file of a folder: models/a, models/b/c, ..."),
)
@store_options
def put(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Name of the object; with -r the folder to store.")
    ],
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="File to store, - for a pipe; with -r the prefix of the names."
        ),
    ],
    recursive: Annotated[
        bool,
        typer.Option(
            "-r", "--recursive", help="Store all files of the folder KEY below the prefix FILE."
        ),
    ] = False,
    replicas: Annotated[int | None, typer.Option(help="Copies on distinct segments.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an object that exists.")
    ] = False,
    hard_pin: Annotated[bool, typer.Option("--hard-pin", help="Never evict it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Store an object, or all files of a folder. What exists is left alone unless --replace.

    With -r: `mooncake put -r DIR PREFIX` stores each file of DIR below PREFIX.
    """
    if recursive:
        settings = {} if replicas is None else {"replicas": replicas}
        options: dict[str, Any] = {"hard_pin": True} if hard_pin else {}
        with connected(**settings) as store:
            stored = _put_folder(store, key, source, replace, options)
        emit(stored, as_json=as_json, human=lambda: _told_folder(stored))
        return
    options = {"upsert": replace, "hard_pin": hard_pin}
    if replicas is not None:
        options["replicas"] = replicas
    with (
        nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file,
        connected() as store,
        progress(f"storing {shown(key_of(key))}") as say,
    ):
        watch = Stopwatch()
        size = 0 if source == "-" else _size_of(file)
        if size > PIECE_BYTES:
            result = _put_pieces(store, key_of(key), file, size, options, say)
        else:
            data = file.read()
            size = len(data)
            result = store.put(key_of(key), data, **options)
        seconds, rate = watch.seconds, watch.rate(size)
    value = {
        "key": text_of(key_of(key)),
        "outcome": result.outcome,
        "size": size,
        "replicas": result.replicas,
        "seconds": seconds,
    }
    emit(value, as_json=as_json, human=lambda: _told(value, replicas, rate))


def _told(value: dict[str, Any], wanted: int | None, rate: str) -> str:
    from mooncake_store.units import format_size

    name, replicas = printable(value["key"]), value["replicas"]
    if value["outcome"] == "already_present":
        return f"{name} exists already and was left alone; --replace replaces it"
    if value["outcome"] == "superseded":
        return f"{name} was replaced by another program before it was complete"
    stored = f"stored {name}: {format_size(value['size'])}"
    if wanted is not None and replicas < wanted:
        copies = f"{replicas} of {wanted} copies"
        return f"{stored}, {copies}, {rate}; each further one needs another segment with room"
    copies = f"{replicas} {'copy' if replicas == 1 else 'copies'}"
    return f"{stored}, {copies}, {rate}"


def _put_folder(
    store: Client, folder: str, prefix: str, replace: bool, options: dict[str, Any]
) -> dict[str, Any]:
    from mooncake_store.cli.shared.bulk import Remote, send
    from mooncake_store.cli.shared.folder import Folder

    with progress(f"storing {folder}") as say:
        watch = Stopwatch()
        source, remote = Folder(folder), Remote(store, prefix, **options)
        files, others = source.files()
        there = set() if replace else remote.files_so_far().keys() & files.keys()
        sizes = {name: size for name, size in files.items() if name not in there}
        send(source, remote, sizes, say)
    if others:
        note(f"left out, being neither file nor folder: {', '.join(others[:OTHERS_SHOWN])}")
    return {
        "folder": folder,
        "prefix": remote.prefix,
        "stored": len(sizes),
        "size": sum(sizes.values()),
        "already_present": len(there),
        "left_out": others,
        "seconds": watch.seconds,
    }


def _told_folder(value: dict[str, Any]) -> str:
    from mooncake_store.units import format_rate, format_size

    rate = format_rate(value["size"] / value["seconds"])
    stored = f"stored {value['stored']:,} files: {format_size(value['size'])}, {rate}"
    if not value["already_present"]:
        return stored
    return f"{stored}; {value['already_present']:,} exist already, --replace replaces them"


def _size_of(file: BinaryIO) -> int:
    """The size of a file; 0 for pipes and others that do not know how much they will bring."""
    about = os.fstat(file.fileno())
    return about.st_size if stat.S_ISREG(about.st_mode) else 0


def _put_pieces(
    store: Client,
    key: str | bytes,
    file: BinaryIO,
    size: int,
    options: dict[str, Any],
    say: Callable[[str], None],
) -> PutResult:
    from mooncake_store.client import PutResult
    from mooncake_store.errors import AlreadyExistsError
    from mooncake_store.units import format_size

    watch, total = Stopwatch(), format_size(size)
    try:
        with store.writer(key, size, **options) as writer:
            done = 0
            while done < size and (piece := file.read(min(PIECE_BYTES, size - done))):
                done += writer.write(done, piece)
                say(f"storing {shown(key)}: {format_size(done)} of {total}, {watch.rate(done)}")
    except AlreadyExistsError:
        return PutResult("already_present")
    assert writer.result is not None
    return writer.result
