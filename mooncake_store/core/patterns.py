"""Name patterns as tables: what a name is matched against costs a step a byte, whatever it says.

A backtracking matcher can be kept busy for years by a short expression and a long name, and a
shard does one thing at a time. So a pattern becomes a deterministic automaton once, and a kernel
walks it over every name. An expression whose automaton would be too large is refused; so is what
no automaton can do (references back, looking around) and what nobody needs for names (word
boundaries, inline flags). `^` and `$` are the ends of the name, `.` is any byte.

Cost: O(states x kinds of bytes) to compile, bounded by STATES_MAX and WORK_MAX; O(bytes) a name.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.core.kernels.names import ACCEPTS, SETTLED

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PATTERN_BYTES_MAX", "Pattern", "compile_pattern"]

PATTERN_BYTES_MAX = 256
NODES_MAX = 1024
STATES_MAX = 1024
WORK_MAX = 1 << 19

ALL_BYTES = (1 << 256) - 1
_FLAGS_REFUSED = re.IGNORECASE | re.MULTILINE | re.LOCALE | re.VERBOSE
# The standard library's own parser; it has no public name, and a second one would differ from it.
_parser: Any = import_module("re._parser")
_c: Any = import_module("re._constants")
_WORD = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
_CATEGORIES = {"DIGIT": b"0123456789", "SPACE": b" \t\n\r\f\v", "WORD": _WORD}


class Pattern(NamedTuple):
    """An automaton that begins in state 0."""

    table: NDArray[np.int16]
    """[state, byte] -> state."""
    verdicts: NDArray[np.uint8]
    """ACCEPTS: a name that ends here matches. SETTLED: no byte leads anywhere else."""


@functools.lru_cache(maxsize=8)
def compile_pattern(pattern: str, kind: str) -> Pattern:
    """Compile a "glob", which names match as a whole, or a "regex" that is searched in them.

    Raises ValueError, saying why, for what is no pattern or would cost too much.
    """
    if len(pattern.encode()) > PATTERN_BYTES_MAX:
        raise ValueError(f"the pattern is longer than {PATTERN_BYTES_MAX} bytes")
    text = fnmatch.translate(pattern) if kind == "glob" else pattern
    try:
        parsed = _parser.parse(text.encode(), re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if parsed.state.flags & _FLAGS_REFUSED:
        raise ValueError("the regex has flags: spell out what they stand for")
    machine = _Machine(whole=kind == "glob")
    return machine.tables(machine.sequence(parsed.data, machine.end))


class _Machine:
    """The expression as a graph: nodes that take a byte, that are free to pass, or that mark ends.

    Sets of nodes are integers, one bit a node.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._takes: list[int] = []  # bytes with which a node may be left, one bit each
        self._leads: list[tuple[int, ...]] = []
        self._at_start: set[int] = set()  # passed at the start of a name only
        self._at_end: set[int] = set()
        self.end = self._node(0)

    def _node(self, takes: int, *leads: int) -> int:
        if len(self._takes) >= NODES_MAX:
            raise ValueError("the pattern repeats too much: name a simpler one")
        self._takes.append(takes)
        self._leads.append(leads)
        return len(self._takes) - 1

    # Building: an expression is built from its end, each part towards what follows it.

    def sequence(self, items: Any, then: int) -> int:
        """Return the node where these parts, one after the other, begin."""
        for operation, argument in reversed(list(items)):
            then = self._part(str(operation), argument, then)
        return then

    def _part(self, operation: str, argument: Any, then: int) -> int:
        if operation in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return self._node(_bytes_of(operation, argument), then)
        if operation == "BRANCH":
            return self._node(0, *[self.sequence(branch, then) for branch in argument[1]])
        if operation == "SUBPATTERN" and not argument[1] & _FLAGS_REFUSED and not argument[2]:
            return self.sequence(argument[3], then)
        if operation == "ATOMIC_GROUP" and self._whole:  # of a glob: the shortest way will do
            return self.sequence(argument, then)
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeat(least, most, inner, then)
        if operation == "AT":
            return self._edge(str(argument), then)
        raise ValueError(f"the regex uses {operation.lower()}: name a simpler one")

    def _repeat(self, least: int, most: int, items: Any, then: int) -> int:
        if most == _c.MAXREPEAT:
            again = self._node(0)
            self._leads[again] = (self.sequence(items, again), then)
            then = again
        else:
            after = then
            for _ in range(most - least):
                then = self._node(0, self.sequence(items, then), after)
        for _ in range(least):
            then = self.sequence(items, then)
        return then

    def _edge(self, which: str, then: int) -> int:
        node = self._node(0, then)
        if which in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            self._at_start.add(node)
        elif which in ("AT_END", "AT_END_STRING"):
            self._at_end.add(node)
        else:
            raise ValueError(f"the regex uses {which.lower()}: name a simpler one")
        return node

    # Walking: the sets of nodes that can be reached, each of which is a state.

    def _reach(self, nodes: tuple[int, ...], *, start: bool = False, end: bool = False) -> int:
        """Return the nodes to be reached for free where a name starts, ends, or neither."""
        found, waiting = 0, list(nodes)
        while waiting:
            node = waiting.pop()
            if found >> node & 1:
                continue
            found |= 1 << node
            shut = (node in self._at_start and not start) or (node in self._at_end and not end)
            if not self._takes[node] and not shut:
                waiting += self._leads[node]
        return found

    def tables(self, begin: int) -> Pattern:
        """Turn the graph, entered at `begin`, into tables."""
        edges = zip(self._takes, self._leads, strict=True)
        after = [self._reach(leads) if takes else 0 for takes, leads in edges]
        finals = sum(
            1 << node
            for node in range(len(self._takes))
            if self._reach((node,), end=True) >> self.end & 1
        )
        kinds = _kinds_of_bytes(set(self._takes))
        takers = [self._takers(kind & -kind) for kind in kinds]
        # A search may begin anywhere.
        restart = 0 if self._whole else self._reach((begin,))
        # The first state is that of the start of a name and never comes again.
        states, numbers = [self._reach((begin,), start=True) | restart], dict[int, int]()
        rows: list[list[int]] = []
        work = 0
        for state in states:  # which grows meanwhile
            row = []
            for taker in takers:
                following = restart
                left = state & taker
                work += left.bit_count() + 1
                while left:
                    node = left.bit_length() - 1
                    left ^= 1 << node
                    following |= after[node]
                if not self._whole and state >> self.end & 1:
                    following = state  # found already: whatever follows, it stays found
                number = numbers.setdefault(following, len(states))
                if number == len(states):
                    states.append(following)
                row.append(number)
            rows.append(row)
            if len(states) > STATES_MAX or work > WORK_MAX:
                raise ValueError("the pattern is too involved: name a simpler one")
        accepts = [bool(state & finals) for state in states]
        accepts[0] |= bool(self._reach((begin,), start=True, end=True) >> self.end & 1)
        return _pattern(rows, kinds, accepts)

    def _takers(self, byte: int) -> int:
        """Return the nodes that take a byte, which is given as its bit."""
        return sum(1 << node for node, takes in enumerate(self._takes) if takes & byte)


def _bytes_of(operation: str, argument: Any) -> int:
    """The bytes, one bit each, that a part of one byte stands for."""
    if operation == "ANY":
        return ALL_BYTES
    if operation == "LITERAL":
        return 1 << int(argument)
    if operation == "NOT_LITERAL":
        return ALL_BYTES ^ 1 << int(argument)
    found, negated = 0, False
    for kind, value in argument:
        if str(kind) == "NEGATE":
            negated = True
        elif str(kind) == "RANGE":
            found |= (1 << value[1] + 1) - (1 << value[0])
        elif str(kind) == "CATEGORY":
            found |= _category(str(value).removeprefix("CATEGORY_"))
        else:
            found |= 1 << int(value)
    return ALL_BYTES ^ found if negated else found


def _category(name: str) -> int:
    found = sum(1 << byte for byte in _CATEGORIES[name.removeprefix("NOT_")])
    return ALL_BYTES ^ found if name.startswith("NOT_") else found


def _kinds_of_bytes(sets: set[int]) -> list[int]:
    """Divide the bytes into sets whose members no part of the pattern tells apart."""
    kinds = [ALL_BYTES]
    for one in sets:
        kinds = [part for kind in kinds for part in (kind & one, kind & ~one) if part]
    return kinds


def _pattern(rows: list[list[int]], kinds: list[int], accepts: list[bool]) -> Pattern:
    kind_of = np.array(
        [next(at for at, kind in enumerate(kinds) if kind >> byte & 1) for byte in range(256)]
    )
    table = np.ascontiguousarray(np.array(rows, np.int16)[:, kind_of])
    settled = (table == np.arange(len(rows), dtype=np.int16)[:, None]).all(axis=1)
    verdicts = np.where(settled, SETTLED, 0) | np.where(accepts, ACCEPTS, 0)
    return Pattern(table, verdicts.astype(np.uint8))
