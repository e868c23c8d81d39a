"""What the commands that talk to a store share: the `--url` and secret options, one client."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mooncake_store.client import Client

__all__ = ["SecretOption", "UrlOption", "connected", "text_of"]

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The store, mooncake://host:port/namespace; else MOONCAKE_CLIENT_URL.",
        show_default=False,
    ),
]
SecretOption = Annotated[
    str | None,
    typer.Option("--secret-file", help="File with the shared secret.", show_default=False),
]


@contextmanager
def connected(url: str | None, secret_file: str | None) -> Iterator[Client]:
    """A client for the duration of one command."""
    from mooncake_store.client import Client

    with Client(url, secret_file=secret_file) as store:
        yield store


def text_of(key: str | bytes) -> str:
    """A key as people read it; bytes that are no text show as escapes."""
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")
