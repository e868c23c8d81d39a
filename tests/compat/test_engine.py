"""The engine by addresses: what is registered moves, nothing else does."""

import ctypes
import json
import signal

import pytest

from mooncake_store.compat import engine_memory
from mooncake_store.compat.engine import TransferEngine, TransferNotify, TransferOpcode
from tests.waiting import until
from transfer_engine import Segment, TransferServer
from transfer_engine import TransferEngine as NativeEngine
from transfer_engine.topology.machine import Device, Node, Topology

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

# The second engine has the address and the memory of the first: only asking tells them apart.
RESTARTING = """
import ctypes, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
from mooncake_store.compat.engine import TransferEngine
plain = (ctypes.c_ubyte * 4096)()
at, name, metadata = ctypes.addressof(plain), "127.0.0.1", "P2PHANDSHAKE"
for life in (b"first", b"second"):
    ctypes.memmove(at, life, len(life))
    engine = TransferEngine()
    assert engine.initialize(name, metadata, "tcp", "") == 0
    assert engine.register_memory(at, 4096) == 0
    name, metadata = f"127.0.0.1:{engine.get_rpc_port()}", "a metadata server"
    print(life.decode(), "at", name, at, flush=True)
    signal.sigwait({signal.SIGUSR1})
    print(life.decode(), "was told", [note.msg for note in engine.get_notifies()], flush=True)
    engine.close()
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

    def start(name="127.0.0.1", metadata="P2PHANDSHAKE"):
        engine = TransferEngine()
        assert engine.initialize(name, metadata, "tcp", "") == 0
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


def polled(engine, batch):
    return until(lambda: engine.transfer_check_status(batch))


def waited_for(engine, batch):
    return 1 if engine.get_batch_transfer_status([batch]) == 0 else -1


@pytest.mark.parametrize("end", [polled, waited_for])
def test_asynchronous_transfers_find_memory_that_was_registered_again(pair, end, caplog):
    one, mine, other, name, theirs = pair

    def write():
        return end(one, one.batch_transfer_async_write(name, [mine.ptr], [theirs.ptr], [10]))

    assert write() == 1
    assert other.unregister_memory(theirs.ptr) == 0
    assert other.register_memory(theirs.ptr, 4096) == 0
    assert write() == -1  # what was known before is gone
    assert f"transfer with {name} failed" in caplog.text
    assert write() == 1


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


def test_a_peer_that_restarts_on_its_port_is_found_again(make, start_program):
    program = start_program("-c", RESTARTING)
    engine, _ = make()
    mine, names = Memory(engine, 4096), set()
    for life in ("first", "second"):
        name, at = program.wait_for_line(f"{life} at ").split()[2:]
        names.add(name)
        assert engine.transfer_sync_read(name, mine.ptr, int(at), len(life)) == 0
        assert mine[: len(life)] == life.encode()
        note = TransferNotify("note", f"to the {life}")
        assert engine.transfer_sync(name, mine.ptr, int(at), 1, TransferOpcode.Read, note) == 0
        program.signal(signal.SIGUSR1)
        assert note.msg in program.wait_for_line(f"{life} was told")
    assert len(names) == 1


def test_notes_are_long_and_arrive_in_order(pair):
    one, mine, other, name, theirs = pair

    def leave(note):
        return one.transfer_sync(name, mine.ptr, theirs.ptr, 1, TransferOpcode.Write, note)

    long = TransferNotify("long", "\N{EURO SIGN}" * (20 << 10))  # 60 KiB of UTF-8
    assert [leave(TransferNotify("empty", "")), leave(long)] == [0, 0]
    assert other.get_notifies() == [TransferNotify("empty", ""), long]
    assert leave(TransferNotify("too long", "x" * ((64 << 10) + 1))) == -1
    assert leave(TransferNotify("no text", "\ud800")) == -1
    assert other.get_notifies() == []


def test_a_note_that_is_no_text_is_shown_as_far_as_it_is(pair):
    _, _, other, name, theirs = pair
    with NativeEngine() as native:
        native.notify(native.open(f"{name}/memory-{theirs.ptr:x}"), "bytes", b"a\xffb")
    assert other.get_notifies() == [TransferNotify("bytes", "a\N{REPLACEMENT CHARACTER}b")]


def test_a_note_to_a_peer_without_memory_is_refused(make, caplog):
    engine, _ = make()
    _, name = make()
    note = TransferNotify("note", "to nobody")
    assert engine.batch_transfer_sync(name, [], [], [], TransferOpcode.Write, note) == -1
    assert name in caplog.text


def test_what_a_peer_publishes_besides_memory_is_passed_over(make):
    engine, _ = make()
    mine = Memory(engine, 4)
    ctypes.memmove(mine.ptr, b"here", 4)
    others = ["pool", "memory-", "memory-pool", "memory--1", "memory-0x10", f"memory-{1 << 63:x}"]
    with TransferServer() as server, Segment.wrap(bytearray(4096)) as segment:
        for name in others:
            server.publish(Segment.wrap(bytearray(16)), name=name)
        server.publish(segment, name="memory-1000")
        name = "{}:{}".format(*server.tcp_address)
        assert engine.get_first_buffer_address(name) == 0x1000
        assert engine.transfer_sync_write(name, mine.ptr, 0x1000 + 4092, 4) == 0
        assert segment.buffer[4092:] == b"here"
        assert engine.transfer_sync_write(name, mine.ptr, 0x1000 + 4093, 4) == -1
        assert engine.transfer_sync_write(name, mine.ptr, 0x10, 4) == -1


def test_a_port_that_was_agreed_on_is_taken_or_refused(make, free_port, caplog):
    engine, name = make(f"127.0.0.1:{free_port}", "a metadata server")
    assert engine.get_rpc_port() == free_port
    refused = TransferEngine()
    assert refused.initialize(name, "a metadata server", "tcp", "") == -1
    assert f"cannot listen on {name}" in caplog.text
    assert refused.get_rpc_port() == 0
    elsewhere, _ = make(name)
    assert elsewhere.get_rpc_port() not in (0, free_port)


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


def test_topology_says_which_cards_are_near_each_node(monkeypatch):
    nodes = tuple(Node(number, "", 0) for number in range(2))
    cards = tuple(Device(f"mlx5_{number}", "rdma", number) for number in range(2))
    monkeypatch.setattr(engine_memory, "discover", lambda gpus: Topology(nodes, cards))
    assert json.loads(TransferEngine().get_local_topology()) == {
        "cpu:0": [["mlx5_0"], ["mlx5_1"]],
        "cpu:1": [["mlx5_1"], ["mlx5_0"]],
    }
    assert json.loads(TransferEngine().get_local_topology("mlx5_1,else")) == {
        "cpu:0": [[], ["mlx5_1"]],
        "cpu:1": [["mlx5_1"], []],
    }


def test_an_engine_that_was_closed_takes_the_same_memory_again(make):
    engine, _ = make()
    memory = Memory(engine, 4096)
    engine.close()
    assert engine.write_bytes_to_buffer(memory.ptr, b"x", 1) == -1  # it gave everything up
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ptr, 4096) == 0
