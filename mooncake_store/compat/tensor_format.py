"""A tensor as the original lays it out in an object: 304 bytes that describe it, then the elements.

    40 bytes    magic, version, header length, element type, dimensions, whether it is a shard,
                flags, where the elements start, how many bytes they are
    128 bytes   shape of the whole tensor and of what is stored, 8 dimensions each, -1 beyond
    136 bytes   up to 4 axes along which it was cut: kind, position, rank, size, dimension, ids

Callers put and get such buffers themselves, so the layout is part of the API. It is read with
limits and must agree with the size of its buffer; nothing in it is executed.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any

from mooncake_store.compat.values import ParallelAxis

__all__ = ["HEADER_BYTES", "Layout", "describe", "element_type", "parse"]

_MAGIC = 0x4D4F4F4E
_VERSION = 1
_DIMENSIONS = 8
_AXES = 4
_HEADER = struct.Struct("<IHHiiIIQQ8q8qII")
_AXIS = struct.Struct("<6iq")
HEADER_BYTES = _HEADER.size + _AXES * _AXIS.size
_KINDS = ("dp", "tp", "ep", "pp")
_TYPES = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


@functools.cache
def _torch_types() -> tuple[Any, ...]:
    import torch

    return tuple(getattr(torch, name, None) for name in _TYPES)


def element_type(number: int) -> Any:
    """The torch type of a number; raises ValueError where this torch has none."""
    found = _torch_types()[number] if 0 <= number < len(_TYPES) else None
    if found is None:
        raise ValueError(f"element type {number} is unknown")
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """What a header says. `axes` are empty for a whole tensor."""

    dtype: int
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[ParallelAxis, ...] = ()
    start: int = HEADER_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * int(element_type(self.dtype).itemsize)

    def pack(self) -> bytes:
        """The header."""
        head = _HEADER.pack(
            _MAGIC, _VERSION, HEADER_BYTES, self.dtype, len(self.shape), int(bool(self.axes)), 0,
            HEADER_BYTES, self.nbytes, *_padded(self.global_shape), *_padded(self.shape),
            len(self.axes), 0,
        )  # fmt: skip
        axes = b"".join(self._pack_axis(at, axis) for at, axis in enumerate(self.axes))
        return head + axes.ljust(_AXES * _AXIS.size, b"\0")

    def _pack_axis(self, at: int, axis: ParallelAxis) -> bytes:
        split = -1 if axis.split_dim is None else axis.split_dim
        extent = self.shape[split] if 0 <= split < len(self.shape) else 0
        number = axis.expert_id if axis.kind == "ep" else axis.stage_id
        kind = _KINDS.index(axis.kind)
        return _AXIS.pack(kind, at, axis.rank, axis.size, split, number or 0, extent)


def _padded(shape: tuple[int, ...]) -> list[int]:
    return [*shape, *[-1] * (_DIMENSIONS - len(shape))]


def describe(tensor: Any) -> tuple[Layout, Any]:
    """Return (layout, contiguous CPU tensor); raises TypeError for what is no plain tensor."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} is no torch tensor")
    types = _torch_types()
    if tensor.dtype not in types or tensor.ndim > _DIMENSIONS or tensor.layout != torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype} in {tensor.ndim} dimensions is not stored")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    shape = tuple(plain.shape)
    return Layout(types.index(tensor.dtype), shape, shape), plain


def parse(data: Any) -> Layout:
    """Read the header of a buffer; raises ValueError when it is none, or not of this buffer."""
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise ValueError(f"{len(view)} bytes are no tensor")
    fields = _HEADER.unpack_from(view)
    magic, version, head, dtype, ndim, cut, _, start, nbytes = fields[:9]
    if (magic, version, head) != (_MAGIC, _VERSION, HEADER_BYTES) or cut > 1:
        raise ValueError("it does not begin as a tensor does")
    count = fields[25]
    if not (0 <= ndim <= _DIMENSIONS and count <= _AXES and HEADER_BYTES <= start <= len(view)):
        raise ValueError("its header is out of bounds")
    whole, shape = (tuple(fields[at : at + ndim]) for at in (9, 17))
    if any(n < 0 for n in (*whole, *shape)):
        raise ValueError(f"its shape is {shape}")
    axes = tuple(
        _axis(_AXIS.unpack_from(view, _HEADER.size + at * _AXIS.size), ndim) for at in range(count)
    )
    layout = Layout(dtype, whole, shape, axes, start)
    if layout.nbytes != nbytes or start + nbytes != len(view):
        raise ValueError(f"{len(view)} bytes do not hold {shape}")
    return layout


def _axis(fields: tuple[int, ...], ndim: int) -> ParallelAxis:
    kind, _, rank, size, split, number, _ = fields
    if not (0 <= kind < len(_KINDS) and 0 <= rank < size and -1 <= split < ndim):
        raise ValueError("one of its axes is out of bounds")
    name = _KINDS[kind]
    return ParallelAxis(
        name,
        rank,
        size,
        split if split >= 0 else None,
        number if name == "ep" else None,
        number if name == "pp" else None,
    )
