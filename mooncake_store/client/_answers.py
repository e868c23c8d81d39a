"""Answers to a get as records: what a batch of keys is, and where.

For what is asked now and then. The path of reading has a kernel for the same words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.records import GET_ROW, REPLICA
from mooncake_store.errors import UnavailableError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

__all__ = ["records", "still_there"]


def records(reply: Any, count: int) -> tuple[NDArray[Any], Column, NDArray[Any]]:
    """Read the words of an answer: a record per key, where its replicas end, all replicas."""
    answers, replicas = reply.rows.view(GET_ROW)[:, 0], reply.replicas.view(REPLICA)[:, 0]
    ends = np.cumsum(answers["replicas"], dtype=np.int64)
    if len(answers) != count or int(ends[-1]) != len(replicas):
        raise UnavailableError(
            f"{len(answers)} answers with {len(replicas)} replicas came to {count} keys"
        )
    return answers, ends, replicas


def still_there(
    reply: Any, generations: Column, segments: Column, offsets: Column
) -> NDArray[np.bool_]:
    """Whether each object is the generation it was, with a replica at the place it had.

    The generation alone would not do: an object that is moved keeps it, and the place it had is
    given to another.
    """
    answers, _, replicas = records(reply, len(generations))
    of = np.repeat(np.arange(len(answers)), answers["replicas"])
    here = (replicas["segment"] == segments[of]) & (replicas["offset"] == offsets[of])
    same = np.zeros(len(answers), np.bool_)
    same[of[here]] = True
    same &= (answers["status"] == 0) & (answers["generation"] == generations)
    return same
