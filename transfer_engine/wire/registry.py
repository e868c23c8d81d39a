"""A service is declared once: its operations, each with an opcode and the layout of two bodies.

    STORE = Registry("store", [
        Operation("get", 0x10, Packed(columns=[...]), Packed(columns=[...]), needs=Role.READER),
        Operation("drain", 0x11, request=Cold(DrainRequest), reply=Cold(Drained)),
    ])

The server takes from it which opcodes may arrive, from whom, and how long their bodies may be;
clients take the same for replies; `describe` takes the tables of docs/reference/wire-protocol.md,
so that the document cannot drift from the code. An opcode never changes its meaning: a new layout
is a new opcode, and the old one stays for as long as version N-1 is spoken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from transfer_engine.wire.cold import Cold
from transfer_engine.wire.faults import ERROR_BYTES_MAX
from transfer_engine.wire.frame import HANDSHAKE_OPCODE_MAX
from transfer_engine.wire.handshake import REFUSED
from transfer_engine.wire.rights import Role
from transfer_engine.wire.schema import Column, Packed

__all__ = ["Layout", "Operation", "Registry", "describe", "render", "type_name"]

Layout: TypeAlias = Packed | Cold[Any]
"""How a body is laid out."""

RequestT = TypeVar("RequestT", bound=Layout)
ReplyT = TypeVar("ReplyT", bound=Layout)


@dataclass(frozen=True, slots=True)
class Operation(Generic[RequestT, ReplyT]):
    """One request and its reply. `note` is one line for the reference document.

    `needs` is the least that somebody has to be to ask for it; where nothing is said, an admin.
    """

    name: str
    opcode: int
    request: RequestT
    reply: ReplyT
    note: str = ""
    needs: Role = field(default=Role.ADMIN, kw_only=True)

    def __post_init__(self) -> None:
        if not HANDSHAKE_OPCODE_MAX < self.opcode <= 0xFFFF:
            raise ValueError(
                f"opcode {self.opcode:#06x} of {self.name} is outside "
                f"{HANDSHAKE_OPCODE_MAX + 1:#06x}..0xffff"
            )


class Registry(Iterable[Operation[Any, Any]]):
    """The operations of one service, by opcode; immutable.

    `subject` says what a request is about, such as a key, for an error that refuses it.
    """

    def __init__(
        self,
        service: str,
        operations: Iterable[Operation[Any, Any]],
        subject: Callable[[Any], str | None] = lambda _: None,
    ) -> None:
        self.service = service
        self.operations = tuple(operations)
        self.by_opcode: Mapping[int, Operation[Any, Any]] = MappingProxyType(
            {operation.opcode: operation for operation in self.operations}
        )
        names = {operation.name for operation in self.operations}
        if not len(self.by_opcode) == len(names) == len(self.operations):
            raise ValueError(f"service {service} declares an opcode or a name twice")
        # Plain dicts: every frame is looked up here.
        self.request_limits = {op.opcode: op.request.bytes_max for op in self.operations}
        # An error frame carries the opcode of the request it answers.
        self.reply_limits = {
            op.opcode: max(op.reply.bytes_max, ERROR_BYTES_MAX) for op in self.operations
        }
        self.subject = subject
        # With request id 0 this is about the connection: the last words before it closes.
        self.reply_limits[REFUSED] = ERROR_BYTES_MAX

    def beyond(self, role: Role) -> frozenset[int]:
        """Return the opcodes that are not for this role."""
        return frozenset(op.opcode for op in self.operations if op.needs > role)

    def __iter__(self) -> Iterator[Operation[Any, Any]]:
        return iter(self.operations)

    def __repr__(self) -> str:
        return f"Registry({self.service!r}, {len(self.operations)} operations)"


def describe(registry: Registry) -> str:
    """Return the Markdown table of a service for the reference document."""
    lines = [
        "| opcode | operation | of | request | reply | request bytes, at most |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{op.opcode:#06x}` | **{op.name}**{': ' + op.note if op.note else ''} "
        f"| {op.needs.name.lower()} | {_layout(op.request)} | {_layout(op.reply)} "
        f"| {op.request.bytes_max} |"
        for op in sorted(registry, key=lambda op: op.opcode)
    ]
    return "\n".join(lines) + "\n"


def render(document: str, registry: Registry) -> str:
    """Return the document with the table of this service written anew between its two marks."""
    start = f"<!-- table of {registry.service}: generated -->\n"
    end = f"<!-- end of {registry.service} -->"
    head, found, rest = document.partition(start)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the document lacks the marks {start.strip()!r} and {end!r}")
    return f"{head}{start}\n{describe(registry)}\n{end}{tail}"


def _layout(layout: Layout) -> str:
    if isinstance(layout, Cold):
        fields = ", ".join(
            f"`{field.encode_name}: {type_name(field.type)}`"
            for field in msgspec.structs.fields(layout.kind)
        )
        return f"cold `{layout.kind.__struct_config__.tag}`: {fields or 'no fields'}"
    fields = ", ".join(
        [f"`{name}: {kind}`" for name, kind in layout.scalars]
        + [_column(column) for column in layout.columns]
    )
    if not fields:
        return "empty"
    rows = f"; rows ≤ {layout.rows_max}" if layout.columns else ""
    return fields + rows


def _column(column: Column) -> str:
    width = f"x{column.width}" if column.width > 1 else ""
    bound = f" ≤ {column.bytes_max} bytes" if column.ragged else ""
    return f"`{column.name}: {column.kind}{width}[{column.rows}]`{bound}"


def type_name(kind: Any) -> str:
    """Return how the type of a field is written."""
    if get_origin(kind) is Annotated:  # its bounds are for the decoder
        kind = get_args(kind)[0]
    return kind.__name__ if isinstance(kind, type) else str(kind)
