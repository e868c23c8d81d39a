"""Tensors and arrays as objects: a small header that says what follows, then the elements.

    8 bytes    magic and the length of the header
    header     MessagePack: format version, kind ("torch" or "numpy"), dtype, shape, and how the
               elements are kept where that is not as they are ("fp8", see `narrow`); nothing else
    padding    up to a multiple of 64, so that the elements are aligned in every replica
    elements   C order, little-endian

Nothing in it is executed: no pickle, no names of classes. A header is read with limits (64
dimensions, 2**48 bytes), and it must agree with the size of the object, so an object that is no
tensor, or that claims to be a larger one, is an InvalidArgumentError.

torch is imported when a torch tensor is read or written. Quantised, sparse, complex-conjugate and
device tensors are refused: move them to the CPU first.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mooncake_store.client import narrow
from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["decode_array", "decode_tensor", "describe_array", "describe_tensor"]

_MAGIC = b"MKTN"
_PREFIX = struct.Struct("<4sI")
_ALIGN = 64
_VERSION, _NARROW_VERSION = 1, 2
_HEADER_BYTES_MAX = 4096
_DIMENSIONS_MAX = 64
_BYTES_MAX = 1 << 48
_NUMPY_KINDS = ("b", "i", "u", "f", "c")
_TORCH_TYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    version: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    kept: str = ""


_decoder = msgspec.msgpack.Decoder(_Header)


def _pack(kind: str, dtype: str, shape: tuple[int, ...], kept: str = "") -> bytes:
    version = _NARROW_VERSION if kept else _VERSION
    header = msgspec.msgpack.encode(_Header(version, kind, dtype, shape, kept))
    length = _PREFIX.size + len(header)
    padding = -length % _ALIGN
    return _PREFIX.pack(_MAGIC, len(header) + padding) + header + bytes(padding)


def describe_array(array: NDArray[Any]) -> tuple[bytes, NDArray[Any]]:
    """Return (header, contiguous elements) of a numpy array of numbers."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise InvalidArgumentError(f"a {type(array).__name__} is no numpy array")
    if array.dtype.kind not in _NUMPY_KINDS or array.dtype.hasobject:
        raise InvalidArgumentError(f"arrays of {array.dtype} are not stored, only of numbers")
    contiguous = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return _pack("numpy", contiguous.dtype.str, array.shape), contiguous


def describe_tensor(tensor: Any, *, fp8: bool = False) -> tuple[bytes, Any]:
    """Return (header, contiguous elements) of a CPU tensor; with fp8 what `narrow` makes of it."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(
            f"a {type(tensor).__name__} is no torch tensor", advice="put_array takes numpy arrays"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or dtype not in _TORCH_TYPES:
        raise InvalidArgumentError(
            f"a tensor of {tensor.dtype} on {tensor.device} ({tensor.layout}) is not stored",
            advice="pass a dense tensor of numbers on the CPU",
        )
    if sys.byteorder != "little":
        raise InvalidArgumentError("tensors are stored by little-endian machines only")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not fp8:
        return _pack("torch", dtype, tuple(plain.shape)), plain
    if dtype not in narrow.TYPES:
        raise InvalidArgumentError(
            f"a tensor of {tensor.dtype} is not kept as fp8",
            advice=f"fp8 is for {', '.join(narrow.TYPES)}",
        )
    return _pack("torch", dtype, tuple(plain.shape), "fp8"), narrow.narrow(plain)


def _unpack(data: NDArray[np.uint8], kind: str, item_bytes: Any) -> tuple[_Header, int]:
    """Check a header against its object; return it and where the elements start."""
    try:
        magic, length = _PREFIX.unpack_from(data[: _PREFIX.size].tobytes())
        if magic != _MAGIC or not 0 < length <= _HEADER_BYTES_MAX:
            raise InvalidArgumentError("it does not begin as one")
        text = data[_PREFIX.size : _PREFIX.size + length].tobytes().rstrip(b"\0")
        header = _decoder.decode(text)
        if (header.version, header.kept) not in ((_VERSION, ""), (_NARROW_VERSION, "fp8")):
            raise InvalidArgumentError(
                f"its format is version {header.version}{header.kept[:20] and ', '}"
                f"{header.kept[:20]}, this reads versions {_VERSION} and {_NARROW_VERSION}"
            )
        if header.kind != kind:
            raise InvalidArgumentError(f"it holds a {header.kind} value", advice=_OTHER[kind])
        if len(header.shape) > _DIMENSIONS_MAX or any(n < 0 for n in header.shape):
            raise InvalidArgumentError(f"its shape is {header.shape}")
        start = _PREFIX.size + length
        nbytes = math.prod(header.shape) * item_bytes(header.dtype)
        if header.kept:
            if header.dtype not in narrow.TYPES:
                raise InvalidArgumentError(f"{header.dtype} in fp8")
            nbytes = narrow.narrow_bytes(math.prod(header.shape))
        if nbytes > _BYTES_MAX or start + nbytes != data.size:
            raise InvalidArgumentError(f"{data.size} bytes do not hold {header.shape}")
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the object is no tensor: {error}") from error
    except InvalidArgumentError as error:
        error.what = f"the object is no tensor: {error.what}"
        raise
    return header, start


_OTHER = {"torch": "read it with get_array", "numpy": "read it with get_tensor"}


def decode_array(data: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the array in an object's bytes, without a copy; raises InvalidArgumentError."""
    header, start = _unpack(data, "numpy", lambda name: _numpy_type(name).itemsize)
    return data[start:].view(_numpy_type(header.dtype)).reshape(header.shape)


def _numpy_type(name: str) -> np.dtype[Any]:
    # The text form of a plain type ("<f4") and nothing that numpy's parser could make of more.
    plain = name[:1] in ("<", "|") and name[1:2] in _NUMPY_KINDS and name[2:].isdigit()
    if not plain or len(name) > 5:
        raise InvalidArgumentError(f"its element type is {name[:20]!r}")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise InvalidArgumentError(f"its element type is {name!r}") from error


def decode_tensor(data: NDArray[np.uint8]) -> Any:
    """Return the torch tensor in an object's bytes, without a copy unless that is fp8."""
    import torch

    def item_bytes(name: str) -> int:
        if name not in _TORCH_TYPES or not hasattr(torch, name):
            raise InvalidArgumentError(f"its element type is {name[:20]!r}")
        return int(getattr(torch, name).itemsize)

    header, start = _unpack(data, "torch", item_bytes)
    if header.kept:
        return narrow.widen(data[start:], header.shape, header.dtype)
    if start == data.size:
        return torch.empty(header.shape, dtype=getattr(torch, header.dtype))
    flat = torch.from_numpy(data[start:])
    return flat.view(getattr(torch, header.dtype)).reshape(header.shape)
