"""Errors on the wire: a StoreError becomes the body of an error frame and the same error again.

The class travels by its name, which is part of the protocol; code and retryability travel beside
it, so that a peer that knows an error this side does not (a newer version, another service) still
tells what to do: it arrives as a plain StoreError that carries both.

What it does not do: tracebacks and causes stay where they arose, in the log of the peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from transfer_engine import errors
from transfer_engine.errors import OverloadedError, StoreError
from transfer_engine.wire.cold import Cold

if TYPE_CHECKING:
    from transfer_engine.wire.frame import Body

__all__ = ["ERROR_BYTES_MAX", "ErrorBody", "decode_error", "encode_error"]

ERROR_BYTES_MAX = 8192

# Each text is cut to this many bytes, so that an error always fits; real ones are far shorter.
_TEXT_BYTES_MAX = 1024


class ErrorBody(msgspec.Struct, frozen=True, array_like=True, tag="error", gc=False):
    """What an error frame carries."""

    name: str
    code: int
    retryable: bool
    what: str
    advice: str
    key: str | None = None
    key_bytes: bytes | None = None
    peer: str | None = None
    operation: str | None = None
    elapsed_s: float | None = None
    retry_after_s: float = 0.0


_BODY = Cold(ErrorBody, bytes_max=ERROR_BYTES_MAX)
_CLASSES: dict[str, type[StoreError]] = {name: getattr(errors, name) for name in errors.__all__}


def encode_error(error: StoreError) -> bytes:
    """Return the body of the error frame that tells a peer of `error`."""
    key = error.key
    return _BODY.pack(
        ErrorBody(
            type(error).__name__,
            error.code,
            error.retryable,
            _cut(error.what),
            _cut(error.advice),
            _cut(key) if isinstance(key, str) else None,
            key[:_TEXT_BYTES_MAX] if isinstance(key, bytes) else None,
            None if error.peer is None else _cut(error.peer),
            None if error.operation is None else _cut(error.operation),
            error.elapsed_s,
            error.retry_after_s if isinstance(error, OverloadedError) else 0.0,
        )
    )


def _cut(text: str) -> str:
    # Names of files may hold surrogates, which UTF-8 cannot carry.
    return text.encode(errors="backslashreplace")[:_TEXT_BYTES_MAX].decode(errors="ignore")


def decode_error(body: Body) -> StoreError:
    """Return the error a peer reported; raises RemoteProtocolError when the body is malformed."""
    told = _BODY.unpack(body)
    kind = _CLASSES.get(told.name, StoreError)
    error = kind(
        told.what,
        key=told.key if told.key_bytes is None else told.key_bytes,
        peer=told.peer,
        operation=told.operation,
        elapsed_s=told.elapsed_s,
        advice=told.advice,
    )
    if (kind.code, kind.retryable) != (told.code, told.retryable):
        # The peer knows better than the class of the same, or of a more general, name.
        error.__dict__.update(code=told.code, retryable=told.retryable)
    if isinstance(error, OverloadedError):
        error.retry_after_s = told.retry_after_s
    return error
