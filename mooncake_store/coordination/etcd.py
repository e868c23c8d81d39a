"""A coordinator that an etcd (3.4 or newer) stands behind.

Every read is linearizable: a member that has lost the majority does not answer. What else is not
taken on trust:

- A watch that is silent may hang on a connection that leads nowhere, or on a member that stands
  still or is cut off. So it is begun anew every `SILENCE_S` from where it was, after a read that
  this member answers; else on another one.
- A member that believes itself the leader of the etcd, when another one is already, renews leases
  that it no longer keeps (before 3.5.3 always). So a renewal counts when the member then answers a
  read of the same term as before: by then the majority knew of no later leader.
- An etcd whose data was removed begins at revision 1 again. A watch from later on says that its
  history is gone.

Cost: a connection and a round trip a call, two a renewal, two in `SILENCE_S` a silent watch.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mooncake_store.coordination.base import (
    FAULTS,
    TIMEOUT_S,
    Change,
    CompactedError,
    Coordinator,
    Entry,
    Listing,
    Put,
    check_change,
    check_name,
    checked_namespace,
)
from mooncake_store.coordination.gateway import Gateway
from transfer_engine.errors import LeaseExpiredError, UnavailableError
from transfer_engine.lasting import Setbacks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from mooncake_store.coordination.access import Access
    from mooncake_store.coordination.base import Delete, Seen
    from mooncake_store.coordination.calls import Answer, Event, Header, Pair
    from transfer_engine.rpc.address import Address

__all__ = ["EtcdCoordinator"]

SILENCE_S = 5.0
"""After which a watch is begun anew."""
TERM_ROUNDS = 3
"""Of renewals, when the leader of the etcd changes in between."""


class EtcdCoordinator(Coordinator):
    """A client of the etcd whose members listen at these addresses (`host:port`).

    Raises ConfigError for what is no address.
    """

    def __init__(
        self,
        members: Sequence[str],
        namespace: str,
        *,
        timeout_s: float = TIMEOUT_S,
        access: Access | None = None,
    ) -> None:
        super().__init__(None, timeout_s)
        self._prefix = checked_namespace(namespace).encode()
        self._gateway = Gateway(members, timeout_s, access)
        self._terms: dict[Address, int] = {}
        """The term that a member said last, by a read."""

    async def get(self, key: str, *, timeout_s: float | None = None) -> Entry | None:
        """Return the value of a name, None where it is absent."""
        check_name(key)
        request = {"key": self._prefix + key.encode()}
        read = await self._gateway.ask("get", "kv/range", request, timeout_s=timeout_s)
        return self._entry(read.kvs[0]) if read.kvs else None

    async def list(self, prefix: str, *, timeout_s: float | None = None) -> Listing:
        """Return all values whose names begin so."""
        request = self._range(prefix)
        read = await self._gateway.ask("list", "kv/range", request, timeout_s=timeout_s)
        return Listing(tuple(map(self._entry, read.kvs)), read.header.revision)

    async def change(
        self,
        *operations: Put | Delete,
        given: Sequence[Seen] = (),
        timeout_s: float | None = None,
    ) -> int | None:
        """Do all of these, or, where one condition does not hold, nothing and return None."""
        check_change(operations, given)
        request = {
            # The revision of an absent key is 0.
            "compare": [
                {
                    "key": self._prefix + key.encode(),
                    "target": "MOD",
                    "result": "EQUAL",
                    "mod_revision": revision,
                }
                for key, revision in given
            ],
            "success": [self._operation(operation) for operation in operations],
        }
        changed = await self._gateway.ask(
            "change", "kv/txn", request, repeat=False, timeout_s=timeout_s
        )
        return changed.header.revision if changed.succeeded else None

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """Yield each change of names that begin so from a revision on: all of one at once."""
        setbacks = Setbacks(f"the watch of {prefix!r} in the etcd")
        while True:
            member = self._gateway.members[0]
            try:
                async with aclosing(self._watch_at(member, prefix, revision)) as batches:
                    async for batch in batches:
                        setbacks.worked()
                        revision = batch[0].revision + 1
                        yield batch
            except CompactedError:
                raise
            except FAULTS as error:
                self._gateway.leave(member)
                await asyncio.sleep(setbacks.failed(error))

    async def _watch_at(
        self, member: Address, prefix: str, revision: int
    ) -> AsyncGenerator[tuple[Change, ...], None]:
        request = {"create_request": {**self._range(prefix), "start_revision": revision}}
        await self._check_follows(member, revision)
        answers = self._gateway.stream(member, "watch", "watch", request, SILENCE_S)
        async with aclosing(answers):
            async for answer in answers:
                if answer.canceled:
                    raise _cancelled(answer, member)
                for when, events in groupby(answer.events, lambda event: event.kv.mod_revision):
                    revision = when + 1
                    yield tuple(map(self._seen, events))

    async def _check_follows(self, member: Address, revision: int) -> None:
        """Raise unless a member follows the others, and knows what came before a revision."""
        header = await self._header(member)
        if header.revision < revision - 1:
            raise CompactedError(
                f"the etcd is at revision {header.revision}, before {revision - 1}, which was "
                "seen: its data was removed, or replaced by older data",
                operation="watch",
                peer=str(member),
            )

    async def _header(self, member: Address, timeout_s: float | None = None) -> Header:
        request = {"key": self._prefix, "count_only": True}
        read = await self._gateway.ask(
            "check a member", "kv/range", request, member=member, timeout_s=timeout_s
        )
        return read.header

    async def grant(self, ttl_s: int, timeout_s: float) -> tuple[int, int]:
        """Make a lease; return its number and its length."""
        # One whose answer is lost runs out by itself, so it may be made twice.
        granted = await self._gateway.ask(
            "grant a lease", "lease/grant", {"TTL": ttl_s}, timeout_s=timeout_s
        )
        return granted.ID, granted.TTL

    async def renew(self, lease: int, timeout_s: float) -> bool:
        """Let a lease last for its whole length from now on; False where there is none."""

        async def renew_at(member: Address, until: float) -> bool:
            for _ in range(TERM_ROUNDS):
                kept = await self._gateway.ask(
                    "renew a lease",
                    "lease/keepalive",
                    {"ID": lease},
                    member=member,
                    timeout_s=until - time.monotonic(),
                )
                if kept.TTL <= 0:
                    return False
                term = (await self._header(member, until - time.monotonic())).raft_term
                if term == self._terms.get(member):
                    return True
                self._terms[member] = term
            raise UnavailableError(
                "the etcd changes its leader again and again",
                operation="renew a lease",
                peer=str(member),
            )

        return await self._gateway.in_turn(renew_at, time.monotonic() + timeout_s)

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """End a lease now, and remove what was put with it."""
        with suppress(LeaseExpiredError):  # it has ended already
            await self._gateway.ask(
                "revoke a lease", "lease/revoke", {"ID": lease}, timeout_s=timeout_s
            )

    def _range(self, prefix: str) -> dict[str, Any]:
        key = self._prefix + prefix.encode()
        # No name has a byte 0xff, so the last one can be increased: all that begins so is before.
        return {"key": key, "range_end": key[:-1] + bytes([key[-1] + 1])}

    def _operation(self, operation: Put | Delete) -> dict[str, Any]:
        key = self._prefix + operation.key.encode()
        if isinstance(operation, Put):
            return {"request_put": {"key": key, "value": operation.value, "lease": operation.lease}}
        return {"request_delete_range": {"key": key}}

    def _seen(self, event: Event) -> Change:
        entry = self._entry(event.kv)
        return Change(entry.key, entry.revision, None if event.type == "DELETE" else entry)

    def _entry(self, pair: Pair) -> Entry:
        key = pair.key.removeprefix(self._prefix).decode(errors="replace")
        return Entry(key, pair.value, pair.mod_revision, pair.create_revision, pair.lease)


def _cancelled(answer: Answer, member: Address) -> UnavailableError:
    if answer.compact_revision:
        return CompactedError(
            f"the etcd has compacted what came before {answer.compact_revision}",
            operation="watch",
            peer=str(member),
        )
    reason = answer.cancel_reason or "no reason given"
    return UnavailableError(
        f"the etcd ended the watch: {reason}", operation="watch", peer=str(member)
    )
