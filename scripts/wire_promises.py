"""Writes docs/reference/wire-promises.txt: all that another version relies on when it is talked to.

    python scripts/wire_promises.py

It holds every operation that crosses processes of different versions, every struct and record in
their bodies, and every number that has a name there. What is written there is promised: an
operation keeps its opcode and its layout (another layout is another opcode), a struct grows at its
end, by fields with defaults, numbers keep their meaning. So this refuses to write where the code
has broken one of these, and says which. A test compares the file with the code.

Not covered: what bytes mean, which operation needs which answer, and what is said between processes
that start and end together (a master and its shards). O(fields).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import msgspec

from mooncake_store.core import records
from mooncake_store.wire.cluster import CLUSTER, LIVENESS
from mooncake_store.wire.shard import SHARD, PutFlag, RemoveFlag
from transfer_engine import errors
from transfer_engine.rdma.wire import RDMA
from transfer_engine.wire import faults, handshake
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import type_name

if TYPE_CHECKING:
    import numpy as np

    from transfer_engine.wire.registry import Layout

__all__ = ["FILE", "Promises", "broken", "code", "parse", "text"]

FILE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "wire-promises.txt"
HEAD = """\
# What other versions rely on. Written by `python scripts/wire_promises.py`, which refuses what
# would break it. A struct may grow at its end, by fields with defaults ("="), and names may be
# added; operations and records stay as they are: another layout is another opcode.
"""
SERVICES = (CLUSTER, LIVENESS, SHARD, RDMA)
HANDSHAKE = ("_Hello", "_Challenge", "_ProofBody", "_Welcome")
RECORDS = ("REPLICA", "PUT_ROW", "GET_ROW", "LISTED", "EVENT")
NAMES = (records.Status, records.SegmentState, records.State, records.Tier, records.EventKind)
FLAGS = (PutFlag, RemoveFlag)

Promises: TypeAlias = dict[str, list[str]]
"""Lines by what they are about: its kind and its name."""


def code() -> Promises:
    """Return what the code says now."""
    made: Promises = {}
    for service in SERVICES:
        for each in service:
            layouts = [("request", each.request), ("reply", each.reply)]
            made[f"operation {service.service} {each.name}"] = [
                f"opcode {each.opcode:#06x}",
                *(f"{way} {line}" for way, layout in layouts for line in _layout(layout)),
            ]
            for _, layout in layouts:
                if isinstance(layout, Cold):
                    _add_struct(layout.kind, made)
    for name in HANDSHAKE:
        _add_struct(getattr(handshake, name), made)
    _add_struct(faults.ErrorBody, made)
    for name in RECORDS:
        made[f"record {name}"] = _record(getattr(records, name))
    for kind in NAMES:
        made[f"names {kind.__name__}"] = [f"{each.name} = {int(each)}" for each in kind]
    for flags in FLAGS:
        made[f"names {flags.__name__}"] = [
            f"{name} = {value}" for name, value in vars(flags).items() if name.isupper()
        ]
    made["names errors"] = [f"{name} = {getattr(errors, name).code}" for name in errors.__all__]
    return made


def _layout(layout: Layout) -> list[str]:
    """Return what a body consists of, in order: the tag of a cold one, or all fields."""
    if isinstance(layout, Cold):
        return [f"cold {layout.kind.__struct_config__.tag}"]
    scalars = [f"{name}: {kind}" for name, kind in layout.scalars]
    widths = [f"x{each.width}" if each.width > 1 else "" for each in layout.columns]
    return scalars + [
        f"{each.name}: {each.kind}{width}[{each.rows}]"
        for each, width in zip(layout.columns, widths, strict=True)
    ]


def _add_struct(kind: type[msgspec.Struct], made: Promises) -> None:
    """Add a struct, and those in its fields."""
    name = f"struct {kind.__name__.removeprefix('_')}"
    if name in made:
        return
    made[name] = [f"tag {kind.__struct_config__.tag}"]
    for field in msgspec.structs.fields(kind):
        made[name].append(
            f"{field.encode_name}: {type_name(field.type)}{'' if field.required else ' ='}"
        )
        for inner in _structs_in(field.type):
            _add_struct(inner, made)


def _structs_in(kind: Any) -> list[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [found for inner in get_args(kind) for found in _structs_in(inner)]


def _record(kind: np.dtype[Any]) -> list[str]:
    assert kind.fields is not None
    return [f"{name}: {kind[name].str} at {kind.fields[name][1]}" for name in kind.names or ()]


def broken(before: Promises, now: Promises) -> list[str]:
    """Say which promises of before do not hold now, a sentence each."""
    complaints = []
    for what, lines in before.items():
        kind, found = what.split()[0], now.get(what)
        if found is None:
            complaints.append(f"{what} is gone: earlier versions ask for it")
        elif kind == "names":
            complaints += [f"{what} lacks {line!r}" for line in lines if line not in found]
        elif kind == "struct":
            added = found[len(lines) :]
            if found[: len(lines)] != lines:
                complaints.append(f"{what} has other fields than {lines}: it may grow at its end")
            complaints += [
                f"{what} needs {line!r}, which earlier versions do not send: give it a default"
                for line in added
                if not line.endswith(" =")
            ]
        elif found != lines:
            complaints.append(
                f"{what} has another layout: give that an opcode, or a name, of its own"
            )
    return complaints


def text(promises: Promises) -> str:
    """Return the page."""
    blocks = (
        "\n".join([what, *(f"    {line}" for line in lines)]) for what, lines in promises.items()
    )
    return "\n".join([HEAD, *blocks]) + "\n"


def parse(page: str) -> Promises:
    """Return what a page promises."""
    made: Promises = {}
    lines: list[str] = []
    for line in page.splitlines():
        if line.startswith("    "):
            lines.append(line.strip())
        elif line and not line.startswith("#"):
            lines = made[line] = []
    return made


def main() -> None:
    """Write the page, unless that would break what it says."""
    now = code()
    complaints = broken(parse(FILE.read_text(encoding="utf-8")), now) if FILE.exists() else []
    if complaints:
        raise SystemExit("\n".join(complaints))
    FILE.write_text(text(now), encoding="utf-8")


if __name__ == "__main__":
    main()
