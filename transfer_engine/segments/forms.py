"""How files of a cold segment hold their pieces: as they are, made smaller, sealed, or both.

    forms = Forms(smaller=True, keys=ring)
    extent = forms.dress(extent, memory, "tenant-a")     # None: there is no key for it
    stored = forms.stored(piece, place, data)            # on the thread that writes the file
    forms.read(piece, place, stored, memory)             # and back: how long, or what is wrong

A file's name says its form, so what an earlier run wrote otherwise is read as well. First smaller,
then sealed: what is sealed gets no smaller. Names of files show no checksum of what is sealed: who
guesses what a block holds could compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_engine.errors import AuthError, ConfigError
from transfer_engine.segments.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transfer_engine.segments.extents import Extent
    from transfer_engine.segments.sealing import KeyRing

__all__ = ["RUINED", "UNREADABLE", "USES", "Forms"]

USES = ("codec", "keys")
"""What a file may need to be read, as the health of a store calls it."""

RUINED, UNREADABLE = -2, -3
"""In place of a length: of a file nothing can be made that it held; there is no codec or key."""


class Forms:
    """What a segment makes of bytes before it writes them, and of files after it has read them."""

    def __init__(self, *, smaller: bool, keys: KeyRing | None) -> None:
        self._encoder = self._decoder = Codec() if smaller else None
        self._keys = keys
        self._known: frozenset[str] = frozenset()

    def dress(self, extent: Extent, memory: memoryview, namespace: str) -> Extent | None:
        """Say how an extent is to be written; None: not at all, as its namespace has no key."""
        coded = self._encoder is not None and self._encoder.gains(memory)
        if self._keys is None:
            return extent._replace(coded=coded)
        key = self._keys.of(namespace)
        if key is None:
            return None
        return extent._replace(coded=coded, key=key.id, sums=(0,) * len(extent.sums))

    def stored(self, extent: Extent, place: bytes, data: bytes) -> bytes:
        """Return the bytes of a file that holds these of an extent, at its place.

        Raises AuthError where its key is there no more.
        """
        if extent.coded:
            assert self._encoder is not None
            data = self._encoder.encode(memoryview(data))
        if extent.key:
            key = None if self._keys is None else self._keys.by_id(extent.key)
            if key is None:
                raise AuthError(f"key {extent.key} was taken away meanwhile", operation="write")
            data = key.seal(place, data)
        return data

    def read(self, extent: Extent, place: bytes, stored: bytes, memory: memoryview) -> int:
        """Fill memory with what a file holds; return how much that is, or what is wrong."""
        if extent.key:
            key = None if self._keys is None else self._keys.by_id(extent.key)
            if key is None:
                return UNREADABLE
            opened = key.open(place, stored)
            if opened is None:
                return RUINED
            stored = opened
        if extent.coded:
            if self._decoder is None:
                return UNREADABLE
            return len(memory) if self._decoder.decode(stored, memory) else RUINED
        if len(stored) == len(memory):
            memory[:] = stored
        return len(stored)

    def changed(self) -> bool:
        """Whether there are other keys than when this was asked last."""
        before, self._known = self._known, frozenset() if self._keys is None else self._keys.ids
        return before != self._known

    def expect(self, extents: Iterable[Extent]) -> Iterator[tuple[str, str]]:
        """Prepare to read these; yield (what of, what is wrong) where that cannot be."""
        extents = list(extents)
        if self._decoder is None and any(extent.coded for extent in extents):
            try:
                self._decoder = Codec()
            except ConfigError as error:
                yield "codec", f"{error.what}: {error.advice}"
        ids = {extent.key for extent in extents if extent.key}
        lacking = sorted(ids) if self._keys is None else self._keys.lacking(ids)
        if lacking:
            count = sum(extent.key in lacking for extent in extents)
            yield "keys", f"{count} extents are sealed by keys that are not here: {lacking[0]}, ..."
