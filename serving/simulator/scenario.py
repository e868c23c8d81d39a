"""Scenario files: a trace, machines, a plan, and what of the plan is varied.

    scenario = read_scenario("capacity.toml")
    scenario.variants        # in the order of the file
    scenario.source.read(seed=1)

A file has the fields of `Scenario` as TOML. Variants are those that have a name, each with every
combination of the values that vary, of which the last goes quickest. Everything in a file is
checked when it is read, before anything is run. Traces and hardware lie where the file says, seen
from where the file is.
"""

from __future__ import annotations

import itertools
import os
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

import msgspec

from eviction.trace import columns_of
from mooncake_store.errors import ConfigError, InvalidArgumentError
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import Hardware, known_hardware, read_hardware
from serving.simulator.outages import read_outage
from serving.traces import shape
from serving.traces.generating import KINDS, generate
from serving.traces.reading import read_whole

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from eviction import Trace

__all__ = ["Scenario", "Slo", "TraceSource", "Variant", "name_of", "read_scenario"]

T = TypeVar("T")

_TYPES = get_type_hints(Plan)
PLAN_FIELDS = tuple(field.name for field in fields(Plan) if field.name != "seed")
"""What a scenario may say of a plan; seeds are told apart."""


class TraceSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where requests come from: a file, or a kind that is made up, by the seed of each run."""

    file: str = ""
    kind: str = ""
    requests: int = 0
    """The first so many of a file, or as many as are made up; 0 takes all, or the kind's own."""
    spread: bool = False
    """Whether requests of one timestamp come evenly until the next."""

    def read(self, seed: int) -> Trace:
        """The requests of a run."""
        if self.file:
            trace = read_whole(Path(self.file))
            if self.requests:
                trace, _ = shape.split(trace, min(self.requests, len(trace)))
        else:
            kind = replace(KINDS[self.kind], requests=self.requests)
            trace = columns_of(list(generate(kind, seed)))
        return shape.spread(trace) if self.spread else trace


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What requests are held to where goodput is counted; without, to what their plan says."""

    ttft_s: float | None = None
    tbt_s: float | None = None


class Variant(NamedTuple):
    """One plan, and what of it differs from the others."""

    name: str
    """As the file has it, with what varies."""
    differs: dict[str, Any]
    """Values of what varies, and `variant` where variants have names."""
    plan: Plan


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a file may say."""

    about: str = ""
    trace: dict[str, Any] = {}
    hardware: str = "a800-llama3-70b"
    seeds: list[int] = msgspec.field(default_factory=lambda: [1])
    slo: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {}
    vary: dict[str, list[Any]] = {}


class Scenario(NamedTuple):
    """What a file comes to."""

    about: str
    source: TraceSource
    hardware: Hardware
    seeds: tuple[int, ...]
    slo: Slo
    plan: Plan
    """What all start from."""
    variants: list[Variant]

    @property
    def varied(self) -> list[str]:
        """What differs between variants."""
        return list(self.variants[0].differs)


def read_scenario(path: str | os.PathLike[str], *, trace: str = "") -> Scenario:
    """Read and check a file; `trace` is taken instead of the one it names.

    Raises:
        ConfigError: there is no such file, or what it says is not possible.
    """
    text = os.fspath(path)
    try:
        with open(text, "rb") as opened:
            told = tomllib.load(opened)
    except OSError as error:
        raise ConfigError(f"cannot read the scenario {text}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} is no TOML: {error}") from None
    return _Reading(text).scenario(told, trace)


class _Reading:
    """One file while it is read: its errors name it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def scenario(self, told: dict[str, Any], trace: str) -> Scenario:
        file = self._as(_File, told, "")
        if not file.seeds:
            raise self._wrong("seeds is empty", "name one at least, such as seeds = [1]")
        hardware = self._hardware(file.hardware)
        base = self._fields(file.plan, "plan")
        named = {
            name: self._fields(values, f"variants.{name}") for name, values in file.variants.items()
        }
        varies = self._varies(file.vary)
        scenario = Scenario(
            about=file.about or Path(self._path).stem,
            source=self._source(file.trace, trace),
            hardware=hardware,
            seeds=tuple(file.seeds),
            slo=self._as(Slo, file.slo, "slo"),
            plan=self._plan(base, "plan"),
            variants=list(self._variants(base, named, varies)),
        )
        for variant in scenario.variants:
            self._check(variant, hardware)
        return scenario

    def _variants(
        self, base: dict[str, Any], named: dict[str, dict[str, Any]], varies: dict[str, list[Any]]
    ) -> Iterator[Variant]:
        for name, values in (named or {"": {}}).items():
            for chosen in itertools.product(*varies.values()):
                differs = dict(zip(varies, chosen, strict=True))
                known = {"variant": name} if named else {}
                whole = name_of(known | differs)
                plan = self._plan(base | values | self._fields(differs, "vary"), whole)
                yield Variant(whole, known | differs, plan)

    def _varies(self, told: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        for name, values in told.items():
            self._known({name: None}, PLAN_FIELDS, "vary")
            if not values:
                raise self._wrong(f"vary.{name} is empty", "list the values that it takes")
            for at, value in enumerate(values):
                self._field(name, value, f"vary.{name}[{at}]")
        return dict(told)

    def _source(self, told: dict[str, Any], instead: str) -> TraceSource:
        source = self._as(TraceSource, told, "trace")
        if source.requests < 0:
            raise self._wrong(f"trace.requests is {source.requests}", "0 takes all")
        if instead:
            return msgspec.structs.replace(source, file=instead, kind="")
        if bool(source.file) == bool(source.kind):
            raise self._wrong(
                "trace says both a file and a kind" if source.file else "trace says no file",
                f"file = a trace, or kind = one of {', '.join(KINDS)}; or say --trace",
            )
        if source.kind and source.kind not in KINDS:
            raise self._wrong(f"trace.kind is {source.kind!r}", f"one of {', '.join(KINDS)}")
        if source.kind:
            requests = source.requests or KINDS[source.kind].requests
            return msgspec.structs.replace(source, requests=requests)
        found = self._beside(source.file)
        if not Path(found).is_file():
            raise self._wrong(
                f"trace.file: there is no file {found}", "name one from where this file is"
            )
        return msgspec.structs.replace(source, file=found)

    def _hardware(self, name: str) -> Hardware:
        try:
            return read_hardware(name if name in known_hardware() else self._beside(name))
        except ConfigError as error:
            raise self._wrong(f"hardware: {error}", "") from None

    def _beside(self, name: str) -> str:
        return str(Path(self._path).parent / name)

    # -- plans

    def _fields(self, told: Mapping[str, Any], where: str) -> dict[str, Any]:
        self._known(told, PLAN_FIELDS, where)
        return {name: self._field(name, value, f"{where}.{name}") for name, value in told.items()}

    def _field(self, name: str, value: Any, where: str) -> Any:
        if name == "outages":
            named = self._as(list[str], value, where)
            try:
                return tuple(map(read_outage, named))
            except InvalidArgumentError as error:
                raise self._wrong(f"{where}: {error}", "") from None
        return self._as(_TYPES[name], value, where)

    def _plan(self, values: dict[str, Any], where: str) -> Plan:
        try:
            return Plan(**values)
        except InvalidArgumentError as error:
            raise self._wrong(f"{where}: {error}", "") from None

    def _check(self, variant: Variant, hardware: Hardware) -> None:
        """What only a cluster knows; so it is told before the first run."""
        try:
            Cluster(variant.plan, hardware)
        except InvalidArgumentError as error:
            raise self._wrong(f"{variant.name}: {error}", "") from None

    # -- errors

    def _as(self, kind: type[T], value: Any, where: str) -> T:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            self._known(value, kind.__struct_fields__, where)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            # msgspec says what it expected, and where below the value.
            what, _, below = str(error).partition(" - at `$")
            place = f"{where}{below.removesuffix('`')}".lstrip(".")
            raise self._wrong(f"{place}: {what[0].lower()}{what[1:]}", "") from None

    def _known(self, told: Mapping[str, Any], known: Collection[str], where: str) -> None:
        for name in told:
            if name == "seed" and known is PLAN_FIELDS:
                raise self._wrong(f"{where}.seed is not said there", "write seeds = [1, 2, 3]")
            if name not in known:
                place = f"{where}.{name}".lstrip(".")
                raise self._wrong(f"there is no field {place}", f"choose from {', '.join(known)}")

    def _wrong(self, what: str, advice: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}", advice=advice)


def name_of(differs: Mapping[str, Any]) -> str:
    """What differs, as variants are called by it."""
    told = [
        value if field == "variant" else f"{field} {_shown(value)}"
        for field, value in differs.items()
    ]
    return ", ".join(told) or "plan"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value) or "none"
