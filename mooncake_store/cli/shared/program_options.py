"""What the commands that serve (`master`, `worker`) share: an option for each setting, one start.

The options are read off the settings, so that a new setting has one, with its explanation and its
default, and cannot be forgotten. A value goes to the loader as the text it is: command line,
variable and file are read by the same rules and refused in the same words.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mooncake_store.cli.shared.app import declared, emit, taking
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mooncake_store.config.setting import Kind, Setting, Settings

__all__ = [
    "ConfigOption",
    "InsecureOption",
    "PortFileOption",
    "announce",
    "begin",
    "setting_options",
]

S = TypeVar("S", bound="Settings")

GIVEN = "given"
"""The parameter of a command that takes what was given of its settings."""

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read this file; without it, the one that MOONCAKE_CONFIG names.",
    ),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Accept other machines without a secret.")
]
PortFileOption = Annotated[
    str | None, typer.Option(help="Write the addresses in use to this file.")
]


def setting_options(
    *programs: type[Settings],
    whole: tuple[str, ...] = (),
    also: Mapping[str, str] | None = None,
    **helps: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting of these programs.

    The command gets a dictionary `given`: setting name to text, list of texts or bool, without
    those that were not given. A comma separates items of lists, but not of those in `whole`.
    `also` gives options a second name, `helps` replaces the explanation of settings whose option
    says more here.
    """
    from mooncake_store.config.setting import settings_of

    settings = {setting.name: setting for program in programs for setting in settings_of(program)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            given = {}
            for name in settings:
                value = arguments.pop(name)
                if isinstance(value, list) and name not in whole:
                    value = [item for text in value for item in text.split(",") if item]
                if value not in (None, []):
                    given[name] = value
            command(given=given, **arguments)

        more, own = also or {}, declared(command)
        del own[GIVEN]
        options = {
            name: (None, _option(setting, helps.get(name), more.get(name)))
            for name, setting in settings.items()
        }
        return taking(options | own)(called)

    return decorate


def _option(setting: Setting, about: str | None, second: str | None) -> Any:
    kind = setting.kind
    names = [setting.option]
    if kind.base is bool:
        names = [f"{setting.option}/--no-{setting.option.removeprefix('--')}"]
    if second is not None:
        names.append(second)
    more = " May be given several times." if kind.many else ""
    info = typer.Option(
        *names,
        metavar=None if kind.base is bool else _metavar(kind),
        help=(about or setting.text) + more,
        show_default=kind.show(setting.default) or False,
    )
    value: Any = bool if kind.base is bool else list[str] if kind.many else str
    return Annotated[value | None, info]


def _metavar(kind: Kind) -> str:
    if kind.choices:
        return "|".join(kind.choices)
    if kind.unit:
        return "SIZE" if kind.unit == "bytes" else "DURATION"
    return {int: "N", float: "X", str: "TEXT"}[kind.base]


def begin(program: type[S], file: Path | None, given: dict[str, Any]) -> S:
    """Return the settings of a program that starts; logs are written from here."""
    from mooncake_store import config
    from mooncake_store.config.loading import load_settings
    from mooncake_store.program import logs
    from mooncake_store.program.descriptors import fitted, raise_limit
    from mooncake_store.program.port_file import remove_port_file

    raise_limit()
    loaded = load_settings(program, config.PROGRAMS, file=file, overrides=given)
    settings: Any = loaded.value
    logs.configure(settings.log_level, as_json=settings.log_json)
    loaded.warn()
    if settings.port_file:
        # In a container a run that was killed had the same number, and does not serve any more.
        remove_port_file(settings.port_file)
    return fitted(loaded.value)


def announce(facts: Mapping[str, Any], *, as_json: bool, human: Callable[[], str]) -> None:
    """Say that a program serves, on standard output and to the service manager that started it."""
    from mooncake_store.program.service_manager import notify

    emit({"ready": True, **facts}, as_json=as_json, human=human)
    sys.stdout.flush()
    notify("READY=1", f"STATUS={printable(human())}")
