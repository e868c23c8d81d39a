"""Limits of a principal: how much of a pool who has one credential may take.

    split_limit("bytes=10GiB")                      # ("bytes", 10737418240)
    check_limits({"bytes": 1 << 30}, Role.WRITER, namespaces=("team-a",))

They stand in the file of a credential (`credentials`). A master holds workers to what they lend,
each shard its clients to the rest (`master.accounts`, `core.allowances`). Those that are `divided`
hold in equal parts, of which each shard has one; the others hold on every shard, as what they count
is known on all of them. O(limits).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.errors import ConfigError, InvalidArgumentError
from mooncake_store.units import format_size, parse_size
from transfer_engine.wire.rights import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "LIMITS", "Limit", "changed_limit", "check_limits", "limits_text", "part_of", "split_limit",
]  # fmt: skip

_COUNT = re.compile(r"[0-9]{1,13}")


class Limit(NamedTuple):
    """One thing that may be limited."""

    of: str
    """What is counted, in words."""
    needs: Role
    """Who can take any of it."""
    size: bool = False
    """Whether it is a number of bytes."""
    divided: bool = False
    in_namespaces: bool = False
    """Whether it is counted by the namespaces of the principal, who therefore has to have some."""


LIMITS = {
    "clients": Limit("clients connected at once", Role.READER),
    "names": Limit("namespaces that it brings into being", Role.READER),
    "groups": Limit("groups of objects", Role.WRITER, in_namespaces=True),
    "tasks": Limit("copies and moves that have not ended", Role.WRITER, divided=True),
    "pins": Limit(
        "hard pins", Role.WRITER, size=True, divided=True, in_namespaces=True
    ),
    "bytes": Limit("objects", Role.WRITER, size=True, divided=True, in_namespaces=True),
    "segments": Limit("segments lent", Role.WORKER),
    "lent": Limit("memory and disks lent", Role.WORKER, size=True),
}  # fmt: skip
"""By name. Every copy of an object counts."""


def split_limit(text: str) -> tuple[str, int]:
    """Return what is limited and to how much. Raises ConfigError for what is no limit."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name not in LIMITS:
        raise ConfigError(
            f"{text!r} is no limit", advice=f"write NAME=NUMBER with one of {', '.join(LIMITS)}"
        )
    if not LIMITS[name].size:
        if not _COUNT.fullmatch(value):
            raise ConfigError(
                f"limit {text!r} is no count", advice=f"write {name}=100, without a unit"
            )
        return name, int(value)
    try:
        return name, parse_size(value)
    except InvalidArgumentError:
        raise ConfigError(
            f"limit {text!r} is no size", advice=f"write {name}=10GiB, or a number of bytes"
        ) from None


def changed_limit(text: str) -> tuple[str, int | None]:
    """Return the same of what may be "any" as well: None. Raises ConfigError."""
    name, _, value = (part.strip() for part in text.partition("="))
    return (name, None) if name in LIMITS and value == "any" else split_limit(text)


def check_limits(limits: Mapping[str, int], role: Role, namespaces: Sequence[str]) -> None:
    """Raise ConfigError for limits that a principal of this kind cannot have."""
    for name, most in limits.items():
        if name not in LIMITS:
            raise ConfigError(
                f"there is no limit of {name!r}", advice=f"there are {', '.join(LIMITS)}"
            )
        limit = LIMITS[name]
        if most < 0:
            raise ConfigError(f"a limit of {name} cannot be {most}")
        if role < limit.needs:
            raise ConfigError(
                f"a {role.name.lower()} takes nothing that the limit of {name} is about",
                advice=f"leave the limit of {name} out, or make a {limit.needs.name.lower()}",
            )
        if limit.in_namespaces and not namespaces:
            raise ConfigError(
                f"what the limit of {name} is about is counted by namespaces, and the credential "
                "is for all of them",
                advice="name those that it is for: --namespace",
            )


def part_of(limits: Mapping[str, int], name: str, shards: int) -> int | None:
    """Return what one shard allows of a limit; None for anything."""
    most = limits.get(name)
    if most is None or not LIMITS[name].divided:
        return most
    return most // shards if LIMITS[name].size else max(min(most, 1), most // shards)


def limits_text(limits: Mapping[str, int]) -> str:
    """Return limits as people read them; "" for none."""
    return ", ".join(
        f"{name}={format_size(most) if LIMITS[name].size else most}"
        for name, most in sorted(limits.items())
    )
