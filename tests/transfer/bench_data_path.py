"""Throughput of shm and tcp beside what bare memcpy and bare sockets do with the same blocks.

    python tests/transfer/bench_data_path.py [seconds per cell]

Two processes; random blocks out of a segment of 512 MiB. The sides alternate round by round, so
that noise of the machine hits both; figures are medians.
"""

import multiprocessing
import socket
import sys
import time

import numpy as np

from transfer_engine import Segment, SegmentDescriptor, TransferEngine, TransferServer
from transfer_engine.kernels import moving

SEGMENT = 512 << 20
SHAPES = [
    (4096, 1), (65536, 1), (1 << 20, 1),
    (4096, 32), (4096, 128), (65536, 32), (65536, 128),
    (262144, 32), (262144, 128), (1 << 20, 32), (4 << 20, 16),
]  # fmt: skip


def receive(sock, view):
    while view:
        view = view[sock.recv_into(view) :]


def send_all(sock, parts):
    while parts:
        sent = sock.sendmsg(parts[:1024])
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


def bare_server(listener, memory):
    """Answer (write?, size, count, offsets) with those blocks, or take them."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(24)
    while sock.recv_into(head, 0, socket.MSG_WAITALL) == 24:
        writing, size, count = np.frombuffer(head, np.int64).tolist()
        column = bytearray(8 * count)
        receive(sock, memoryview(column))
        offsets = np.frombuffer(column, np.int64).tolist()
        parts = [memory[at : at + size] for at in offsets]
        if writing:
            receive_into(sock, parts)
            sock.sendall(b"x" * 24)
        else:
            send_all(sock, parts)


def receive_into(sock, parts):
    while parts:
        got, *_ = sock.recvmsg_into(parts[:1024], 0, socket.MSG_WAITALL)
        while parts and got >= len(parts[0]):
            got -= len(parts.pop(0))
        if got:
            parts[0] = parts[0][got:]


def serve(pipe):
    segment = Segment.create(SEGMENT)
    segment.prefault(threads=2).wait(60)
    memory = np.frombuffer(segment.buffer, np.uint8)
    memory[:] = 1
    import threading

    listener = socket.create_server(("127.0.0.1", 0))
    with TransferServer() as server:
        pipe.send((server.publish(segment).encode(), listener.getsockname()))
        threading.Thread(target=bare_server, args=(listener, segment.buffer), daemon=True).start()
        pipe.recv()


class Bare:
    def __init__(self, address, buffer):
        self.sock = socket.create_connection(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.view = memoryview(buffer)

    def read(self, offsets, size, count):
        head = np.array([0, size, count]).tobytes() + offsets.tobytes()
        self.sock.sendall(head)
        receive_into(self.sock, [self.view[i * size : (i + 1) * size] for i in range(count)])

    def write(self, offsets, size, count):
        head = np.array([1, size, count]).tobytes() + offsets.tobytes()
        send_all(
            self.sock,
            [memoryview(head)] + [self.view[i * size : (i + 1) * size] for i in range(count)],
        )
        receive(self.sock, memoryview(bytearray(24)))


def make_sides(engine, shm, tcp, bare, other, addresses, size, count):
    lengths = np.full(count, size)
    none = np.zeros(1, np.int64)
    statuses = np.zeros(count, np.int32)

    def memcpy(at):
        moving.copy_batch(
            other.ctypes.data, at, lengths, addresses, statuses, 0, size * count, 0, 0, none
        )

    return {
        "memcpy": memcpy,
        "shm read": lambda at: engine.read_batch(shm, at, lengths, addresses),
        "shm write": lambda at: engine.write_batch(shm, at, lengths, addresses),
        "shm read+sum": lambda at: engine.read_batch(shm, at, lengths, addresses, checksums=True),
        "bare read": lambda at: bare.read(at, size, count),
        "tcp read": lambda at: engine.read_batch(tcp, at, lengths, addresses),
        "bare write": lambda at: bare.write(at, size, count),
        "tcp write": lambda at: engine.write_batch(tcp, at, lengths, addresses),
        "tcp read+sum": lambda at: engine.read_batch(tcp, at, lengths, addresses, checksums=True),
    }


def main(seconds):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    encoded, address = ours.recv()
    descriptor = SegmentDescriptor.decode(encoded)
    buffer = np.ones(128 << 20, np.uint8)
    other = np.ones(SEGMENT, np.uint8)
    bare = Bare(address, buffer)
    rng = np.random.default_rng(1)
    with TransferEngine() as engine:
        region = engine.register(buffer)
        shm = engine.open(descriptor, require="shm")
        tcp = engine.open(descriptor, require="tcp")

        print(f"{'block':>8} {'n':>4}  median us and GB/s of each")
        for size, count in SHAPES:
            addresses = region.address + np.arange(count) * size
            sides = make_sides(engine, shm, tcp, bare, other, addresses, size, count)
            times = {name: [] for name in sides}
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(times["memcpy"]) < 5:
                for name, run in sides.items():
                    for _ in range(max(1, min(20, (4 << 20) // (size * count)))):
                        at = rng.integers(0, (SEGMENT - size) // 4096, count) * 4096
                        begin = time.perf_counter()
                        run(at)
                        times[name].append(time.perf_counter() - begin)
            cells = []
            for name, taken in times.items():
                median = float(np.median(taken))
                cells.append(
                    f"{name} {median * 1e6:.0f}us {size * count / median / 1e9:.2f} "
                    f"{count / median / 1e3:.0f}k/s"
                )
            print(f"{size:>8} {count:>4}  " + " | ".join(cells), flush=True)
    ours.send(0)
    process.join()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
