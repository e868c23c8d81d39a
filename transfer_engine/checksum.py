"""Checksums of memory: of one range, of many, and of ranges while they are copied.

The checksum is XXH3-64 with seed 0: it runs at memory speed on one core, so it can be on by
default, and it is not a defence against an adversary. `kernels.xxh3` is imported when first used,
takes a whole batch in one call and releases the GIL; it gives the numbers of the `xxhash` package.

Ranges are (address, length) columns, because what is copied lives in registered segments that
have an address and no Python object per block. An address is only a number, so the rule is:
**whoever takes an address keeps the object that owns the memory alive, and does not resize,
unmap or free it, until the call that uses the address has returned.** Holding the buffer in a
local variable is enough; a bytearray must not be resized meanwhile.

Does not do: overlap checks (ranges that overlap a target are undefined, as with memcpy), device
memory, retries. Complexity: O(bytes), one pass over the memory also when copying.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64Column = NDArray[np.int64] | Sequence[int]

__all__ = [
    "BYTES_OFFSET",
    "address_of",
    "checksum_one",
    "checksum_ranges",
    "copy_one",
    "copy_ranges",
    "streams",
]


def _bytes_offset() -> int:
    probe = bytes(range(64))
    offset = bytes.__basicsize__ - 1
    found = int(np.frombuffer(probe, np.uint8).__array_interface__["data"][0])
    return offset if found == id(probe) + offset else 0


BYTES_OFFSET = _bytes_offset()
"""Where the content of a bytes object starts behind its `id`, or 0 if this interpreter does not
tell."""

# What is a part of the second-level cache of a core, and would push out what else is there.
_STREAM_BYTES_MIN = 256 << 10


def address_of(buffer: object, writable: bool) -> tuple[int, int]:
    """Address and size in bytes of a buffer's memory: the module docstring says how long it holds.

    Takes anything with the buffer protocol (bytes, bytearray, memoryview, mmap, ctypes, numpy)
    and torch CPU tensors. Refuses memory that is not C-contiguous, holds Python objects, or is
    read-only when `writable` is asked for.
    """
    if type(buffer) is bytes and BYTES_OFFSET and not writable:
        return id(buffer) + BYTES_OFFSET, len(buffer)
    if isinstance(buffer, np.ndarray):
        flags, nbytes = buffer.flags, buffer.nbytes
        contiguous, read_only = flags.c_contiguous, not flags.writeable
        holds_objects = buffer.dtype.hasobject
        if nbytes and contiguous and not (read_only or holds_objects):
            try:  # a fraction of the time that numpy takes to say it
                first = ctypes.c_char.from_buffer(buffer)  # type: ignore[arg-type]
                return ctypes.addressof(first), nbytes
            except ValueError:
                pass  # dates, and types of other packages, have no buffer
        address = int(buffer.__array_interface__["data"][0])
    elif hasattr(buffer, "data_ptr"):
        return _address_of_tensor(buffer)
    else:
        try:
            view = memoryview(buffer)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidArgumentError(
                f"a {type(buffer).__name__} has no memory to address",
                advice="pass bytes, a bytearray, a memoryview, a numpy array or a CPU tensor",
            ) from None
        contiguous, read_only, nbytes = view.c_contiguous, view.readonly, view.nbytes
        holds_objects = "O" in view.format
        address = 0
        if contiguous and not holds_objects:
            flat = np.frombuffer(view, dtype=np.uint8)
            address = int(flat.__array_interface__["data"][0])
    _require(contiguous, buffer, "is not C-contiguous: copy it first")
    _require(not holds_objects, buffer, "holds references to Python objects, not data")
    _require(not (writable and read_only), buffer, "is read-only")
    return address, nbytes


def _address_of_tensor(tensor: Any) -> tuple[int, int]:
    _require(tensor.device.type == "cpu", tensor, f"lives on device {tensor.device}, not the CPU")
    _require(
        str(tensor.layout) == "torch.strided" and tensor.is_contiguous(),
        tensor,
        "is not contiguous: call .contiguous() first",
    )
    # Such a view only marks its values as conjugated or negated; the memory holds other values.
    _require(
        not (tensor.is_conj() or tensor.is_neg()),
        tensor,
        "is a lazy conjugate or negative view: call .resolve_conj() or .resolve_neg() first",
    )
    return int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())


def _require(condition: bool, buffer: object, complaint: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"this {type(buffer).__name__} {complaint}")


_xxh3: Any = None
"""The kernels, once needed: to import them in each call would cost as much as a short checksum."""


def _kernels() -> Any:
    global _xxh3
    from transfer_engine.kernels import xxh3

    _xxh3 = xxh3
    return xxh3


def streams(total_bytes: int) -> int:
    """Whether a copy of this much should write past the caches, as the kernels take it."""
    return 1 if total_bytes >= _STREAM_BYTES_MIN else 0


def copy_one(source: int, target: int, nbytes: int) -> int:
    """Copy one range, hashed on the way, and return the XXH3-64 of what the target now holds.

    For loops around single objects: the numbers are not checked.
    """
    found: int = (_xxh3 or _kernels()).copy_one_xxh3_64(source, target, nbytes, streams(nbytes))
    return found


def copy_ranges(
    sources: NDArray[np.int64], targets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Copy ranges, and return the XXH3-64 of what each target now holds; nothing is checked."""
    out = np.empty(len(lengths), np.uint64)
    columns = map(np.ascontiguousarray, (sources, targets, lengths))
    (_xxh3 or _kernels()).copy_xxh3_64(*columns, out, streams(int(lengths.sum())))
    return out


def checksum_one(address: int, nbytes: int) -> int:
    """XXH3-64 of one range of memory; the numbers are not checked."""
    found: int = (_xxh3 or _kernels()).xxh3_64_one(address, nbytes)
    return found


def checksum_ranges(addresses: Int64Column, lengths: Int64Column) -> NDArray[np.uint64]:
    """XXH3-64 of each range of memory, in one call without the GIL."""
    from transfer_engine.kernels import xxh3

    # The kernel trusts every number it gets.
    where, sizes = _column("addresses", addresses), _column("lengths", lengths)
    if where.shape != sizes.shape:
        raise InvalidArgumentError(f"{where.size} addresses and {sizes.size} lengths")
    negative = np.flatnonzero(sizes < 0)
    if negative.size:
        at = int(negative[0])
        raise InvalidArgumentError(f"lengths[{at}] is {sizes[at]}, must not be negative")
    bad = np.flatnonzero((where <= 0) & (sizes > 0))
    if bad.size:
        raise InvalidArgumentError(f"addresses[{int(bad[0])}] is not an address")
    out = np.empty(sizes.size, dtype=np.uint64)
    xxh3.xxh3_64_ranges(where, sizes, np.uint64(0), out)
    return out


def _column(name: str, values: Int64Column) -> NDArray[np.int64]:
    column = np.asarray(values)
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"{name} must be one column of integers")
    return np.ascontiguousarray(column, dtype=np.int64)
