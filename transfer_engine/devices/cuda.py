"""CUDA devices over torch: streams, events, pinning, and copies between any two addresses.

Torch gives contexts, streams and events, which is what other code of the process orders its work
with, and `cudart()` registers host memory. Copies go through the driver (`cuMemcpyAsync`), because
transfers name addresses and torch copies tensors; the driver library is there wherever CUDA works,
under one name, whatever runtime torch was built with.

Memory is lent to other processes by the driver's IPC handles. A handle names a whole allocation,
of which torch gives out parts, so the offset travels with it. Memory of torch's expandable segments
has no such handle and is refused by the driver.

Torch is imported when the first device is asked for. Streams are torch's own, from its pool.
Cost: about a call into the driver per copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import struct
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Any

from transfer_engine.devices.devices import (
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

    from transfer_engine.segments.mapping import Mapping

__all__ = ["TorchDevice", "borrow_memory", "locate_tensor", "open_device", "unavailable"]

_log = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1
_REGISTER_READ_ONLY = 8
_LAZY_PEER_ACCESS = 1
# What one process tells another: who reads it, the device's uuid, offset, size, and the handle.
_TOKEN = struct.Struct("<4s16sQQ64s")


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


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle: opaque, passed by value."""

    _fields_ = (("data", ctypes.c_ubyte * 64),)


@functools.cache
def _driver() -> ctypes.CDLL:
    """Load the driver and declare the functions that are used of it."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p,
    ]  # fmt: skip
    library.cuMemGetAddressRange_v2.argtypes = [
        ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64,
    ]  # fmt: skip
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_IpcHandle), ctypes.c_uint64]
    library.cuIpcOpenMemHandle_v2.argtypes = [
        ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint,
    ]  # fmt: skip
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
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
        # Memory that is not pinned works too, only slower: the driver stages it once more.
        self.pool = StagingPool(PIECE_BYTES, PIECES_MAX, prepare=self.pin)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it current for calls into the driver, which need a context on their thread.

        A thread has none before its first call into the runtime, and torch makes none where the
        device is the thread's already.
        """
        with self._cuda.device(self.index):
            self._cuda.current_stream().query()
            yield

    def fence(self) -> Fence:
        """Return the point behind what the current stream of this thread holds."""
        with self._cuda.device(self.index):
            return _TorchFence(self._cuda.current_stream().record_event())

    @contextlib.contextmanager
    def queue(self) -> Iterator[Queue]:
        """Lend a stream, with this device current meanwhile."""
        with self.current():
            yield _TorchQueue(self, self._cuda.Stream())

    def lend(self, address: int, size: int) -> bytes:
        """Return the IPC handle of the allocation that this memory is part of, and which part."""
        base, whole, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
        driver = _driver()
        with self.current():
            found = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(whole), address)
            _check(found, "lend", self.location)
            _check(
                driver.cuIpcGetMemHandle(ctypes.byref(handle), base.value), "lend", self.location
            )
        return _TOKEN.pack(b"cuda", _uuid(self.index), address - base.value, size, bytes(handle))

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


def _uuid(index: int) -> bytes:
    """Return the bytes that name a device on this host, whatever its number in a process is."""
    import torch

    return uuid.UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes


class _Opened:
    """An allocation of another process, mapped until nobody holds this."""

    def __init__(self, device: TorchDevice, handle: bytes) -> None:
        base = ctypes.c_uint64()
        with device.current():
            code = _driver().cuIpcOpenMemHandle_v2(
                ctypes.byref(base), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
            _check(code, "borrow", device.location)
        self.base = base.value
        undo = weakref.finalize(self, _give_back, device, self.base)
        undo.atexit = False  # the driver is taken down by then


def _give_back(device: TorchDevice, base: int) -> None:
    """Unmap what another process lent, on whichever thread it was last held."""
    with device.current():
        code = _driver().cuIpcCloseMemHandle(base)
    if code:
        _log.warning("%s cannot unmap lent memory (CUDA error %d)", device.location, code)


_opened: weakref.WeakValueDictionary[bytes, _Opened] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def borrow_memory(token: bytes) -> DeviceMemory:
    """Map memory that another process of this host lent.

    Raises InvalidArgumentError for nonsense, UnavailableError where its device is not seen here,
    TransferError when the driver refuses.
    """
    if len(token) != _TOKEN.size:
        raise InvalidArgumentError(f"{len(token)} bytes do not name lent device memory")
    _, name, offset, size, handle = _TOKEN.unpack(token)
    open_device(0)  # says why CUDA does not work, where it does not
    import torch

    found = [index for index in range(torch.cuda.device_count()) if _uuid(index) == name]
    if not found:
        raise UnavailableError(
            f"the memory is of device {uuid.UUID(bytes=name)}, which this process does not see",
            operation="borrow",
            advice="look at CUDA_VISIBLE_DEVICES",
        )
    device = open_device(found[0])
    with _opening:
        whole = _opened.get(handle)
        if whole is None:
            whole = _opened[handle] = _Opened(device, handle)
    return DeviceMemory(device, whole.base + offset, size, whole)


def locate_tensor(tensor: Any) -> DeviceMemory:
    """Return where the bytes of a CUDA tensor lie. Raises InvalidArgumentError for strided ones."""
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            "this tensor is not contiguous: its bytes are not one range",
            advice="call .contiguous() and keep the result",
        )
    size = int(tensor.numel() * tensor.element_size())
    return DeviceMemory(open_device(tensor.device.index), int(tensor.data_ptr()), size, tensor)
