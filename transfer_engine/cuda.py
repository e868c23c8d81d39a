"""CUDA devices over torch: streams, events, pinning, and copies between any two addresses.

Torch gives contexts, streams and events, which is what other code of the process orders its work
with, and `cudart()` registers host memory. Copies go through the driver (`cuMemcpyAsync`), because
transfers name addresses and torch copies tensors; the driver library is there wherever CUDA works,
under one name, whatever runtime torch was built with.

Torch is imported when the first device is asked for. Streams are torch's own, from its pool.
Cost: about a call into the driver per copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from transfer_engine.devices import (
    PIECE_BYTES,
    PIECES_MAX,
    Device,
    DeviceMemory,
    Fence,
    Queue,
)
from transfer_engine.errors import InvalidArgumentError, TransferError, UnavailableError
from transfer_engine.staging import StagingPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transfer_engine.memory import Mapping

__all__ = ["TorchDevice", "locate_tensor", "open_device", "unavailable"]

_log = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1
_REGISTER_READ_ONLY = 8


def unavailable() -> str | None:
    """Return why CUDA cannot be used in this process, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.version.cuda:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


@functools.cache
def _driver() -> ctypes.CDLL:
    """Load the driver and declare the functions that are used of it."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p,
    ]  # fmt: skip
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _check(code: int, operation: str, location: str) -> None:
    if code == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    raise TransferError(
        f"{location} refused: {(name.value or b'an unknown error').decode()} ({code})",
        operation=operation,
        peer=location,
    )


class _TorchFence(Fence):
    """A recorded event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class _TorchQueue(Queue):
    """A stream of torch, with its device current on this thread."""

    def __init__(self, device: TorchDevice, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._handle = int(stream.cuda_stream)

    def after(self, fence: Fence) -> None:
        assert isinstance(fence, _TorchFence)
        self._stream.wait_event(fence.event)

    def copy(self, target: int, source: int, length: int) -> None:
        code = _driver().cuMemcpyAsync(target, source, length, self._handle)
        _check(code, "copy", self._device.location)

    def mark(self) -> Fence:
        return _TorchFence(self._stream.record_event())


class TorchDevice(Device):
    """A CUDA device that torch sees; `open_device` returns the one object for each."""

    def __init__(self, index: int) -> None:
        import torch

        self.index = index
        self.location = f"cuda:{index}"
        self._cuda: Any = torch.cuda
        self._lock = threading.Lock()
        # Registered mappings, and those that could not be: asked for once.
        self._pinned: weakref.WeakKeyDictionary[Mapping, bool] = weakref.WeakKeyDictionary()
        self._pool = StagingPool(PIECE_BYTES, PIECES_MAX, prepare=self._prepare)

    @property
    def pool(self) -> StagingPool:
        """Return the pinned memory that transfers pass through."""
        return self._pool

    def fence(self) -> Fence:
        """Return the point behind what the current stream of this thread holds."""
        with self._cuda.device(self.index):
            return _TorchFence(self._cuda.current_stream().record_event())

    @contextlib.contextmanager
    def queue(self) -> Iterator[Queue]:
        """Lend a stream, with this device current meanwhile."""
        with self._cuda.device(self.index):
            yield _TorchQueue(self, self._cuda.Stream())

    def _prepare(self, piece: Mapping) -> None:
        # Memory that is not pinned works too, only slower: the driver stages it once more.
        self.pin(piece)

    def pin(self, mapping: Mapping) -> bool:
        """Register host memory with CUDA until `mapping` is gone. Refusals are logged once."""
        with self._lock:
            known = self._pinned.get(mapping)
            if known is not None:
                return known
            flags = _REGISTER_PORTABLE | (0 if mapping.writable else _REGISTER_READ_ONLY)
            with self._cuda.device(self.index):
                code = int(
                    self._cuda.cudart().cudaHostRegister(mapping.address, mapping.bytes, flags)
                )
            self._pinned[mapping] = code == 0
            if code == 0:
                undo = weakref.finalize(
                    mapping, self._cuda.cudart().cudaHostUnregister, mapping.address
                )
                undo.atexit = False  # the driver is taken down by then
            else:
                _log.warning(
                    "%s cannot register %d bytes of host memory (CUDA error %d): "
                    "copies pass through staging memory",
                    self.location, mapping.bytes, code,
                )  # fmt: skip
            return code == 0


@functools.cache
def open_device(index: int) -> TorchDevice:
    """Return the device of this number. Raises UnavailableError where CUDA does not work."""
    why = unavailable()
    if why is not None:
        raise UnavailableError(f"no CUDA device: {why}", operation="open", advice="see nvidia-smi")
    return TorchDevice(index)


def locate_tensor(tensor: Any) -> DeviceMemory:
    """Return where the bytes of a CUDA tensor lie. Raises InvalidArgumentError for strided ones."""
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            "this tensor is not contiguous: its bytes are not one range",
            advice="call .contiguous() and keep the result",
        )
    size = int(tensor.numel() * tensor.element_size())
    return DeviceMemory(open_device(tensor.device.index), int(tensor.data_ptr()), size, tensor)
