"""Which blocks are usable, learnt from the names of single objects.

A block is stored in pieces: one object for each distinct rank and stage, one for each group of a
hybrid model (a scope of its own), and with layers stored apart several more, the last of which
stands for all. A router wants to hear of a block once all of it is there, and once when the first
piece is gone. Pure: no I/O, no clock.

O(1) an object; a few hundred bytes a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.connectors.keys import KeyParts

__all__ = ["Presence"]

_LAST = "last"

Piece = tuple[str, tuple[int, int]]


class Presence:
    """The pieces of blocks of some scopes, and which blocks are whole."""

    def __init__(self, scopes: Iterable[str]) -> None:
        self._scopes = frozenset(scopes)
        self._pieces: dict[str, set[Piece]] = {}
        self._wanted: dict[str, int] = {}
        self._whole: dict[str, None] = {}

    @property
    def whole(self) -> list[str]:
        """The hashes of all blocks that are usable, oldest first."""
        return list(self._whole)

    def counts(self, parts: KeyParts) -> bool:
        """Whether an object tells anything here."""
        return parts.scope in self._scopes and parts.part in ("", _LAST)

    def add(self, parts: KeyParts) -> bool:
        """An object is there; whether its block is usable from now on, and was not before."""
        if not self.counts(parts):
            return False
        pieces = self._pieces.setdefault(parts.block_hash, set())
        pieces.add((parts.scope, parts.piece))
        self._wanted[parts.scope] = parts.pieces
        whole = len(self._wanted) == len(self._scopes) and len(pieces) == sum(self._wanted.values())
        if not whole or parts.block_hash in self._whole:
            return False
        self._whole[parts.block_hash] = None
        return True

    def drop(self, parts: KeyParts) -> bool:
        """An object is gone; whether its block was usable until now."""
        if not self.counts(parts):
            return False
        pieces = self._pieces.get(parts.block_hash, set())
        pieces.discard((parts.scope, parts.piece))
        if not pieces:
            self._pieces.pop(parts.block_hash, None)
        if parts.block_hash not in self._whole:
            return False
        del self._whole[parts.block_hash]
        return True
