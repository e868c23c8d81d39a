"""Tags that content has of its writers, told with the answers to gets.

    tags = tell_tags(shard, digests, rows)      # of the get just made

What a tag is only clients know (`transfer_engine.tagging`): here it is a word that came when a put
ended, and goes wherever the object goes. O(n); nothing where no object has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import context as places
from mooncake_store.core.kernels import tags as k
from mooncake_store.core.records import KEYS_MAX
from mooncake_store.core.state import ShardState, as_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["tell_tags"]


def tell_tags(
    state: ShardState, digests: NDArray[np.uint64], answers: NDArray[Any]
) -> NDArray[np.int64]:
    """Return a row of two words for each key: the tag of its content, or 0, and 0."""
    out = np.zeros((len(digests), 2), np.int64)
    if state.numbers[places.TAGS_USED] and len(digests) <= KEYS_MAX:
        k.tell_tags(state.words, as_words(digests), answers, out)
    return out
