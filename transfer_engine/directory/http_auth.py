"""Proofs on requests and answers of the HTTP directory: HMAC-SHA256 with a shared secret.

A request proves that its sender knows the secret, and carries a time and a nonce, so that a copy
of it is worth nothing: the server refuses old times and nonces it has seen. An answer proves the
same over the nonce of its request, so that nobody on the way can make up where a segment is.
Bodies travel in the clear; names of segments are no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict

from transfer_engine.errors import AuthError, BusyError, ConfigError

__all__ = ["NONCE", "PROOF", "SKEW_S", "TIME", "Guard", "check_secret", "prove"]

TIME, NONCE, PROOF = "mooncake-time", "mooncake-nonce", "mooncake-proof"
SKEW_S = 120
"""How far the clocks of two hosts may be apart."""
_NONCES_MAX = 100_000
_SECRET_BYTES_MIN = 16


def check_secret(secret: bytes | None) -> None:
    """Refuse a secret that can be guessed."""
    if secret is not None and len(secret) < _SECRET_BYTES_MIN:
        raise ConfigError(
            f"a secret of {len(secret)} bytes can be guessed; use {_SECRET_BYTES_MIN} or more",
            advice="for example: head -c 32 /dev/urandom | base64 > secret",
        )


def prove(secret: bytes, *parts: bytes) -> str:
    """Return the proof over parts; their lengths are part of it, so they cannot run together."""
    signer = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        signer.update(len(part).to_bytes(8, "little"))
        signer.update(part)
    return signer.hexdigest()


class Guard:
    """Checks proofs, and remembers the nonces of those that were right while they could repeat."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._seen: OrderedDict[str, int] = OrderedDict()

    def check(self, now_s: int, headers: dict[str, str], *parts: bytes) -> None:
        """Raise AuthError unless the headers prove these parts, now and for the first time."""
        time_s, nonce = headers.get(TIME, ""), headers.get(NONCE, "")
        expected = prove(self._secret, time_s.encode(), nonce.encode(), *parts)
        # As bytes: what is not ASCII cannot be compared as text.
        if not hmac.compare_digest(expected.encode(), headers.get(PROOF, "").encode()):
            raise AuthError("the request does not prove the shared secret")
        # Only who knows the secret comes this far, so nonces cost nobody else's memory.
        if not re.fullmatch(r"[0-9]{1,12}", time_s) or abs(now_s - int(time_s)) > SKEW_S:
            raise AuthError(
                f"the request is of another time than {now_s}", advice="synchronise the clocks"
            )
        while self._seen and next(iter(self._seen.values())) < now_s - 2 * SKEW_S:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            raise AuthError("this request was made before")
        if len(self._seen) >= _NONCES_MAX:
            raise BusyError(f"more than {_NONCES_MAX} requests in {2 * SKEW_S} s")
        self._seen[nonce] = now_s
