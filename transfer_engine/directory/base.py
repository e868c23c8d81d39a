"""The interface of a directory: names of segments, and how to reach what they name.

A directory maps a name to the bytes of a descriptor. It is a hint, never a right: whoever opens a
segment proves itself to the owner, and the owner checks every access. So the worst that a wrong
entry can do is a refusal, provided that owners have secrets.

The rules, which `directory.testing.DirectoryContract` holds every implementation to:

- `publish` does not replace what another value stands for, unless told to: two owners that chose
  one name are an error at the second, not a surprise at whoever reads.
- With a time to live an entry ends by itself; publishing it again renews it. A crashed owner's
  entries end so.
- Names, values and answers are bounded. Every call has a deadline and may be made by any thread;
  after a fork the child makes its own connections.
- A directory that cannot be asked raises UnavailableError; that is never NotFoundError.

It does not watch, elect or lock: what the engine needs is to find a peer once.
"""

from __future__ import annotations

import abc
import math
import re
from typing import TYPE_CHECKING, ClassVar

from transfer_engine.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    RemoteProtocolError,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "NAMES_MAX",
    "NAME_BYTES_MAX",
    "TIMEOUT_S",
    "TTL_S_MAX",
    "VALUE_BYTES_MAX",
    "Directory",
]

NAME_BYTES_MAX = 256
VALUE_BYTES_MAX = 64 << 10
NAMES_MAX = 10_000
"""Most names of one answer of `names`."""
TTL_S_MAX = 7 * 86_400.0
TIMEOUT_S = 5.0
"""How long a directory may take to answer."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]*")


class Directory(abc.ABC):
    """Names of segments. Thread-safe; close it when done."""

    name: ClassVar[str]

    def publish(
        self, name: str, value: bytes, *, ttl_s: float | None = None, replace: bool = False
    ) -> str:
        """Let others find `value` under `name`; return the address they look up.

        Publishing the same value again renews its time to live. Raises AlreadyExistsError when
        the name stands for something else and `replace` is not set.
        """
        self._check_name(name)
        if not 0 < len(value) <= VALUE_BYTES_MAX:
            raise InvalidArgumentError(
                f"a value of {len(value)} bytes; a directory takes 1 to {VALUE_BYTES_MAX}",
                key=name,
            )
        if ttl_s is not None and not (math.isfinite(ttl_s) and 0 < ttl_s <= TTL_S_MAX):
            raise InvalidArgumentError(f"ttl_s={ttl_s}: choose up to {TTL_S_MAX:.0f} s", key=name)
        if not self._publish(name, bytes(value), ttl_s, replace):
            raise AlreadyExistsError(
                "this name stands for another segment",
                key=name,
                peer=str(self),
                operation="publish",
                advice="choose another name, or pass replace=True if the other one is gone",
            )
        return self.address_of(name)

    def lookup(self, address: str) -> bytes:
        """Return what an address stands for. Raises NotFoundError."""
        self._check_address(address)
        value = self._lookup(address)
        if value is None:
            raise NotFoundError(
                "no segment is published under this name",
                key=address,
                peer=str(self),
                operation="lookup",
                advice="publish it first, or see `names` for what is there",
            )
        if len(value) > VALUE_BYTES_MAX:
            raise RemoteProtocolError(
                f"{len(value)} bytes are no descriptor of a segment", key=address, peer=str(self)
            )
        return value

    def withdraw(self, name: str) -> bool:
        """Forget a name; return whether it was there."""
        self._check_name(name)
        return self._withdraw(name)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that start so, sorted; at most NAMES_MAX of them."""
        if prefix:
            self._check_name(prefix)
        return sorted(self._names(prefix))[:NAMES_MAX]

    def address_of(self, name: str) -> str:
        """Return the address that others look a name of this process up with."""
        return name

    def close(self) -> None:  # noqa: B027 - some hold nothing
        """Give connections up; what was published stays. Idempotent."""

    @abc.abstractmethod
    def _publish(self, name: str, value: bytes, ttl_s: float | None, replace: bool) -> bool:
        """Store; return False when another value is there and may not be replaced."""

    @abc.abstractmethod
    def _lookup(self, address: str) -> bytes | None:
        """Return the value, or None when there is none."""

    @abc.abstractmethod
    def _withdraw(self, name: str) -> bool:
        """Remove; return whether it was there."""

    @abc.abstractmethod
    def _names(self, prefix: str) -> list[str]:
        """Return the names that start so, at most NAMES_MAX, in any order."""

    def _check_name(self, name: str) -> None:
        if len(name) > NAME_BYTES_MAX or not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"{name[:NAME_BYTES_MAX]!r} cannot name a segment",
                advice=f"use up to {NAME_BYTES_MAX} letters, digits and . _ : @ / + -",
            )

    def _check_address(self, address: str) -> None:
        self._check_name(address)

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
