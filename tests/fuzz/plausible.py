"""Requests made of the declarations of operations: what peers might send, and what they must not.

    plausible = Plausible(rng, Seen())
    body = plausible.body(GET.request)            # of the right shape, with values of every kind
    body = plausible.hostile(GET.request)         # the same with something wrong in it

Nothing is known here of any operation but how its bodies are laid out, so new ones are tried as
well. What earlier answers told comes back in later requests by the names of fields (`Seen`): the
cursor of a page, the number of a task, a generation. Values are otherwise small, or at the edges of
what their kind can say.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import inspect

from tests.fuzz.wire import mutate
from transfer_engine.errors import LocalProtocolError
from transfer_engine.wire.cold import Cold

if TYPE_CHECKING:
    import random

    from transfer_engine.wire.registry import Layout
    from transfer_engine.wire.schema import Column, Packed

__all__ = ["Plausible", "Seen"]

EDGES = (-(1 << 63), -(1 << 31), -2, -1, 0, 1, 255, 65_536, (1 << 31) - 1, 1 << 32, (1 << 63) - 1,
         (1 << 64) - 1)  # fmt: skip
ROWS = (0, 1, 1, 1, 2, 3, 7, 300)
LONG = 70_000
DEEP = 2_000
TEXTS = ("", "a", "fuzz", "../..", "*", "(a+)+$", "\x1b[2J\x9b", "\u202e", "é" * 40, "x" * 300)
KINDS = ("regex", "glob", "prefix", "drain", "gone", "query", "ok")
SEEN_MAX = 8


class Seen:
    """The values that answers brought lately, by the names of their fields."""

    def __init__(self) -> None:
        self._values: dict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=SEEN_MAX))

    def learn(self, reply: Any) -> None:
        """Keep what an answer tells."""
        if isinstance(reply, msgspec.Struct):
            for name in reply.__struct_fields__:
                self.keep(name, getattr(reply, name))
        elif hasattr(reply, "_fields"):
            for name in reply._fields:
                value = getattr(reply, name)
                if isinstance(value, np.ndarray):
                    value = value.ravel()[0].item() if value.size else None
                self.keep(name, value)
                if name == "rows" and value is not None:
                    self.keep("generations", value & 0xFFFF_FFFF)

    def keep(self, name: str, value: Any) -> None:
        """Keep one value, or the first of several."""
        if isinstance(value, (list, tuple)):
            for each in value[:1]:
                self.learn(each) if isinstance(each, msgspec.Struct) else self.keep(name, each)
        elif isinstance(value, (int, str, bytes)):
            self._values[name.rstrip("s")].append(value)

    def value(self, rng: random.Random, name: str, kind: type) -> Any:
        """One of those, or None."""
        found = [each for each in self._values.get(name.rstrip("s"), ()) if isinstance(each, kind)]
        return rng.choice(found) if found else None


class Plausible:
    """Makes requests by chance."""

    def __init__(self, rng: random.Random, seen: Seen) -> None:
        self._rng = rng
        self._seen = seen

    def body(self, layout: Layout) -> bytes:
        """A request that can be understood, whatever its values mean."""
        if isinstance(layout, Cold):
            return msgspec.msgpack.encode(self._tree(layout))
        return self._packed(layout)

    def hostile(self, layout: Layout) -> bytes:
        """One that cannot, or says what nobody would."""
        if isinstance(layout, Cold) and self._rng.random() < 0.6:
            tree = self._tree(layout)
            self._spoil(tree)
            return msgspec.msgpack.encode(tree)
        return mutate(self._rng, self.body(layout), self.body(layout))

    # -- packed bodies

    def _packed(self, layout: Packed) -> bytes:
        rows = {each: self._rng.choice(ROWS) for each in layout.dimensions}
        values: dict[str, Any] = {
            name: self._rng.randbytes(int(kind[1:])) if kind[0] == "b" else self._number(name, kind)
            for name, kind in layout.scalars
        }
        for column in layout.columns:
            values[column.name] = self._column(column, rows[column.rows])
        try:
            return layout.pack(**values)
        except LocalProtocolError:  # fewer rows fit
            few = {each.name: self._column(each, 1) for each in layout.columns}
            return layout.pack(**values | few)

    def _column(self, column: Column, rows: int) -> Any:
        if column.ragged:
            return [self._text(column.name).encode() for _ in range(rows)]
        if column.kind[0] == "f":
            return np.full((rows, column.width), self._rng.random(), column.kind)
        if column.kind == "u8" and column.width == 2:
            few = self._rng.choices(range(16), k=rows)  # objects that there may be
            return np.array([[each, ~each & 0xFFFF] for each in few], "u8").reshape(rows, 2)
        shape = (rows,) if column.width == 1 else (rows, column.width)
        numbers = [self._number(column.name, column.kind) for _ in range(rows * column.width)]
        return np.array(numbers, column.kind).reshape(shape)

    def _number(self, name: str, kind: str) -> int | float:
        if kind[0] == "f":
            return self._rng.choice((0.0, 1.0, -1.0, 1e300, float("inf"), float("nan")))
        most = np.iinfo(kind)
        return min(int(most.max), max(int(most.min), self._integer(name)))

    # -- cold bodies

    def _tree(self, layout: Cold[Any]) -> list[Any]:
        return self._struct(inspect.type_info(layout.kind))

    def _struct(self, kind: Any) -> list[Any]:
        fields = [self._value(each.encode_name, each.type) for each in kind.fields]
        return fields if kind.tag is None else [kind.tag, *fields]

    def _value(self, name: str, kind: Any) -> Any:
        match kind:
            case inspect.BoolType():
                return self._rng.random() < 0.5
            case inspect.IntType():
                return self._integer(name)
            case inspect.FloatType():
                return self._number(name, "f8")
            case inspect.StrType():
                return self._text(name)
            case inspect.BytesType():
                known = self._seen.value(self._rng, name, bytes)
                return self._bytes(kind) if known is None or self._rng.random() < 0.3 else known
            case inspect.NoneType():
                return None
            case inspect.StructType():
                return self._struct(kind)
            case inspect.UnionType():
                return self._value(name, self._rng.choice(kind.types))
            case inspect.TupleType():
                return [self._value(name, each) for each in kind.item_types]
            case inspect.VarTupleType() | inspect.ListType():
                count = self._rng.choice((0, 1, 1, 2, 5))
                return [self._value(name, kind.item_type) for _ in range(count)]
        raise NotImplementedError(f"a field {name} of the kind {kind}")

    def _bytes(self, kind: inspect.BytesType) -> bytes:
        if kind.min_length:
            return self._rng.randbytes(kind.min_length)
        return self._rng.randbytes(self._rng.choice((0, 1, 8, 16, 16, 16, 40)))

    def _integer(self, name: str) -> int:
        chance = self._rng.random()
        known = self._seen.value(self._rng, name, int)
        if known is not None and chance < 0.4:
            return int(known)
        return self._rng.randrange(10) if chance < 0.8 else self._rng.choice(EDGES)

    def _text(self, name: str) -> str:
        chance = self._rng.random()
        known = self._seen.value(self._rng, name, str)
        if known is not None and chance < 0.3:
            return str(known)
        return self._rng.choice(TEXTS + KINDS)

    def _spoil(self, tree: list[Any]) -> None:
        """Put something where it does not belong; fields may also lack, or be too many."""
        at: list[Any] = tree
        while at and isinstance(inner := self._rng.choice(at), list) and inner:
            at = inner
        chance = self._rng.randrange(5)
        if chance == 0 and at:
            del at[self._rng.randrange(len(at)) :]
        elif chance == 1:
            at.append(self._odd())
        elif at:
            at[self._rng.randrange(len(at))] = self._odd()

    def _odd(self) -> Any:
        chance = self._rng.randrange(8)
        if chance == 0:
            return msgspec.Raw(b"\x91" * DEEP + b"\x90")  # lists in lists
        if chance == 1:
            return "x" * self._rng.choice((256, 1025, LONG))
        if chance == 2:
            return self._rng.randbytes(self._rng.choice((15, 17, 5_000)))
        if chance == 3:
            return [self._rng.randrange(10) for _ in range(3_000)]
        if chance == 4:
            return {"a": None}
        if chance == 5:
            return self._rng.choice((None, True, float("nan"), -0.0))
        return self._rng.choice(EDGES)
