"""`mooncake put`: store a file, or what comes through a pipe."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from mooncake_store.cli._app import JsonOption, emit, examples, make_app, progress
from mooncake_store.cli._client import (
    SecretOption,
    Stopwatch,
    UrlOption,
    connected,
    key_of,
    store_options,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.client import Client, PutResult

app = make_app()

PIECE_BYTES = 64 << 20
"""A larger file is stored piece by piece: it need not fit in memory, and one sees it go."""


@app.command(
    epilog=examples(
        ("mooncake put greeting hello.txt", "store a file under the key `greeting`"),
        ("mooncake put greeting -", "store what a pipe brings"),
        ("mooncake put model weights.bin --replicas 2 --hard-pin", "two copies, never evicted"),
    )
)
@store_options
def put(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Name of the object.")],
    source: Annotated[str, typer.Argument(metavar="FILE", help="File to store; - for a pipe.")],
    replicas: Annotated[
        int | None, typer.Option(help="Copies on distinct segments.", show_default=False)
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace an object that exists.", show_default=False),
    ] = False,
    hard_pin: Annotated[
        bool, typer.Option("--hard-pin", help="Never evict it.", show_default=False)
    ] = False,
    url: UrlOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store an object. One that exists is left alone unless --replace."""
    from mooncake_store.units import format_size

    options: dict[str, Any] = {"upsert": replace, "hard_pin": hard_pin}
    if replicas is not None:
        options["replicas"] = replicas
    name = text_of(key_of(key))
    with (
        nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file,
        connected(url, secret_file) as store,
        progress(f"storing {name}") as say,
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
        "key": name,
        "outcome": result.outcome,
        "size": size,
        "replicas": result.replicas,
        "seconds": seconds,
    }

    def human() -> str:
        if result.already_present:
            return f"{name} exists already and was left alone; --replace replaces it"
        if result.superseded:
            return f"{name} was replaced by another program before it was complete"
        stored = f"stored {name}: {format_size(size)}"
        if replicas is not None and result.replicas < replicas:
            copies = f"{result.replicas} of {replicas} copies"
            return f"{stored}, {copies}, {rate}; each further one needs another segment with room"
        copies = f"{result.replicas} {'copy' if result.replicas == 1 else 'copies'}"
        return f"{stored}, {copies}, {rate}"

    emit(value, as_json=as_json, human=human)


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
                say(f"storing {text_of(key)}: {format_size(done)} of {total}, {watch.rate(done)}")
    except AlreadyExistsError:
        return PutResult("already_present")
    assert writer.result is not None
    return writer.result
