"""The engine by addresses: what is registered moves, nothing else does."""

import ctypes
import json

import pytest

from mooncake_store.compat.engine import TransferEngine, TransferNotify, TransferOpcode

SCRIPT = """
import ctypes, sys
from mooncake_store.compat.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
plain = (ctypes.c_ubyte * 4096)(*range(200))
assert engine.register_memory(ctypes.addressof(plain), 4096) == 0
shared = engine.allocate_managed_buffer(8192)
engine.write_bytes_to_buffer(shared, b"shared", 6)
print("at", engine.get_rpc_port(), ctypes.addressof(plain), shared, flush=True)
while not (notes := engine.get_notifies()):
    pass
print("noted", [(note.name, note.msg) for note in notes], bytes(plain[:6]), flush=True)
sys.stdin.read()
"""


class Memory:
    def __init__(self, engine, nbytes):
        self.array = (ctypes.c_ubyte * nbytes)()
        self.ptr = ctypes.addressof(self.array)
        assert engine.register_memory(self.ptr, nbytes) == 0

    def __getitem__(self, where):
        return bytes(self.array[where])


@pytest.fixture
def make():
    made = []

    def start():
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        made.append(engine)
        return engine, f"127.0.0.1:{engine.get_rpc_port()}"

    yield start
    for engine in made:
        engine.close()


@pytest.fixture
def pair(make):
    (one, _), (other, name) = make(), make()
    return one, Memory(one, 4096), other, name, Memory(other, 4096)


def test_writes_and_reads(pair):
    one, mine, _, name, theirs = pair
    ctypes.memmove(mine.ptr, b"0123456789", 10)
    assert one.transfer_sync_write(name, mine.ptr, theirs.ptr + 100, 10) == 0
    assert theirs[100:110] == b"0123456789"
    assert one.transfer_sync_read(name, mine.ptr + 50, theirs.ptr + 102, 3) == 0
    assert mine[50:53] == b"234"
    assert one.transfer_sync(name, mine.ptr, theirs.ptr, 2, TransferOpcode.Write) == 0
    assert theirs[0:2] == b"01"
    assert one.get_first_buffer_address(name) == theirs.ptr


def test_batches_over_several_regions(pair):
    one, mine, other, name, theirs = pair
    more = Memory(other, 4096)
    ctypes.memmove(mine.ptr, b"abcdef", 6)
    source = [mine.ptr, mine.ptr + 2, mine.ptr + 4]
    target = [theirs.ptr, more.ptr + 10, theirs.ptr + 20]
    assert one.batch_transfer_sync_write(name, source, target, [2, 2, 2]) == 0
    assert (theirs[0:2], more[10:12], theirs[20:22]) == (b"ab", b"cd", b"ef")
    back = [mine.ptr + 100, mine.ptr + 200, mine.ptr + 300]
    assert one.batch_transfer_sync_read(name, back, target, [2, 2, 2]) == 0
    assert mine[200:202] == b"cd"
    assert one.batch_transfer_sync_write(name, source, target, [2, 2]) == -1
    assert one.batch_transfer_sync_write(name, [], [], []) == 0


def test_what_is_not_registered_is_refused_on_both_sides(pair):
    one, mine, other, name, theirs = pair
    stray = (ctypes.c_ubyte * 16)()
    address = ctypes.addressof(stray)
    assert one.transfer_sync_write(name, address, theirs.ptr, 16) == -1
    assert one.transfer_sync_write(name, mine.ptr, address, 16) == -1
    assert one.transfer_sync_write(name, mine.ptr, theirs.ptr + 4090, 10) == -1
    assert other.unregister_memory(theirs.ptr) == 0
    assert other.unregister_memory(theirs.ptr) == -1
    assert one.transfer_sync_write(name, mine.ptr, theirs.ptr, 1) == -1
    assert other.register_memory(theirs.ptr, 4096) == 0
    assert one.transfer_sync_write(name, mine.ptr, theirs.ptr, 1) == 0
    assert one.register_memory(1, 10) == -1
    assert one.register_memory(mine.ptr, 10) == -1


def test_asynchronous_transfers(pair):
    one, mine, _, name, theirs = pair
    ctypes.memmove(mine.ptr, b"0123456789", 10)
    batch = one.batch_transfer_async_write(name, [mine.ptr], [theirs.ptr], [10])
    assert batch > 0
    assert one.get_batch_transfer_status([batch]) == 0
    assert theirs[0:10] == b"0123456789"
    assert one.get_batch_transfer_status([batch]) == -1  # asked for already
    single = one.transfer_submit_write(name, mine.ptr, theirs.ptr + 20, 10)
    while (status := one.transfer_check_status(single)) == 0:
        pass
    assert status == 1
    read = one.batch_transfer_async(name, [mine.ptr], [theirs.ptr], [4], TransferOpcode.Read)
    assert one.get_batch_transfer_status([read]) == 0
    assert one.transfer_check_status(12345) == -1
    assert one.batch_transfer_async_read("127.0.0.1:1", [mine.ptr], [theirs.ptr], [10]) == 0


def test_another_process(make, start_program):
    program = start_program("-c", SCRIPT)
    port, plain, shared = map(int, program.wait_for_line("at ").split()[1:])
    engine, _ = make()
    mine, name = Memory(engine, 4096), f"127.0.0.1:{port}"
    assert engine.transfer_sync_read(name, mine.ptr, plain, 200) == 0
    assert mine[0:200] == bytes(range(200))
    assert engine.transfer_sync_read(name, mine.ptr, shared, 6) == 0
    assert mine[0:6] == b"shared"
    note = TransferNotify("done", "chunk 1")
    assert engine.send_probe(name) == 0
    assert engine.transfer_sync(name, mine.ptr, plain, 6, TransferOpcode.Write, note) == 0
    line = program.wait_for_line("noted")
    assert "('done', 'chunk 1')" in line
    assert "b'shared'" in line
    program.kill()
    assert engine.send_probe(name) != 0
    assert engine.transfer_sync_write(name, mine.ptr, plain, 6) == -1


def test_managed_buffers(make):
    engine, _ = make()
    address = engine.allocate_managed_buffer(4096)
    assert address
    assert engine.write_bytes_to_buffer(address, b"hello", 5) == 0
    assert engine.read_bytes_from_buffer(address, 5) == b"hello"
    assert engine.write_bytes_to_buffer(address + 4090, b"0123456789", 10) == -1
    with pytest.raises(ValueError, match="not registered"):
        engine.read_bytes_from_buffer(1, 5)
    assert engine.free_managed_buffer(address, 4096) == 0
    assert engine.free_managed_buffer(address, 4096) == -1
    assert engine.allocate_managed_buffer(0) == 0


def test_registering_a_batch_is_all_or_none(make):
    engine, _ = make()
    array = (ctypes.c_ubyte * 8192)()
    at = ctypes.addressof(array)
    assert engine.batch_register_memory([at, 1], [4096, 10]) == -1
    assert engine.batch_register_memory([at, at + 4096], [4096, 4096]) == 0
    assert engine.batch_unregister_memory([at, at + 4096]) == 0
    assert engine.batch_unregister_memory([at]) == -1


def test_life(make):
    engine = TransferEngine()
    assert engine.get_rpc_port() == 0
    assert engine.transfer_sync_write("127.0.0.1:1", 1, 1, 1) == -1
    assert engine.register_memory(1, 1) == -1
    assert engine.get_notifies() == []
    assert engine.initialize("10.1.2.3", "P2PHANDSHAKE", "tcp", "") == -1  # no secret
    assert engine.initialize_ext("127.0.0.1", "P2PHANDSHAKE", "tcp", "", "p2p") == 0
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1  # already
    assert engine.get_engine() is engine
    assert "cpu:0" in json.loads(engine.get_local_topology())
    engine.close()
    engine.close()
