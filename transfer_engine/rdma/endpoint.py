"""One connection of an rdma client and what runs over it: chains of requests, and their end.

An endpoint is a queue pair joined to one of the owner, and the TCP connection that joined them.
One batch uses it at a time, so completions need no sorting and a failure hurts nobody else. A
`Transfer` moves a window of a batch over an endpoint: two chains of linked requests at most are
under way, each with one completion.

Waiting adapts: it polls the completion queue for a few microseconds, because small transfers end
within them, and then sleeps on the card's event and on the TCP connection: a dead owner ends that,
and so does who cancels. The time spent polling grows while that pays and shrinks while it does not,
so long transfers and dead peers cost no processor time.

Whatever ends a transfer early leaves it under way: close its endpoint before anybody hears of it.
That destroys the queue pair, after which no card touches the caller's memory any more.
Cost: a few kernel calls and one system call at most a chain.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.base import remaining_s, restarted
from transfer_engine.errors import (
    PeerLostError,
    RemoteProtocolError,
    TransferError,
    UnavailableError,
)
from transfer_engine.kernels import rdma
from transfer_engine.rdma.verbs import REMOTE_ACCESS, STATUS_NAMES, SUCCESS
from transfer_engine.rdma.wire import (
    CONNECT,
    FEATURE,
    OPEN,
    RDMA,
    Ask,
    Grant,
    Offer,
    check_answer,
    check_grant,
)
from transfer_engine.transports.dialing import dial
from transfer_engine.wire.faults import decode_error
from transfer_engine.wire.frame import ERROR, VERSIONS, FrameDecoder, encode_frame

if TYPE_CHECKING:
    from typing import Any

    from transfer_engine.base import Batch, Columns, SegmentDescriptor
    from transfer_engine.rdma.verbs import Nic, QueuePair
    from transfer_engine.rpc.networks import Objection
    from transfer_engine.transports.stream import Link
    from transfer_engine.wire.keyring import Secret

__all__ = ["Cancelled", "Endpoint", "Job", "RefusedByCard", "Transfer"]

# One request moves at most this much: a lost packet repeats little.
PIECE_BYTES = 1 << 20
# And one chain this much: software cards serve a chain within the call that posts it, where
# neither a deadline nor a cancellation is noticed.
CHAIN_BYTES = 8 << 20
_SPIN_S_MIN, _SPIN_S_MAX = 2e-6, 50e-6
_CHAINS_MAX = 2
# poll() counts milliseconds in 31 bits.
_SLEEP_S_MAX = 3600.0


class Cancelled(Exception):
    """The batch was given up."""


class RefusedByCard(TransferError):
    """The owner's card refused the key or the range: the segment was withdrawn, or replaced."""


@dataclass(slots=True)
class Job:
    """What `Transfer` needs of a batch: its columns, and the keys of its local memory."""

    batch: Batch
    offsets: Columns
    lengths: Columns
    addresses: Columns
    where: Columns
    keys: Columns


class Endpoint:
    """A queue pair joined to an owner's. Made by `connect`, used by one thread at a time."""

    def __init__(self, nic: Nic, card: int, link: Link, pair: QueuePair) -> None:
        self.nic = nic
        self.card = card
        """The number of the card among those of this host."""
        self.link = link
        self.pair = pair
        self.lost = ""
        self.spin_s = _SPIN_S_MAX
        self._decoder = FrameDecoder(RDMA.reply_limits, replies=True, versions=VERSIONS)
        self._grants: dict[bytes, Grant] = {}
        self._number = 0
        self._peer_nic = "?"

    @classmethod
    def connect(
        cls, nic: Nic, card: int, segment: SegmentDescriptor, *, secret: Secret | None,
        instance: bytes, deadline: float, objection: Objection | None = None,
    ) -> Endpoint:  # fmt: skip
        """Join a new queue pair on this card to one of the segment's owner."""
        link, features = dial(
            (segment.tcp_host, segment.tcp_port), segment.instance, secret=secret,
            deadline=deadline, features=(FEATURE,), objection=objection,
        )  # fmt: skip
        try:
            if FEATURE not in features:
                raise UnavailableError(
                    "the owner has no RDMA device", peer=link.peer, operation="connect"
                )
            endpoint = cls(nic, card, link, nic.queue_pair())
        except BaseException:
            link.close()
            raise
        try:
            endpoint._join(instance, segment.instance, deadline)
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def _join(self, instance: bytes, owner: bytes, deadline: float) -> None:
        own = Offer.of(self.nic, instance, self.card, self.pair.number)
        answer: Offer = self._ask(CONNECT, own, deadline)
        check_answer(own, answer, self.link.peer)
        if answer.instance != owner:
            raise restarted(owner, answer.instance.hex(), operation="connect", peer=self.link.peer)
        self.pair.connect(own.psn, answer.side, mtu=answer.mtu, reads=answer.reads)
        self._peer_nic = answer.nic

    def try_out(self, deadline: float) -> None:
        """Write nothing, and wait for the answer: cards may have met that cannot reach each other.

        A write of no bytes needs no key and touches no memory. Raises as a transfer does.
        """
        pair = self.pair
        pair.requests[0, :2] = 0
        pair.requests[0, 3:7] = rdma.WRITE << 32, rdma.SIGNALED, 0, 0
        pair.post(0)
        while True:
            pair.arm()
            done, status = pair.poll()
            if status != SUCCESS:
                raise self.failure(status)
            if done:
                return
            if self.lost:
                raise self.gone()
            self.wait_for_news(deadline, "open")

    def wait_for_news(self, deadline: float, operation: str) -> None:
        """Sleep until the card, which was armed, has completions, or the connection ended.

        Raises TransferTimeoutError when the deadline has passed.
        """
        left = remaining_s(deadline, operation, self.link.peer)
        poll = select.poll()
        poll.register(self.pair.event_fd, select.POLLIN)
        poll.register(self.link.sock, select.POLLIN)
        for fd, _ in poll.poll(min(left, _SLEEP_S_MAX) * 1000):
            if fd == self.pair.event_fd:
                self.pair.disarm()
            else:
                # An owner says nothing unasked: this is the end of the connection.
                self.lost = "the owner ended, or closed the connection"

    def gone(self) -> PeerLostError:
        """Return the error of an owner that went away."""
        peer = self.link.peer
        return PeerLostError(f"lost {peer}: {self.lost}", peer=peer)

    def _ask(self, operation: Any, body: Any, deadline: float) -> Any:
        """Exchange one request on the TCP connection; raise what the owner answers."""
        self._number += 1
        link = self.link
        link.deadline = deadline
        link.send(
            encode_frame(operation.opcode, operation.request.pack(body), request_id=self._number)
        )
        frame = link.frame(self._decoder)
        if frame.flags & ERROR:
            raise decode_error(frame.body)
        if (frame.opcode, frame.request_id) != (operation.opcode, self._number):
            raise RemoteProtocolError(
                f"{link.peer} answered {operation.name} {self._number} with opcode "
                f"{frame.opcode:#x} {frame.request_id}",
                peer=link.peer,
            )
        return operation.reply.unpack(frame.body)

    def open(self, segment: SegmentDescriptor, deadline: float) -> Grant:
        """Ask for the key of a segment over this connection."""
        grant: Grant = self._ask(OPEN, Ask(segment.uuid, segment.writable), deadline)
        check_grant(grant, segment.uuid, segment.size, self.link.peer)
        self._grants[segment.uuid] = grant
        return grant

    def grant(self, segment: SegmentDescriptor, deadline: float) -> Grant:
        """Return the key of a segment, asking for it the first time."""
        return self._grants.get(segment.uuid) or self.open(segment, deadline)

    def failure(self, status: int) -> TransferError:
        """Return the error of a request that ended with this status."""
        kind = RefusedByCard if status == REMOTE_ACCESS else PeerLostError
        what = STATUS_NAMES.get(status, "the request failed")
        return kind(
            f"{self.nic.name} of process {os.getpid()} and {self._peer_nic} of {self.link.peer}: "
            f"{what} (status {status})",
            peer=self.link.peer,
        )

    def abort(self) -> None:
        """End it from any thread: who waits on it wakes with an error."""
        self.link.abort()

    def forget(self) -> None:
        """In a forked child: close the copies of the parent's descriptors."""
        self.link.close()
        self.pair.close()

    def close(self) -> None:
        """Destroy the queue pair, then the connection that stands for it. Idempotent."""
        self.pair.close()
        self.link.close()


class Transfer:
    """Bytes [begin, end) of a job's registered requests, on their way over one endpoint."""

    __slots__ = ("_endpoint", "_flying", "_grant", "_half", "_job", "_left", "_opcode", "_state")

    def __init__(self, endpoint: Endpoint, job: Job, grant: Grant, begin: int, end: int) -> None:
        self._endpoint = endpoint
        self._job = job
        self._grant = grant
        self._opcode = rdma.WRITE if job.batch.writing else rdma.READ
        self._state = np.array([0, 0, begin, 0], dtype=np.int64)
        self._left = end - begin
        self._half = 0
        self._flying = 0

    def run(self) -> None:
        """Move everything.

        Raises what the card reports, PeerLostError for an owner that went away,
        TransferTimeoutError and Cancelled: close the endpoint then.
        """
        endpoint, batch = self._endpoint, self._job.batch
        spin_s = endpoint.spin_s
        spin_until = time.perf_counter() + spin_s
        armed = slept = False
        while True:
            if batch.cancelled:  # looked at first: cancelling ends the connection as well
                raise Cancelled
            if self._advance():
                break
            if armed:
                self._sleep()
                armed, slept = False, True
            elif time.perf_counter() >= spin_until:
                endpoint.pair.arm()
                armed = True  # and look once more: a completion may have come just before
        if slept:
            endpoint.spin_s = max(_SPIN_S_MIN, spin_s / 2)
        elif time.perf_counter() < spin_until:
            endpoint.spin_s = min(_SPIN_S_MAX, spin_s * 2)

    def _advance(self) -> bool:
        """Take completions and post what there is room for; return whether all is done."""
        endpoint = self._endpoint
        pair = endpoint.pair
        if self._flying:
            done, status = pair.poll()
            self._flying -= done
            if status != SUCCESS:
                raise endpoint.failure(status)
        while self._flying < _CHAINS_MAX and self._left:
            first = self._half * pair.half
            job, grant = self._job, self._grant
            self._state[3] = most = min(self._left, CHAIN_BYTES)
            count = rdma.build_chain(
                job.offsets, job.lengths, job.addresses, job.where,
                job.keys[endpoint.card], grant.base, grant.key, self._opcode, PIECE_BYTES,
                pair.requests, pair.entries, first, pair.half, self._state,
            )  # fmt: skip
            assert count, "a window holds more bytes than its requests"
            self._left -= most - int(self._state[3])
            pair.post(first)
            self._half ^= 1
            self._flying += 1
        if not self._flying:
            return True
        if endpoint.lost:
            raise endpoint.gone()
        return False

    def _sleep(self) -> None:
        """Wait until the card has news, the owner is gone, the batch is given up or time is up."""
        batch, endpoint = self._job.batch, self._endpoint
        batch.interrupt = endpoint.abort
        try:
            if batch.cancelled:
                raise Cancelled
            endpoint.wait_for_news(batch.deadline, batch.operation.verb)
        finally:
            batch.interrupt = None
