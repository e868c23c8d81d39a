"""Request traces: the published JSONL format, and a synthetic trace of the same shape.

One line is one request: `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, the ids of its prompt blocks from the first token on, where equal ids mean equal
prefixes. Ids are renumbered densely by first appearance (published traces are so already), as
policies index arrays by them. Order is file order; timestamps are kept, not interpreted.

It does not check block sizes or that ids form a trie. Cost: O(blocks), all in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from numpy.typing import NDArray

__all__ = [
    "BLOCK_TOKENS",
    "Row",
    "Trace",
    "columns_of",
    "parse_trace",
    "read_trace",
    "synthetic_trace",
]

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests as columns; the blocks of request r are ids[offsets[r]:offsets[r + 1]]."""

    timestamps_ms: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.timestamps_ms)

    @property
    def distinct_blocks(self) -> int:
        """How many different blocks occur: the capacity at which nothing is ever evicted."""
        return int(self.ids.max(initial=-1)) + 1


class Row(msgspec.Struct, gc=False):
    """One request, as a line of the file has it."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: str | PathLike[str]) -> Trace:
    """The trace in the JSONL file at `path`.

    Raises ValueError naming file and line for a line that is no request, OSError for the file.
    """
    with open(path, "rb") as lines:
        return parse_trace(lines, source=str(path))


def parse_trace(lines: Iterable[bytes | str], source: str = "trace") -> Trace:
    """The trace in `lines`; blank ones are skipped, and `source` names them in errors."""
    decoder = msgspec.json.Decoder(Row)
    requests: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
            if len(set(request.hash_ids)) != len(request.hash_ids):
                raise ValueError("hash_ids names a block twice")
        # msgspec's errors are ValueErrors; invalid UTF-8 is one as well.
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: not a trace request: {error}") from error
        requests.append(request)
    try:
        return columns_of(requests)
    except OverflowError as error:
        raise ValueError(f"{source}: a number does not fit 64 bits") from error


def columns_of(requests: list[Row]) -> Trace:
    """The requests as columns, ids renumbered by first appearance."""
    lengths = [len(request.hash_ids) for request in requests]
    flat = np.array([id_ for request in requests for id_ in request.hash_ids], dtype=np.int64)
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return Trace(
        timestamps_ms=np.array([request.timestamp for request in requests], dtype=np.int64),
        input_tokens=np.array([request.input_length for request in requests], dtype=np.int64),
        output_tokens=np.array([request.output_length for request in requests], dtype=np.int64),
        ids=rank[inverse],
        offsets=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
    )


def synthetic_trace(requests: int, seed: int = 0) -> Trace:
    """A made-up trace of conversations: shared system prompts, and turns that extend them.

    Each request either opens a conversation on one of a few system prompts or continues a recent
    one, repeating its blocks and adding new ones. It has the shape of chat traffic, not its
    numbers: hit ratios on it say nothing about any real workload.
    """
    random = np.random.default_rng(seed)
    prompts = [list(range(4 * prompt, 4 * prompt + 4)) for prompt in range(8)]
    fresh = 4 * len(prompts)
    open_conversations: list[list[int]] = []
    lines: list[Row] = []
    for number in range(requests):
        if open_conversations and random.random() < 0.6:
            back = min(int(random.exponential(200)), len(open_conversations) - 1)
            conversation = open_conversations.pop(-1 - back)
        else:
            conversation = prompts[min(int(random.exponential(2)), len(prompts) - 1)]
        added = 1 + int(random.exponential(12))
        conversation = [*conversation, *range(fresh, fresh + added)]
        fresh += added
        open_conversations.append(conversation)
        lines.append(Row(100 * number, BLOCK_TOKENS * len(conversation), 200, conversation))
    return columns_of(lines)
