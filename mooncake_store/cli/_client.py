"""What the commands that talk to a store share: the options that say which store, one client.

`--url` and `--secret-file` are parameters of each command. What chooses settings in general
(`--config`, `--profile`, `--setting`) is the same for all and concerns none of them:
`store_options` adds it to a command, and `connected` finds it.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mooncake_store.cli._program_options import ConfigOption
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mooncake_store.client import Client

__all__ = [
    "ProfileOption",
    "SecretOption",
    "Stopwatch",
    "UrlOption",
    "client_settings",
    "connected",
    "key_of",
    "shown",
    "store_options",
    "store_url",
    "text_of",
]

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        "--master",
        metavar="STORE",
        help="The store: mooncake://host:port/namespace, or the address of its master.",
        show_default=False,
    ),
]
SecretOption = Annotated[
    str | None,
    typer.Option("--secret-file", help="File with the shared secret.", show_default=False),
]


T = TypeVar("T")

ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="The table [profile.NAME] of that file; else MOONCAKE_PROFILE.",
        show_default=False,
    ),
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="NAME=VALUE",
        help="A setting of the client, such as deadline=5s; may be given several times.",
        show_default=False,
    ),
]
_OPTIONS = {"config_file": ConfigOption, "profile": ProfileOption, "setting": SettingOption}

_settings: ContextVar[dict[str, Any]] = ContextVar("settings of the running command")


def store_options(command: Callable[..., T]) -> Callable[..., T]:
    """Let a command that uses `connected` take `--config`, `--profile` and `--setting`."""

    @functools.wraps(command)
    def called(**arguments: Any) -> T:
        found = client_settings(*(arguments.pop(name) for name in _OPTIONS))
        token = _settings.set(found)
        try:
            return command(**arguments)
        finally:
            _settings.reset(token)

    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _OPTIONS.items()
    ]
    own = [each.replace(kind=each.KEYWORD_ONLY) for each in signature.parameters.values()]
    called.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *added]
    )
    called.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return called


def client_settings(
    config_file: object, profile: str | None, setting: list[str] | None
) -> dict[str, Any]:
    """Return what a client is made with for these options; raises ConfigError for `--setting x`."""
    from mooncake_store.errors import ConfigError

    found: dict[str, Any] = {"config_file": config_file, "profile": profile}
    for text in setting or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--setting {text!r} is not NAME=VALUE, such as deadline=5s")
        found[name] = value
    return found


def store_url(named: str) -> str:
    """The URL of a store that is named by its URL or by the address of its master."""
    return named if "://" in named else f"mooncake://{named}"


@contextmanager
def connected(url: str | None, secret_file: str | None, **more: Any) -> Iterator[Client]:
    """A client for the duration of one command; `more` are settings the command decides."""
    from mooncake_store.client import Client

    settings = _settings.get({}) | more
    if secret_file is not None:
        settings["secret_file"] = secret_file
    with Client(None if url is None else store_url(url), **settings) as store:
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
    """A key as text, for programs; bytes that are no text show as escapes."""
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")


def shown(key: str | bytes) -> str:
    """A key as people read it: on one line, whatever it holds."""
    return printable(text_of(key))
