"""One setting: its name, kind, default, explanation, and the sentence that says what is wrong.

Settings are the fields of a `Settings` struct. What a field does not say by itself stands in the
`msgspec.Meta` of its annotation: limits (`ge`, `gt`, `le`), the explanation (`description`), the
unit its text may carry (`extra={"unit": "bytes" | "ns" | "s"}`) and a place it shares with other
programs (`extra={"general": (table, name)}`). Loader, error messages and the reference page all
read this one description.

An attribute ends in its native unit (`put_discard_ns`), a setting does not (`put_discard`),
because its value carries a unit of its own (`"30s"`). From a file or the environment a duration
must have one; numbers given by Python code are seconds.

Not done here: reading files and the environment (`loading.py`). Parsing is O(text).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec

from mooncake_store.units import (
    SECOND_NS,
    format_duration,
    format_size,
    parse_duration,
    parse_duration_ns,
    parse_size,
)
from transfer_engine.errors import ConfigError

__all__ = ["Contradiction", "Setting", "Settings", "settings_of"]

_UNIT_SUFFIXES = ("_bytes", "_ns", "_s")
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "off", "0"), False)
_SHOWN_MAX = 60


class Contradiction(ConfigError):
    """Settings that are fine alone and impossible together; names them for the loader."""

    def __init__(self, what: str, *names: str) -> None:
        super().__init__(what)
        self.names = names


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a setting, or each item of its list, may have."""

    base: type
    unit: str = ""
    low: float | None = None
    low_excluded: bool = False
    high: float | None = None
    choices: tuple[str, ...] = ()
    many: bool = False

    def parse(self, raw: object, *, from_file: bool) -> object:
        """Return the value that `raw` means; a file has types, other places may only have text.

        Raises:
            ValueError: it means none that is allowed.
        """
        if not self.many:
            return self._parse_item(raw, from_file)
        if isinstance(raw, str) and not from_file:
            raw = [item.strip() for item in raw.split(",") if item.strip()]
        if not isinstance(raw, list | tuple):
            raise ValueError
        return tuple(self._parse_item(item, from_file) for item in raw)

    def _parse_item(self, raw: Any, from_file: bool) -> object:
        if self.unit == "bytes":
            value: object = parse_size(raw)
        elif self.unit:
            if from_file and not isinstance(raw, str):
                raise ValueError
            value = parse_duration_ns(raw) if self.unit == "ns" else parse_duration(raw)
        elif isinstance(raw, str) and self.base is not str and not from_file:
            value = _BOOLEANS[raw.lower()] if self.base is bool else self.base(raw)
        elif self.choices and isinstance(raw, str):
            value = raw.lower()
        else:
            value = float(raw) if self.base is float and type(raw) is int else raw
        if not self._allows_item(value):
            raise ValueError
        return value

    def allows(self, value: object) -> bool:
        """Return whether `value`, already in its native unit, is of this kind."""
        if self.many:
            return isinstance(value, tuple) and all(self._allows_item(item) for item in value)
        return self._allows_item(value)

    def _allows_item(self, value: Any) -> bool:
        types = (int, float) if self.base is float else (self.base,)
        if type(value) not in types or (self.choices and value not in self.choices):
            return False
        if self.base is float and not math.isfinite(value):
            return False
        if self.low is not None and (value <= self.low if self.low_excluded else value < self.low):
            return False
        return self.high is None or value <= self.high

    def expected(self) -> str:
        """Return a phrase that completes 'it must be ...'."""
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        item = f"one of {', '.join(self.choices)}" if self.choices else names[self.base]
        if self.unit == "bytes":
            item = f"a size{self._range()}, such as '64MiB', '1.5g' or '4096'"
        elif self.unit:
            item = f"a duration{self._range()}, with its unit, such as '10s' or '500ms'"
        else:
            item += self._range()
        return f"a list, each item {item}" if self.many else item

    def _range(self) -> str:
        low = f" from {self._limit(self.low)}" if self.low is not None else ""
        if self.low_excluded:
            low = f" above {self._limit(self.low)}"
        if self.high is None:
            return low.replace("from", "of at least")
        separator = " and up to" if self.low_excluded or not low else " to"
        return f"{low}{separator} {self._limit(self.high)}"

    def _limit(self, limit: float | None) -> str:
        return "0" if not limit else self.show(limit)

    def show(self, value: Any) -> str:
        """Return `value` in full precision, as it would be written in a variable."""
        if isinstance(value, tuple):
            return ",".join(self.show(item) for item in value)
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.unit == "bytes":
            text = format_size(int(value))
            return text if parse_size(text) == value else str(int(value))
        if self.unit:
            value_ns = value if self.unit == "ns" else round(value * SECOND_NS)
            text = format_duration(value_ns / SECOND_NS)
            return text if parse_duration_ns(text) == value_ns else f"{value_ns}ns"
        return str(value)

    def literal(self, value: Any) -> str:
        """Return `value` as it would be written in a TOML file."""
        if isinstance(value, tuple):
            return f"[{', '.join(self.literal(item) for item in value)}]"
        text = self.show(value)
        return json.dumps(text, ensure_ascii=False) if self.unit or self.base is str else text


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of one program."""

    name: str
    attribute: str
    table: str
    kind: Kind
    default: Any
    text: str
    option: str
    general: tuple[str, str] | None = None

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Where it may be set, as (table, name), the more general place first."""
        own = (self.table, self.name)
        return (own,) if self.general is None else (self.general, own)

    def parse(self, raw: object, where: str, *, ways: str, from_file: bool) -> Any:
        """Return the value `raw` means.

        Raises:
            ConfigError: it means none; the sentence begins with `where`, ends with what was found,
                and `ways` says how to set it.
        """
        try:
            return self.kind.parse(raw, from_file=from_file)
        except (ValueError, KeyError, TypeError):
            shown = repr(raw) if len(repr(raw)) <= _SHOWN_MAX else f"{repr(raw)[:_SHOWN_MAX]}..."
            raise ConfigError(
                f"{where} must be {self.kind.expected()}, not {shown}", advice=ways
            ) from None


def _without_unit(attribute: str) -> str:
    for suffix in _UNIT_SUFFIXES:
        if attribute.endswith(suffix):
            return attribute.removesuffix(suffix)
    return attribute


class Settings(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename=_without_unit,
):
    """The settings of one program: a frozen struct that refuses to exist with wrong values."""

    table: ClassVar[str]
    profiled: ClassVar[bool] = False
    """Whether `[profile.NAME]` tables of a file hold settings of this program."""
    options: ClassVar[frozenset[str] | None] = None
    """The settings with a command-line option of their own; None: all. The rest: `--setting`."""

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            value = getattr(self, setting.attribute)
            if not setting.kind.allows(value):
                raise ConfigError(
                    f"{self.table}.{setting.attribute} must be {setting.kind.expected()} "
                    f"in its native unit, not {value!r}"
                )
        self.check()

    def check(self) -> None:
        """Refuse settings that are possible alone and not together.

        Raises:
            Contradiction: the first such pair.
        """


@lru_cache(maxsize=64)
def settings_of(program: type[Settings]) -> tuple[Setting, ...]:
    """Return the settings of `program` in the order they are written."""
    return tuple(_setting(program, info) for info in msgspec.structs.fields(program))


def _setting(program: type[Settings], info: msgspec.structs.FieldInfo) -> Setting:
    kind, text, extra = _read_annotation(info.type)
    name = info.encode_name
    if not text:
        raise TypeError(f"{program.table}.{info.name} has no description")
    # Each item of a list has an option of its own: `--segment 1GiB --segment 2GiB`. One that is
    # reached as others say (`reached_as`) is no plural.
    plural = kind.many and not name.endswith("_as")
    option = f"--{name.removesuffix('s') if plural else name}".replace("_", "-")
    if program.options is not None and name not in program.options:
        option = f"--setting {name}=VALUE"
    return Setting(
        name=name,
        attribute=info.name,
        table=program.table,
        kind=kind,
        default=info.default,
        text=text,
        option=option,
        general=extra.get("general"),
    )


def _read_annotation(annotation: Any) -> tuple[Kind, str, dict[str, Any]]:
    """Return kind, explanation and extras of a field; raises TypeError for what it cannot be."""
    base: Any = annotation
    metas: list[msgspec.Meta] = []
    if get_origin(annotation) is Annotated:
        base, *rest = get_args(annotation)
        metas = [meta for meta in rest if isinstance(meta, msgspec.Meta)]
    limits: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    text = ""
    for meta in metas:
        limits.update({k: v for k in ("ge", "gt", "le") if (v := getattr(meta, k)) is not None})
        extra |= meta.extra if meta.extra is not None else {}
        text = meta.description if meta.description is not None else text
    if get_origin(base) is tuple:
        item = _read_annotation(get_args(base)[0])[0]
        return replace(item, many=True), text, extra
    choices = get_args(base) if get_origin(base) is Literal else ()
    base = str if choices else base
    if base not in (bool, int, float, str):
        raise TypeError(f"a setting cannot be of type {base!r}")
    kind = Kind(
        base=base,
        unit=extra.get("unit", ""),
        low=limits.get("ge", limits.get("gt")),
        low_excluded="gt" in limits,
        high=limits.get("le"),
        choices=choices,
    )
    return kind, text, extra
