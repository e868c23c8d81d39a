"""From a status number to an error that says key, operation and next step; and back.

Statuses are the numbers of `core.records.Status`, of `transfer_engine.errors`, and BUFFER_SMALL.
No I/O, no state; O(1) per error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.records import Status
from mooncake_store.errors import (
    AlreadyExistsError,
    AuthError,
    BusyError,
    ChecksumMismatchError,
    DiskError,
    HasLeaseError,
    IllegalClientError,
    InvalidArgumentError,
    LeaseExpiredError,
    NoSpaceError,
    NotFoundError,
    ObjectTooLargeError,
    PeerLostError,
    ReplicaNotReadyError,
    StoreError,
    TooSlowError,
    TransferError,
    TransferTimeoutError,
    TruncatedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BUFFER_SMALL", "NOT_RENAMED", "OUT_OF_RANGE", "error_of", "explain_absent"]

BUFFER_SMALL = -10
"""The object does not fit into the buffer it was to be read into."""
OUT_OF_RANGE = -11
"""The range asked for is not within the object; local to the client."""
NOT_RENAMED = -12
"""The two keys of a rename belong to different shards; local to the client."""

_KINDS: dict[int, tuple[type[StoreError], str]] = {
    BUFFER_SMALL: (InvalidArgumentError, "the buffer is smaller than what is to be read"),
    OUT_OF_RANGE: (InvalidArgumentError, "the range is outside of the object"),
    NOT_RENAMED: (InvalidArgumentError, "the new key belongs to another shard: copy the object"),
    Status.NO_SPACE: (NoSpaceError, "no segment has room for the object"),
    Status.TOO_LARGE: (ObjectTooLargeError, "the object is larger than any segment of its shard"),
    Status.PINS_FULL: (NoSpaceError, "hard pins have their whole share of the pool"),
    Status.TOO_FEW_SEGMENTS: (
        NoSpaceError,
        "fewer segments than replicas_min asks for could hold the object, were they empty",
    ),
    Status.INVALID_KEY: (InvalidArgumentError, "the key is not valid"),
    Status.INVALID_PARAMS: (
        InvalidArgumentError,
        "the request was refused: an object has 1 byte to 256 TiB and 1 to 64 replicas",
    ),
    Status.ILLEGAL_CLIENT: (IllegalClientError, "another client owns this put"),
    Status.CLIENT_NOT_FOUND: (UnavailableError, "the store does not know this client any more"),
    Status.INVALID_WRITE: (
        IllegalClientError,
        "the object is complete already, or was not written as it had to be",
    ),
    AuthError.code: (AuthError, "the owner of the replica refused it"),
    Status.NOT_READY: (ReplicaNotReadyError, "the object is still being written"),
    Status.NOT_FOUND: (NotFoundError, "no readable object has this key"),
    Status.ABSENT: (NotFoundError, "the workers that hold the object are absent"),
    Status.ALREADY_EXISTS: (AlreadyExistsError, "the key names an object already"),
    Status.OTHER_NAME: (InvalidArgumentError, "an object of another name has the digest of this"),
    Status.HAS_LEASE: (HasLeaseError, "the object is being read"),
    Status.LEASE_EXPIRED: (LeaseExpiredError, "the lease ended before the transfer did"),
    Status.BUSY: (BusyError, "a copy or move of the object is running"),
    Status.TENANT_QUOTA: (NoSpaceError, "the quota of the namespace has no room for the object"),
    Status.LIMIT_BYTES: (NoSpaceError, "a limit of the credential has no room for the object"),
    Status.LIMIT_PINS: (NoSpaceError, "the credential may pin no more hard"),
    Status.LIMIT_GROUPS: (NoSpaceError, "the credential may have no more groups"),
    Status.PINNED: (BusyError, "the object is pinned, and a pin counts for more than this hint"),
    Status.TASK_LIMIT: (BusyError, "as many copies wait as a shard takes"),
    ChecksumMismatchError.code: (
        ChecksumMismatchError,
        "what was read is not what was put, on every replica",
    ),
    TruncatedError.code: (
        TruncatedError,
        "a file of the pool ended before the object did, or is gone",
    ),
    DiskError.code: (DiskError, "the disk that has the object failed"),
    PeerLostError.code: (PeerLostError, "the owner of the replica was lost"),
    TransferTimeoutError.code: (TransferTimeoutError, "the transfer did not end in time"),
    UnavailableError.code: (UnavailableError, "no replica can be reached"),
    TransferError.code: (TransferError, "the transfer failed"),
    TooSlowError.code: (TooSlowError, "reading it would take longer than it is worth"),
}

_ADVICE: dict[int, str] = {
    Status.PINS_FULL: "unpin or remove hard-pinned objects, put without hard_pin, or raise "
    "hard_pin_share of the master, of which one client has three quarters at most; waiting helps "
    "only while workers are absent",
    Status.TOO_FEW_SEGMENTS: "put it with a smaller replicas_min, or start another worker; waiting "
    "does not help",
    Status.ABSENT: "recompute it and put it again, or wait: it is kept for a while (worker_grace "
    "of the master), and is as before if they come back",
    Status.OTHER_NAME: "choose another key; where the master names keys with a secret (identity "
    "keyed, its default) nobody can make two of them meet",
    Status.PINNED: "clear its pins first, or leave it to evictions",
    Status.TASK_LIMIT: "ask again when `mooncake top` says that fewer replicas are missing",
    Status.TENANT_QUOTA: "remove or unpin objects of the namespace, wait for leases to end, or "
    "raise its quota in the setting quotas of the master",
    Status.LIMIT_BYTES: "remove or unpin objects of its namespaces, wait for leases to end, or "
    "have the limit of bytes raised in the credential",
    Status.LIMIT_PINS: "unpin or remove objects that are pinned hard, or have the limit of pins "
    "raised in the credential",
    Status.LIMIT_GROUPS: "put into groups that there are, remove all objects of some, or have the "
    "limit of groups raised in the credential",
}

_PUTS = ("put", "commit")
_GIVEN_UP = ("the put was given up, or the key removed, before it was complete", "put it again")


def error_of(
    status: int,
    *,
    key: str | bytes | None,
    operation: str,
    detail: str = "",
    elapsed_s: float | None = None,
    peer: str | None = None,
) -> StoreError:
    """Return the error a status stands for; `detail` says more than the number can."""
    kind, what = _KINDS.get(status, (StoreError, f"the store answered {status}"))
    advice = _ADVICE.get(status)
    if status == Status.NOT_FOUND and operation in _PUTS:
        what, advice = _GIVEN_UP
    if detail:
        what = f"{what}: {detail}"
    return kind(
        what,
        key=key,
        operation=operation,
        elapsed_s=elapsed_s,
        peer=peer,
        advice=advice,
    )


def explain_absent(
    statuses: NDArray[Any], errors: dict[int, StoreError | str], operation: str
) -> None:
    """Make what lies on absent workers not found, as it is for who asks, and keep why as an error.

    `statuses` has one per key, `errors` what is known beyond it. O(keys).
    """
    if not np.count_nonzero(statuses):
        return  # nearly always
    absent = np.flatnonzero(statuses == Status.ABSENT)
    if len(absent):
        statuses[absent] = Status.NOT_FOUND
        error = error_of(Status.ABSENT, key=None, operation=operation)
        errors.update(dict.fromkeys(absent.tolist(), error))
