"""Tensors cut along named axes (`TensorParallelism`) and read as stored, as a shard, or whole.

Each shard is an object of its own whose key names its axes and whose header says how it was cut:
rank 0 tells how many shards there are and along which dimension. Keys with several axes name the
number of shards, so a small object beside them tells it to readers of another cut. A shard of
another cut than the stored one is made from the whole tensor.

One axis "tp" alone takes the shard itself, as the original does; with further axes, and with a
writer partition, the whole tensor is passed and its part is cut out here.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mooncake_store.compat.codes import INVALID_PARAMS
from mooncake_store.compat.tensor_format import describe, parse
from mooncake_store.compat.tensors import TensorCalls, memory_at, serialize, tensor_at
from mooncake_store.compat.values import ParallelAxis, ReadTarget, TensorParallelism
from mooncake_store.compat.variants import named, settled, single

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.compat.tensor_format import Layout
    from mooncake_store.compat.values import ReplicateConfig

__all__ = ["ParallelCalls"]

_ORDER = ("dp", "pp", "ep", "tp")
_NOTE = "__parallelism_manifest"


def _checked(parallelism: TensorParallelism | None) -> list[ParallelAxis]:
    """Its axes in one order; raises ValueError for a contradiction."""
    axes = list(parallelism.axes) if parallelism is not None else []
    kinds = [axis.kind for axis in axes]
    if len(set(kinds)) != len(kinds) or not set(kinds) <= set(_ORDER):
        raise ValueError(f"axes {kinds}: each of {_ORDER} may stand once")
    for axis in axes:
        if not 0 <= axis.rank < axis.size:
            raise ValueError(f"rank {axis.rank} of {axis.size} {axis.kind} shards")
        if (axis.split_dim is not None) != (axis.kind == "tp"):
            raise ValueError("tp names a split_dim, and no other axis does")
        if axis.kind == "ep" and axis.expert_id is None:
            raise ValueError("ep names an expert_id")
        if axis.kind == "pp" and axis.stage_id is None:
            raise ValueError("pp names a stage_id")
    return sorted(axes, key=lambda axis: _ORDER.index(axis.kind))


def shard_key(key: str, axes: Sequence[ParallelAxis]) -> str:
    """The key of one shard."""
    if not axes:
        return key
    if len(axes) == 1 and axes[0].kind == "tp":
        return f"{key}_tp_{axes[0].rank}"
    for axis in axes:
        key += f"__{axis.kind}_{axis.rank}of{axis.size}"
        for mark, value in (
            ("sd", axis.split_dim),
            ("eid", axis.expert_id),
            ("sid", axis.stage_id),
        ):
            key += "" if value is None else f"_{mark}{value}"
    return key


def _cut_note(key: str, axes: Sequence[ParallelAxis]) -> dict[str, bytes]:
    """A small object that tells readers of other cuts how this one is cut, by its key."""
    axis = _tp(axes)
    if axis is None or len(axes) == 1:
        return {}
    others = [each for each in axes if each is not axis]
    return {shard_key(key, others) + _NOTE: f"{axis.size} {axis.split_dim or 0}".encode()}


def _tp(axes: Sequence[ParallelAxis]) -> ParallelAxis | None:
    return next((axis for axis in axes if axis.kind == "tp"), None)


def _cut(tensor: Any, axis: ParallelAxis) -> Any:
    """The part of a rank; raises ValueError where the dimension is not divisible."""
    dim = axis.split_dim or 0
    if dim >= tensor.ndim or tensor.shape[dim] % axis.size:
        raise ValueError(f"{tuple(tensor.shape)} is not cut into {axis.size} along {dim}")
    width = tensor.shape[dim] // axis.size
    return tensor.narrow(dim, axis.rank * width, width)


def _partition(writer: Any) -> ParallelAxis:
    """A writer partition, (rank, size, split_dim) in whatever form, as an axis."""
    if isinstance(writer, dict):
        writer = (writer["rank"], writer["size"], writer.get("split_dim", 0))
    elif not isinstance(writer, tuple | list):
        writer = (writer.rank, writer.size, writer.split_dim)
    rank, size, dim = writer
    return ParallelAxis("tp", int(rank), int(size), int(dim))


@named
class ParallelCalls(TensorCalls):
    """Shards of tensors."""

    # -- writing

    def _store_shards(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[Any] | None = None,
        *,
        upsert: bool,
    ) -> list[int]:
        """Store tensors, or the shards of them that are named; a number per key."""
        cuts = list(parallelisms) if parallelisms is not None else [None] * len(keys)
        parts = list(writer_partitions) if writer_partitions is not None else [None] * len(keys)
        if not len(keys) == len(tensors_list) == len(cuts) == len(parts):
            return [INVALID_PARAMS] * len(keys)
        answers: list[int] = [0] * len(keys)
        made: dict[int, tuple[str, Any, Layout | None]] = {}
        notes: dict[str, bytes] = {}
        wanted = zip(keys, tensors_list, cuts, parts, strict=True)
        for at, (key, tensor, cut, part) in enumerate(wanted):
            try:
                made[at] = _shard(key, tensor, cut, part)
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                answers[at] = self._failed("put_tensor_with_parallelism", error)
        if made:
            names, shards, layouts = zip(*made.values(), strict=True)
            stored = self._put_tensors(names, shards, config, upsert=upsert, layouts=layouts)
            for (at, (_, _, layout)), answer in zip(made.items(), stored, strict=True):
                answers[at] = answer
                if answer == 0 and layout is not None:
                    notes |= _cut_note(keys[at], layout.axes)
        if notes:
            self.upsert_batch(list(notes), list(notes.values()))
        return answers

    def _store_shards_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[Any] | None = None,
        *,
        upsert: bool,
    ) -> list[int]:
        """Store serialized tensors in registered memory, or the shards of them that are named."""
        tensors = self._tensors_at(keys, buffer_ptrs, sizes)
        if tensors is None:
            return [INVALID_PARAMS] * len(keys)
        return self._store_shards(
            keys, tensors, parallelisms, config, writer_partitions, upsert=upsert
        )

    batch_put_tensor_with_parallelism = settled(_store_shards, upsert=False)
    batch_upsert_tensor_with_parallelism = settled(_store_shards, upsert=True)
    batch_put_tensor_with_parallelism_from = settled(_store_shards_from, upsert=False)
    batch_upsert_tensor_with_parallelism_from = settled(_store_shards_from, upsert=True)

    _ONE = "key tensor parallelism config writer_partition"
    _ONE_FROM = "key buffer_ptr size parallelism config writer_partition"
    put_tensor_with_parallelism = single(batch_put_tensor_with_parallelism, _ONE)
    upsert_tensor_with_parallelism = single(batch_upsert_tensor_with_parallelism, _ONE)
    put_tensor_with_parallelism_from = single(batch_put_tensor_with_parallelism_from, _ONE_FROM)
    upsert_tensor_with_parallelism_from = single(
        batch_upsert_tensor_with_parallelism_from, _ONE_FROM
    )

    # -- reading

    def get_tensor_with_parallelism(self, key: str, target: ReadTarget | None = None) -> Any:
        """Return what is stored, a shard, or the whole tensor; None if it is not all there."""
        try:
            return self._read(key, target)
        except (ValueError, RuntimeError) as error:
            self._failed("get_tensor_with_parallelism", error)
            return None

    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Sequence[ReadTarget | None] | None = None
    ) -> list[Any]:
        """Return many; those that are asked for as they are stored come in one request."""
        wanted = list(targets) if targets is not None else [None] * len(keys)
        if len(wanted) != len(keys):
            return [None] * len(keys)
        pairs = list(zip(keys, wanted, strict=True))
        if all(target is None or target.mode == "as_stored" for target in wanted):
            with suppress(ValueError):  # one contradicts itself: each answers for itself
                return self.batch_get_tensor([self._stored_key(*pair) for pair in pairs])
        return [self.get_tensor_with_parallelism(*pair) for pair in pairs]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: ReadTarget | None = None
    ) -> Any:
        """Read one into registered memory, behind its header; the tensor there, or None."""
        if target is None or target.mode == "as_stored":
            try:
                stored = self._stored_key(key, target)
            except ValueError as error:
                self._failed("get_tensor_with_parallelism_into", error)
                return None
            return self.get_tensor_into(stored, buffer_ptr, size)
        tensor = self.get_tensor_with_parallelism(key, target)
        if tensor is None:
            return None
        header, address, nbytes, owner = serialize(tensor)
        total = len(header) + nbytes
        if total > size or not self._registry.covers([buffer_ptr], [total]).all():
            return None
        ctypes.memmove(buffer_ptr, header, len(header))
        ctypes.memmove(buffer_ptr + len(header), address, nbytes)
        del owner  # held the memory until here
        return self._tensor_in(memory_at(buffer_ptr, total))

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Sequence[ReadTarget | None] | None = None,
    ) -> list[Any]:
        """Read many into registered memory, one after the other."""
        wanted = list(targets) if targets is not None else [None] * len(keys)
        if not len(keys) == len(buffer_ptrs) == len(sizes) == len(wanted):
            return [None] * len(keys)
        each = zip(keys, buffer_ptrs, sizes, wanted, strict=True)
        return [self.get_tensor_with_parallelism_into(*call) for call in each]

    def _stored_key(self, key: str, target: ReadTarget | None) -> str:
        return key if target is None else shard_key(key, _checked(target.parallelism))

    def _read(self, key: str, target: ReadTarget | None) -> Any:
        if target is None or target.mode == "as_stored":
            return self.get_tensor(self._stored_key(key, target))
        if target.mode not in ("shard", "full"):
            raise ValueError(f"mode {target.mode!r}: choose as_stored, shard or full")
        axes = _checked(target.parallelism)
        if target.mode == "full":
            return self._whole(key, axes)
        if not axes:
            raise ValueError("a shard is named by target.parallelism")
        layout, found = self._described(shard_key(key, axes))
        if found is not None and layout is not None and _same_cut(layout, axes):
            return found
        whole = self._whole(key, axes)
        axis = _tp(axes)
        return whole if whole is None or axis is None else _cut(whole, axis).contiguous()

    def _whole(self, key: str, axes: list[ParallelAxis]) -> Any:
        """The whole tensor: stored so, or put together from its tp shards."""
        others = [axis for axis in axes if axis.kind != "tp"]
        if not others:
            found = self.get_tensor(key)
            if found is not None:
                return found
        wanted = _tp(axes) or ParallelAxis("tp", 0, 1, 0)
        first = shard_key(key, [*others, replace(wanted, rank=0)])
        layout, shard = self._described(first)
        if shard is None and others:
            # Its name says how many shards there are: another cut than the one wanted was stored.
            cut = self._noted_cut(key, others)
            if cut is not None:
                layout, shard = self._described(shard_key(key, [*others, cut]))
        stored = _tp(layout.axes) if layout is not None else None
        if shard is None or stored is None:
            return shard
        import torch

        names = [
            shard_key(key, [*others, replace(stored, rank=rank)]) for rank in range(1, stored.size)
        ]
        rest = self.batch_get_tensor(names) if names else []
        if any(part is None for part in rest):
            return None
        return torch.cat([shard, *rest], dim=stored.split_dim or 0)

    def _noted_cut(self, key: str, others: list[ParallelAxis]) -> ParallelAxis | None:
        size, _, dim = self.get(shard_key(key, others) + _NOTE).decode().partition(" ")
        return ParallelAxis("tp", 0, int(size), int(dim)) if size.isdigit() else None

    def _described(self, key: str) -> tuple[Layout | None, Any]:
        handle = self.get_buffer(key)
        if handle is None:
            return None, None
        return parse(handle), tensor_at(handle)


def _same_cut(layout: Layout, axes: list[ParallelAxis]) -> bool:
    stored, wanted = _tp(layout.axes), _tp(axes)
    if stored is None or wanted is None:
        return stored is wanted
    return (stored.size, stored.split_dim) == (wanted.size, wanted.split_dim)


def _shard(
    key: str, tensor: Any, parallelism: TensorParallelism | None, writer: Any
) -> tuple[str, Any, Layout | None]:
    """(key, shard, layout) of what one call wants to store."""
    if parallelism is not None and writer is not None:
        raise ValueError("parallelism and writer_partition exclude each other")
    axes = _checked(parallelism if writer is None else TensorParallelism([_partition(writer)]))
    if not axes:
        return key, tensor, None
    axis = _tp(axes)
    whole = tuple(tensor.shape)
    if axis is not None and (writer is not None or len(axes) > 1):
        tensor = _cut(tensor, axis)
    elif axis is not None:
        dim = axis.split_dim or 0
        if dim >= tensor.ndim:
            raise ValueError(f"{whole} has no dimension {dim}")
        whole = tuple(n * axis.size if at == dim else n for at, n in enumerate(whole))
    layout, plain = describe(tensor)
    return shard_key(key, axes), plain, replace(layout, axes=tuple(axes), global_shape=whole)
