"""Calls with torch tensors: whole ones, and ones cut for tensor parallelism (`key_tp_<rank>`).

A tensor is written from where it lies behind a header (`tensor_format`), in one request for a
batch, and read into memory the returned tensor then owns. torch is imported when first needed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_store.client import Pieces
from mooncake_store.compat.bytes import BytesCalls
from mooncake_store.compat.codes import INVALID_PARAMS, OK, log
from mooncake_store.compat.pointers import PointerCalls
from mooncake_store.compat.tensor_format import describe, element_type, parse
from mooncake_store.compat.variants import named, settled, single
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.compat.tensor_format import Layout
    from mooncake_store.compat.values import ReplicateConfig

__all__ = ["TensorCalls", "deserialize", "memory_at", "serialize", "tensor_at"]


def tensor_at(data: Any) -> Any:
    """The tensor in a buffer that begins with its header, sharing its memory; raises ValueError."""
    import torch

    layout = parse(data)
    dtype = element_type(layout.dtype)
    if not layout.nbytes:
        return torch.empty(layout.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, offset=layout.start, count=layout.nbytes)
    return flat.view(dtype).reshape(layout.shape)


def serialize(tensor: Any) -> tuple[bytes, int, int, Any]:
    """Return (header, address, bytes, what owns the memory) of a tensor."""
    layout, plain = describe(tensor)
    address, nbytes = address_of(plain, writable=False)
    return layout.pack(), address, nbytes, plain


def deserialize(data: bytes) -> Any:
    """Return the tensor in the bytes of an object; None when it is none."""
    try:
        return tensor_at(bytearray(data))
    except ValueError:
        return None


def _parts_of(tensor: Any, count: int, dim: int) -> list[Any]:
    """Cut a tensor into `count` parts along a dimension; the last ones may be smaller, or empty."""
    parts = list(tensor.chunk(count, dim))
    empty = tensor.narrow(dim, 0, 0)
    return [*parts, *[empty] * (count - len(parts))]


@named
class TensorCalls(PointerCalls, BytesCalls):
    """Tensors."""

    # -- whole tensors

    def _store_tensors(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
        *,
        upsert: bool,
    ) -> list[int]:
        """Store tensors (an upsert: in place of what the keys named); a number per key.

        Segments that a configuration names must be as many as its replicas.
        """
        if not _publishable(config):
            return [INVALID_PARAMS] * len(keys)
        return self._put_tensors(keys, tensors_list, config, upsert=upsert)

    batch_put_tensor = settled(_store_tensors, config=None, upsert=False)
    batch_pub_tensor = settled(_store_tensors, upsert=False)
    batch_upsert_tensor = settled(_store_tensors, config=None, upsert=True)
    batch_upsert_pub_tensor = settled(_store_tensors, upsert=True)
    put_tensor = single(batch_put_tensor, "key tensor")
    pub_tensor = single(batch_pub_tensor, "key tensor config")
    upsert_tensor = single(batch_upsert_tensor, "key tensor")
    upsert_pub_tensor = single(batch_upsert_pub_tensor, "key tensor config")

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """Return tensors, None where there is none, or what is there is no tensor."""
        return [self._tensor_in(handle) for handle in self.batch_get_buffer(keys)]

    get_tensor = single(batch_get_tensor, "key")

    # -- buffers of the caller that hold a header and its tensor

    def _store_tensors_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], *, upsert: bool
    ) -> list[int]:
        """Store serialized tensors from registered memory; a number per key."""
        if self._tensors_at(keys, buffer_ptrs, sizes) is None:
            return [INVALID_PARAMS] * len(keys)
        return self._put_from("put_tensor_from", keys, buffer_ptrs, sizes, None, upsert=upsert)

    batch_put_tensor_from = settled(_store_tensors_from, upsert=False)
    batch_upsert_tensor_from = settled(_store_tensors_from, upsert=True)
    put_tensor_from = single(batch_put_tensor_from, "key buffer_ptr size")
    upsert_tensor_from = single(batch_upsert_tensor_from, "key buffer_ptr size")

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """Read tensors into registered memory, where those returned lie; None where there is none.

        Lists of different lengths are refused with a number per key, as by the original.
        """
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        found = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [
            self._tensor_in(memory_at(address, nbytes)) if nbytes > 0 else None
            for address, nbytes in zip(buffer_ptrs, found, strict=True)
        ]

    get_tensor_into = single(batch_get_tensor_into, "key buffer_ptr size")

    def batch_get_tensor_into_cuda(
        self, keys: Sequence[str], tensors_list: Sequence[Any]
    ) -> list[int]:
        """Read tensors into ones of the same size on any device; bytes or negative per key."""
        if len(keys) != len(tensors_list):
            return [INVALID_PARAMS] * len(keys)
        out = []
        for found, target in zip(self.batch_get_tensor(keys), tensors_list, strict=True):
            if found is None or found.numel() != target.numel() or found.dtype != target.dtype:
                out.append(INVALID_PARAMS)
                continue
            target.copy_(found.reshape(target.shape))
            out.append(found.numel() * found.element_size())
        return out

    get_tensor_into_cuda = single(batch_get_tensor_into_cuda, "key tensor")

    # -- cut for tensor parallelism, a key for each rank

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Cut tensors and store the parts of all ranks; a number per tensor."""
        if not _publishable(config) or len(base_keys) != len(tensors_list):
            return [INVALID_PARAMS] * len(base_keys)
        if tp_size <= 1:
            return self._put_tensors(base_keys, tensors_list, config)
        try:
            parts = [part for each in tensors_list for part in _parts_of(each, tp_size, split_dim)]
        except (AttributeError, IndexError, RuntimeError) as error:
            return [self._failed("put_tensor_with_tp", error)] * len(base_keys)
        names = [f"{key}_tp_{rank}" for key in base_keys for rank in range(tp_size)]
        numbers = self._put_tensors(names, parts, config)
        groups = [numbers[at : at + tp_size] for at in range(0, len(numbers), tp_size)]
        return [next((number for number in group if number), OK) for group in groups]

    batch_put_tensor_with_tp = settled(batch_pub_tensor_with_tp, config=None)
    pub_tensor_with_tp = single(
        batch_pub_tensor_with_tp, "key tensor config tp_rank tp_size split_dim"
    )
    put_tensor_with_tp = single(batch_put_tensor_with_tp, "key tensor tp_rank tp_size split_dim")

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Cut serialized tensors in registered memory and store the parts; a number per tensor."""
        tensors = self._tensors_at(base_keys, buffer_ptrs, sizes)
        if tensors is None:
            return [INVALID_PARAMS] * len(base_keys)
        return self.batch_put_tensor_with_tp(base_keys, tensors, tp_rank, tp_size, split_dim)

    put_tensor_with_tp_from = single(
        batch_put_tensor_with_tp_from, "key buffer_ptr size tp_rank tp_size split_dim"
    )

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        """Return the parts of a rank, None where there is none."""
        return self.batch_get_tensor(_rank_keys(base_keys, tp_rank, tp_size))

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """Return the part of a rank, or None."""
        return self.batch_get_tensor_with_tp([key], tp_rank, tp_size)[0]

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        """Read the parts of a rank into registered memory; the tensors there, None without one."""
        keys = _rank_keys(base_keys, tp_rank, tp_size)
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Any:
        """Read the part of a rank into registered memory; the tensor there, or None."""
        return self.batch_get_tensor_with_tp_into([key], [buffer_ptr], [size], tp_rank, tp_size)[0]

    # -- files

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Write a tensor to a safetensors file, named like its key unless told otherwise."""
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return INVALID_PARAMS
        try:
            save_file({key: tensor.contiguous()}, file_name or key)
        except (OSError, RuntimeError) as error:
            return self._failed("save_tensor_to_safetensor", error)
        return OK

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Any:
        """Read a tensor from a safetensors file, store it, and return it; None on failure."""
        from safetensors.torch import load_file

        name = file_name or key or ""
        if not Path(name).is_file():
            return None
        tensors = load_file(name)
        wanted = key or file_name
        if wanted not in tensors:
            if not tensors:
                return None
            log.warning("%s holds no tensor %r: its first one is taken", name, wanted)
        tensor = tensors.get(wanted, next(iter(tensors.values())))
        return tensor if self.put_tensor(wanted, tensor) == OK else None

    # -- what they share

    def _put_tensors(
        self,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None,
        *,
        upsert: bool = False,
        layouts: Sequence[Layout | None] = (),
    ) -> list[int]:
        """Store tensors behind their headers, in one batch; a number per key."""
        if len(keys) != len(tensors) or not len(keys):
            return [INVALID_PARAMS] * len(keys)
        parts = []
        for at, tensor in enumerate(tensors):
            try:
                layout, plain = describe(tensor)
            except TypeError as error:
                return [self._failed("put_tensor", error)] * len(keys)
            chosen = layouts[at] if layouts else None
            parts.append(((chosen or layout).pack(), plain))
        places = [address_of(part, writable=False) for pair in parts for part in pair]
        pieces = Pieces(
            [address or 1 for address, _ in places],
            [nbytes for _, nbytes in places],
            range(0, len(places) + 1, 2),
            keep=parts,
        )
        nbytes = int(pieces.totals.sum())
        return self._put("put_tensor", list(keys), pieces, nbytes, config, upsert=upsert)

    def _tensor_in(self, data: Any) -> Any:
        if data is None:
            return None
        try:
            return tensor_at(data)
        except ValueError as error:
            self._failed("get_tensor", error)
            return None

    def _tensors_at(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any] | None:
        """The tensors in registered buffers, each behind its header; None if one is none."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return None
        if not self._registry.covers(list(buffer_ptrs), list(sizes)).all():
            return None
        try:
            return [
                tensor_at(memory_at(address, size))
                for address, size in zip(buffer_ptrs, sizes, strict=True)
            ]
        except ValueError as error:
            self._failed("put_tensor_from", error)
            return None


def memory_at(address: int, nbytes: int) -> Any:
    """Registered memory as a buffer; its owner keeps it."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


def _rank_keys(keys: Sequence[str], rank: int, count: int) -> list[str]:
    return [f"{key}_tp_{rank}" for key in keys] if count > 1 else list(keys)


def _publishable(config: ReplicateConfig | None) -> bool:
    """Segments that are named must be as many as replicas."""
    if config is None or not config.preferred_segments:
        return True
    return len(config.preferred_segments) == config.replica_num
