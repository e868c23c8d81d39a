"""Reads a trace and says of each line that cannot be used what is wrong with it.

`eviction.read_trace` takes what it can index and stops at the first line that is none; here every
line is looked at, and also what only matters to who plays a trace: times in order, lengths, a name
for each block of the prompt, and that a name always stands for the same prefix.

    found = check_trace("trace.jsonl")
    found.trace       # of the lines that are right
    found.faults      # of the others: line and reason

It does not ask whether figures are plausible. Cost: a few microseconds a block; all blocks are in
memory, and the parent of each name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from eviction.trace import BLOCK_TOKENS, Row, columns_of
from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    from eviction import Trace

__all__ = ["Checked", "Fault", "Lines", "check_trace", "read_whole"]

NUMBER_MAX = (1 << 63) - 1
FAULTS_KEPT = 20
"""A file that is no trace has a fault in every line, and nobody reads them all."""


class Fault(NamedTuple):
    """What is wrong with a line."""

    line: int
    reason: str


class Checked(NamedTuple):
    """A trace of the lines that are right, and what is wrong with the others."""

    trace: Trace
    faults: list[Fault]
    """The first of them."""
    faulty: int
    """How many there are."""


class Lines:
    """Goes through the lines of a trace; afterwards `faults` has what was wrong."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.faulty = 0
        self._decoder = msgspec.json.Decoder(Row)
        self._latest = 0
        self._parents: dict[int, int] = {}

    def rows(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yield the requests of the lines that are right; blank lines are none."""
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = self._decoder.decode(line)
                reason = self._fault(row)
            # msgspec's errors are ValueErrors; invalid UTF-8 is one as well.
            except ValueError as error:
                reason = f"no request: {error}"
            if not reason:
                yield row
                continue
            self.faulty += 1
            if len(self.faults) < FAULTS_KEPT:
                self.faults.append(Fault(number, reason))

    def _fault(self, row: Row) -> str:
        """Say what is wrong with a request, or nothing."""
        for name in ("timestamp", "input_length", "output_length"):
            value = getattr(row, name)
            if not 0 <= value <= NUMBER_MAX:
                return f"{name} is {value}, which is {'below 0' if value < 0 else 'too large'}"
        blocks = -(-row.input_length // BLOCK_TOKENS)
        if len(row.hash_ids) != blocks:
            return (
                f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, "
                f"which are {blocks} blocks of {BLOCK_TOKENS}"
            )
        if row.timestamp < self._latest:
            return f"timestamp {row.timestamp} is before {self._latest} of an earlier line"
        return self._fault_of_names(row.hash_ids) or self._take(row)

    def _fault_of_names(self, names: list[int]) -> str:
        if len(set(names)) != len(names):
            return "hash_ids names a block twice"
        before = -1
        for name in names:
            if not 0 <= name <= NUMBER_MAX:
                return f"hash_ids has {name}, which is {'below 0' if name < 0 else 'too large'}"
            known = self._parents.get(name, before)
            if known != before:
                here, there = (f"after {it}" if it >= 0 else "first" for it in (before, known))
                return f"block {name} comes {here}, and in an earlier line {there}"
            before = name
        return ""

    def _take(self, row: Row) -> str:
        """Hold later lines to what a line says that is right."""
        self._latest = row.timestamp
        self._parents.update(zip(row.hash_ids, [-1, *row.hash_ids[:-1]], strict=True))
        return ""


def check_trace(path: str | PathLike[str]) -> Checked:
    """Read the trace in the file at `path`. Raises InvalidArgumentError if it cannot be read."""
    lines = Lines()
    try:
        with open(path, "rb") as file:
            rows = list(lines.rows(file))
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read the trace {path}: {error.strerror}", advice="name a file of JSON lines"
        ) from error
    return Checked(columns_of(rows), lines.faults, lines.faulty)


def read_whole(path: str | PathLike[str]) -> Trace:
    """The trace in the file at `path`, of which every line has to be right.

    Raises InvalidArgumentError with the first that is not, or if there are no requests.
    """
    found = check_trace(path)
    if found.faults:
        line, reason = found.faults[0]
        others = f", and {found.faulty - 1} further lines are wrong" if found.faulty > 1 else ""
        raise InvalidArgumentError(
            f"{path}, line {line}: {reason}{others}",
            advice=f"`mooncake trace describe {path}` names them",
        )
    if not len(found.trace):
        raise InvalidArgumentError(f"{path} has no requests", advice="name a file of JSON lines")
    return found.trace
