"""Accelerators for tests: a fake one in host memory, and the first CUDA device if there is one.

The fake executes nothing until somebody waits for it. A copy that nobody waited for has not
happened, a buffer that was reused too early delivers the wrong bytes, and work of the caller's
stream that nobody ordered before a copy comes too late: every missing synchronisation shows as a
wrong byte, in every run. Device memory may only be touched through the device; it counts what it
copies, so bytes that came another way are noticed.
"""

import contextlib
import mmap
import os
import threading
import weakref

import numpy as np

from transfer_engine.accelerators import BORROWERS
from transfer_engine.devices.devices import Device, DeviceMemory, Fence, Queue
from transfer_engine.staging import StagingPool

POISON = 0xDD


class FakeFence(Fence):
    def __init__(self, stream):
        self.stream, self.position = stream, stream.queued

    def wait(self):
        self.stream.run(self.position)


class FakeStream(Queue):
    def __init__(self, device):
        self.device = device
        self.operations = []
        self.lock = threading.RLock()
        self.queued = self.done = 0

    def put(self, operation):
        self.operations.append(operation)
        self.queued += 1

    def run(self, position):
        with self.lock:
            while self.done < position:
                self.done += 1
                self.operations.pop(0)()

    def after(self, fence):
        self.put(fence.wait)

    def copy(self, target, source, length):
        assert length > 0
        assert any(self.device.owns(address, length) for address in (target, source))
        self.put(lambda: self.device.execute(target, source, length))

    def mark(self):
        return FakeFence(self)


class FakeTensor:
    is_cuda = True

    def __init__(self, device, size):
        # Of a file without a name, so that it can be lent to another process.
        self.fd = os.memfd_create("fake-device")
        os.ftruncate(self.fd, size)
        self.device = device
        self.memory = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.memory[:] = POISON
        device.tensors.append(weakref.ref(self))
        self.address = self.memory.ctypes.data
        device.ranges.append((self.address, self.address + size))

    def device_memory(self):
        return DeviceMemory(self.device, self.address, self.memory.size, self)

    def __del__(self):
        os.close(self.fd)


class Borrowed:
    def __init__(self, memory):
        self.memory = memory


class FakeDevice(Device):
    location = "cuda:0"

    def __init__(self, piece_bytes=1 << 20, pieces_max=4):
        self.ranges = []
        self.tensors = []
        self.borrowed = weakref.WeakSet()
        self.current = FakeStream(self)
        self.copied = self.copies = 0
        self.pins = True
        self.pinned = weakref.WeakSet()
        self.pool = StagingPool(piece_bytes, pieces_max)

    def owns(self, address, length):
        return any(begin <= address and address + length <= end for begin, end in self.ranges)

    def execute(self, target, source, length):
        into, origin = (view(address, length) for address in (target, source))
        into[:] = origin
        self.copied += length
        self.copies += 1

    def fence(self):
        return FakeFence(self.current)

    @contextlib.contextmanager
    def queue(self):
        yield FakeStream(self)

    def pin(self, mapping):
        if self.pins:
            self.pinned.add(mapping)
        return self.pins

    def make(self, size):
        return FakeTensor(self, size)

    def lend(self, address, size):
        tensors = [tensor for tensor in (ref() for ref in self.tensors) if tensor is not None]
        (tensor,) = (tensor for tensor in tensors if tensor.address == address)
        return f"fake{os.getpid()}:{tensor.fd}:{size}".encode()

    def borrow(self, token):
        """Map what a fake device of another process lent."""
        pid, fd, size = map(int, token[4:].decode().split(":"))
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        address = memory.ctypes.data
        keep = Borrowed(memory)
        self.borrowed.add(keep)
        self.ranges.append((address, address + size))
        return DeviceMemory(self, address, size, keep)

    def understands_lent_memory(self):
        """Make this the device of the process that maps what others lend."""
        BORROWERS[b"fake"] = self.borrow

    def fill(self, tensor, data):
        """Queue a kernel that writes `data`, as a computation would."""
        data = data.copy()

        def kernel():
            tensor.memory[: data.size] = data

        self.current.put(kernel)

    def content(self, tensor):
        return tensor.memory.copy()


def view(address, length):
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class RealDevice:
    """The same helpers over the first CUDA device."""

    def __init__(self):
        import torch

        from transfer_engine.devices.cuda import open_device

        self.torch = torch
        self.device = open_device(0)
        self.pool = self.device.pool

    def make(self, size):
        return self.torch.full((size,), POISON, dtype=self.torch.uint8, device="cuda:0")

    def fill(self, tensor, data):
        torch = self.torch
        # Slow work first, so that a transfer that does not wait for it comes too early.
        big = torch.ones((4096, 4096), device="cuda:0")
        for _ in range(20):
            big = big @ big
            big = big / big.max()
        staged = torch.from_numpy(data.copy()).to("cuda:0", non_blocking=True)
        tensor[: data.size].copy_(staged + (big[0, 0] * 0).to(torch.uint8))

    def content(self, tensor):
        return tensor.cpu().numpy()
