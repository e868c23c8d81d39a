"""Batches of blocks between an engine's memory and the store, and what to make of failures.

A batch is read with one round trip to each shard and written with two (where to, and done); bytes
move between the engine's memory and the store's without a stop. Nothing here raises for the store:
a read answers which positions failed, a write which ones are new and which were not kept, so that
the engine computes or forgets them.

- A block whose checksum was wrong is removed, so that the next save can store it.
- After a save that found no room, saves are skipped for a while: a lost save is a miss later.
- When nothing of a batch could be moved although the master answered, the client is taken anew.

Cost: O(blocks) in Python a batch for names and outcomes; no copy.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import NoSpaceError, TransferError
from serving.connectors.link import RUINED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mooncake_store import Pieces
    from serving.connectors.counts import Counts
    from serving.connectors.link import StoreLink
    from serving.connectors.options import StoreOptions

__all__ = ["Moves", "joined"]

log = logging.getLogger(__name__)


class Moves:
    """Reads and writes blocks and counts what became of them. Thread-safe."""

    def __init__(self, link: StoreLink, options: StoreOptions, counts: Counts) -> None:
        self.link = link
        self.counts = counts
        self._options = options
        self._pressed_until = 0.0

    def read(self, names: list[str], buffers: Any) -> list[int]:
        """Read a batch into buffers; the bytes of each block, 0 for what could not be read."""
        got = self._take(
            names, lambda c, deadline: c.get_into_many(names, buffers, deadline=deadline)
        )
        return [0] * len(names) if got is None else got.sizes.tolist()

    def values(self, names: list[str]) -> list[bytes | None]:
        """Read a batch of blocks whose sizes are not known, each into new memory."""
        got = self._take(names, lambda c, within: c.get_many(names, deadline=within))
        return [None] * len(names) if got is None else got.values

    def rates(self) -> dict[tuple[str, int], tuple[tuple[float, ...], ...]]:
        """What reads of this process take, by transport and tier, as plain data."""
        from mooncake_store.client.extension import rates_of  # Not when the engine imports this.

        client = self.link.client
        if client is None:
            return {}
        return {kind: tuple(map(tuple, rates)) for kind, rates in rates_of(client).items()}

    def _take(self, names: list[str], ask: Callable[[Any, float], Any]) -> Any:
        """Read a batch and see to what failed; None if the store is away."""
        deadline = self._options.load_deadline_s
        with self.counts.timed("load_seconds"):
            got = self.link.call(lambda c: ask(c, deadline))
        self.counts.add("load_batches", 1)
        if got is None:
            self.counts.add("load_failures", len(names))
            return None
        failed: list[int] = got.failed.tolist()
        self.counts.add("load_blocks", len(names) - len(failed))
        self.counts.add("load_bytes", int(got.sizes.sum()))
        self.counts.add("load_failures", len(failed))
        if failed:
            self._see_to(names, got, failed)
        return got

    def _see_to(self, names: list[str], got: Any, failed: list[int]) -> None:
        """Take a new client if no bytes moved, and remove blocks whose bytes are wrong or lost."""
        log.info("%d of %d blocks could not be read, first: %s", len(failed), len(names),
                 got.error(failed[0]))  # fmt: skip
        if len(failed) == len(names) and all(_unmoved(got.error(at)) for at in failed):
            self.link.doubt()
        wrong = [names[at] for at in failed if isinstance(got.error(at), RUINED)]
        if wrong:
            self.counts.add("load_corrupt", len(wrong))
            deadline = self._options.load_deadline_s
            self.link.call(lambda c: c.remove_many(wrong, force=True, deadline=deadline))

    def write(
        self,
        names: list[str],
        gather: Callable[[], Any],
        sizes: Sequence[int],
        *,
        groups: Sequence[str] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Offer a batch; positions of what is new in the store, and of what is not in it.

        `gather` gives the buffers; it is not called when the batch is skipped. Blocks of one of
        `groups` leave the store together.
        """
        everything = list(range(len(names)))
        if time.monotonic() < self._pressed_until:
            self.counts.add("save_skipped_pressure", len(names))
            return [], everything
        options: dict[str, Any] = {"deadline": self._options.save_deadline_s}
        if groups is not None:
            options["group"] = groups
        if self._in_doubt(names):
            options["upsert"] = True
        buffers = gather()
        with self.counts.timed("save_seconds"):
            result = self.link.call(lambda c: c.put_many(names, buffers, **options))
        if result is None:
            self.counts.add("save_skipped_down", len(names))
            return [], everything
        refused = result.failed.tolist()
        present = result.already_present
        without = set(refused)
        stored = [at for at in everything if at not in without and not present[at]]
        self.counts.add("save_batches", 1)
        self.counts.add("save_blocks", len(stored))
        self.counts.add("save_bytes", sum(sizes[at] for at in stored))
        self.counts.add("save_present", len(names) - len(refused) - len(stored))
        self.counts.add("save_failures", len(refused))
        if len(refused) == len(names) and all(_unmoved(result.error(at)) for at in refused):
            self.link.doubt()
        if any(isinstance(result.error(at), NoSpaceError) for at in refused):
            self._pressed_until = time.monotonic() + self._options.pressure_pause_s
        return stored, refused

    def _in_doubt(self, names: list[str]) -> bool:
        """Hook: whether what is there under one of these names is to be replaced."""
        return False


def _unmoved(error: Exception | None) -> bool:
    """Whether an error says that bytes could not be moved, and nothing of the bytes."""
    return isinstance(error, TransferError) and not isinstance(error, RUINED)


def joined(parts: Sequence[Pieces]) -> Pieces:
    """The objects of several batches of pieces as one batch, in order."""
    import numpy as np

    from mooncake_store import Pieces  # Not when the engine imports this; see connector.py.

    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0] + [len(part.addresses) for part in parts])
    return Pieces(
        np.concatenate([part.addresses for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate(
            [[0]] + [part.starts[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
        ),
        keep=tuple(part.keep for part in parts),
    )
