"""How an operation is answered: one declaration beside its handler.

    @answers(wire.REMOVE, keys="digests", changes=True)
    def remove(self, peer: Peer, request: Any) -> Answer:
        ...

Everything else is the same for all of them and done by `AnswerTable`: the request is unpacked,
what was changed is kept as far as the settings ask for before anybody hears of it, keys are
counted and, where an object would be lost by it, checked to be of this shard, and what the handler
returns is packed. A handler that cannot answer at once returns an awaitable of its answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mooncake_store.master.attendance import RETURN_S
from mooncake_store.master.site import wait_max_ms
from transfer_engine.errors import UnavailableError
from transfer_engine.wire.schema import Packed

if TYPE_CHECKING:
    from mooncake_store.master.clients import Peer
    from mooncake_store.master.keeping import Keeper
    from mooncake_store.master.site import Site
    from transfer_engine.rpc.serving import Reply
    from transfer_engine.wire.frame import Frame
    from transfer_engine.wire.registry import Operation

__all__ = ["Answer", "AnswerTable", "answers"]

Answer = Any
"""The fields of a packed reply as a dict, or the struct of another one."""
Handler = TypeVar("Handler", bound=Callable[..., Any])


class _Declaration(NamedTuple):
    operation: Operation[Any, Any]
    keys: str
    routed: tuple[str, ...]
    changes: bool
    begun: str
    waits: bool
    dear: bool
    idle: Answer | None


def answers(
    operation: Operation[Any, Any],
    *,
    keys: str = "",
    routed: tuple[str, ...] = (),
    changes: bool = False,
    begun: str = "",
    waits: bool = False,
    dear: bool = False,
    idle: Answer | None = None,
) -> Callable[[Handler], Handler]:
    """Declare a method as the handler of an operation.

    `keys` is the column of the request whose rows are counted, `routed` those whose keys must be of
    this shard, `begun` that whose keys are to be of new objects. What `changes` something is kept
    before that is answered. A handler that `waits` is told the milliseconds that its caller waits
    at most, 0 for any time. What is `dear`, because it looks at all objects and not at some keys,
    takes turns (`turns.py`). `idle` is answered, instead of an error, while nothing may be changed:
    by what hands out work.
    """

    def declare(handler: Handler) -> Handler:
        declaration = _Declaration(operation, keys, routed, changes, begun, waits, dear, idle)
        handler.declaration = declaration  # type: ignore[attr-defined]
        return handler

    return declare


class _Entry(NamedTuple):
    declaration: _Declaration
    unpack: Callable[[Any], Any]
    handle: Callable[..., Any]
    pack: Callable[..., bytes]
    by_name: bool
    """Whether `pack` takes the fields of an answer, each by its name, or a struct."""


class AnswerTable:
    """The handlers of a service by opcode."""

    def __init__(self, site: Site, owners: Iterable[object]) -> None:
        self._site = site
        entries = [entry for owner in owners for entry in _of(owner)]
        self._answering = {
            entry.declaration.operation.opcode: self._asking(entry) or partial(self._all, entry)
            for entry in entries
        }

    def _asking(self, entry: _Entry) -> Callable[[Peer, Frame], bytes] | None:
        """The same for what only asks about keys, which most requests do, without the rest."""
        declared, site = entry.declaration, self._site
        column = declared.keys
        if not column or declared.routed or declared.changes or declared.waits or not entry.by_name:
            return None
        unpack, handle, pack = entry.unpack, entry.handle, entry.pack

        def answer(peer: Peer, frame: Frame) -> bytes:
            request = unpack(frame.body)
            site.keys += len(getattr(request, column))
            if peer.confined:
                request = self._narrowed(peer, entry, request)
            return pack(**handle(peer, request))

        return answer

    def answer(self, peer: Peer, frame: Frame) -> Reply | Awaitable[Reply] | None:
        """Answer a request, at once or later; None for an operation without a handler."""
        answering = self._answering.get(frame.opcode)
        return None if answering is None else answering(peer, frame)

    def _all(
        self,
        entry: _Entry,
        peer: Peer,
        frame: Frame,
        *,
        patient: bool = True,
        in_turn: bool = False,
    ) -> Reply | Awaitable[Reply]:
        """All that can be declared, in order."""
        declaration = entry.declaration
        request = entry.unpack(frame.body)
        if declaration.dear and not in_turn:
            turn = self._site.turns.take(peer.handle)
            if turn is not None:
                return self._in_turn(entry, peer, frame, turn)
        keeper = None
        if declaration.changes:
            keeper = self._site.keeper
            if keeper is not None:
                try:
                    keeper.check()
                except UnavailableError:
                    if declaration.idle is not None:
                        return _packed(entry, declaration.idle)
                    if not (patient and keeper.replicates and keeper.counting.attendance.may_come):
                        raise
                    return self._once_followed(entry, peer, frame, keeper)
        if declaration.keys:
            self._site.keys += len(getattr(request, declaration.keys))
        for column in declaration.routed:
            self._site.check_routing(getattr(request, column))
        if peer.confined:
            request = self._narrowed(peer, entry, request)
        if declaration.waits:
            told = entry.handle(peer, request, frame.deadline_ms)
            if isinstance(told, Awaitable):
                return _later(entry, told, keeper)
        else:
            told = entry.handle(peer, request)
        if keeper is not None:
            keeper.check_kept()
        reply = _packed(entry, told)
        if keeper is not None and keeper.waits:
            return _when_kept(keeper, reply)
        return reply

    def _narrowed(self, peer: Peer, entry: _Entry, request: Any) -> Any:
        """Return the request without keys that are others'."""
        declaration = entry.declaration
        columns = {each for each in (declaration.keys, *declaration.routed) if each}
        return self._site.confinement.narrowed(
            peer, request, columns, declaration.begun, declaration.operation.name
        )

    async def _once_followed(
        self, entry: _Entry, peer: Peer, frame: Frame, keeper: Keeper
    ) -> Reply:
        """Answer when a standby follows again; refuse where none has come in time.

        That is before the caller waits no more, so he hears why.
        """
        wait_ms = wait_max_ms(int(RETURN_S * 1000), frame.deadline_ms)
        await keeper.counting.attendance.wait(wait_ms / 1000)
        self._site.check_led()
        reply = self._all(entry, peer, frame, patient=False, in_turn=True)
        return await reply if isinstance(reply, Awaitable) else reply

    async def _in_turn(
        self, entry: _Entry, peer: Peer, frame: Frame, turn: Awaitable[None]
    ) -> Reply:
        """Answer when it is the turn of this client."""
        await turn
        self._site.check_led()
        reply = self._all(entry, peer, frame, in_turn=True)
        return await reply if isinstance(reply, Awaitable) else reply


def _packed(entry: _Entry, told: Answer) -> bytes:
    return entry.pack(**told) if entry.by_name else entry.pack(told)


async def _later(entry: _Entry, told: Awaitable[Answer], keeper: Keeper | None) -> bytes:
    answer = await told
    if keeper is not None:
        keeper.check_kept()
    reply = _packed(entry, answer)
    if keeper is not None and keeper.waits:
        await keeper.synced()
    return reply


async def _when_kept(keeper: Keeper, reply: bytes) -> bytes:
    await keeper.synced()
    return reply


def _of(owner: object) -> Iterable[_Entry]:
    for name in dir(owner):
        handle = getattr(owner, name)
        declaration = getattr(handle, "declaration", None)
        if declaration is not None:
            unpack, reply = declaration.operation.request.unpack, declaration.operation.reply
            yield _Entry(declaration, unpack, handle, reply.pack, isinstance(reply, Packed))
