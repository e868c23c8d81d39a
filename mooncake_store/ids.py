"""What digests are made of and where they lead: keys and tokens as columns, slots, shards.

A key is a str or bytes of 1 to 4096 bytes; a str is its UTF-8 form. A digest is 16 bytes that are
the key everywhere behind the client; how it is made of a key, or of a block of tokens, is up to the
namespace (`identity`). One digest is `bytes` (little-endian), a batch is a uint64[n, 2] array of
(low, high) with the same memory layout: `digests.tobytes()` is the digests one after the other.

Tokens are hashed as little-endian int64, whatever dtype they arrive in. The format is wide on
purpose: choosing a narrower one when all tokens fit would let a later token change the keys of
earlier blocks.

Batches run as one kernel call: per-key calls cost 100 ns before hashing starts. Kernels (and with
them numba) are imported when a batch is first hashed. Strings are joined by NUL and encoded
together, which is what makes a batch fast; keys that contain NUL are only slower, never wrong.
Complexity: O(bytes) everywhere.
"""

from __future__ import annotations

import functools
import struct
from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    KeyKernel = Callable[[NDArray[np.uint8], NDArray[np.int64], int, NDArray[np.uint64]], int]

__all__ = [
    "DIGEST_BYTES",
    "KEY_BYTES_MAX",
    "SLOTS",
    "Blocks",
    "cut_blocks",
    "hash_keys",
    "hex",
    "key_bytes",
    "shard_of",
    "shard_of_one",
    "slot_of",
    "utf8",
    "words_of",
]

DIGEST_BYTES = 16
KEY_BYTES_MAX = 4096
SLOTS = 4096

# Long argument lists fall out of the cache: 10 ns a token in chunks of 1024, 14 ns in one.
PACK_TOKENS = 1024
_WORDS = struct.Struct("<QQ")


def key_bytes(key: str | bytes) -> bytes:
    """Return a key as the bytes that are hashed. Raises InvalidArgumentError for what is none."""
    data = utf8(key, "the key") if isinstance(key, str) else key
    if not 0 < len(data) <= KEY_BYTES_MAX:
        raise _refused("the key", len(data))
    return data


def hash_keys(keys: Sequence[str | bytes], kernel: KeyKernel) -> NDArray[np.uint64]:
    """Return the digests of many keys as uint64[n, 2] of (low, high).

    The kernel takes the keys joined by single bytes, where each begins (and the last would go on),
    the most bytes of one, and the array to fill; it answers -1, or the first key that it refuses.
    """
    if isinstance(keys, str | bytes):
        raise InvalidArgumentError("keys must be a sequence of keys, not one key")
    count = len(keys)
    out = np.empty((count, 2), dtype=np.uint64)
    if not count:
        return out
    try:
        if isinstance(keys[0], str):
            joined = "\0".join(keys).encode()  # type: ignore[arg-type]
        else:
            joined = b"\0".join(keys)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        # The keys are mixed, or one of them is no key: find out which.
        keys = _encode_each(keys)
        joined = b"\0".join(keys)
    blob = np.frombuffer(joined, dtype=np.uint8)
    offsets = np.empty(count + 1, dtype=np.int64)
    if not _splitting()(blob, offsets):
        _measure(keys, offsets, len(joined))
    refused = kernel(blob, offsets, KEY_BYTES_MAX, out)
    if refused >= 0:
        raise _refused(f"key {refused}", int(offsets[refused + 1] - offsets[refused]) - 1)
    return out


@functools.cache
def _splitting() -> Callable[..., bool]:
    """Imported when first needed: it loads numba, and an import in each call costs 1 us."""
    from transfer_engine.kernels import xxh3

    split: Callable[..., bool] = xxh3.split_at_zero
    return split


def slot_of(digests: NDArray[np.uint64], slots: int = SLOTS) -> NDArray[np.int64]:
    """The slot of each digest in uint64[n, 2]: its highest bits, so slots are runs of digests.

    The table inside a shard probes by the low word, which stays independent of the slot.
    """
    if not 1 <= slots <= 1 << 32:
        raise InvalidArgumentError(f"slots must be between 1 and 2^32, not {slots}")
    top = digests[:, 1] >> np.uint64(32)
    return ((top * np.uint64(slots)) >> np.uint64(32)).astype(np.int64)


def shard_of(digests: NDArray[np.uint64], shards: int) -> NDArray[np.int64]:
    """The shard of each digest: each shard has one run of the SLOTS slots, as even as possible."""
    if not 1 <= shards <= SLOTS:
        raise InvalidArgumentError(f"shards must be between 1 and {SLOTS}, not {shards}")
    return slot_of(digests) * shards // SLOTS


def shard_of_one(digest: bytes, shards: int) -> int:
    """What `shard_of` says of a single digest."""
    top = int.from_bytes(digest[12:], "little")
    return (top * SLOTS >> 32) * shards // SLOTS


def hex(digest: bytes | NDArray[np.uint64]) -> str:
    """The one text form of a digest, given as 16 bytes or as one row of (low, high)."""
    data = digest if isinstance(digest, bytes) else digest.astype("<u8", copy=False).tobytes()
    if len(data) != DIGEST_BYTES:
        raise InvalidArgumentError(f"a digest has {DIGEST_BYTES} bytes, not {len(data)}")
    return data.hex()


class Blocks(NamedTuple):
    """A sequence of tokens cut into blocks, and room for the digest of each."""

    tokens: NDArray[np.int64]
    block_size: int
    out: NDArray[np.uint64]

    @property
    def address(self) -> int:
        """Where the tokens lie."""
        return int(self.tokens.__array_interface__["data"][0])


def cut_blocks(
    tokens: Iterable[int] | NDArray[np.integer], block_size: int, *, partial_tail: bool
) -> Blocks:
    """Cut tokens into full blocks, and one of what is left with `partial_tail`."""
    if block_size < 1:
        raise InvalidArgumentError(f"block_size must be at least 1, not {block_size}")
    values = _token_column(tokens)
    blocks, tail = divmod(values.shape[0], block_size)
    # A block never reaches beyond the tokens, so an absurd block_size costs no scratch memory.
    block_size = min(block_size, max(1, values.shape[0]))
    out = np.empty((blocks + (1 if partial_tail and tail else 0), 2), dtype=np.uint64)
    return Blocks(values, block_size, out)


def words_of(digest: bytes, what: str = "the digest") -> tuple[np.uint64, np.uint64]:
    """Return a digest as (low, high), as kernels take it."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidArgumentError(f"{what} must have {DIGEST_BYTES} bytes, not {len(digest)}")
    low, high = _WORDS.unpack(digest)
    return np.uint64(low), np.uint64(high)


def _token_column(tokens: Iterable[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Tokens as contiguous little-endian int64: the one form that is hashed."""
    if hasattr(tokens, "__array__") or isinstance(tokens, memoryview | array):
        given = np.asarray(tokens)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise InvalidArgumentError(
                f"tokens must be one row of integers, not {given.ndim}-d {given.dtype}"
            )
        # Unsigned tokens beyond the limit wrap to negative ones here and are refused below.
        values = np.ascontiguousarray(given, dtype="<i8")
    else:
        if isinstance(tokens, str | bytes | bytearray):
            raise InvalidArgumentError(f"tokens must be integers, not {type(tokens).__name__}")
        values = np.frombuffer(
            _pack(tokens if isinstance(tokens, list | tuple) else list(tokens)), dtype="<i8"
        )
    if values.size and values.min() < 0:
        at = int(np.argmax(values < 0))
        raise InvalidArgumentError(f"token {at} is negative or above 2^63 - 1")
    return values


def _pack(tokens: Sequence[int]) -> bytes:
    """Python ints as little-endian int64. Unlike numpy, struct neither truncates nor promotes."""
    full = len(tokens) // PACK_TOKENS * PACK_TOKENS
    pack = struct.Struct(f"<{PACK_TOKENS}q").pack
    try:
        chunks = [pack(*tokens[at : at + PACK_TOKENS]) for at in range(0, full, PACK_TOKENS)]
        chunks.append(struct.pack(f"<{len(tokens) - full}q", *tokens[full:]))
    except struct.error as error:
        raise InvalidArgumentError(f"tokens must be integers from 0 to 2^63 - 1: {error}") from None
    return b"".join(chunks)


def utf8(text: str, what: str) -> bytes:
    """Return the UTF-8 form of a text. Raises InvalidArgumentError where it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{what} has no UTF-8 form: {error}", advice="pass such keys as bytes"
        ) from None


def _measure(keys: Sequence[str | bytes], offsets: NDArray[np.int64], joined_bytes: int) -> None:
    """Offsets of keys joined by one byte, from their lengths: for keys that contain the joint."""
    offsets[0] = 0
    np.cumsum(np.fromiter(map(len, keys), np.int64, len(keys)) + 1, out=offsets[1:])
    if offsets[-1] != joined_bytes + 1:
        # A str that is not ASCII has more bytes than characters; no key can have fewer.
        _measure(_encode_each(keys), offsets, joined_bytes)


def _encode_each(keys: Sequence[str | bytes]) -> list[bytes]:
    encoded = []
    for index, key in enumerate(keys):
        if isinstance(key, str):
            encoded.append(utf8(key, f"key {index}"))
        elif isinstance(key, bytes | bytearray | memoryview):
            encoded.append(bytes(key))
        else:
            raise InvalidArgumentError(
                f"key {index} is a {type(key).__name__}, must be str or bytes"
            )
    return encoded


def _refused(what: str, length: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{what} has {length} bytes, must have 1 to {KEY_BYTES_MAX}",
        advice="shorten it, or use its hash as the key",
    )
