"""How one namespace names things: keys and blocks of tokens become digests, which are the keys.

    identity = client.identity
    identity.digest("prompt/1")                    # 16 bytes
    identity.digests(["a", "b"])                   # uint64[n, 2] of (low, high)
    identity.hash_blocks(tokens, 16)               # chained digests of a prompt's blocks

Everything behind the client knows objects by digest alone. Whoever can make two keys meet in one
digest can make one user's block be another's, and whoever writes a prompt chooses what is hashed.
So digests are made by a keyed function (`Keyed`, SipHash-2-4 of 128 bits) with a secret that the
master makes for each namespace and tells its clients when they connect; prompts' authors know
none of it. `Unkeyed` is XXH3 (`ids`), for pools that other programs feed, and whose writers all
trust each other: two blocks of 64 tokens that meet in one digest of it take a second to find.

A chain of blocks is keyed at two levels: key_i = link(digest(block_i), key_{i-1}), so that digests
of blocks, which depend on nothing before them, are computed eight at a time.

Digests depend on the values alone: not on process, machine, PYTHONHASHSEED, or the dtype of tokens.
No I/O. O(bytes); docs/internals/hashing.md has figures.
"""

from __future__ import annotations

import abc
import hmac
import struct
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from mooncake_store import ids
from mooncake_store.errors import InvalidArgumentError, RemoteProtocolError
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from mooncake_store.ids import Blocks
    from transfer_engine.tagging import Tagging

    Words = tuple[np.uint64, np.uint64]

__all__ = ["KEYED", "KINDS", "UNKEYED", "Identity", "Keyed", "Unkeyed", "identity_of", "secret_of"]

KEYED, UNKEYED = "keyed", "xxh3"
KINDS = (KEYED, UNKEYED)
SECRET_BYTES = 16
_SALTS_KEPT = 1024
_WORDS = struct.Struct("<QQ")


class Identity(abc.ABC):
    """What keys and blocks of a namespace are called."""

    @property
    def tagging(self) -> Tagging | None:
        """What makes tags of the content of the namespace; None where there is no secret for it."""
        return None

    @abc.abstractmethod
    def digest(self, key: str | bytes) -> bytes:
        """Return the 16-byte digest of one key. For more than a few, `digests` is faster."""

    @abc.abstractmethod
    def digests(self, keys: Sequence[str | bytes]) -> NDArray[np.uint64]:
        """Return the digests of many keys as uint64[n, 2] of (low, high)."""

    def hash_blocks(
        self,
        tokens: Iterable[int] | NDArray[np.integer],
        block_size: int,
        parent: bytes | None = None,
        salt: str | bytes = b"",
        *,
        partial_tail: bool = False,
    ) -> NDArray[np.uint64]:
        """Return the chained keys of a token sequence's blocks as uint64[m, 2] of (low, high).

        A key names the whole prefix up to and including its block. Only full blocks count unless
        `partial_tail`. `parent` is the key of the block before the first one, so a long prompt may
        be hashed in pieces. `salt` says what must match besides tokens (model, adapter, tenant,
        dtype); pass the same for each piece. An ndarray is far faster than a list, whose integers
        have to be unpacked one by one.
        """
        blocks = ids.cut_blocks(tokens, block_size, partial_tail=partial_tail)
        before = None if parent is None else ids.words_of(parent, "parent")
        self._chain(blocks, before, ids.utf8(salt, "the salt") if isinstance(salt, str) else salt)
        return blocks.out

    @abc.abstractmethod
    def _chain(self, blocks: Blocks, parent: Words | None, salt: bytes) -> None:
        """Fill in the keys of the blocks."""


class Keyed(Identity):
    """SipHash under subkeys of a secret of the namespace; nobody else can compute it."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise InvalidArgumentError(
                f"the secret of a namespace has {len(secret)} bytes, must have {SECRET_BYTES}",
                advice="take the one that the master tells its clients",
            )
        from transfer_engine.kernels import siphash

        self._kernels = siphash  # an import in each call would cost as much as a digest
        # One for each use, so that a digest made for one says nothing of another: a name that
        # consists of the bytes of a block is not found where that block is.
        self._names, self._blocks, self._links, self._salts = (
            ids.words_of(_derived(secret, f"key of {use}"))
            for use in ("names", "blocks", "links", "salts")
        )
        self._first = lru_cache(_SALTS_KEPT)(self._salted)
        self._content = _derived(secret, "key of content")

    @cached_property
    def tagging(self) -> Tagging:
        """What makes tags of the content of the namespace."""
        from transfer_engine.tagging import Tagging

        return Tagging(self._content)

    def digest(self, key: str | bytes) -> bytes:
        """Return the digest of one key."""
        return self._digest(ids.key_bytes(key), self._names)

    def digests(self, keys: Sequence[str | bytes]) -> NDArray[np.uint64]:
        """Return the digests of many keys."""
        return ids.hash_keys(keys, partial(self._kernels.sip128_strings, *self._names))

    def _chain(self, blocks: Blocks, parent: Words | None, salt: bytes) -> None:
        """The salt stands where the first block has no parent."""
        self._kernels.sip128_chain(
            blocks.address,
            len(blocks.tokens),
            blocks.block_size,
            *(self._first(salt) if parent is None else parent),
            *self._links,
            *self._blocks,
            blocks.out,
        )

    def _salted(self, salt: bytes) -> Words:
        return ids.words_of(self._digest(salt, self._salts))

    def _digest(self, data: bytes, key: Words) -> bytes:
        return _WORDS.pack(*self._kernels.sip128_one(*address_of(data, False), *key))


class Unkeyed(Identity):
    """XXH3, seeded by the namespace: anybody can compute it, and make keys meet.

    Blocks are called the same in every namespace.
    """

    def __init__(self, namespace: str) -> None:
        self._seed = xxhash.xxh3_64_intdigest(ids.utf8(namespace, "the namespace"))

    def digest(self, key: str | bytes) -> bytes:
        """Return the digest of one key."""
        number = xxhash.xxh3_128_intdigest(ids.key_bytes(key), self._seed)
        return int(number).to_bytes(ids.DIGEST_BYTES, "little")

    def digests(self, keys: Sequence[str | bytes]) -> NDArray[np.uint64]:
        """Return the digests of many keys."""
        from transfer_engine.kernels import xxh3

        return ids.hash_keys(keys, partial(xxh3.xxh3_128_strings, np.uint64(self._seed)))

    def _chain(self, blocks: Blocks, parent: Words | None, salt: bytes) -> None:
        """The salt seeds each hash; 16 zero bytes stand where the first block has no parent."""
        from transfer_engine.kernels import xxh3

        xxh3.xxh3_128_chain(
            blocks.address,
            blocks.tokens.nbytes,
            8 * blocks.block_size,
            *(parent or ids.words_of(bytes(ids.DIGEST_BYTES))),
            np.uint64(xxhash.xxh3_64_intdigest(salt)),
            blocks.out,
        )


def identity_of(kind: str, secret: bytes, namespace: str) -> Identity:
    """Return how a namespace names things, as the master said it."""
    if kind == KEYED and len(secret) == SECRET_BYTES:
        return Keyed(secret)
    if kind == UNKEYED:
        return Unkeyed(namespace)
    raise RemoteProtocolError(
        f"the master names keys by {kind!r} with a secret of {len(secret)} bytes",
        operation="connect",
        advice=f"use a client of the version of the master; this one knows {', '.join(KINDS)}",
    )


def secret_of(root: bytes, namespace: str) -> bytes:
    """Return the secret of a namespace, made of the master's; one says nothing of another."""
    return _derived(root, f"secret of the namespace {namespace}")


def _derived(secret: bytes, label: str) -> bytes:
    """Return 16 bytes made of a secret; what objects are called depends on it, so it stays."""
    return hmac.digest(secret, b"mooncake " + label.encode(errors="surrogatepass"), "sha256")[:16]
