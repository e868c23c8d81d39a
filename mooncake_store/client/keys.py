"""What callers name objects by, as the columns that requests carry.

A key is a str or bytes of 1 to 4096 bytes, or ready-made digests (`Digests`), as KV-block chains
produce them. Names travel with puts only, for listing; digests have none, and such objects do not
show up in listings. A key that is refused (empty, too long, no key at all) spoils neither its
batch nor a request: it has the status INVALID_KEY from the start and is never sent.

Cost: 55 ns a key hashed, 40 ns a key named; nothing per key for `Digests`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from mooncake_store import ids
from mooncake_store.client.arguments import items_of
from mooncake_store.core.records import Status
from mooncake_store.errors import InvalidArgumentError
from transfer_engine.wire.schema import Ragged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.identity import Identity

__all__ = ["Digests", "Key", "KeyBatch", "Keys"]

_OFFSETS = np.dtype("<u4")
_WORD = np.dtype(np.uint64)


class Digests(Sequence["Digests"]):
    """Keys that are hashes already: 16 bytes each, as an `Identity` makes.

    Takes a uint64[n, 2] array, which is copied, or any sequence of 16-byte strings. It may stand
    wherever a batch of keys is expected; one of length 1 wherever a single key is.
    """

    __slots__ = ("words",)

    def __init__(self, digests: NDArray[np.uint64] | Sequence[bytes] | bytes) -> None:
        if isinstance(digests, np.ndarray):
            if digests.dtype != np.uint64 or digests.ndim != 2 or digests.shape[1] != 2:
                raise InvalidArgumentError(
                    f"digests are a uint64[n, 2] array, not {digests.dtype}{digests.shape}"
                )
            self.words = np.array(digests, dtype=np.uint64, order="C")
            return
        each: Sequence[bytes] = (digests,) if isinstance(digests, bytes) else digests
        if any(len(digest) != ids.DIGEST_BYTES for digest in each):
            raise InvalidArgumentError(f"a digest has {ids.DIGEST_BYTES} bytes")
        self.words = np.frombuffer(bytearray(b"".join(each)), dtype="<u8").reshape(len(each), 2)

    def __len__(self) -> int:
        return len(self.words)

    @overload
    def __getitem__(self, index: int) -> Digests: ...
    @overload
    def __getitem__(self, index: slice) -> Digests: ...
    def __getitem__(self, index: int | slice) -> Digests:
        if not isinstance(index, slice):
            index = operator.index(index)  # numpy's numbers, too
            if not -len(self) <= index < len(self):
                raise IndexError(f"digest {index} of {len(self)}")
            index = slice(index, index + 1 or None)
        return Digests(self.words[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and np.array_equal(self.words, other.words)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if len(self) == 1:
            return f"Digests({ids.hex(self.words[0])})"
        return f"Digests({len(self)})"


Key: TypeAlias = str | bytes | Digests
"""One key."""
Keys: TypeAlias = Sequence[str] | Sequence[bytes] | Sequence[str | bytes] | Digests
"""A batch of keys."""


class KeyBatch:
    """A batch of keys as columns. `refused` lists the positions of those that are no keys."""

    __slots__ = ("digests", "given", "identity", "refused", "words")

    def __init__(
        self,
        given: Keys,
        digests: NDArray[np.uint64],
        refused: Sequence[int] = (),
        identity: Identity | None = None,
    ) -> None:
        self.given = given
        self.identity = identity
        """What named them; None for digests that were given."""
        self.digests = digests
        # Kernels take signed words: numba turns a mix of signed and unsigned into floats.
        self.words = digests.view(np.int64)
        self.refused = refused

    @classmethod
    def of(cls, keys: Keys, identity: Identity) -> KeyBatch:
        """Hash a batch."""
        if not isinstance(keys, list | tuple):  # asked first: most are, and it is quick to ask
            if isinstance(keys, Digests):
                return cls(keys, keys.words)
            if isinstance(keys, str | bytes):
                raise InvalidArgumentError(
                    "keys must be a sequence of keys, not one key", advice="wrap it in a list"
                )
            keys = items_of(keys, "keys")
        try:
            return cls(keys, identity.digests(keys), identity=identity)
        except (InvalidArgumentError, TypeError):
            return cls._one_by_one(keys, identity)

    @classmethod
    def single(cls, key: Key, identity: Identity) -> KeyBatch:
        """Hash one key. Raises InvalidArgumentError: a single call has nobody else to spare."""
        if isinstance(key, Digests):
            if len(key) != 1:
                raise InvalidArgumentError(f"one key is expected, not {len(key)} digests")
            return cls(key, key.words)
        if not isinstance(key, str | bytes):
            raise InvalidArgumentError(
                f"a key is a str, bytes or Digests, not {type(key).__name__}"
            )
        digest = bytearray(identity.digest(key))
        return cls((key,), np.ndarray((1, 2), _WORD, digest), identity=identity)

    @classmethod
    def _one_by_one(cls, keys: Sequence[str | bytes], identity: Identity) -> KeyBatch:
        digests = np.zeros((len(keys), 2), np.uint64)
        refused = []
        for at, key in enumerate(keys):
            try:
                digests[at] = identity.digests([key])[0]
            except (InvalidArgumentError, TypeError):
                refused.append(at)
        return cls(keys, digests, refused, identity)

    def __len__(self) -> int:
        return len(self.digests)

    def part(self, index: NDArray[np.int64]) -> KeyBatch:
        """Return the keys at these positions, none of which is refused."""
        given: Keys
        if isinstance(self.given, Digests):
            given = Digests(self.digests[index])
        else:
            given = [self.given[at] for at in index.tolist()]
        return KeyBatch(given, self.digests[index], identity=self.identity)

    def statuses(self) -> NDArray[np.int16]:
        """A new column of statuses, 0 but for refused keys."""
        out = np.zeros(len(self.digests), np.int16)
        if self.refused:
            out[self.refused] = Status.INVALID_KEY
        return out

    def label(self, at: int) -> str | bytes:
        """The key at a position as errors and listings show it."""
        return label_of(self.given[at])

    def names(self, index: NDArray[np.int64]) -> Ragged:
        """The names that travel with a put of the keys at these positions, in order."""
        count = len(index)
        offsets = np.zeros(count + 1, _OFFSETS)
        if isinstance(self.given, Digests):
            return Ragged(offsets, b"")
        keys = self.given
        if count != len(self.digests):
            keys = [keys[at] for at in index.tolist()]
        try:
            blob = "".join(keys).encode()  # type: ignore[arg-type]
            np.cumsum(np.fromiter(map(len, keys), _OFFSETS, count), out=offsets[1:])
            if int(offsets[-1]) == len(blob):  # all ASCII: characters are bytes
                return Ragged(offsets, blob)
        except TypeError:
            pass  # some keys are bytes
        return Ragged.of([key.encode() if isinstance(key, str) else bytes(key) for key in keys])


def label_of(key: Key) -> str | bytes:
    """One key as errors and listings show it."""
    return ids.hex(key.words[0]) if isinstance(key, Digests) else key


def name_of(key: Key) -> bytes:
    """The name that travels with the put of one key; digests have none."""
    return b"" if isinstance(key, Digests) else key.encode() if isinstance(key, str) else key
