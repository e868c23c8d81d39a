"""Calls with torch tensors: whole ones, and ones cut for tensor parallelism (`key_tp_<rank>`).

A tensor is written from where it lies behind a header (`tensor_format`), in one request for a
batch, and read into memory the returned tensor then owns. torch is imported when first needed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_store.client import Pieces
from mooncake_store.compat import tensor_format
from mooncake_store.compat._bytes import BytesCalls
from mooncake_store.compat._codes import INVALID_PARAMS, OK, log
from mooncake_store.compat._pointers import PointerCalls
from mooncake_store.compat.tensor_format import HEADER_BYTES, Layout
from mooncake_store.errors import StoreError
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.compat.values import ReplicateConfig

__all__ = ["TensorCalls", "deserialize", "serialize", "shards_of", "tensor_at"]


def tensor_at(data: Any) -> Any:
    """The tensor in a buffer that begins with its header, sharing its memory; raises ValueError."""
    import torch

    layout = tensor_format.parse(data)
    dtype = tensor_format.element_type(layout.dtype)
    if not layout.nbytes:
        return torch.empty(layout.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, offset=layout.start, count=layout.nbytes)
    return flat.view(dtype).reshape(layout.shape)


def serialize(tensor: Any) -> tuple[bytes, int, int, Any]:
    """Return (header, address, bytes, what owns the memory) of a tensor."""
    layout, plain = tensor_format.describe(tensor)
    address, nbytes = address_of(plain, writable=False)
    return layout.pack(), address, nbytes, plain


def deserialize(data: bytes) -> Any:
    """Return the tensor in the bytes of an object; None when it is none."""
    try:
        return tensor_at(bytearray(data))
    except ValueError:
        return None


def shards_of(tensor: Any, count: int, dim: int) -> list[Any]:
    """Cut a tensor into `count` parts along a dimension; the last ones may be smaller, or empty."""
    parts = list(tensor.chunk(count, dim))
    empty = tensor.narrow(dim, 0, 0)
    return [*parts, *[empty] * (count - len(parts))]


class TensorCalls(PointerCalls, BytesCalls):
    """Tensors."""

    # -- whole tensors

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Store a tensor."""
        return self._put_tensors([key], [tensor], None)[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """Store tensors; a number per key."""
        return self._put_tensors(keys, tensors_list, None)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """Store a tensor with a configuration."""
        return self.batch_pub_tensor([key], [tensor], config)[0]

    def batch_pub_tensor(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store tensors with a configuration; its segments must be as many as its replicas."""
        if not _publishable(config):
            return [INVALID_PARAMS] * len(keys)
        return self._put_tensors(keys, tensors_list, config)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """Store a tensor in place of what the key named."""
        return self._put_tensors([key], [tensor], None, upsert=True)[0]

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """Upsert tensors; a number per key."""
        return self._put_tensors(keys, tensors_list, None, upsert=True)

    def upsert_pub_tensor(
        self, key: str, tensor: Any, config: ReplicateConfig | None = None
    ) -> int:
        """Upsert a tensor with a configuration."""
        return self.batch_upsert_pub_tensor([key], [tensor], config)[0]

    def batch_upsert_pub_tensor(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Upsert tensors with a configuration; a number per key."""
        if not _publishable(config):
            return [INVALID_PARAMS] * len(keys)
        return self._put_tensors(keys, tensors_list, config, upsert=True)

    def get_tensor(self, key: str) -> Any:
        """Return a tensor; None if there is none, or it is no tensor."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """Return tensors, None where there is none."""
        return [self._tensor_in(handle) for handle in self.batch_get_buffer(keys)]

    # -- buffers of the caller that hold a header and its tensor

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store a serialized tensor from registered memory."""
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Store serialized tensors from registered memory; a number per key."""
        if not self._hold_tensors(keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(keys)
        return self.batch_put_from(keys, buffer_ptrs, sizes)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Upsert a serialized tensor from registered memory."""
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Upsert serialized tensors from registered memory; a number per key."""
        if not self._hold_tensors(keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(keys)
        return self.batch_upsert_from(keys, buffer_ptrs, sizes)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """Read a tensor into registered memory; the tensor returned lies there. None otherwise."""
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """Read tensors into registered memory; None where there is none.

        Lists of different lengths are refused with a number per key, as by the original.
        """
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        found = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [
            self._tensor_in(_memory(address, nbytes)) if nbytes > 0 else None
            for address, nbytes in zip(buffer_ptrs, found, strict=True)
        ]

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Read a tensor into one of the same size on any device; its bytes, or negative."""
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    def batch_get_tensor_into_cuda(
        self, keys: Sequence[str], tensors_list: Sequence[Any]
    ) -> list[int]:
        """The same of a batch; bytes copied, or a negative number, per key."""
        out = []
        for found, target in zip(self.batch_get_tensor(keys), tensors_list, strict=True):
            if found is None or found.numel() != target.numel() or found.dtype != target.dtype:
                out.append(INVALID_PARAMS)
                continue
            target.copy_(found.reshape(target.shape))
            out.append(found.numel() * found.element_size())
        return out

    # -- cut for tensor parallelism, a key for each rank

    def put_tensor_with_tp(
        self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Cut a tensor and store the parts of all ranks."""
        return self.batch_put_tensor_with_tp([key], [tensor], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Cut tensors and store all parts; a number per tensor."""
        return self._put_cut(base_keys, tensors_list, None, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Cut a tensor and store the parts of all ranks with a configuration."""
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[
            0
        ]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Cut tensors and store all parts with a configuration; a number per tensor."""
        if not _publishable(config):
            return [INVALID_PARAMS] * len(base_keys)
        return self._put_cut(base_keys, tensors_list, config, tp_size, split_dim)

    def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Cut a serialized tensor in registered memory and store the parts of all ranks."""
        return self.batch_put_tensor_with_tp_from(
            [key], [buffer_ptr], [size], tp_rank, tp_size, split_dim
        )[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """The same of a batch; a number per tensor."""
        if not self._hold_tensors(base_keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(base_keys)
        places = zip(buffer_ptrs, sizes, strict=True)
        tensors = [tensor_at(_memory(address, size)) for address, size in places]
        return self._put_cut(base_keys, tensors, None, tp_size, split_dim)

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """Return the part of a rank, or None."""
        return self.batch_get_tensor_with_tp([key], tp_rank, tp_size)[0]

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        """Return the parts of a rank, None where there is none."""
        return self.batch_get_tensor(_rank_keys(base_keys, tp_rank, tp_size))

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

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        """The same of a batch."""
        keys = _rank_keys(base_keys, tp_rank, tp_size)
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

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
                layout, plain = tensor_format.describe(tensor)
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
        try:
            self._require_local_buffer()
            options = self._options(config, len(keys), int(pieces.totals.sum()), upsert=upsert)
            return self._tell("put_tensor", self._put(list(keys), pieces, options))
        except StoreError as error:
            return [self._failed("put_tensor", error)] * len(keys)

    def _put_cut(
        self,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None,
        count: int,
        dim: int,
    ) -> list[int]:
        if count <= 1:
            return self._put_tensors(keys, tensors, config)
        if len(keys) != len(tensors):
            return [INVALID_PARAMS] * len(keys)
        try:
            parts = [part for tensor in tensors for part in shards_of(tensor, count, dim)]
        except (AttributeError, IndexError, RuntimeError) as error:
            return [self._failed("put_tensor_with_tp", error)] * len(keys)
        names = [f"{key}_tp_{rank}" for key in keys for rank in range(count)]
        numbers = self._put_tensors(names, parts, config)
        groups = [numbers[at : at + count] for at in range(0, len(numbers), count)]
        return [next((number for number in group if number), OK) for group in groups]

    def _tensor_in(self, data: Any) -> Any:
        if data is None:
            return None
        try:
            return tensor_at(data)
        except ValueError as error:
            self._failed("get_tensor", error)
            return None

    def _hold_tensors(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> bool:
        """Whether registered buffers hold a header and its tensor each."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return False
        if any(size < HEADER_BYTES for size in sizes):
            return False
        if not self._registry.covers(list(buffer_ptrs), list(sizes)).all():
            return False
        try:
            for address, size in zip(buffer_ptrs, sizes, strict=True):
                tensor_format.parse(_memory(address, size))
        except ValueError as error:
            self._failed("put_tensor_from", error)
            return False
        return True


def _memory(address: int, nbytes: int) -> Any:
    """Registered memory as a buffer; its owner keeps it."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


def _rank_keys(keys: Sequence[str], rank: int, count: int) -> list[str]:
    return [f"{key}_tp_{rank}" for key in keys] if count > 1 else list(keys)


def _publishable(config: ReplicateConfig | None) -> bool:
    """Segments that are named must be as many as replicas."""
    if config is None or not config.preferred_segments:
        return True
    return len(config.preferred_segments) == config.replica_num
