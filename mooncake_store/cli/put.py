"""`mooncake put`: store a file, or what comes through a pipe."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mooncake_store.cli._app import JsonOption, emit, examples, make_app, progress
from mooncake_store.cli._client import SecretOption, UrlOption, connected

app = make_app()


@app.command(
    epilog=examples(
        ("mooncake put greeting hello.txt", "store a file under the key `greeting`"),
        ("mooncake put greeting -", "store what a pipe brings"),
        ("mooncake put model weights.bin --replicas 2 --hard-pin", "two copies, never evicted"),
    )
)
def put(
    key: Annotated[str, typer.Argument(help="Name of the object.")],
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
    from mooncake_store.client import PutOptions
    from mooncake_store.units import format_size

    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    options = PutOptions(upsert=replace, hard_pin=hard_pin)
    if replicas is not None:
        options["replicas"] = replicas
    with connected(url, secret_file) as store, progress(f"storing {key}"):
        result = store.put(key, data, **options)
    value = {
        "key": key,
        "outcome": result.outcome,
        "size": len(data),
        "replicas": result.replicas,
    }

    def human() -> str:
        if result.already_present:
            return f"{key} exists already and was left alone; --replace replaces it"
        copies = "copy" if result.replicas == 1 else "copies"
        return f"stored {key}: {format_size(len(data))}, {result.replicas} {copies}"

    emit(value, as_json=as_json, human=human)
