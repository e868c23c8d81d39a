"""One call of an etcd's JSON gateway: the bytes that are sent, and what those that come back mean.

    call = Call(Address("10.0.0.1", 2379), "get", "kv/range", {"key": b"name"})
    answer = call.answer(everything_that_came_after(call.request()))

HTTP/1.0 with a connection for each call, so an answer ends where its connection does. No I/O: calls
are carried out by `gateway` on the event loop of a coordinator, by `exchange` for who only looks
something up. O(bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mooncake_store.coordination.base import CompactedError, lease_ended
from mooncake_store.printable import printable
from transfer_engine.errors import (
    AuthError,
    InvalidArgumentError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.wire.cold import MALFORMED
from transfer_engine.wire.frame import MAGIC_BYTES

if TYPE_CHECKING:
    from transfer_engine.rpc.address import Address

__all__ = [
    "ADVICE_FULL",
    "LOG_IN",
    "Answer",
    "Call",
    "Event",
    "Header",
    "Pair",
    "TokenError",
    "is_good",
]

ADVICE = "check that the etcd runs, and that a majority of its members reach each other"
ADVICE_ADDRESS = "check that this is where an etcd of version 3.4 or newer listens for clients"
ADVICE_MASTER = "a master listens there, which is named by mooncake://HOST:PORT/NAMESPACE"
ADVICE_USER = "check the user of the etcd, the password, and what it may read and write"
ADVICE_CERTIFICATE = (
    "show an etcd that has users a certificate without a common name (CN): else it takes no call "
    "over HTTP"
)
ADVICE_FULL = (
    "compact its history and defragment it, or start it with a larger --quota-backend-bytes; "
    "then run `etcdctl alarm disarm`"
)
LOG_IN = "log in", "auth/authenticate"
STREAMED = ("lease/keepalive", "watch")

# Of the codes of gRPC, which an etcd answers with.
_INVALID, _NOT_FOUND, _FORBIDDEN, _EXHAUSTED, _OUT_OF_RANGE, _UNAUTHENTICATED = 3, 5, 7, 8, 11, 16


class TokenError(AuthError):
    """The etcd does not know the token (any more): it forgets them when it is started."""


class Header(msgspec.Struct):
    """What every answer says of the etcd."""

    revision: int = 0
    raft_term: int = 0


class Pair(msgspec.Struct):
    """A key with its value."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    create_revision: int = 0
    lease: int = 0


class Event(msgspec.Struct):
    """What a watch tells; a key that was removed has no value."""

    kv: Pair
    type: str = "PUT"


class Answer(msgspec.Struct):
    """What there may be in an answer; an etcd leaves out what is 0 or empty."""

    header: Header
    kvs: list[Pair] = []
    succeeded: bool = False
    ID: int = 0
    TTL: int = 0
    token: str = ""
    events: list[Event] = []
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0


class _Failure(msgspec.Struct):
    message: str
    code: int = 0
    grpc_code: int = 0
    """Instead of the other in a stream of 3.4 and 3.5."""


class _Streamed(msgspec.Struct):
    result: Answer | None = None
    error: _Failure | None = None


class Call(NamedTuple):
    """A call of one member of the etcd; `operation` is what errors call it."""

    member: Address
    operation: str
    path: str
    message: object

    def request(self, token: str = "") -> bytes:
        """Return what is sent, by who has logged in if there is a token."""
        body = msgspec.json.encode(self.message)
        known = f"Authorization: {token}\r\n" if token else ""
        return (
            f"POST /v3/{self.path} HTTP/1.0\r\nHost: {self.member}\r\n"
            f"Content-Length: {len(body)}\r\n{known}\r\n"
        ).encode() + body

    def answer(self, received: bytes) -> Answer:
        """Return what all that came back means; raises what an answer means that is not good."""
        if not received:
            raise self.unreachable("it hung up")
        head, _, body = received.partition(b"\r\n\r\n")
        if not is_good(head):
            raise self.refusal(b"".join(head.splitlines(keepends=True)[:1]), body)
        return self.decoded(body)

    def decoded(self, body: bytes) -> Answer:
        """Return what the body of a good answer says, or one line of a stream."""
        try:
            if self.path not in STREAMED:
                return msgspec.json.decode(body, type=Answer, strict=False)
            part = msgspec.json.decode(body, type=_Streamed, strict=False)
        except MALFORMED:
            raise self.garbage(body) from None
        if part.error:
            raise self._refused(part.error)
        if part.result is None:
            raise self.garbage(body)
        return part.result

    def refusal(self, status: bytes, body: bytes) -> StoreError:
        """Return what an answer means that is not good."""
        try:
            return self._refused(msgspec.json.decode(body, type=_Failure))
        except MALFORMED:
            if not body.startswith(b"CommonName"):
                return self.garbage(status + body)
            return AuthError(
                f"the etcd refuses: {printable(body[:300].decode(errors='replace').strip())}",
                peer=str(self.member),
                operation=self.operation,
                advice=ADVICE_CERTIFICATE,
            )

    def _refused(self, failure: _Failure) -> StoreError:
        """The error for how an etcd says no."""
        code, what = failure.code or failure.grpc_code, printable(failure.message[:300])
        context: dict[str, Any] = {"peer": str(self.member), "operation": self.operation}
        if code == _NOT_FOUND and "lease" in what:
            return lease_ended(**context)
        if code == _UNAUTHENTICATED or "auth store is old" in what:
            return TokenError(f"the etcd refuses: {what}", advice=ADVICE_USER, **context)
        if code == _FORBIDDEN or "auth" in what or "user name" in what:
            return AuthError(f"the etcd refuses: {what}", advice=ADVICE_USER, **context)
        if code == _OUT_OF_RANGE and "compacted" in what:
            return CompactedError("the etcd has compacted its history", **context)
        if code == _EXHAUSTED and "space" in what:
            full = f"the etcd is full and takes no changes: {what}"
            return UnavailableError(full, advice=ADVICE_FULL, **context)
        if code == _INVALID:
            return InvalidArgumentError(f"the etcd refuses: {what}", **context)
        return UnavailableError(f"the etcd cannot answer: {what}", advice=ADVICE, **context)

    def fault(self, error: Exception) -> StoreError:
        """Return what it means that carrying it out failed so: an OSError or a ValueError."""
        if isinstance(error, TimeoutError):
            return TransferTimeoutError(
                "the etcd did not answer",
                peer=str(self.member),
                operation=self.operation,
                advice=ADVICE,
            )
        if isinstance(error, OSError):
            return self.unreachable(error)
        return self.garbage(b"a line, or an answer, without an end")

    def unreachable(self, why: object) -> UnavailableError:
        """Return that this member cannot be asked."""
        return UnavailableError(
            f"cannot reach the etcd: {why}",
            peer=str(self.member),
            operation=self.operation,
            advice=ADVICE,
        )

    def garbage(self, answer: bytes) -> RemoteProtocolError:
        """Return that this is no answer of an etcd."""
        start = printable(answer[:80].decode(errors="replace"))
        return RemoteProtocolError(
            f"this is no answer of an etcd: {start!r}",
            peer=str(self.member),
            operation=self.operation,
            advice=ADVICE_MASTER if answer.startswith(MAGIC_BYTES) else ADVICE_ADDRESS,
        )


def is_good(head: bytes) -> bool:
    """Whether an answer that begins so is a good one."""
    version, _, code = head.partition(b" ")
    return version.startswith(b"HTTP/1.") and code.startswith(b"200")
