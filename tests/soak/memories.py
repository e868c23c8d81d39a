"""What tenants may try at the memory of a worker: rows of `tests.soak.abuse`, against a pool.

Each has a session there, as all who read and write have, and knows where things of others lie. He
shows no right, one that he has made up, or one of his own for another place; he writes when his put
has ended, was given up, or should have ended long ago; and he ends puts of which he wrote nothing.
No byte of others may come to him, or be changed by him, and nobody may be shown what he did not
write.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.core.records import PUT_ROW, REPLICA, Status
from mooncake_store.wire import shard as wire
from tests.master.wires import as_records, digests
from tests.soak.insiders import Row, of_shard
from tests.soak.pool_of_processes import CALL_S
from tests.soak.tenants import VALUE, known
from tests.waiting import until
from transfer_engine.base import REFUSED, Operation
from transfer_engine.engine import TransferEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tests.soak.insiders import Insider
    from tests.soak.tenants import Known
    from transfer_engine.outcome import BatchResult
    from transfer_engine.wire.keyring import Secret

__all__ = ["ROWS"]

SIZE = len(VALUE)
STEP = 4096
FORGED = b"forged! " * (SIZE // 8 + 1)
LEASE_MS = 10_000
SHORT_MS = 500
AGAIN_S = 0.02
READ, WRITE = Operation.READ, Operation.WRITE


class Place(NamedTuple):
    """Where an object lies, of which generation, and the right to it."""

    offset: int
    generation: int
    right: NDArray[np.int64]


class Hand:
    """Somebody with a client of his own: a session at a shard, and one at the worker."""

    def __init__(self, who: Insider, secret: Secret, namespace: str) -> None:
        self._left = contextlib.ExitStack()
        wires = self._left.enter_context(who.wires(secret=secret, namespace=namespace))
        self.shard = wires.shard()
        engine = TransferEngine(secret=secret, transports=["tcp"])
        self._engine = self._left.enter_context(engine)
        assert who.pool.descriptor is not None
        self.size = who.pool.descriptor.size
        self._worker = engine.open(who.pool.descriptor, require="tcp")

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *error: object) -> None:
        self._left.close()

    def begin(self, name: bytes) -> Place:
        """Begin an object on that worker."""
        asked = self.shard.put_request([name], SIZE, preferred=[b"w"])
        reply = self.shard.call(wire.PUT_START, **asked)
        (row,) = as_records(reply.rows, PUT_ROW)
        assert row["status"] == Status.OK, Status(row["status"])
        return self._place(reply, int(row["generation"]))

    def find(self, name: bytes, ttl_ms: int = LEASE_MS) -> Place:
        """Be told where it is, and the right to read it."""
        reply = self.shard.call(wire.GET, ttl_ms=ttl_ms, stop_at_miss=0, digests=digests(name))
        return self._place(reply, 0)

    def _place(self, reply: object, generation: int) -> Place:
        place, right, *_ = as_records(reply.replicas, REPLICA)  # type: ignore[attr-defined]
        return Place(
            int(place["offset"]), generation, np.array([right]).view(np.int64).reshape(1, 2)
        )

    def end(self, name: bytes, place: Place, receipt: int | None) -> int:
        """End a put, by what its owner has said, or as who has to show nothing."""
        shown: dict[str, Any] = {}
        if receipt is not None:
            shown = {"receipts": np.array([receipt], np.int64), "tags": np.zeros(1, np.uint64)}
        operation = wire.PUT_END if receipt is None else wire.PUT_END_SHOWN
        reply = self.shard.call(
            operation, digests=digests(name), checksums=np.zeros(1, np.uint64),
            generations=np.array([place.generation], np.uint32), **shown,
        )  # fmt: skip
        return int(reply.statuses[0])

    def put(self, name: bytes) -> Place:
        """Put an object as one has to."""
        place = self.begin(name)
        receipt = self.move(WRITE, [place.offset], [SIZE], place.right)[0].receipts[0]
        assert self.end(name, place, int(receipt)) == Status.OK
        return place

    def move(
        self,
        operation: Operation,
        offsets: list[int],
        lengths: list[int],
        rights: NDArray[np.int64] | None = None,
    ) -> tuple[BatchResult, NDArray[np.uint8]]:
        """Read, or write what is forged, somewhere in the worker's memory."""
        starts = np.cumsum([0, *lengths])
        here = np.zeros(starts[-1], np.uint8)
        if operation is WRITE:
            here[:] = np.resize(np.frombuffer(FORGED, np.uint8), here.size)
        call = self._engine.write_batch if operation is WRITE else self._engine.read_batch
        told = call(
            self._worker, offsets, lengths, here.ctypes.data + starts[:-1], timeout_s=CALL_S,
            trusted=True, rights=None if rights is None else np.ascontiguousarray(rights),
        )  # fmt: skip
        return told, here

    def is_refused(
        self, operation: Operation, offset: int, nbytes: int, right: NDArray[np.int64] | None
    ) -> bool:
        """Whether it is, and nothing has come."""
        told, here = self.move(operation, [offset], [nbytes], right)
        return int(told.statuses[0]) == REFUSED and (operation is WRITE or not here.any())


@contextlib.contextmanager
def beside(who: Insider) -> Iterator[tuple[Known, int, Hand]]:
    """An object of a tenant, where it lies, and another tenant who knows that."""
    one = known(who)
    with one.owner, who.wires() as wires, Hand(who, who.pool.tenant, "other") as hand:
        shard = wires.shard()
        found = shard.call(wire.GET, ttl_ms=0, stop_at_miss=0, digests=one.digests)
        (place,) = as_records(found.replicas, REPLICA)
        yield one, int(place["offset"]), hand
        assert one.is_whole(), "the object of another tenant was changed"
        one.forget()


def names(count: int = 1) -> list[bytes]:
    """Of new objects, all of the first shard."""
    return of_shard(0, secrets.token_hex(4).encode(), count)


def places_of_others(who: Insider, count: int) -> float:
    """Places of others, by no right, by made up ones, and by one's own for another place."""
    with beside(who) as (_, theirs, hand):
        (name,) = names()
        mine = hand.put(name)
        read, spent = hand.find(name), mine.right
        assert not hand.is_refused(READ, read.offset, SIZE, read.right), "one's own cannot be read"
        for _ in range(count):
            invented = np.frombuffer(secrets.token_bytes(16), np.int64).reshape(1, 2)
            later = read.right + np.array([0, 1 << 40])
            for operation in READ, WRITE:
                for right in None, invented, read.right, spent, later:
                    assert hand.is_refused(operation, theirs, SIZE, right), (
                        f"{operation} at others'"
                    )
                for right in None, invented, spent, later:
                    assert hand.is_refused(operation, mine.offset, SIZE, right), f"{operation}"
                for by in -8, 8, STEP:
                    assert hand.is_refused(operation, mine.offset + by, SIZE, read.right), "shifted"
                    assert hand.is_refused(operation, mine.offset, SIZE + by, read.right), "another"
            assert hand.is_refused(WRITE, mine.offset, SIZE, read.right), "written by one to read"
        return who.asks()


def all_of_a_segment(who: Insider, count: int) -> float:
    """Every place there is, read and written by tenants and readers without a right."""
    with who.wires() as wires:
        wires.shard(namespace="fuzz")  # readers name few that are new, and other rows have
    with beside(who) as (_, _, hand), Hand(who, who.pool.guest, "fuzz") as reader:
        offsets = list(range(0, hand.size, STEP))
        lengths = [STEP] * len(offsets)
        for _ in range(count):
            for each, operation in (hand, READ), (reader, READ), (hand, WRITE):
                told, here = each.move(operation, offsets, lengths)
                assert (told.statuses == REFUSED).all(), (
                    f"{operation} of some place was not refused"
                )
                assert operation is WRITE or not here.any(), "bytes of others have come"
            assert hand.is_refused(READ, 0, hand.size, None), "it was read as a whole"
        return who.asks()


def written_late(who: Insider, count: int) -> float:
    """Writes by a right that was used, and whose put has ended or was given up meanwhile."""
    with beside(who) as (one, _, hand):
        for _ in range(count):
            ended, given_up = names(2)
            place = hand.put(ended)
            read = hand.find(ended)
            before = hand.move(READ, [read.offset], [SIZE], read.right)[1].tobytes()
            for _ in range(3):
                assert hand.is_refused(WRITE, place.offset, SIZE, place.right), "it was good twice"
            again = hand.move(READ, [read.offset], [SIZE], read.right)[1].tobytes()
            assert again == before == FORGED[:SIZE]
            place = hand.begin(given_up)
            revoked = {"late": 0, "generations": np.array([place.generation], np.uint32)}
            hand.shard.call(wire.PUT_REVOKE, digests=digests(given_up), **revoked)
            key = f"after {secrets.token_hex(4)}"
            one.owner.put(key, VALUE, preferred=["w"])
            hand.move(WRITE, [place.offset], [SIZE], place.right)
            assert one.owner.get(key) == VALUE, "it lies where another one may still write"
            one.owner.remove(key, force=True)
            hand.shard.remove([ended], wire.RemoveFlag.FORCE)
        return who.asks()


def never_written(who: Insider, count: int) -> float:
    """Puts that are ended by who has written nothing, so as to be shown what lay there before."""
    with beside(who) as (_, _, hand):
        earlier = names()[0]
        place = hand.begin(earlier)
        told, _ = hand.move(WRITE, [place.offset], [SIZE], place.right)
        receipt = int(told.receipts[0])
        assert hand.end(earlier, place, receipt) == Status.OK
        for _ in range(count):
            (name,) = names()
            place = hand.begin(name)
            tag = int(place.right[0, 0])
            for shown in None, 0, receipt, tag, secrets.randbits(62):
                status = hand.end(name, place, shown)
                assert status == Status.INVALID_WRITE, f"it was ended: {status}"
            assert not hand.shard.exists([name])[0], "it can be read"
            revoked = {"late": 0, "generations": np.array([place.generation], np.uint32)}
            hand.shard.call(wire.PUT_REVOKE, digests=digests(name), **revoked)
        return who.asks()


def read_late(who: Insider, count: int) -> float:
    """Reads by rights that have ended with their leases, when others lie there."""
    with beside(who) as (_, _, hand):
        mine = names(count)
        for name in mine:
            hand.put(name)
        found = [hand.find(name, SHORT_MS) for name in mine]
        hand.shard.remove(mine, wire.RemoveFlag.FORCE)
        for each in found:
            until(
                lambda each=each: hand.is_refused(READ, each.offset, SIZE, each.right),
                CALL_S, "the right to read ends", AGAIN_S,
            )  # fmt: skip
        later = found[0].right + np.array([0, 1 << 40])
        assert hand.is_refused(READ, found[0].offset, SIZE, later), "it was prolonged"
        return who.asks()


ROWS = (
    Row("places of others", 20, places_of_others),
    Row("all of a segment", 3, all_of_a_segment),
    Row("written late", 50, written_late),
    Row("read late", 50, read_late),
    Row("never written", 100, never_written),
)
