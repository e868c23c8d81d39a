"""`mooncake get`: read an object into a file or a pipe."""

import sys
from pathlib import Path
from typing import Annotated

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
from mooncake_store.errors import InvalidArgumentError

app = make_app()


@app.command(
    epilog=examples(
        ("mooncake get greeting", "write the object to standard output"),
        ("mooncake get greeting hello.txt", "write it to a file"),
    )
)
@store_options
def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Name of the object.")],
    target: Annotated[
        str, typer.Argument(metavar="FILE", help="File to write; - for standard output.")
    ] = "-",
    url: UrlOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read an object. Its checksum is verified before a byte is written.

    With --json the object goes into a file, and what is printed tells of it.
    """
    from mooncake_store.units import format_size

    if as_json and target == "-":
        raise InvalidArgumentError(
            "--json and the object would share standard output", advice="name a file"
        )
    name = text_of(key_of(key))
    with connected(url, secret_file) as store, progress(f"reading {name}"):
        watch = Stopwatch()
        value = store.get(key_of(key))
        seconds, rate = watch.seconds, watch.rate(len(value))
    if target == "-":
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
        return
    Path(target).write_bytes(value)
    emit(
        {"key": name, "size": len(value), "file": target, "seconds": seconds},
        as_json=as_json,
        human=lambda: f"wrote {format_size(len(value))} to {target}, read at {rate}",
    )
