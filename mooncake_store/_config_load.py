"""The loader: defaults < TOML file < environment < command line, with the origin of each value.

One loader for every program. A file has one table per program, `[master]`, `[worker]`,
`[client]`, and the general `[log]`; `port` of `[master]` is `MOONCAKE_MASTER_PORT` in the
environment. What several programs share (`log.level`, `secret_file`) may be set once in its
general place; the program's own table or variable wins over that within the same source.

An unknown name is an error that names the nearest known one, in every table and not only in the
one being loaded, because a file is usually shared by all programs. Left alone are the tables and
variables of `serving`, which reads its own, and variables that look like settings and are not:
those that Kubernetes injects for a service called `mooncake-master`, and those that inference
engines read. An empty variable counts as absent, since compose files cannot unset one.

Not done here: creating anything a setting names, and rendering. A load costs O(settings + variables
+ file); `tomllib` and `difflib` are imported only when needed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from mooncake_store._setting import Contradiction, Setting, Settings, settings_of
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Loaded", "Row", "environment_name", "load_settings", "nearest", "rows"]

PREFIX = "MOONCAKE_"
FILE_VARIABLE = "MOONCAKE_CONFIG"
FOREIGN_TABLE = "serving"
DEFAULT = "default"
COMMAND_LINE = "command line"
# Variables of SGLang and of the original; they are set where our client runs in their place.
ENGINE_VARIABLES = frozenset({"MOONCAKE_CLIENT_HTTP_PORT", "MOONCAKE_MASTER_METRICS_PORT"})

# A name this close to a known one is a misspelling even where unknown names are allowed.
_MISSPELLED = 0.92
_KUBERNETES_PORT = re.compile(r"_PORT_[0-9]+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?")

Place = tuple[str, str]
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """The settings of a program, and where each of them came from."""

    value: S
    origins: Mapping[str, str]

    def origin(self, name: str) -> str:
        """Return `default`, `file PATH`, `environment VARIABLE` or `command line`.

        Raises:
            ConfigError: no setting has this name.
        """
        if name not in self.origins:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, self.origins)}")
        return self.origins[name]


class Row(NamedTuple):
    """One line of `mooncake config show`: all text, ready to print."""

    name: str
    value: str
    origin: str
    variable: str


def rows(loaded: Loaded[S]) -> list[Row]:
    """Return every setting of `loaded` with its value and origin. No value is a secret."""
    program = type(loaded.value)
    return [
        Row(
            f"{program.table}.{setting.name}",
            setting.kind.show(getattr(loaded.value, setting.attribute)),
            loaded.origins[setting.name],
            environment_name((program.table, setting.name)),
        )
        for setting in settings_of(program)
    ]


def environment_name(place: Place) -> str:
    """Return the variable of a place: `("master", "port")` is `MOONCAKE_MASTER_PORT`."""
    return PREFIX + "_".join(part for part in place if part).upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or the list of what is known when nothing is near."""
    import difflib

    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def load_settings(
    program: type[S],
    family: Iterable[type[Settings]],
    *,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Loaded[S]:
    """Load the settings of `program`; `family` are all programs that share file and environment.

    `overrides` come from the command line and are keyed by setting name; None means not given.
    Without `file`, `MOONCAKE_CONFIG` names it.

    Raises:
        ConfigError: a name is unknown, a value is impossible, or two contradict each other.
    """
    environ = os.environ if environ is None else environ
    known = _Known([*family, program])
    path = os.fspath(file) if file is not None else environ.get(FILE_VARIABLE, "")
    document = _read_file(path, given=file is not None) if path else {}
    known.check_file(document, path)
    known.check_environment(environ)
    given = {name: raw for name, raw in (overrides or {}).items() if raw is not None}
    settings = {setting.name: setting for setting in settings_of(program)}
    for name in given:
        if name not in settings:
            raise ConfigError(
                f"unknown setting {name!r} on the command line{nearest(name, settings)}"
            )
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for setting in settings.values():
        found = _find(setting, document, path, environ, given)
        origins[setting.name] = DEFAULT if found is None else found.origin
        if found is not None:
            from_file = found.origin.startswith("file ")
            value = setting.parse(found.raw, found.where, from_file=from_file)
            values[setting.attribute] = value
    try:
        return Loaded(program(**values), origins)
    except Contradiction as error:
        whence = ", ".join(f"{name}: {origins[name]}" for name in error.names)
        raise ConfigError(f"{error.what} ({whence})") from None


class _Found(NamedTuple):
    raw: object
    origin: str
    where: str


def _find(
    setting: Setting,
    document: Mapping[str, Any],
    path: str,
    environ: Mapping[str, str],
    given: Mapping[str, object],
) -> _Found | None:
    """Return the value that wins for `setting`, or None when only the default is left."""
    if setting.name in given:
        return _Found(given[setting.name], COMMAND_LINE, f"{setting.name} on the command line")
    for place in reversed(setting.places):
        variable = environment_name(place)
        if environ.get(variable) and variable not in _kubernetes_names(environ):
            return _Found(
                environ[variable], f"environment {variable}", f"{variable} in the environment"
            )
    for table, name in reversed(setting.places):
        settings = document.get(table, {}) if table else document
        if name in settings:
            return _Found(settings[name], f"file {path}", f"{name} {_within(table)}{path}")
    return None


def _within(table: str) -> str:
    return f"in [{table}] of " if table else "in "


def _read_file(path: str, *, given: bool) -> dict[str, Any]:
    import tomllib

    source = "" if given else f" (named by {FILE_VARIABLE})"
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}{source}: {error.strerror}"
        ) from None
    except (ValueError, RecursionError) as error:
        # Besides TOMLDecodeError: bytes that are no UTF-8, absurd numbers, absurd nesting.
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from None


class _Known:
    """Every name that any program of the family understands."""

    def __init__(self, programs: Iterable[type[Settings]]) -> None:
        self.tables: dict[str, set[str]] = {}
        for program in programs:
            for setting in settings_of(program):
                for table, name in setting.places:
                    self.tables.setdefault(table, set()).add(name)
        self.foreign = {FOREIGN_TABLE} - self.tables.keys()

    def check_file(self, document: Mapping[str, Any], path: str) -> None:
        """Refuse unknown tables and names in a file."""
        named_tables = {table for table in self.tables if table}
        general = self.tables.get("", set())
        for key, value in document.items():
            if key in self.foreign or key in general:
                continue
            if key not in named_tables:
                thing = "table" if isinstance(value, dict) else "setting"
                advice = nearest(key, named_tables | general)
                raise ConfigError(f"unknown {thing} {key!r} in {path}{advice}")
            if not isinstance(value, dict):
                raise ConfigError(f"{key!r} in {path} must be a table, begun by the line [{key}]")
            for name in value:
                if name not in self.tables[key]:
                    advice = nearest(name, self.tables[key])
                    raise ConfigError(f"unknown setting {name!r} in [{key}] of {path}{advice}")

    def check_environment(self, environ: Mapping[str, str]) -> None:
        """Refuse variables that begin like ours, or are nearly one of ours, and are not."""
        names = set(self._variables())
        prefixes = tuple(environment_name((table, "")) + "_" for table in self.tables if table)
        foreign = tuple(environment_name((table, "")) + "_" for table in self.foreign)
        ignored = _kubernetes_names(environ) | ENGINE_VARIABLES
        for variable, value in sorted(environ.items()):
            ours = variable.startswith(PREFIX) and value and variable not in ignored
            if not ours or variable in names or variable.startswith(foreign):
                continue
            if variable.startswith(prefixes) or _is_misspelled(variable, names):
                advice = _nearest_variable(variable, names)
                raise ConfigError(f"unknown variable {variable} in the environment{advice}")

    def _variables(self) -> Iterator[str]:
        yield FILE_VARIABLE
        for table, settings in self.tables.items():
            for name in settings:
                yield environment_name((table, name))


def _is_misspelled(variable: str, names: Iterable[str]) -> bool:
    import difflib

    return bool(difflib.get_close_matches(variable, names, n=1, cutoff=_MISSPELLED))


def _nearest_variable(variable: str, names: Iterable[str]) -> str:
    import difflib

    # The common beginning of all variables would make every pair look alike: compare the rest.
    rest = {name.removeprefix(PREFIX): name for name in sorted(names)}
    close = difflib.get_close_matches(variable.removeprefix(PREFIX), rest, n=1, cutoff=0.0)
    return f"; did you mean {rest[close[0]]}?"


def _kubernetes_names(environ: Mapping[str, str]) -> set[str]:
    """Return the variables that Kubernetes sets in every pod for a service named like ours.

    A service `mooncake-master` brings MOONCAKE_MASTER_SERVICE_HOST, MOONCAKE_MASTER_SERVICE_PORT,
    MOONCAKE_MASTER_PORT=tcp://10.0.0.1:50051 and MOONCAKE_MASTER_PORT_50051_TCP_ADDR and the like.
    """
    names: set[str] = set()
    for host in [name for name in environ if name.endswith("_SERVICE_HOST")]:
        service = host.removesuffix("_SERVICE_HOST")
        for name, value in environ.items():
            rest = name.removeprefix(service)
            if rest != name and (
                rest.startswith(("_SERVICE_HOST", "_SERVICE_PORT"))
                or (rest == "_PORT" and "://" in value)
                or _KUBERNETES_PORT.fullmatch(rest)
            ):
                names.add(name)
    return names
