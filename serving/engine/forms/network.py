"""A grammar of bytes as states: bytes lead from one to the next, or a part has to be gone through.

    part = network.part()
    network.literals(part.start, [b"null"], part.end)
    network.call(a, part, b)        # from a through the whole part to b

A part may go through itself (a list of lists), so what comes after it is remembered on a stack. A
`Spot` is where somebody who reads a text may be: all places that the bytes so far allow, each with
its stack. Parts that `nest` do so at most `DEPTH_MAX` deep, so a stack has a bound; a text that
might be in more than `PLACES_MAX` places is not allowed, so a spot has one, too.

Values, no I/O. A step costs the places of a spot, which are few for grammars such as JSON's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DEPTH_MAX", "END", "PLACES_MAX", "Network", "Part", "Spot"]

DEPTH_MAX = 64
PLACES_MAX = 1024

Stack: TypeAlias = "tuple[int, Any, int] | None"
"""(where to go on, the stack below, how deep that is nested)."""
Spot: TypeAlias = frozenset[tuple[int, Stack]]
END = -1
"""The place behind the whole text."""


class Part(NamedTuple):
    """From where to where it goes, and whether it counts as a level of nesting."""

    start: int
    end: int
    nests: bool


@dataclass(slots=True)
class Network:
    """States by number; nothing is taken away from it."""

    edges: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """By state: (first byte, last byte, next state)."""
    skips: list[list[int]] = field(default_factory=list)
    calls: list[list[tuple[Part, int]]] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)

    def state(self) -> int:
        """A new state."""
        self.edges.append([])
        self.skips.append([])
        self.calls.append([])
        return len(self.edges) - 1

    def part(self, *, nests: bool = False) -> Part:
        """A new part, still empty."""
        part = Part(self.state(), self.state(), nests)
        self.ends.add(part.end)
        return part

    def edge(self, start: int, first: int, last: int, end: int) -> None:
        """One byte of a range leads on."""
        self.edges[start].append((first, last, end))

    def span(self, start: int, bounds: bytes, end: int) -> None:
        """One byte leads on: the first of these two, the last, or one between them."""
        first, last = bounds
        self.edge(start, first, last, end)

    def any_of(self, start: int, alternatives: bytes, end: int) -> None:
        """One of these bytes leads on."""
        for byte in alternatives:
            self.edge(start, byte, byte, end)

    def skip(self, start: int, end: int) -> None:
        """Nothing at all leads on."""
        self.skips[start].append(end)

    def call(self, start: int, part: Part, end: int) -> None:
        """A whole part leads on."""
        self.calls[start].append((part, end))

    def literals(self, start: int, texts: Iterable[bytes], end: int) -> None:
        """One of these texts leads on. What they have in common has states in common."""
        states = {b"": start}
        for text in texts:
            for length in range(1, len(text)):
                if text[:length] not in states:
                    states[text[:length]] = following = self.state()
                    byte = text[length - 1]
                    self.edge(states[text[: length - 1]], byte, byte, following)
            self.edge(states[text[:-1]], text[-1], text[-1], end)

    def characters(self, start: int, ranges: Iterable[tuple[int, int]], end: int) -> None:
        """One character of these ranges of code points leads on, in UTF-8; no surrogate does."""
        for low, high in ranges:
            for first, last in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
                if first <= last:
                    self._utf8(start, first, last, end)

    def _utf8(self, start: int, low: int, high: int, end: int) -> None:
        """A range of characters, cut where their bytes are no longer ranges of their own."""
        for last in (0x7F, 0x7FF, 0xFFFF):  # the last characters of one, two and three bytes
            if low <= last < high:
                self._utf8(start, low, last, end)
                self._utf8(start, last + 1, high, end)
                return
        length = len(chr(high).encode())
        for number in range(1, length):
            rest = (1 << 6 * number) - 1
            if low & ~rest == high & ~rest:
                continue
            if low & rest:
                self._utf8(start, low, low | rest, end)
                self._utf8(start, (low | rest) + 1, high, end)
                return
            if high & rest != rest:
                self._utf8(start, low, (high & ~rest) - 1, end)
                self._utf8(start, high & ~rest, high, end)
                return
        firsts, lasts = chr(low).encode(), chr(high).encode()
        for number, (first, last) in enumerate(zip(firsts, lasts, strict=True), 1):
            following = end if number == length else self.state()
            self.edge(start, first, last, following)
            start = following

    # -- reading

    def spot(self, places: Iterable[tuple[int, Stack]]) -> Spot:
        """All places that can be reached from these without a byte, but those only passed."""
        seen, found = set(places), set()
        work = list(seen)
        while work:
            if len(seen) > PLACES_MAX:
                return frozenset()
            state, stack = work.pop()
            if state == END or self.edges[state]:
                found.add((state, stack))
            if state == END:
                continue
            reached: list[tuple[int, Stack]] = [(end, stack) for end in self.skips[state]]
            depth = stack[2] if stack else 0
            for part, end in self.calls[state]:
                if depth + part.nests <= DEPTH_MAX:
                    reached.append((part.start, (end, stack, depth + part.nests)))
            if state in self.ends:
                reached.append((stack[0], stack[1]) if stack else (END, None))
            work += [place for place in reached if place not in seen]
            seen.update(reached)
        return frozenset(found)

    def loops(self, part: Part) -> bool:
        """Whether a part begins with itself: whoever went through it would never come to a byte."""
        seen: set[int] = set()
        work = [part.start]
        while work:
            state = work.pop()
            begun = [called.start for called, _ in self.calls[state]]
            if part.start in begun:
                return True
            fresh = {*self.skips[state], *begun} - seen
            seen |= fresh
            work += fresh
        return False
