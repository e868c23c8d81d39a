"""The grammar of JSON, made of parts that schemas are put together from.

What it allows is a part of JSON, so that an answer comes to an end and can be read by everybody:
runs of at most `SPACES_MAX` spaces and line ends, numbers of at most `DIGITS_MAX` digits before the
point and as many behind it, escapes that make whole characters.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.engine.forms.network import Network, Part

__all__ = ["DIGITS_MAX", "SPACES_MAX", "JsonParts"]

SPACES_MAX = 32
DIGITS_MAX = 20
_EXPONENT_DIGITS = 2
_LITERALS = (b"true", b"false", b"null")


class JsonParts:
    """Parts of one network, made when first asked for."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._strings: dict[tuple[int, int | None], Part] = {}

    @cached_property
    def space(self) -> Part:
        """Spaces and line ends, or none."""
        net = self._network
        part = net.part()
        state = part.start
        net.skip(state, part.end)
        for _ in range(SPACES_MAX):
            following = net.state()
            net.any_of(state, b" \n\t", following)
            net.skip(following, part.end)
            state = following
        return part

    @cached_property
    def character(self) -> Part:
        """One character within a string, escaped or not."""
        net = self._network
        part = net.part()
        net.characters(part.start, [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)], part.end)
        escape, code = net.state(), net.state()
        net.any_of(part.start, b"\\", escape)
        net.any_of(escape, b'"\\/bfnrt', part.end)
        net.any_of(escape, b"u", code)
        self._code(code, part.end)
        return part

    def _code(self, start: int, end: int) -> None:
        """Four hexadecimal digits; of a pair of surrogates both."""
        net = self._network
        plain, paired = net.state(), net.state()
        for span in (b"09", b"ac", b"ef", b"AC", b"EF"):
            net.span(start, span, plain)
        self._digits(plain, 3, end)
        net.any_of(start, b"dD", paired)
        low, escape, code = net.state(), net.state(), net.state()
        second = net.state()
        net.span(paired, b"07", second)
        self._digits(second, 2, end)
        high = net.state()
        for span in (b"89", b"ab", b"AB"):
            net.span(paired, span, high)
        self._digits(high, 2, low)
        net.any_of(low, b"\\", escape)
        net.any_of(escape, b"u", code)
        third, fourth = net.state(), net.state()
        net.any_of(code, b"dD", third)
        for span in (b"cf", b"CF"):
            net.span(third, span, fourth)
        self._digits(fourth, 2, end)

    def _digits(self, start: int, count: int, end: int) -> None:
        """So many hexadecimal digits."""
        for left in reversed(range(count)):
            following = self._network.state() if left else end
            for span in (b"09", b"af", b"AF"):
                self._network.span(start, span, following)
            start = following

    def string(self, least: int, most: int | None) -> Part:
        """A string of so many characters."""
        if (least, most) in self._strings:
            return self._strings[least, most]
        net = self._network
        self._strings[least, most] = part = net.part()
        state = net.state()
        net.any_of(part.start, b'"', state)
        for count in range(least if most is None else most):
            if count >= least:
                net.any_of(state, b'"', part.end)
            following = net.state()
            net.call(state, self.character, following)
            state = following
        net.any_of(state, b'"', part.end)
        if most is None:
            net.call(state, self.character, state)
        return part

    def other_key(self, taken: Iterable[str]) -> Part:
        """A string, without escapes, that is none of these."""
        net = self._network
        names = set(taken)
        part, free = net.part(), net.state()
        plain = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)]
        net.characters(free, plain, free)
        net.any_of(free, b'"', part.end)
        beginnings = {name[:length] for name in names for length in range(len(name) + 1)}
        states = {beginning: net.state() for beginning in beginnings | {""}}
        net.any_of(part.start, b'"', states[""])
        for beginning, state in states.items():
            if beginning not in names:
                net.any_of(state, b'"', part.end)
            ahead = sorted(each[-1] for each in beginnings if each and each[:-1] == beginning)
            for letter in ahead:
                if letter not in '"\\' and letter >= " ":
                    net.characters(state, [(ord(letter),) * 2], states[beginning + letter])
            net.characters(state, _without(plain, map(ord, ahead)), free)
        return part

    @cached_property
    def integer(self) -> Part:
        """A whole number."""
        net = self._network
        part = net.part()
        self._whole(part.start, part.end)
        return part

    def _whole(self, start: int, end: int) -> None:
        net = self._network
        unsigned, state = net.state(), net.state()
        net.skip(start, unsigned)
        net.any_of(start, b"-", unsigned)
        net.any_of(unsigned, b"0", end)
        net.span(unsigned, b"19", state)
        self._up_to(state, DIGITS_MAX - 1, end)

    def _up_to(self, start: int, count: int, end: int) -> None:
        """No more than so many decimal digits."""
        net = self._network
        for _ in range(count):
            net.skip(start, end)
            following = net.state()
            net.span(start, b"09", following)
            start = following
        net.skip(start, end)

    @cached_property
    def number(self) -> Part:
        """A number."""
        net = self._network
        part = net.part()
        whole, point, fraction, signed, power = (net.state() for _ in range(5))
        self._whole(part.start, whole)
        net.skip(whole, fraction)
        net.any_of(whole, b".", point)
        first = net.state()
        net.span(point, b"09", first)
        self._up_to(first, DIGITS_MAX - 1, fraction)
        net.skip(fraction, part.end)
        net.any_of(fraction, b"eE", signed)
        net.skip(signed, power)
        net.any_of(signed, b"+-", power)
        digit = net.state()
        net.span(power, b"09", digit)
        self._up_to(digit, _EXPONENT_DIGITS - 1, part.end)
        return part

    def constants(self, start: int, values: Iterable[Any], end: int) -> None:
        """One of these values, written in one way, without spaces."""
        texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
        unlike = dict.fromkeys(text.encode() for text in texts)
        self._network.literals(start, unlike, end)

    @cached_property
    def anything(self) -> Part:
        """Any value."""
        net = self._network
        part = net.part()
        self.__dict__["anything"] = part  # within it there is anything, too
        net.literals(part.start, _LITERALS, part.end)
        for each in (self.string(0, None), self.number):
            net.call(part.start, each, part.end)
        net.call(part.start, self.array(part, 0, None), part.end)
        net.call(part.start, self.object([], part), part.end)
        return part

    def array(self, item: Part, least: int, most: int | None) -> Part:
        """A list of so many of these."""
        net = self._network
        part = net.part(nests=True)
        state = net.state()
        opened = net.state()
        net.any_of(part.start, b"[", opened)
        net.call(opened, self.space, state)
        for count in range(max(1, least) if most is None else most):
            if count >= least:
                net.any_of(state, b"]", part.end)
            state = self._further_item(state, item, comma=bool(count))
        net.any_of(state, b"]", part.end)
        if most is None:
            net.skip(self._further_item(state, item, comma=True), state)
        return part

    def _further_item(self, start: int, item: Part, *, comma: bool) -> int:
        net = self._network
        if comma:
            after, begun = net.state(), net.state()
            net.any_of(start, b",", after)
            net.call(after, self.space, begun)
            start = begun
        told, end = net.state(), net.state()
        net.call(start, item, told)
        net.call(told, self.space, end)
        return end

    def object(self, members: list[tuple[str, Part, bool]], other: Part | None) -> Part:
        """An object: members in this order, with those that may be left out, then `other` ones.

        Of a member: its key, its value, whether it must be there.
        """
        net = self._network
        part = net.part(nests=True)
        opened, first, further = net.state(), net.state(), net.state()
        net.any_of(part.start, b"{", opened)
        net.call(opened, self.space, first)
        behind: int | None = None  # a member, where a comma has to come before the next
        for key, value, required in members:
            begun, after = net.state(), net.state()
            net.skip(first, begun)
            if behind is not None:
                self._comma(behind, begun)
            named = net.state()
            self.constants(begun, [key], named)
            self._value(named, value, after)
            if not required:
                passed = net.state()
                net.skip(first, passed)
                if behind is not None:
                    net.skip(behind, after)
                first = passed
            else:
                first = net.state()  # cannot be reached: there is a member before it
            behind = after
        if other is not None:
            begun, named = net.state(), net.state()
            net.skip(first, begun)
            net.call(begun, self.other_key(key for key, _, _ in members), named)
            self._value(named, other, further)
            self._comma(further, begun)
            net.any_of(further, b"}", part.end)
            if behind is not None:
                self._comma(behind, begun)
        net.any_of(first, b"}", part.end)
        if behind is not None:
            net.any_of(behind, b"}", part.end)
        return part

    def _comma(self, start: int, end: int) -> None:
        after = self._network.state()
        self._network.any_of(start, b",", after)
        self._network.call(after, self.space, end)

    def _value(self, start: int, value: Part, end: int) -> None:
        """Behind a key: a colon, the value, and spaces."""
        net = self._network
        colon, before, begun, told = (net.state() for _ in range(4))
        net.call(start, self.space, colon)
        net.any_of(colon, b":", before)
        net.call(before, self.space, begun)
        net.call(begun, value, told)
        net.call(told, self.space, end)


def _without(ranges: list[tuple[int, int]], taken: Iterable[int]) -> list[tuple[int, int]]:
    """Ranges of code points with holes."""
    for hole in taken:
        cut = []
        for low, high in ranges:
            if low <= hole <= high:
                cut += [(low, hole - 1), (hole + 1, high)]
            else:
                cut.append((low, high))
        ranges = [(low, high) for low, high in cut if low <= high]
    return ranges
