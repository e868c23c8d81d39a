"""What the clients of one principal may have together: of bytes, of hard pins, of groups.

    shard.allowances[client] = Allowance(("team-a", "team-b"), {"bytes": 10 << 30}, shards=4)

What counts is all that lies in the namespaces that the principal is for, whoever put it: that is
known of every object, and is the same after a restart, on a standby and behind a split. A shard has
an equal part of bytes and pins; of groups it may have all, since the members of one are on many.

Limits are read whenever they are asked for, so another number in the mapping counts at once.
O(namespaces of the principal) a put, and nothing for clients that have no allowance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from mooncake_store.core.groups import Groups

__all__ = ["ORDERS_MAX", "Allowance", "limits_bytes"]

ORDERS_MAX = 64
"""Namespaces with an order of eviction of their own, those with a quota among them: each is told of
every use of an object. Nothing is evicted for the limits of others."""


class _Tenant(Protocol):
    @property
    def number(self) -> int: ...


class _Hauls(Protocol):
    def __len__(self) -> int: ...
    def moving_bytes(self, tenant: int) -> int: ...


class _Counting(Protocol):
    """What is asked of the state of a shard, which explains each."""

    tenant_use: NDArray[np.int64]
    tenant_pins: NDArray[np.int64]
    groups: Groups

    @property
    def tenants(self) -> Mapping[str, _Tenant]: ...
    @property
    def hauls(self) -> _Hauls: ...
    @property
    def quota_orders(self) -> Mapping[int, Any]: ...
    @property
    def allowances(self) -> Mapping[int, Allowance]: ...
    def order_tenant(self, tenant: int) -> None: ...


class Allowance:
    """Some namespaces, and what may lie in them together."""

    def __init__(self, namespaces: tuple[str, ...], limits: Mapping[str, int], shards: int) -> None:
        self._namespaces = namespaces
        self._limits = limits
        self._shards = shards
        self._tenants = np.empty(0, np.int64)
        self._of = 0  # namespaces that there were when these were looked up

    @property
    def bytes_most(self) -> int | None:
        """How many bytes may be here; None: any."""
        return self._part("bytes")

    @property
    def pins_most(self) -> int | None:
        """How many bytes may be pinned hard here; None: any."""
        return self._part("pins")

    @property
    def groups_most(self) -> int | None:
        """How many groups may be here; None: any."""
        return self._limits.get("groups")

    def _part(self, what: str) -> int | None:
        most = self._limits.get(what)
        return None if most is None else most // self._shards

    def tenants(self, state: _Counting) -> list[int]:
        """Return the numbers of the namespaces, as far as there are any of these."""
        if len(state.tenants) != self._of:
            self._of, known = len(state.tenants), state.tenants
            found = [known[name].number for name in self._namespaces if name in known]
            self._tenants = np.array(found, np.int64)
        return self._tenants.tolist()

    def used(self, state: _Counting) -> int:
        """Return the bytes that are here; what is on its way to another tier counts once."""
        numbers = self.tenants(state)
        total = int(state.tenant_use[self._tenants, 0].sum())
        return total - sum(map(state.hauls.moving_bytes, numbers if len(state.hauls) else ()))

    def pinned(self, state: _Counting) -> int:
        """Return the bytes that are pinned hard here."""
        self.tenants(state)
        return int(state.tenant_pins[self._tenants].sum())

    def groups(self, state: _Counting) -> int:
        """Return how many groups there are here."""
        return sum(state.groups.of[number] for number in self.tenants(state))

    def takes_groups(self, state: _Counting, tenant: int, names: Iterable[str]) -> bool:
        """Whether objects may be put into these groups of a namespace."""
        most = self.groups_most
        if most is None:
            return True
        new = sum(not state.groups.has(tenant, name) for name in {*names} - {""})
        return not new or self.groups(state) + new <= most

    def evictable(self, state: _Counting, tenant: int) -> list[int]:
        """Return the namespaces that give way, in turn, to what is put into one of them."""
        numbers = self.tenants(state)
        for number in numbers:
            if number not in state.quota_orders and len(state.quota_orders) < ORDERS_MAX:
                state.order_tenant(number)
        first = sorted(numbers, key=lambda number: number != tenant)
        return [number for number in first if number in state.quota_orders]


def limits_bytes(state: _Counting, client: int) -> bool:
    """Whether what a client puts is held against a limit."""
    allowance = state.allowances.get(client)
    return allowance is not None and allowance.bytes_most is not None
