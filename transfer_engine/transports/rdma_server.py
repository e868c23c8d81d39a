"""The owner's end of the rdma transport: registers segments and joins queue pairs; bytes pass by.

Cards read and write segments without this process taking part. What it decides, it decides when a
client asks for a segment: identity was proven when the connection was made, rights are judged by
the access hook, once for reading and once for writing, as with shared memory. Who may not write
gets the key of a registration that cannot be written through. Bounds are held by the card.

A withdrawn segment is deregistered, which is final: when that returns no card can reach it.
A client's queue pair lives on the thread of its TCP connection and ends with it.

A segment is registered when it is published, on every card: that pins its memory and takes a
while for a large one, but no client then waits for it. Cost: nothing per transfer.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from transfer_engine.base import REFUSED, UNKNOWN_SEGMENT, Operation, error_of
from transfer_engine.errors import (
    RemoteProtocolError,
    StoreError,
    TransferError,
)
from transfer_engine.rdma import verbs
from transfer_engine.rdma.verbs import READABLE, WRITABLE
from transfer_engine.rdma.wire import CONNECT, OPEN, RDMA, Ask, Grant, Offer, agree, draw_base
from transfer_engine.transports.owner import may_open
from transfer_engine.wire.faults import encode_error
from transfer_engine.wire.frame import ERROR, REPLY, VERSIONS, FrameDecoder, encode_frame

if TYPE_CHECKING:
    from transfer_engine.rdma.verbs import MemoryRegion, Nic, QueuePair
    from transfer_engine.segments.mapping import Mapping
    from transfer_engine.transports.owner import Owner, Served
    from transfer_engine.transports.stream import Link
    from transfer_engine.wire.frame import Frame

__all__ = ["RdmaServer"]

_log = logging.getLogger(__name__)
_MESSAGE_S = 5.0


@dataclass(eq=False)
class _Registered:
    """A segment's registrations: by card, and whether it may be written through."""

    segment: Served
    mapping: Mapping
    regions: dict[tuple[Nic, bool], MemoryRegion] = field(default_factory=dict)

    def close(self) -> None:
        for region in self.regions.values():
            region.close()
        self.regions = {}


class RdmaServer:
    """Registers published segments on all cards of the host and answers clients on data links."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._nics = verbs.find_nics()
        self._lock = threading.Lock()
        self._served: dict[bytes, _Registered] = {}

    def publish(self, segment: Served) -> bool:
        """Register a segment of memory on every card; return whether that worked."""
        mapping = segment.held()
        if mapping is None:
            return False  # a file: no card reads those
        served = _Registered(segment, mapping)
        try:
            for nic in self._nics:
                self._register(served, nic, writable=segment.writable)
        except TransferError as error:
            served.close()
            _log.warning("%r is not served over rdma: %s", segment, error)
            return False
        with self._lock:
            self._served[segment.uuid] = served
        return True

    def _register(self, served: _Registered, nic: Nic, *, writable: bool) -> MemoryRegion:
        """Return the registration of a segment on a card, made when first asked for."""
        region = served.regions.get((nic, writable))
        if region is None:
            mapping = served.mapping
            region = nic.register(
                mapping.address, mapping.bytes, WRITABLE if writable else READABLE,
                keep=mapping, base=draw_base(mapping.address),
            )  # fmt: skip
            served.regions[nic, writable] = region
        return region

    def withdraw(self, uuid: bytes) -> None:
        """Deregister a segment: when this returns no peer reaches it any more."""
        with self._lock:
            served = self._served.pop(uuid, None)
            if served is not None:
                served.close()

    def serve(self, link: Link) -> None:
        """Answer the requests of one client until its connection ends, by raising why."""
        decoder = FrameDecoder(RDMA.request_limits, replies=False, versions=VERSIONS)
        nic: Nic | None = None
        pair: QueuePair | None = None
        try:
            while True:
                frame = self._next(link, decoder)
                try:
                    if frame.opcode == CONNECT.opcode and pair is None:
                        offer = CONNECT.request.unpack(frame.body)
                        nic = self._nics[offer.rail % len(self._nics)]
                        pair = nic.queue_pair(serving=True)
                        body = self._join(nic, pair, offer, link.peer)
                    elif frame.opcode == OPEN.opcode and nic is not None:
                        ask = OPEN.request.unpack(frame.body)
                        body = OPEN.reply.pack(self._grant(nic, ask, link))
                    else:
                        raise RemoteProtocolError(
                            f"opcode {frame.opcode:#06x} came out of turn", peer=link.peer
                        )
                except StoreError as error:
                    self._answer(link, frame, encode_error(error), REPLY | ERROR)
                    # A segment may be refused on a sound connection; anything else ends it.
                    if frame.opcode != OPEN.opcode or isinstance(error, RemoteProtocolError):
                        raise
                else:
                    self._answer(link, frame, body, REPLY)
        finally:
            if pair is not None:
                pair.close()

    def _next(self, link: Link, decoder: FrameDecoder) -> Frame:
        """Wait for a request, however long, then receive it with patience for a short message."""
        poll = select.poll()
        poll.register(link.sock, select.POLLIN)
        poll.poll()
        link.deadline = time.monotonic() + _MESSAGE_S
        return link.frame(decoder)

    def _answer(self, link: Link, frame: Frame, body: bytes, flags: int) -> None:
        link.deadline = time.monotonic() + _MESSAGE_S
        link.send(encode_frame(frame.opcode, body, flags, frame.request_id))

    def _join(self, nic: Nic, pair: QueuePair, offer: Offer, peer: str) -> bytes:
        """Connect our end to the client's and describe it."""
        own = Offer.of(nic, self._owner.instance, offer.rail, pair.number)
        mtu, reads = agree(own, offer, peer)
        pair.connect(own.psn, offer.side, mtu=mtu, reads=reads)
        _log.debug("joined %s and %s of %s", own, offer, peer)
        return CONNECT.reply.pack(msgspec.structs.replace(own, mtu=mtu, reads=reads))

    def _grant(self, nic: Nic, ask: Ask, link: Link) -> Grant:
        """Judge who asks for a segment and return its key on this card.

        Who has to show rights for it gets none: a card asks for no rights.
        """
        peer = link.peer
        with self._lock:
            served = self._served.get(ask.uuid)
            if served is None:
                raise error_of(UNKNOWN_SEGMENT, operation="open", peer=peer)
            segment = served.segment
            guard = self._owner.guard_of(ask.uuid)
            if guard is not None and guard.asks(link.peer_words):
                raise error_of(REFUSED, operation="open", peer=peer)
            writable = ask.writable and segment.writable
            writable = writable and may_open(self._owner, peer, Operation.WRITE, segment)
            if not writable and not may_open(self._owner, peer, Operation.READ, segment):
                raise error_of(REFUSED, operation="open", peer=peer)
            region = self._register(served, nic, writable=writable)
        return Grant(ask.uuid, region.base, segment.size, region.rkey, writable)

    def close(self) -> None:
        """Deregister everything. Idempotent."""
        with self._lock:
            served, self._served = list(self._served.values()), {}
        for one in served:
            one.close()

    def forget(self) -> None:
        """In a forked child: the registrations are the parent's."""
        self._lock = threading.Lock()
        self._served = {}
