"""What the commands that talk to a store share: the `--url` and secret options, one client."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mooncake_store.client import Client

__all__ = ["SecretOption", "Stopwatch", "UrlOption", "connected", "key_of", "text_of"]

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


class Stopwatch:
    """Seconds since it was made, and the rate that a number of bytes comes to."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds so far, never 0."""
        return max(time.monotonic() - self._started, 1e-9)

    def rate(self, nbytes: int) -> str:
        """Bytes a second so far, as people read it."""
        from mooncake_store.units import format_rate

        return format_rate(nbytes / self.seconds)


def key_of(argument: str) -> str | bytes:
    """The key that a word of the command line names: bytes where it is no text."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return os.fsencode(argument)
    return argument


def text_of(key: str | bytes) -> str:
    """A key as people read it; bytes that are no text show as escapes."""
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")
