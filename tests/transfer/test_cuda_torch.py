"""The CUDA device over torch, with torch's and the driver's calls recorded instead of made."""

import contextlib
import ctypes
import gc
import mmap
import threading

import pytest

from transfer_engine.devices import cuda
from transfer_engine.errors import TransferError
from transfer_engine.segments.mapping import Mapping

NO_CONTEXT = 201
CONTEXT = threading.local()
"""Of each thread: whether it called the runtime, which gives it what the driver's calls need."""


class Event:
    def __init__(self, calls):
        self.calls = calls

    def synchronize(self):
        self.calls.append(("synchronize",))


class Stream:
    cuda_stream = 0xBEEF

    def __init__(self, calls):
        self.calls = calls

    def record_event(self):
        self.calls.append(("record",))
        return Event(self.calls)

    def wait_event(self, event):
        assert isinstance(event, Event)
        self.calls.append(("wait",))

    def query(self):
        CONTEXT.here = True
        return True


class Runtime:
    """What `torch.cuda` and `torch.cuda.cudart()` are asked for."""

    def __init__(self, calls, refusal=0):
        self.calls, self.refusal = calls, refusal

    @contextlib.contextmanager
    def device(self, index):
        self.calls.append(("enter", index))
        yield
        self.calls.append(("leave", index))

    def current_stream(self):
        return Stream(self.calls)

    Stream = current_stream

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):
        self.calls.append(("register", address, size, flags))
        return self.refusal

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


class Driver:
    def __init__(self, calls, code=0):
        self.calls, self.code = calls, code

    def _called(self, *call):
        self.calls.append(call)
        return self.code if getattr(CONTEXT, "here", False) else NO_CONTEXT

    def cuMemcpyAsync(self, *arguments):
        return self._called("copy", *arguments)

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value = address - 64
        return self._called("range", address)

    def cuIpcGetMemHandle(self, handle, base):
        return self._called("lend", base)

    def cuIpcOpenMemHandle_v2(self, base, handle, flags):
        base._obj.value = 1 << 20
        return self._called("borrow")

    def cuIpcCloseMemHandle(self, base):
        return self._called("give back", base)

    def cuGetErrorName(self, code, name):
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def calls():
    return []


@pytest.fixture
def device(calls, monkeypatch):
    pytest.importorskip("torch")
    made = cuda.TorchDevice(1)
    made._cuda = Runtime(calls)
    monkeypatch.setattr(cuda, "_driver", lambda: Driver(calls))
    return made


def memory(*, writable=True):
    return Mapping(mmap.mmap(-1, 8192), writable=writable)


def test_copies_follow_the_fence_on_their_stream(device, calls):
    fence = device.fence()
    with device.queue() as queue:
        queue.after(fence)
        queue.copy(1, 2, 3)
        queue.mark().wait()
    assert calls == [
        ("enter", 1), ("record",), ("leave", 1),
        ("enter", 1), ("wait",), ("copy", 1, 2, 3, 0xBEEF), ("record",), ("synchronize",),
        ("leave", 1),
    ]  # fmt: skip


def test_memory_is_registered_once_and_until_it_goes(device, calls):
    mapping, read_only = memory(), memory(writable=False)
    address = mapping.address
    assert device.pin(mapping)
    assert device.pin(mapping)
    assert device.pin(read_only)
    registered = [call for call in calls if call[0] == "register"]
    assert registered == [
        ("register", address, 8192, 1), ("register", read_only.address, 8192, 9),
    ]  # fmt: skip
    del mapping
    gc.collect()
    assert calls[-1] == ("unregister", address)


def test_a_refused_registration_is_said_once_and_never_undone(device, calls, caplog):
    device._cuda.refusal = 2
    mapping = memory()
    assert not device.pin(mapping)
    assert not device.pin(mapping)
    assert len(caplog.records) == 1
    assert "CUDA error 2" in caplog.text
    del mapping
    gc.collect()
    assert not [call for call in calls if call[0] == "unregister"]


def test_a_failed_copy_names_the_device_and_the_error(device, calls, monkeypatch):
    monkeypatch.setattr(cuda, "_driver", lambda: Driver(calls, code=1))
    with (
        device.queue() as queue,
        pytest.raises(TransferError, match=r"cuda:1 refused: CUDA_ERROR_INVALID_VALUE \(1\)"),
    ):
        queue.copy(1, 2, 3)


def on_a_new_thread(run):
    """What `run` returns on a thread that never called CUDA."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(run()))
    thread.start()
    thread.join()
    return returned[0]


@pytest.fixture
def two_devices(device, monkeypatch):
    monkeypatch.setattr(cuda, "open_device", lambda index: device)
    monkeypatch.setattr(cuda, "_uuid", lambda index: bytes([index] * 16))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    return device


def test_memory_is_lent_mapped_and_given_back_on_threads_that_never_called_cuda(two_devices, calls):
    """A server's thread lends it, and whoever drops it last gives it back."""
    token = on_a_new_thread(lambda: two_devices.lend(4096, 100))
    held = [on_a_new_thread(lambda: cuda.borrow_memory(token))]
    assert (held[0].address, held[0].size) == ((1 << 20) + 64, 100)
    on_a_new_thread(held.clear)
    gc.collect()
    assert [call for call in calls if call[0] not in ("enter", "leave")] == [
        ("range", 4096), ("lend", 4032), ("borrow",), ("give back", 1 << 20),
    ]  # fmt: skip


def test_lent_memory_that_cannot_be_unmapped_is_told(two_devices, calls, monkeypatch, caplog):
    held = cuda.borrow_memory(two_devices.lend(4096, 100))
    monkeypatch.setattr(cuda, "_driver", lambda: Driver(calls, code=1))
    del held
    gc.collect()
    assert "cuda:1 cannot unmap lent memory (CUDA error 1)" in caplog.text


def test_a_thread_that_never_called_cuda_copies(device, calls):
    def run():
        with device.queue() as queue:
            queue.copy(1, 2, 3)
        return True

    assert on_a_new_thread(run)
