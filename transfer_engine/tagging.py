"""Tags of content under a key: what a batch is compared with where a checksum would not do.

    tagging = Tagging(key)
    tagging.ranges(addresses, lengths)                  # uint64[n], never 0
    engine.read_batch(..., tagging=tagging).tags        # of what was read

Whoever can change bytes can change them so that their XXH3 stays. Nobody without the key does so
with a tag, but for one try in about 2^63: `kernels.content_tags` says what it is, and why.

Addresses are those of `checksum`, and so are the rules about them; nothing is checked. A `Tagging`
may be shared by threads, a `Stream` may not. O(bytes) each.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KEY_BYTES", "Stream", "Tagging", "load_kernels"]

KEY_BYTES = 16
_HASH_BYTES = 64


def load_kernels() -> None:
    """Load or compile what the first tag would otherwise wait for."""
    from transfer_engine.kernels import content_tags

    content_tags.warmup()


class Tagging:
    """What makes tags under one key."""

    __slots__ = ("_kernels", "schedule")

    def __init__(self, key: bytes) -> None:
        if len(key) < KEY_BYTES:
            raise InvalidArgumentError(f"a key of tags has {KEY_BYTES} bytes, not {len(key)}")
        from transfer_engine.kernels import content_tags

        self._kernels = content_tags
        words = content_tags.SCHEDULE_WORDS
        parts = [
            hmac.digest(key, b"words of tags %d" % nth, "sha512")
            for nth in range(-(-8 * words // _HASH_BYTES))
        ]
        # Whoever shows a tagging shows its key: it has no text of its own.
        self.schedule: NDArray[np.uint64] = np.frombuffer(b"".join(parts), "<u8", words).copy()

    def one(self, address: int, nbytes: int) -> int:
        """Return the tag of one range of memory."""
        return int(self._kernels.tag_one(address, nbytes, self.schedule))

    def ranges(
        self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Return the tag of each range of memory."""
        out = np.empty(len(lengths), np.uint64)
        columns = np.ascontiguousarray(addresses), np.ascontiguousarray(lengths)
        self._kernels.tags_of_ranges(*columns, self.schedule, out)
        return out

    def pieces(
        self,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> NDArray[np.uint64]:
        """Return the tags of objects of which the pieces from `starts[i]` to `starts[i + 1]` are.

        They are those of the same bytes in one range.
        """
        out = np.empty(len(starts) - 1, np.uint64)
        columns = map(np.ascontiguousarray, (addresses, lengths, starts))
        self._kernels.tags_of_pieces(*columns, self.schedule, out)
        return out


class Stream:
    """The tag of bytes that come one behind the other."""

    __slots__ = ("_state", "_tagging")

    def __init__(self, tagging: Tagging) -> None:
        self._tagging = tagging
        self._state = np.empty(tagging._kernels.STATE_WORDS, np.uint64)
        tagging._kernels.begin(tagging.schedule, self._state)

    def take(self, address: int, nbytes: int) -> None:
        """Take the next bytes."""
        kernels, schedule = self._tagging._kernels, self._tagging.schedule
        kernels.absorb(schedule, self._state, address, nbytes)

    def tag(self) -> int:
        """Return the tag of all that came; more may follow."""
        kernels, schedule = self._tagging._kernels, self._tagging.schedule
        return int(kernels.tag_of(schedule, self._state))
