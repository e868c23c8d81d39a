"""Calls that name memory by address: what engines use on their hot path.

A batch is one request to each shard for its objects, whatever the number of buffers. Memory that
was not registered is refused (-600) for its key only; lists of different lengths are refused for
all keys. What a failed read left in a buffer is undefined.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client import Pieces
from mooncake_store.client.extension import Memory
from mooncake_store.compat.base import Base, require_keys, require_text
from mooncake_store.compat.codes import INVALID_PARAMS, OK, codes
from mooncake_store.compat.memory import MooncakeHostMemAllocator
from mooncake_store.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mooncake_store.compat.values import ReplicateConfig

    Column = NDArray[np.int64]
    Nested = Sequence[Sequence[int]]

__all__ = ["PointerCalls", "column"]


def column(values: Sequence[int]) -> Column:
    """Numbers as a column; TypeError for what is no number, -1 for what fits no address."""
    try:
        return np.array(values, np.int64) if len(values) else np.zeros(0, np.int64)
    except OverflowError:
        return np.array([v if 0 <= v < 1 << 63 else -1 for v in values], np.int64)
    except ValueError:
        raise TypeError("addresses and sizes are lists of int") from None


class Allowed(NamedTuple):
    """Memory of those keys of a batch whose memory may be touched, and which keys those are."""

    buffers: Memory | Pieces | None
    """None if there is not one entry for each key."""
    chosen: Column


class PointerCalls(Base):
    """Values in memory of the caller."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Allow pointer calls to touch memory; -600 if it is none, or was registered before."""
        try:
            self._require()
        except StoreError as error:
            return self._failed("register_buffer", error)
        return OK if self._registry.add(int(buffer_ptr), int(size)) else INVALID_PARAMS

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Forbid what `register_buffer` allowed; -600 for another address."""
        return OK if self._registry.discard(int(buffer_ptr)) else INVALID_PARAMS

    def alloc_from_mem_pool(self, size: int) -> int:
        """Return the address of memory after `setup_dummy`, else 0; it need not be registered."""
        if self._client is None or self._worker is not None:
            return 0
        address = MooncakeHostMemAllocator().alloc(size)
        if address:
            self._registry.lend(address, size)
        return address

    # -- puts

    def put_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """Store memory under a key."""
        if size == 0:
            return OK  # of nothing there is no object, and the original says so too
        return self.batch_put_from([require_text(key)], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store memory under keys; a number per key."""
        return self._put_from("batch_put_from", keys, buffer_ptrs, sizes, config)

    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """Store memory under a key, in place of what it named."""
        return self.batch_upsert_from([require_text(key)], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Upsert memory under keys; a number per key."""
        return self._put_from("batch_upsert_from", keys, buffer_ptrs, sizes, config, upsert=True)

    def _put_from(
        self,
        what: str,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        *,
        upsert: bool = False,
    ) -> list[int]:
        keys = require_keys(keys)
        memory = self._memory(len(keys), buffer_ptrs, sizes)
        return self._store(what, keys, memory, config, upsert)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Nested,
        all_sizes: Nested,
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store several pieces of memory under each key, gathered; a number per key."""
        keys = require_keys(keys)
        pieces = self._pieces(len(keys), all_buffer_ptrs, all_sizes)
        return self._store("batch_put_from_multi_buffers", keys, pieces, config, False)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store metadata and data, in this order, as one object."""
        pieces = [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]]
        return self.batch_put_from_multi_buffers([require_text(key)], *pieces, config)[0]

    def _store(
        self,
        what: str,
        keys: list[str],
        allowed: Allowed,
        config: ReplicateConfig | None,
        upsert: bool,
    ) -> list[int]:
        def put(named: list[str], values: Memory | Pieces) -> list[int]:
            nbytes = int((values.totals if isinstance(values, Pieces) else values.sizes).sum())
            part = config if len(named) == len(keys) else _part(config, allowed.chosen)
            return self._put(what, named, values, nbytes, part, upsert=upsert, buffered=False)

        return self._with(what, keys, allowed, put)

    # -- gets

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read an object into memory; its bytes, or a negative number."""
        return self.batch_get_into([require_text(key)], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Read objects into memory; bytes, or a negative number, per key."""
        keys = require_keys(keys)
        memory = self._memory(len(keys), buffer_ptrs, sizes)
        return self._with("batch_get_into", keys, memory, partial(self._load, "batch_get_into"))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Nested,
        all_sizes: Nested,
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read objects into several pieces of memory each, scattered; bytes or negative per key.

        The nearest replica is read in any case.
        """
        keys = require_keys(keys)
        what = "batch_get_into_multi_buffers"
        pieces = self._pieces(len(keys), all_buffer_ptrs, all_sizes)
        return self._with(what, keys, pieces, partial(self._load, what))

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Nested],
        all_src_offsets: Sequence[Nested],
        all_sizes: Sequence[Nested],
    ) -> list[list[list[int]]]:
        """Read ranges of objects to places in buffers; bytes or negative by buffer, key, range.

        A range is not verified: a checksum speaks of a whole object.
        """
        lists = (all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        if any(len(each) != len(buffer_ptrs) for each in lists):
            return [[[INVALID_PARAMS]]]
        out: list[list[list[int]]] = []
        wanted: list[tuple[str, int, int, int]] = []  # key, address, offset, bytes
        places: list[tuple[list[int], int]] = []  # where the answer of each goes
        for i, base in enumerate(buffer_ptrs):
            keys = require_keys(all_keys[i])
            if any(len(each[i]) != len(keys) for each in lists[1:]):
                out.append([[INVALID_PARAMS] for _ in keys])
                continue
            room = self._registry.room(base)
            out.append([])
            for j, key in enumerate(keys):
                targets, sources, sizes = (each[i][j] for each in lists[1:])
                answers = [INVALID_PARAMS] * max(len(targets), len(sources), len(sizes))
                out[i].append(answers)
                if not len(targets) == len(sources) == len(sizes):
                    continue
                for m, (to, start, size) in enumerate(zip(targets, sources, sizes, strict=True)):
                    if to >= 0 and size > 0 and start >= 0 and to + size <= room:
                        wanted.append((key, base + to, start, size))
                        places.append((answers, m))
        if wanted:
            names, addresses, starts, lengths = (list(part) for part in zip(*wanted, strict=True))
            pieces = Pieces(addresses, lengths, range(len(wanted) + 1), offsets=starts)
            found = self._load("get_into_ranges", names, pieces)
            for (answers, m), size, number in zip(places, lengths, found, strict=True):
                answers[m] = size if number >= 0 else number
        return out

    def _load(self, what: str, keys: list[str], buffers: Memory | Pieces) -> list[int]:
        try:
            result = self._require().get_into_many(keys, buffers)
        except StoreError as error:
            return [self._failed(what, error)] * len(keys)
        self._judge_reads(what, keys, result)
        sizes: list[int] = result.sizes.tolist()
        if result.ok:
            return sizes
        numbers = zip(codes(result.statuses), sizes, strict=True)
        return [number or size for number, size in numbers]

    # -- what both share

    def _memory(self, count: int, buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> Allowed:
        """One piece of memory for each key."""
        at, nbytes = column(buffer_ptrs), column(sizes)
        if not count == len(at) == len(nbytes):
            return Allowed(None, np.zeros(0, np.int64))
        chosen = np.flatnonzero(self._registry.covers(at, nbytes))
        if len(chosen) == count:
            return Allowed(Memory(at, nbytes, None), chosen)
        return Allowed(Memory(at[chosen], nbytes[chosen], None), chosen)

    def _pieces(self, count: int, addresses: Nested, sizes: Nested) -> Allowed:
        """Several pieces of memory for each key."""
        if not count == len(addresses) == len(sizes):
            return Allowed(None, np.zeros(0, np.int64))
        try:
            pieces = Pieces.of(addresses, sizes)
            if self._registry.covers(pieces.addresses, pieces.lengths).all():
                return Allowed(pieces, np.arange(count))
        except (InvalidArgumentError, OverflowError):
            pass  # some key is to blame: look at each
        good = [i for i in range(count) if self._may(addresses[i], sizes[i])]
        chosen = np.array(good, np.int64)
        if not good:
            return Allowed(Pieces([], [], [0]), chosen)
        return Allowed(Pieces.of([addresses[i] for i in good], [sizes[i] for i in good]), chosen)

    def _may(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether these pieces are some, and lie in registered memory."""
        at, size = column(addresses), column(sizes)
        if len(at) != len(size) or not len(at) or (at < 0).any() or (size < 0).any():
            return False
        return bool(self._registry.covers(at, size).all())

    def _with(
        self,
        what: str,
        keys: list[str],
        allowed: Allowed,
        act: Callable[[list[str], Memory | Pieces], list[int]],
    ) -> list[int]:
        """Numbers of all keys; `act` gives those of the keys whose memory may be touched."""
        buffers, chosen = allowed
        if buffers is None:
            return [INVALID_PARAMS] * len(keys)
        if len(chosen) == len(keys):
            return act(keys, buffers) if keys else []
        self._failed(
            what,
            InvalidArgumentError(
                f"{len(keys) - len(chosen)} of {len(keys)} keys name memory that is not registered",
                advice="call register_buffer, or set MOONCAKE_COMPAT_UNCHECKED_POINTERS=1",
            ),
        )
        out = [INVALID_PARAMS] * len(keys)
        positions = chosen.tolist()
        found = act([keys[at] for at in positions], buffers) if positions else []
        for at, number in zip(positions, found, strict=True):
            out[at] = number
        return out


def _part(config: ReplicateConfig | None, chosen: Column) -> Any:
    """The configuration of some keys of a batch."""
    if config is None or config.group_ids is None:
        return config
    import copy

    part = copy.copy(config)
    part.group_ids = [config.group_ids[at] for at in chosen.tolist() if at < len(config.group_ids)]
    return part
