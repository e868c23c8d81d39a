"""What a session may do: the role of whoever proved a credential, and the namespaces it is for.

Roles are in order, and each may do what those below it may: a reader looks, a writer changes
objects, a worker lends memory and carries out what masters ask of it, an admin does everything.
Every operation says in its declaration whose it is (`registry.Operation.needs`); a server asks
nothing else, and what it refuses is told to the log (`audit`). O(1), once a request.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transfer_engine import audit
from transfer_engine.errors import AuthError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EVERYTHING", "LOOKING", "Rights", "Role"]


class Role(enum.IntEnum):
    """What somebody is to a pool."""

    READER = 1
    WRITER = 2
    WORKER = 3
    ADMIN = 4


@dataclass(frozen=True, slots=True)
class Rights:
    """Who somebody is, and what he may do. No `namespaces` are all of them.

    `until` is when they end, in seconds since 1970. `proof` tells the secrets of a principal apart.
    `limits` say how much he may have of what he may have at all, by names of the store's; they are
    looked up and not written down here: what is in the mapping counts just now.
    """

    principal: str
    role: Role
    namespaces: tuple[str, ...] = ()
    until: float = math.inf
    proof: bytes = b""
    limits: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def asked(self) -> bool:
        """Whether owners of memory ask for rights to each place: of named readers and writers."""
        return bool(self.principal) and self.role < Role.WORKER

    @property
    def who(self) -> str:
        """How a log names whoever has them."""
        return self.principal or (audit.POOL if self.role == Role.ADMIN else audit.READERS)

    def refusal(self, needs: Role, operation: str, peer: str, key: str | None = None) -> AuthError:
        """Return what is said about an operation that is for others, and tell the log of it.

        `peer` is the address that it was asked from.
        """
        if self.role == Role.READER:
            what = "the credential is read-only"
        else:
            what = f"the credential is one of a {self.role.name.lower()}"
        if self.principal:
            what = f"{what}, of {self.principal}"
        audit.refused(self.who, peer, operation, what, "role")
        return AuthError(
            what,
            key=key,
            operation=operation,
            advice=f"connect with one of a {needs.name.lower()}, or with the pool's secret",
        )

    def ended(self) -> AuthError:
        """Return what is said when they have ended."""
        return AuthError(
            f"the credential of {self.principal} was taken back, changed, or has run out",
            advice="connect with one that holds: `mooncake secret list` tells those",
        )

    def check_namespace(self, namespace: str, operation: str, peer: str) -> None:
        """Raise AuthError for a namespace that is others'."""
        if self.namespaces and namespace not in self.namespaces:
            what = f"the credential of {self.principal} is not for namespace {namespace!r}"
            audit.refused(self.who, peer, operation, what, "namespace")
            raise AuthError(
                what,
                operation=operation,
                advice=f"use one of its own: {', '.join(self.namespaces)}",
            )


EVERYTHING = Rights("", Role.ADMIN)
"""Of whoever knows the pool's secret, and of everybody where there is none."""
LOOKING = Rights("", Role.READER)
