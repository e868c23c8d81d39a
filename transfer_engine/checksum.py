"""Checksums of memory: of one buffer, of many ranges, and of ranges while they are copied.

The checksum is XXH3-64 with seed 0: it runs at memory speed on one core, so it can be on by
default, and it is not a defence against an adversary. One buffer goes through the `xxhash`
package (no kernel to load); batches go through `_kernels_xxh3`, which is imported when first
used, takes the whole batch in one call and releases the GIL. Both give the same numbers.

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
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64Column = NDArray[np.int64] | Sequence[int]

__all__ = [
    "SHARE_BYTES_MIN",
    "address_of",
    "checksum",
    "checksum_one",
    "checksum_ranges",
    "copy_one",
    "copy_with_checksum",
    "streams",
]

# What is a part of the second-level cache of a core, and would push out what else is there.
_STREAM_BYTES_MIN = 256 << 10
# A thread costs about 0.1 ms to start and join; below this share it eats most of what it saves.
SHARE_BYTES_MIN = 4 << 20


def address_of(buffer: object, writable: bool) -> tuple[int, int]:
    """Address and size in bytes of a buffer's memory: the module docstring says how long it holds.

    Takes anything with the buffer protocol (bytes, bytearray, memoryview, mmap, ctypes, numpy)
    and torch CPU tensors. Refuses memory that is not C-contiguous, holds Python objects, or is
    read-only when `writable` is asked for.
    """
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


def streams(total_bytes: int) -> int:
    """Whether a copy of this much should write past the caches, as the kernels take it."""
    return 1 if total_bytes >= _STREAM_BYTES_MIN else 0


def checksum(buffer: object) -> int:
    """XXH3-64 of a buffer's bytes, as an unsigned 64-bit number."""
    address, nbytes = address_of(buffer, writable=False)
    if nbytes == 0:
        return int(xxhash.xxh3_64_intdigest(b""))
    return int(xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address)))


def copy_one(source: int, target: int, nbytes: int) -> int:
    """Copy one range, hashed on the way, and return the XXH3-64 of what the target now holds.

    For loops around single objects: the numbers are not checked.
    """
    from transfer_engine import _kernels_xxh3

    found: int = _kernels_xxh3.copy_one_xxh3_64(source, target, nbytes, streams(nbytes))
    return found


def checksum_one(address: int, nbytes: int) -> int:
    """XXH3-64 of one range of memory; the numbers are not checked."""
    from transfer_engine import _kernels_xxh3

    found: int = _kernels_xxh3.xxh3_64_one(address, nbytes)
    return found


def checksum_ranges(addresses: Int64Column, lengths: Int64Column) -> NDArray[np.uint64]:
    """XXH3-64 of each range of memory, in one call without the GIL."""
    from transfer_engine import _kernels_xxh3

    (address_column,), length_column = _columns({"addresses": addresses}, lengths)
    out = np.empty(length_column.shape[0], dtype=np.uint64)
    _kernels_xxh3.xxh3_64_ranges(address_column, length_column, np.uint64(0), out)
    return out


def copy_with_checksum(
    sources: Int64Column, targets: Int64Column, lengths: Int64Column, threads: int = 1
) -> NDArray[np.uint64]:
    """Copy each source range to its target and return the XXH3-64 of what each target now holds.

    The bytes are hashed as they pass through the registers on their way to the target. With
    `threads` > 1 the batch is cut into contiguous runs of about equal bytes, one a thread, the
    caller's among them; never into shares under SHARE_BYTES_MIN. One range is never cut.
    """
    from transfer_engine import _kernels_xxh3

    if threads < 1:
        raise InvalidArgumentError(f"threads must be at least 1, not {threads}")
    (source_column, target_column), length_column = _columns(
        {"sources": sources, "targets": targets}, lengths
    )
    out = np.empty(length_column.shape[0], dtype=np.uint64)
    streaming = streams(int(length_column.sum()))

    def copy(begin: int, end: int) -> None:
        run = slice(begin, end)
        _kernels_xxh3.copy_xxh3_64(
            source_column[run], target_column[run], length_column[run], out[run], streaming
        )

    cuts = _cuts(length_column, threads) if threads > 1 else [0, out.shape[0]]
    own_run, *other_runs = pairwise(cuts)
    helpers = [
        threading.Thread(target=copy, args=run, name="copy-with-checksum") for run in other_runs
    ]
    for helper in helpers:
        helper.start()
    copy(*own_run)
    for helper in helpers:
        helper.join()
    return out


def _cuts(lengths: NDArray[np.int64], threads: int) -> list[int]:
    """Where to cut a batch so that each run holds about the same number of bytes."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    shares = max(1, min(threads, total // SHARE_BYTES_MIN))
    wanted = [total * share // shares for share in range(1, shares)]
    inner = np.searchsorted(ends, wanted, side="left") + 1
    return [0, *np.minimum(inner, lengths.shape[0]).tolist(), lengths.shape[0]]


def _columns(
    addresses: dict[str, Int64Column], lengths: Int64Column
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Check and convert the columns: the kernels trust every number they get."""
    length_column = _column("lengths", lengths)
    negative = np.flatnonzero(length_column < 0)
    if negative.size:
        at = int(negative[0])
        raise InvalidArgumentError(f"lengths[{at}] is {length_column[at]}, must not be negative")
    columns = []
    for name, values in addresses.items():
        column = _column(name, values)
        if column.shape != length_column.shape:
            raise InvalidArgumentError(
                f"{name} has {column.shape[0]} entries but lengths has {length_column.shape[0]}"
            )
        bad = np.flatnonzero((column <= 0) & (length_column > 0))
        if bad.size:
            raise InvalidArgumentError(f"{name}[{int(bad[0])}] is not an address")
        columns.append(column)
    return columns, length_column


def _column(name: str, values: Int64Column) -> NDArray[np.int64]:
    column = np.asarray(values)
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"{name} must be one column of integers")
    return np.ascontiguousarray(column, dtype=np.int64)
