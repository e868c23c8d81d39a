"""Writes a trace, a line a request, as the requests come.

A file appears under its name when it is whole. Cost: O(blocks), and memory for one line.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import msgspec

from eviction.trace import Row
from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from eviction import Trace

__all__ = ["line_of", "rows_of", "write_rows"]

_encoder = msgspec.json.Encoder()


def line_of(row: Row) -> bytes:
    """The line of a request."""
    return _encoder.encode(row) + b"\n"


def rows_of(trace: Trace) -> Iterator[Row]:
    """The requests of a trace, one by one."""
    bounds = itertools.pairwise(trace.offsets.tolist())
    for number, (begin, end) in enumerate(bounds):
        yield Row(
            int(trace.timestamps_ms[number]),
            int(trace.input_tokens[number]),
            int(trace.output_tokens[number]),
            trace.ids[begin:end].tolist(),
        )


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write a trace to a file, in place of one that is there; return how many requests it has.

    Raises InvalidArgumentError if that cannot be; what was there stays then.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with open(unfinished, "wb") as file:
            for row in rows:
                file.write(line_of(row))
                count += 1
        unfinished.replace(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write the trace {path}: {error.strerror}",
            advice="name a file in a folder that can be written to, with room for it",
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return count
