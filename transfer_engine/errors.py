"""The error tree of the whole stack, defined at its lowest layer so that every layer raises it.

    StoreError
    ├── NotFoundError (KeyError)
    ├── AlreadyExistsError
    ├── NoSpaceError (OSError, errno ENOSPC)
    │   └── ObjectTooLargeError
    ├── LeaseExpiredError
    ├── HasLeaseError
    ├── ReplicaNotReadyError
    ├── BusyError
    ├── TooSlowError
    ├── IllegalClientError
    ├── TransferError
    │   ├── TransferTimeoutError (TimeoutError)
    │   ├── PeerLostError (ConnectionError)
    │   ├── ChecksumMismatchError
    │   ├── TruncatedError
    │   └── DiskError
    ├── ProtocolError
    │   ├── LocalProtocolError      this side broke the rules
    │   └── RemoteProtocolError     the peer broke the rules
    ├── AuthError (PermissionError)
    ├── ConfigError (ValueError)
    ├── UnavailableError (ConnectionError)
    ├── OverloadedError
    └── InvalidArgumentError (ValueError)

Every error carries a stable number (`code`, the one the drop-in API returns), says whether a
retry can help (`retryable`), and names key, peer, operation, elapsed time and the next step as
far as they are known. Object-level errors live here too, although this package knows nothing of
objects: one tree in one file is worth more than purity, and `mooncake_store.errors` re-exports it.
"""

from __future__ import annotations

import errno
from typing import ClassVar, Self, TypeVar

ErrorT = TypeVar("ErrorT", bound="StoreError")

__all__ = [
    "AlreadyExistsError",
    "AuthError",
    "BusyError",
    "ChecksumMismatchError",
    "ConfigError",
    "HasLeaseError",
    "IllegalClientError",
    "InvalidArgumentError",
    "LeaseExpiredError",
    "LocalProtocolError",
    "NoSpaceError",
    "NotFoundError",
    "ObjectTooLargeError",
    "OverloadedError",
    "PeerLostError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicaNotReadyError",
    "StoreError",
    "TooSlowError",
    "TransferError",
    "TransferTimeoutError",
    "TruncatedError",
    "DiskError",
    "UnavailableError",
]


class StoreError(Exception):
    """Root of everything this project raises on purpose."""

    code: ClassVar[int] = -1
    retryable: ClassVar[bool] = False
    default_advice: ClassVar[str] = ""

    def __init__(
        self,
        what: str,
        *,
        key: str | bytes | None = None,
        peer: str | None = None,
        operation: str | None = None,
        elapsed_s: float | None = None,
        advice: str | None = None,
    ) -> None:
        self.what = what
        self.key = key
        self.peer = peer
        self.operation = operation
        self.elapsed_s = elapsed_s
        self.advice = self.default_advice if advice is None else advice
        super().__init__(what)

    def __str__(self) -> str:
        context = [
            f"{name} {value}"
            for name, value in (
                ("operation", self.operation),
                ("key", None if self.key is None else repr(self.key)),
                ("peer", self.peer),
                ("after", None if self.elapsed_s is None else f"{self.elapsed_s:.3f} s"),
            )
            if value is not None
        ]
        text = self.what if not context else f"{self.what} ({', '.join(context)})"
        return text if not self.advice else f"{text}; {self.advice}"

    def again(self) -> Self:
        """Return an equal error: to be kept in place of one that was raised, and the reverse.

        What was raised holds the frames it passed, those of its callers included, and they hold
        who keeps the error: a cycle, and the buffers in those frames would wait for the garbage
        collector, which for a program with few new objects comes once in hours.
        """
        fresh: Self = _rebuild(type(self), self.what, self.__dict__)
        return fresh

    def __reduce__(self) -> tuple[object, ...]:
        # Built from keywords, so the default reduce (positional args only) would lose them.
        state = {k: v for k, v in self.__dict__.items() if k != "what"}
        return (_rebuild, (type(self), self.what, state))


def _rebuild(kind: type[ErrorT], what: str, state: dict[str, object]) -> ErrorT:
    error = kind(what)
    error.__dict__.update(state)
    return error


class NotFoundError(StoreError, KeyError):
    """No readable object under this key."""

    code = -704
    default_advice = "it was never put, was removed, or was evicted: recompute it and put it again"


class AlreadyExistsError(StoreError):
    """The key already names an object and the call asked not to replace it."""

    code = -705
    default_advice = "use upsert to replace it, or remove it first"


class NoSpaceError(StoreError, OSError):
    """No segment can hold the object, now and until the caller's deadline."""

    code = -200
    retryable = True
    default_advice = "wait for leases to end, add a segment, or raise the deadline"

    def __init__(self, what: str, **context: object) -> None:
        StoreError.__init__(self, what, **context)  # type: ignore[arg-type]
        self.errno = errno.ENOSPC


class ObjectTooLargeError(NoSpaceError):
    """No segment could hold the object, even if it were empty; waiting would not help."""

    retryable = False
    default_advice = "lend a larger segment, use fewer shards, or put it in several pieces"


class LeaseExpiredError(StoreError):
    """The transfer outlived its read lease, so its bytes may be somebody else's."""

    code = -707
    retryable = True
    default_advice = "read again, with a longer lease ttl if the object is large"


class HasLeaseError(StoreError):
    """The object is being read, so it cannot be removed yet."""

    code = -706
    retryable = True
    default_advice = "wait for the lease to end, or remove with force"


class ReplicaNotReadyError(StoreError):
    """The object is being written and has no readable replica yet."""

    code = -703
    retryable = True
    default_advice = "retry when its writer has finished"


class BusyError(StoreError):
    """A copy, a move or another task holds the object."""

    code = -708
    retryable = True
    default_advice = "retry when the running task has ended"


class TooSlowError(StoreError):
    """A read was predicted to take longer than it is worth, so nothing was read.

    `predicted_s` is the least time that a read of the key would take by the prediction, over
    `transport` from a segment of `tier` "memory", "disk" or "cold"; `peer` names it.
    """

    code = -760
    default_advice = "compute it, or read it with a larger `worth` or none"
    predicted_s: float = 0.0
    transport: str = ""
    tier: str = ""


class IllegalClientError(StoreError):
    """Another client owns what this client tried to change."""

    code = -601
    default_advice = "only the client that started a put, or mounted a segment, may end it"


class TransferError(StoreError):
    """Bytes could not be moved."""

    code = -800
    retryable = True


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer did not end before its deadline."""

    code = -901
    default_advice = "raise the deadline, or see `mooncake doctor` for the path it took"


class PeerLostError(TransferError, ConnectionError):
    """The other end closed the connection or stopped answering."""

    code = -900
    default_advice = "check that the peer runs; the next call reconnects"


class ChecksumMismatchError(TransferError):
    """The bytes read are not the bytes that were put; they were not handed out."""

    code = -801
    default_advice = "another replica is tried first; if this repeats, check the memory of the peer"


class TruncatedError(TransferError):
    """A file under a segment lacks what was written: somebody shortened it, or removed it."""

    code = -802
    retryable = False
    default_advice = (
        "remove what lay there and put it anew; make a segment anew whose file was shortened"
    )


class DiskError(TransferError):
    """The disk under a segment failed to read, to write, or to say that it has everything."""

    code = -803
    default_advice = (
        "`mooncake status` says which and why; until it is well, what lies there is a miss"
    )


class ProtocolError(StoreError):
    """A rule of the wire protocol was broken."""

    code = -300


class LocalProtocolError(ProtocolError):
    """This side tried to send something the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol forbids."""

    default_advice = "check that the address names a mooncake server of a compatible version"


class AuthError(StoreError, PermissionError):
    """The peer did not prove that it knows the shared secret, or lacks the right."""

    code = -1011
    default_advice = "set the same secret on both ends (MOONCAKE_SECRET_FILE)"


class ConfigError(StoreError, ValueError):
    """A setting is unknown, malformed or contradicts another."""

    code = -600


class UnavailableError(StoreError, ConnectionError):
    """The service cannot be reached, or cannot serve yet."""

    code = -1010
    retryable = True
    default_advice = "check the address and that the service runs"


class OverloadedError(StoreError):
    """The service has as much to do as it takes on, so nothing was done of this request.

    It says after how long another try is worth it: `retry_after_s`. Clients wait so long by
    themselves, about, while their deadline allows it.
    """

    code = -1012
    retryable = True
    default_advice = "ask again later, or ask for less at a time"
    retry_after_s: float = 0.0


class InvalidArgumentError(StoreError, ValueError):
    """An argument is out of range or of the wrong kind."""

    code = -600
