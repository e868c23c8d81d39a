"""What the commands that talk to a store share: the options that say which store, one client.

Which store it is, and with which settings, is said alike for all commands and concerns none of
them: `store_options` adds these options to a command, and `connected` finds what they say.
"""

from __future__ import annotations

import functools
import os
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mooncake_store.cli.shared.app import declared, taking
from mooncake_store.cli.shared.program_options import ConfigOption
from mooncake_store.printable import printable

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from mooncake_store.client import Client
    from mooncake_store.config.settings import ClientConfig
    from transfer_engine.wire.keyring import Keyring

__all__ = [
    "MASTER_NAMES",
    "EtcdFileOption",
    "ProfileOption",
    "SecretOption",
    "Stopwatch",
    "connected",
    "key_of",
    "secret_named",
    "settings_of_store",
    "shown",
    "store_named",
    "store_options",
    "store_url",
    "text_of",
]

MASTER_NAMES = ("--url", "--master")
"""What every command calls the option that names a store, or the master of one: both alike."""

UrlOption = Annotated[
    str | None,
    typer.Option(
        *MASTER_NAMES,
        metavar="STORE",
        help="The store: mooncake://host:port/namespace, or the address of its master; several "
        "host:port, separated by commas, where others stand by; mooncake+etcd://host:port/pool/"
        "namespace, where an etcd knows them.",
    ),
]
SecretOption = Annotated[
    str | None, typer.Option("--secret-file", help="File with the shared secret.")
]

EtcdFileOption = Annotated[
    str | None, typer.Option("--etcd-file", help="File that says how the etcd lets us in.")
]

T = TypeVar("T")

ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="The table [profile.NAME] of that file; else MOONCAKE_PROFILE.",
    ),
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="NAME=VALUE",
        help="A setting of the client, such as deadline=5s; may be given several times.",
    ),
]
_STORE = {
    "url": (None, UrlOption),
    "secret_file": (None, SecretOption),
    "etcd_file": (None, EtcdFileOption),
}
_SETTINGS = {
    "config_file": (None, ConfigOption),
    "profile": (None, ProfileOption),
    "setting": (None, SettingOption),
}

_named: ContextVar[dict[str, Any]] = ContextVar("what the running command makes its client with")


def store_options(command: Callable[..., T]) -> Callable[..., T]:
    """Let a command that uses `connected` take the options that say which store."""

    @functools.wraps(command)
    def called(**arguments: Any) -> T:
        given = {name: arguments.pop(name) for name in (*_STORE, *_SETTINGS)}
        token = _named.set(_client_arguments(**given))
        try:
            return command(**arguments)
        finally:
            _named.reset(token)

    own = declared(command)
    as_json = {"as_json": own.pop("as_json")}
    return taking(own | _STORE | as_json | _SETTINGS)(called)


def _client_arguments(url: str | None, setting: list[str] | None, **chosen: Any) -> dict[str, Any]:
    """What a client is made with for these options; raises ConfigError for `--setting x`."""
    from mooncake_store.errors import ConfigError

    files = {name: chosen.pop(name) for name in ("secret_file", "etcd_file")}
    found = {"url": None if url is None else store_url(url), **chosen}
    for text in setting or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--setting {text!r} is not NAME=VALUE, such as deadline=5s")
        found[name] = value
    return found | {name: file for name, file in files.items() if file is not None}


def store_url(named: str) -> str:
    """The URL of a store that is named by its URL or by the address of its master."""
    return named if "://" in named else f"mooncake://{named}"


@contextmanager
def connected(**more: Any) -> Iterator[Client]:
    """A client of the store that is named, for the command; `more` is what the command decides."""
    from mooncake_store.client import Client

    with Client(**_named.get() | more) as store:
        yield store


def settings_of_store() -> ClientConfig:
    """The settings that a client of the store that is named would have."""
    from mooncake_store.config.settings import load_client

    named = dict(_named.get())
    return load_client(named.pop("url"), named)


def secret_named(secret_file: str | None) -> Keyring | None:
    """What a command proves itself with that names no store, but maybe a file with a secret.

    The rest is as the settings of the client say: whether it speaks TLS.
    """
    from mooncake_store.config import ClientConfig, load
    from mooncake_store.credentials import secret_of

    return secret_of(load(ClientConfig, overrides={"secret_file": secret_file}).value)


def judge_of(url: str) -> ssl.SSLContext | None:
    """How a server at this URL is judged, as the settings of the client say; None for http."""
    if not url.startswith("https:"):
        return None
    from mooncake_store.config import ClientConfig, load
    from mooncake_store.credentials import https_context

    return https_context(load(ClientConfig).value)


def store_named() -> bool:
    """Whether the command line says which store it is: itself, or by a file or profile."""
    named = _named.get()
    return any(named[by] is not None for by in ("url", "config_file", "profile"))


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
