"""Which tokens may come next: a grammar of bytes read by all tokens of a vocabulary at once.

    words = Words(vocabulary, size)
    automaton = Automaton(network, part, words)
    reader = Reader(automaton)
    reader.allowed()           # for each token, whether the text may go on with it
    reader.take(token)
    reader.complete, reader.over

Spots of the grammar get a row of a table when a token first passes there: where each byte leads.
To ask a spot for its tokens is to walk the table with all of them, byte by byte, as arrays: tokens
that fall out early cost nothing more. What was found is kept by spot, packed.

One `Automaton` is shared by all answers of a form, on one thread. About `SPOTS_MAX` rows are kept,
then all are forgotten; a reader keeps its spot itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.engine.forms.network import END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from serving.engine.forms.network import Network, Part, Spot
    from serving.engine.vocabulary import Vocabulary

__all__ = ["Automaton", "Reader", "Words"]

SPOTS_MAX = 8192
MASKS_MAX = 256
_NOWHERE = 0


class Words:
    """The bytes of all tokens that can be shown, in columns: first bytes, second bytes, ..."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        """`size` is the model's: it may have more tokens than its tokenizer, or fewer."""
        pairs = zip(vocabulary.pieces[:size], vocabulary.shown[:size], strict=True)
        pieces = [piece if shown else b"" for piece, shown in pairs]
        order = sorted(range(len(pieces)), key=lambda token: -len(pieces[token]))
        longest = len(pieces[order[0]]) if order else 0
        self.size = size
        self.pieces = pieces
        self.order: NDArray[np.int64] = np.array(order, np.int64)
        """Tokens, the longest first, so that those with an n-th byte are the first of them."""
        lengths = np.array([len(pieces[token]) for token in order], np.int64)
        starts = np.cumsum(lengths) - lengths
        every = np.frombuffer(b"".join(pieces[token] for token in order), np.uint8)
        counts = [int(np.count_nonzero(lengths > at)) for at in range(longest)]
        self.columns: list[NDArray[np.uint8]] = [
            every[starts[:count] + at] for at, count in enumerate(counts)
        ]


class Automaton:
    """A grammar, as far as it was read."""

    def __init__(self, network: Network, part: Part, words: Words) -> None:
        self.words = words
        self._network = network
        self.start = network.spot([(part.start, None)])
        self._masks: dict[Spot, NDArray[np.uint8]] = {}
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[Spot, int] = {frozenset(): _NOWHERE}
        self._spots: list[Spot] = [frozenset()]
        self._rows = np.zeros((64, 256), np.int32)
        self._known = np.zeros(64, np.bool_)
        self._known[_NOWHERE] = True

    def _number(self, spot: Spot) -> int:
        found = self._numbers.get(spot)
        if found is None:
            found = self._numbers[spot] = len(self._spots)
            self._spots.append(spot)
            if found >= len(self._known):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
                self._known = np.concatenate([self._known, np.zeros_like(self._known)])
        return found

    def _learn(self, number: int) -> None:
        """Find out where each byte leads from a spot."""
        reached: list[list[tuple[int, object]]] = [[] for _ in range(256)]
        for state, stack in self._spots[number]:
            if state == END:
                continue
            for first, last, following in self._network.edges[state]:
                for byte in range(first, last + 1):
                    reached[byte].append((following, stack))
        row = np.zeros(256, np.int32)
        same: dict[tuple[tuple[int, object], ...], int] = {}
        for byte, places in enumerate(reached):
            if places:
                key = tuple(places)
                if key not in same:
                    same[key] = self._number(self._network.spot(key))  # type: ignore[arg-type]
                row[byte] = same[key]
        self._rows[number] = row
        self._known[number] = True

    def follow(self, spot: Spot, piece: bytes) -> Spot:
        """Where these bytes lead; nowhere if they are not allowed there."""
        if len(self._spots) > SPOTS_MAX:
            self._forget()
        number = self._number(spot)
        for byte in piece:
            if not self._known[number]:
                self._learn(number)
            number = int(self._rows[number, byte])
        return self._spots[number]

    def allowed(self, spot: Spot) -> NDArray[np.bool_]:
        """For each token whether all of its bytes are allowed there."""
        packed = self._masks.pop(spot, None)
        if packed is None:
            packed = np.packbits(self._walk(spot))
        self._masks[spot] = packed  # the last one used is the last one
        if len(self._masks) > MASKS_MAX:
            del self._masks[next(iter(self._masks))]
        return np.unpackbits(packed, count=self.words.size).view(np.bool_)

    def _walk(self, spot: Spot) -> NDArray[np.bool_]:
        if len(self._spots) > SPOTS_MAX:
            self._forget()
        columns, order = self.words.columns, self.words.order
        mask = np.zeros(self.words.size, np.bool_)
        if not columns:
            return mask
        at = np.full(len(columns[0]), self._number(spot), np.int32)
        alive = np.arange(len(columns[0]))
        for column in columns:
            alive = alive[: np.searchsorted(alive, len(column))]
            places = at[alive]
            for number in np.unique(places[~self._known[places]]).tolist():
                self._learn(number)
            places = self._rows[places, column[alive]]
            at[alive] = places
            alive = alive[places != _NOWHERE]
            if not len(alive):
                break
        mask[order[: len(at)][at != _NOWHERE]] = True
        return mask


class Reader:
    """One answer on its way through a form."""

    def __init__(self, automaton: Automaton, tokens: Sequence[int] = ()) -> None:
        """`tokens` are those that the answer has already."""
        self._automaton = automaton
        self._spot = automaton.start
        for token in tokens:
            self.take(token)

    def take(self, token: int) -> None:
        """The answer goes on with this token."""
        pieces = self._automaton.words.pieces
        piece = pieces[token] if token < len(pieces) else b""
        self._spot = self._automaton.follow(self._spot, piece)

    def allowed(self) -> NDArray[np.bool_]:
        """For each token whether the answer may go on with it."""
        return self._automaton.allowed(self._spot)

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return (END, None) in self._spot

    @property
    def over(self) -> bool:
        """Whether it must."""
        return self._spot == {(END, None)}
