"""What principals take of a pool, held against the limits of their credentials.

    accounts = Accounts(shard, shards)
    account = accounts.admit(rights, uuid, peer)     # may refuse one more client
    account.check_name(peer)                         # one more namespace, one more copy...

A shard counts the clients that are connected, the namespaces that one brought into being and the
copies that have not ended; bytes, hard pins and groups the core counts itself, by namespaces
(`core.allowances`). What workers lend a master counts (`lent`). Limits are those of the file just
now.

Refusals name the principal, the limit and what is taken of it, and are told to the log of the
audit. O(1) a request, and nothing for whoever has no name.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.allowances import Allowance
from mooncake_store.core.records import Status
from mooncake_store.core.tasks import TaskState
from mooncake_store.limits import LIMITS, part_of
from mooncake_store.units import format_size
from transfer_engine import audit
from transfer_engine.errors import AuthError, NoSpaceError, OverloadedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.core.shard import Shard
    from transfer_engine.audit import Limited
    from transfer_engine.wire.rights import Rights

__all__ = ["Account", "Accounts", "refusal"]

RETRY_S = 0.5
"""After how long it is worth to ask again for what ends by itself."""
_HELD_TO: dict[int, Limited] = {
    Status.LIMIT_BYTES: "bytes",
    Status.LIMIT_PINS: "pins",
    Status.LIMIT_GROUPS: "groups",
}
_ADVICE: dict[Limited, str] = {
    "clients": "close some of its clients",
    "names": "use a namespace that there is",
    "groups": "put into groups that there are, or remove all objects of some",
    "tasks": "ask again when some of them have ended",
    "pins": "unpin or remove objects that are pinned hard",
    "bytes": "remove or unpin objects of its namespaces, or wait for leases to end",
    "segments": "end some of its workers, or lend fewer and larger segments",
    "lent": "end some of its workers, or lend less",
}


def refusal(
    who: str, name: Limited, most: int, taken: int, *, peer: str, operation: str
) -> StoreError:
    """Return what is said about one more than a limit allows, and tell the log of it."""
    limit = LIMITS[name]
    first, second = (format_size(most), format_size(taken)) if limit.size else (most, taken)
    here = " on this shard" if limit.divided else ""
    what = f"the credential of {who} has a limit of {first} for {limit.of}{here} (taken: {second})"
    audit.refused(who, peer, operation, what, name)
    if name in ("names", "segments", "lent"):
        error: StoreError = AuthError(what, operation=operation)
    elif name in ("clients", "tasks"):
        error = OverloadedError(what, operation=operation)
        error.retry_after_s = RETRY_S
    else:
        error = NoSpaceError(what, operation=operation)
    error.advice = f"{_ADVICE[name]}, or have the limit of {name} raised in its credential"
    return error


class Account:
    """What one principal takes of a shard."""

    def __init__(self, rights: Rights, shard: Shard, shards: int) -> None:
        self._shard = shard
        self._shards = shards
        self.know(rights)
        self._connections: Counter[bytes] = Counter()  # by client
        self._names = 0
        self._tasks: set[int] = set()

    def know(self, rights: Rights) -> None:
        """Take these for its rights; they may be others than when it was here last."""
        self.rights = rights
        self.allowance = Allowance(rights.namespaces, rights.limits, self._shards)

    def _most(self, name: Limited) -> int | None:
        return part_of(self.rights.limits, name, self._shards)

    def check_client(self, uuid: bytes, peer: str) -> None:
        """Raise OverloadedError where a client would be one too many."""
        most, taken = self._most("clients"), len(self._connections)
        if most is not None and uuid not in self._connections and taken >= most:
            raise self._refusal("clients", most, taken, peer, "open")

    def connect(self, uuid: bytes, handle: int) -> Callable[[], None]:
        """Note a connection of a client; to be called with its end is what is returned."""
        self._connections[uuid] += 1
        if self.rights.namespaces:
            self._shard.allowances[handle] = self.allowance

        def end() -> None:
            self._connections[uuid] -= 1
            if not self._connections[uuid]:
                del self._connections[uuid]

        return end

    def check_name(self, peer: str) -> None:
        """Raise AuthError where a namespace that is new would be one too many."""
        most = self._most("names")
        if most is not None and self._names >= most:
            raise self._refusal("names", most, self._names, peer, "open")

    def named(self) -> None:
        """Note a namespace that it brought into being."""
        self._names += 1

    def check_task(self, digest: NDArray[np.uint64], copies: int, peer: str) -> None:
        """Raise OverloadedError or NoSpaceError where a copy or move, or its bytes, are too many.

        `copies` of the object are made beside those that there are.
        """
        most = self._most("tasks")
        if most is not None and len(self._tasks) >= most:
            self._tasks = {number for number in self._tasks if self._runs(number)}
            if len(self._tasks) >= most:
                taken = len(self._tasks)
                raise self._refusal("tasks", most, taken, peer, "submit_task")
        most, shard = self.allowance.bytes_most, self._shard
        if copies and most is not None and (found := shard.stat(shard.now, digest)) is not None:
            taken = self.allowance.used(shard)
            if taken + copies * found.size > most:
                raise self._refusal("bytes", most, taken, peer, "submit_task")

    @property
    def pinned(self) -> int:
        """Bytes that are pinned hard in its namespaces."""
        return self.allowance.pinned(self._shard)

    def _runs(self, number: int) -> bool:
        task = self._shard.tasks.get(number)
        return task is not None and task.state in (TaskState.PENDING, TaskState.PROCESSING)

    def asked(self, number: int) -> None:
        """Note a copy or move that it asked for."""
        if "tasks" in self.rights.limits:
            self._tasks.add(number)

    def check_statuses(self, peer: str, statuses: NDArray[Any], operation: str) -> None:
        """Tell the log of keys that the core refused for a limit; raise if all of them were."""
        if not self.rights.limits:
            return
        held = np.isin(statuses, list(_HELD_TO))
        if not held.any():
            return
        name = _HELD_TO[int(statuses[held][0])]
        allowance, shard = self.allowance, self._shard
        most, taken = {
            "bytes": (allowance.bytes_most, allowance.used),
            "pins": (allowance.pins_most, allowance.pinned),
            "groups": (allowance.groups_most, allowance.groups),
        }[name]
        error = self._refusal(name, most or 0, taken(shard), peer, operation)
        if held.all():
            raise error

    def _refusal(
        self, name: Limited, most: int, taken: int, peer: str, operation: str
    ) -> StoreError:
        return refusal(self.rights.who, name, most, taken, peer=peer, operation=operation)


class Accounts:
    """The accounts of a shard, by principal."""

    def __init__(self, shard: Shard, shards: int) -> None:
        self._shard = shard
        self._shards = shards
        self._of: dict[str, Account] = {}

    @property
    def confined(self) -> list[Account]:
        """Those of principals that are for some namespaces."""
        return [account for account in self._of.values() if account.rights.namespaces]

    def admit(self, rights: Rights, uuid: bytes, peer: str) -> Account | None:
        """Return the account of somebody who opens a connection; None without a name.

        Raises OverloadedError.
        """
        if not rights.principal:
            return None
        account = self._of.get(rights.principal)
        if account is None:
            account = self._of[rights.principal] = Account(rights, self._shard, self._shards)
        else:
            account.know(rights)
        account.check_client(uuid, peer)
        return account
