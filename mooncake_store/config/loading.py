"""The loader: defaults < TOML file < environment < command line, with the origin of each value.

One loader for every program. A file has one table per program, `[master]`, `[worker]`,
`[client]`, and the general `[log]`; `port` of `[master]` is `MOONCAKE_MASTER_PORT` in the
environment. What several programs share (`log.level`, `secret_file`) may be set once in its
general place; the program's own table or variable wins over that within the same source.

A table `[profile.NAME]` holds settings of clients and replaces those of `[client]`. A profile that
is named in the call or on the command line also wins over the environment: who says
`--profile test` must not reach what `MOONCAKE_CLIENT_URL` names. `MOONCAKE_PROFILE` is the
environment's way to say it, and there each setting's own variable is the more specific one.

An unknown name in a file is an error that names the nearest known one, in every table and not only
in the one being loaded, because a file is usually shared by all programs. In the environment others
put names as well, without asking: an unknown variable that begins like ours is one warning, and an
error where `strict` says so. Left alone are the tables and variables of `serving`, which are its
own, those that describe a service or container (`service_links.py`), and those that inference
engines read. An empty variable counts as absent, since compose files cannot unset one.

Not done here: creating anything a setting names, and rendering. A load costs O(settings + variables
+ file); `tomllib` and `difflib` are imported only when needed.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from mooncake_store.config.service_links import is_service_link
from mooncake_store.config.setting import Contradiction, Setting, Settings, settings_of
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "COMMAND_LINE",
    "CLIENT_ARGUMENT",
    "Loaded",
    "Row",
    "Source",
    "environment_name",
    "load_settings",
    "nearest",
    "rows",
]

log = logging.getLogger(__name__)

PREFIX = "MOONCAKE_"
FILE_VARIABLE = "MOONCAKE_CONFIG"
PROFILE_VARIABLE = "MOONCAKE_PROFILE"
PROFILES_TABLE = "profile"
FOREIGN_TABLE = "serving"
DEFAULT = "default"
# Variables of SGLang and of the original; they are set where our client runs in their place.
ENGINE_VARIABLES = frozenset({"MOONCAKE_CLIENT_HTTP_PORT", "MOONCAKE_MASTER_METRICS_PORT"})

# A name this close to a known one is a misspelling even where unknown names are allowed.
_MISSPELLED = 0.92
_TOLD_MAX = 1024
_LISTED_MAX = 8
_told: set[str] = set()

Place = tuple[str, str]
S = TypeVar("S", bound=Settings)


class Source(NamedTuple):
    """Where `overrides` come from, as origins and refusals call it."""

    origin: str
    where: str


COMMAND_LINE = Source("command line", "on the command line")
CLIENT_ARGUMENT = Source("argument", "given to the client")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """The settings of a program, where each of them came from, and what meant nothing.

    An origin is `default`, `file PATH`, `environment VARIABLE`, `command line` or `argument`.
    `unknown` are the variables that begin like ours, each with the nearest that has a meaning;
    `links` are those that describe a service and were passed over.
    """

    value: S
    origins: Mapping[str, str]
    unknown: Mapping[str, str]
    links: tuple[str, ...]

    def warn(self) -> None:
        """Log the unknown variables in one line; each is told once in the life of a process."""
        fresh = [name for name in self.unknown if name not in _told]
        if not fresh:
            return
        if len(_told) + len(fresh) <= _TOLD_MAX:
            _told.update(fresh)
        log.warning(
            "unknown variables in the environment are ignored: %s; MOONCAKE_STRICT=1 refuses them",
            _listed({name: self.unknown[name] for name in fresh}),
        )


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
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    source: Source = COMMAND_LINE,
) -> Loaded[S]:
    """Load the settings of `program`; `family` are all programs that share file and environment.

    `overrides` come from `source` and are keyed by setting name; None means not given. Without
    `file`, `MOONCAKE_CONFIG` names it; without `profile`, `MOONCAKE_PROFILE`.

    Raises:
        ConfigError: a name is unknown, a value is impossible, or two contradict each other.
    """
    environ = os.environ if environ is None else environ
    ours = {name: environ[name] for name in environ if name.startswith(PREFIX)}
    known = _known((*family, program))
    path = os.fspath(file) if file is not None else ours.get(FILE_VARIABLE, "")
    document = _read_file(path, given=file is not None) if path else {}
    known.check_file(document, path)
    links = {name for name in ours if is_service_link(name, ours)}
    given = {name: raw for name, raw in (overrides or {}).items() if raw is not None}
    settings = {setting.name: setting for setting in settings_of(program)}
    for name in given:
        if name not in settings:
            raise ConfigError(f"unknown setting {name!r} {source.where}{nearest(name, settings)}")
    chosen = (profile or ours.get(PROFILE_VARIABLE, "")) if program.profiled else ""
    variables = {name: raw for name, raw in ours.items() if raw and name not in links}
    in_profile = _from_profile(document, path, chosen, given=bool(profile))
    found = _from_file(settings.values(), document, path) | in_profile
    found |= _from_environment(settings.values(), variables)
    found |= (in_profile if profile else {}) | _from_caller(given, source)
    origins = {name: found[name].origin if name in found else DEFAULT for name in settings}
    values = {
        setting.attribute: setting.parse(
            found[name].raw, found[name].where, ways=_ways(setting), from_file=found[name].typed
        )
        for name, setting in settings.items()
        if name in found
    }
    try:
        value = program(**values)
    except Contradiction as error:
        whence = ", ".join(f"{name}: {origins[name]}" for name in error.names)
        raise ConfigError(
            f"{error.what} ({whence})",
            advice="; ".join(_ways(settings[name]) for name in error.names),
        ) from None
    unknown = known.unknown_variables(variables)
    if unknown and getattr(value, "strict", False):
        raise ConfigError(
            f"unknown variables in the environment: {_listed(unknown)}",
            advice=f"unset what is not meant for this store, or leave out {program.table}.strict",
        )
    return Loaded(value, origins, unknown, tuple(sorted(links)))


def _ways(setting: Setting) -> str:
    """Return how a setting is set: option, variable and key of a file."""
    own = (setting.table, setting.name)
    return (
        f"{setting.table}.{setting.name} is set by {setting.option}, {environment_name(own)}, or "
        f"{setting.name} in [{setting.table}] of a file"
    )


class _Found(NamedTuple):
    """A value in one source, and what origins and refusals call its place."""

    raw: object
    origin: str
    where: str
    typed: bool = False


def _from_caller(given: Mapping[str, object], source: Source) -> dict[str, _Found]:
    return {
        name: _Found(raw, source.origin, f"{name} {source.where}") for name, raw in given.items()
    }


def _from_environment(settings: Iterable[Setting], environ: Mapping[str, str]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    if not environ:
        return found
    for setting in settings:
        for place in setting.places:  # the more general one first
            variable = environment_name(place)
            if variable in environ:
                found[setting.name] = _Found(
                    environ[variable], f"environment {variable}", f"{variable} in the environment"
                )
    return found


def _from_file(
    settings: Iterable[Setting], document: Mapping[str, Any], path: str
) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    if not document:
        return found
    for setting in settings:
        for table, name in setting.places:
            given = document.get(table, {}) if table else document
            if name in given:
                where = f"{name} {_within(table)}{path}"
                found[setting.name] = _Found(given[name], f"file {path}", where, typed=True)
    return found


def _from_profile(
    document: Mapping[str, Any], path: str, name: str, *, given: bool
) -> dict[str, _Found]:
    """Return the settings of a profile; none without a name.

    Raises:
        ConfigError: no file has it.
    """
    if not name:
        return {}
    source = "" if given else f" (named by {PROFILE_VARIABLE})"
    profiles = document.get(PROFILES_TABLE, {})
    if not path:
        raise ConfigError(
            f"there is no file to read the profile {name!r}{source} from",
            advice=f"name one by --config FILE or {FILE_VARIABLE}",
        )
    if name not in profiles:
        raise ConfigError(
            f"there is no [{PROFILES_TABLE}.{name}] in {path}{source}"
            + (nearest(name, profiles) if profiles else "")
        )
    table = f"{PROFILES_TABLE}.{name}"
    return {
        key: _Found(raw, f"file {path} [{table}]", f"{key} {_within(table)}{path}", typed=True)
        for key, raw in profiles[name].items()
    }


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


@functools.cache
def _known(programs: tuple[type[Settings], ...]) -> _Known:
    return _Known(programs)


class _Known:
    """Every name that any program of the family understands."""

    def __init__(self, programs: Iterable[type[Settings]]) -> None:
        self.tables: dict[str, set[str]] = {}
        self.profiled: set[str] = set()
        for program in programs:
            for setting in settings_of(program):
                for table, name in setting.places:
                    self.tables.setdefault(table, set()).add(name)
                if program.profiled:
                    self.profiled.add(setting.name)
        self.foreign = {FOREIGN_TABLE} - self.tables.keys()

    def check_file(self, document: Mapping[str, Any], path: str) -> None:
        """Refuse unknown tables and names in a file."""
        named_tables = {table for table in self.tables if table}
        general = self.tables.get("", set())
        for key, value in document.items():
            if key in self.foreign or key in general:
                continue
            if key not in named_tables | {PROFILES_TABLE}:
                thing = "table" if isinstance(value, dict) else "setting"
                advice = nearest(key, named_tables | general | {PROFILES_TABLE})
                raise ConfigError(f"unknown {thing} {key!r} in {path}{advice}")
            begun = f"{key}.NAME" if key == PROFILES_TABLE else key
            if not isinstance(value, dict):
                raise ConfigError(f"{key!r} in {path} must be a table, begun by the line [{begun}]")
            if key != PROFILES_TABLE:
                _check_names(value, self.tables[key], key, path)
                continue
            for name, settings in value.items():
                if not isinstance(settings, dict):
                    raise ConfigError(
                        f"{name!r} in [{key}] of {path} is in no profile; begin one by the line "
                        f"[{begun}]"
                    )
                _check_names(settings, self.profiled, f"{key}.{name}", path)

    def unknown_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return those that are nobody's, or nearly ours, with the nearest that has a meaning.

        Every variable of `environ` begins like ours.
        """
        if not environ:
            return {}
        names = {FILE_VARIABLE, PROFILE_VARIABLE}
        names |= {
            environment_name((table, name)) for table in self.tables for name in self.tables[table]
        }
        prefixes = tuple(environment_name((table, "")) + "_" for table in self.tables if table)
        foreign = tuple(environment_name((table, "")) + "_" for table in self.foreign)
        return {
            variable: _nearest_variable(variable, names)
            for variable in sorted(environ)
            if variable not in names | ENGINE_VARIABLES
            and not variable.startswith(foreign)
            and (variable.startswith(prefixes) or _is_misspelled(variable, names))
        }


def _check_names(given: Iterable[str], known: set[str], table: str, path: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r} in [{table}] of {path}{nearest(name, known)}"
            )


def _listed(unknown: Mapping[str, str]) -> str:
    """Return the first unknown variables, each with the nearest known one, and how many follow."""
    shown = [f"{name} (did you mean {near}?)" for name, near in list(unknown.items())[:_LISTED_MAX]]
    more = len(unknown) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _is_misspelled(variable: str, names: Iterable[str]) -> bool:
    import difflib

    return bool(difflib.get_close_matches(variable, names, n=1, cutoff=_MISSPELLED))


def _nearest_variable(variable: str, names: Iterable[str]) -> str:
    import difflib

    # The common beginning of all variables would make every pair look alike: compare the rest.
    rest = {name.removeprefix(PREFIX): name for name in sorted(names)}
    close = difflib.get_close_matches(variable.removeprefix(PREFIX), rest, n=1, cutoff=0.0)
    return rest[close[0]]
