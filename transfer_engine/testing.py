"""A conformance suite for transports, and an owner of segments in another process to run it on.

A transport passes when a test class derived from `TransportContract` does:

    class TestMine(TransportContract):
        @pytest.fixture
        def case(self): ...            # yields a TransportCase

Every test compares every byte with a model held by the test: the segment as it must be. Owners
are separate processes driven over their standard streams, one JSON line a command, so tests can
kill and stop them. Used by this project's tests; public for transports kept elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from transfer_engine.base import BAD_RANGE, CANCELLED, COMPLETED, Access, Operation, Region
from transfer_engine.base import SegmentDescriptor as Descriptor
from transfer_engine.errors import InvalidArgumentError, TransferTimeoutError
from transfer_engine.segments.file import FileSegment
from transfer_engine.segments.memory import Segment
from transfer_engine.transports.server import TransferServer
from transfer_engine.wire.keyring import SharedSecret
from transfer_engine.wire.tls import Tls

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from transfer_engine.engine import TransferEngine
    from transfer_engine.handle import SegmentHandle
    from transfer_engine.wire.keyring import Secret

__all__ = ["Owner", "OwnerProcess", "TransportCase", "TransportContract", "content"]

_START_S = 30.0
_BLOCK = (32 << 20) + 1


def content(seed: int, size: int) -> NDArray[np.uint8]:
    """Return the bytes that an owner fills a segment of this seed with.

    Large segments repeat a random block whose length is odd, so that no offset looks like another.
    """
    block = np.random.default_rng(seed).integers(0, 256, min(size, _BLOCK), dtype=np.uint8)
    return np.resize(block, size)


class OwnerProcess:
    """A process that serves segments until it is closed, killed or stopped.

    Keyword arguments become arguments of its `TransferServer`; `secret` is bytes, and `policy`
    names an access hook: "read-only", "fence=N" or "nobody". `tls`, beside a secret, has the
    arguments of a `Tls`. `prefix` is a command that starts it, such as one that enters a network
    namespace.
    """

    def __init__(self, **options: Any) -> None:
        if isinstance(options.get("secret"), bytes):
            options["secret"] = options["secret"].hex()
        prefix = options.pop("prefix", ())
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "transfer_engine.testing", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the owner ended with {self.process.wait(_START_S)}")
        return json.loads(line)

    def publish(self, size: int, seed: int, *, uuid: bytes | None = None) -> Descriptor:
        """Serve a new segment filled with `content(seed, size)`."""
        told = self.ask("publish", size=size, seed=seed, uuid=uuid.hex() if uuid else None)
        return Descriptor.decode(bytes.fromhex(told))

    def publish_file(self, path: str, size: int, seed: int, **options: Any) -> Descriptor:
        """Serve a file or block device of `FileSegment.create` or `open`, filled likewise."""
        told = self.ask("publish_file", path=path, size=size, seed=seed, options=options)
        return Descriptor.decode(bytes.fromhex(told))

    def publish_map(self, path: str, size: int, seed: int) -> Descriptor:
        """Serve a file or DAX device of `Segment.map`, filled likewise."""
        told = self.ask("publish_map", path=path, size=size, seed=seed)
        return Descriptor.decode(bytes.fromhex(told))

    def digest(self, descriptor: Descriptor) -> str:
        """Return the hash of the whole segment as its owner sees it."""
        return str(self.ask("digest", uuid=descriptor.uuid.hex()))

    def withdraw(self, descriptor: Descriptor) -> None:
        """Stop serving a segment."""
        self.ask("withdraw", uuid=descriptor.uuid.hex())

    def __enter__(self) -> OwnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever state it is in. Idempotent."""
        self.process.kill()
        self.process.wait(_START_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@dataclass
class TransportCase:
    """One open segment with its model, and registered memory to move bytes from and to."""

    engine: TransferEngine
    target: SegmentHandle
    region: Region
    memory: NDArray[np.uint8]
    model: NDArray[np.uint8]
    digest: Callable[[], str]

    def check_segment(self) -> None:
        """Compare every byte of the segment, as its owner sees it, with the model."""
        assert self.digest() == xxhash.xxh3_128_hexdigest(self.model.data)


class TransportContract:
    """What every transport must do. Derived classes provide the fixture `case`."""

    def test_reads_every_size(self, case: TransportCase) -> None:
        """Reads of 1 byte to 16 MiB at odd places change exactly their target."""
        rng = np.random.default_rng(11)
        for size in (1, 7, 8, 63, 64, 4095, 4096, 65_537, 1 << 20, (16 << 20) - 1, 16 << 20):
            offset = int(rng.integers(0, case.model.size - size + 1))
            at = int(rng.integers(0, case.memory.size - size + 1))
            before = case.memory.copy()
            done = case.engine.read_batch(case.target, [offset], [size], [case.region.address + at])
            assert done.ok
            before[at : at + size] = case.model[offset : offset + size]
            assert np.array_equal(case.memory, before)

    def test_writes_every_size(self, case: TransportCase) -> None:
        """Writes of 1 byte to 16 MiB change exactly their range."""
        rng = np.random.default_rng(12)
        for size in (1, 7, 64, 4095, 65_537, 1 << 20, 16 << 20):
            offset = int(rng.integers(0, case.model.size - size + 1))
            at = int(rng.integers(0, case.memory.size - size + 1))
            case.memory[at : at + size] = rng.integers(0, 256, size, dtype=np.uint8)
            case.engine.write_batch(
                case.target, [offset], [size], [case.region.address + at]
            ).check()
            case.model[offset : offset + size] = case.memory[at : at + size]
            case.check_segment()

    def test_moves_unaligned_batches_both_ways(self, case: TransportCase) -> None:
        """Batches of mixed lengths, zero included, in any order."""
        rng = np.random.default_rng(13)
        lengths = rng.integers(0, 9000, 300)
        gaps = rng.integers(0, 50, 300)
        offsets = np.cumsum(lengths + gaps) - lengths
        positions = np.cumsum(lengths) - lengths
        addresses = case.region.address + positions[::-1]
        lengths_back = lengths[::-1].copy()
        case.memory[:] = rng.integers(0, 256, case.memory.size, dtype=np.uint8)
        local = case.memory.copy()
        done = case.engine.write_batch(case.target, offsets[::-1], lengths_back, addresses)
        assert done.ok
        for offset, length, address in zip(offsets[::-1], lengths_back, addresses, strict=True):
            at = address - case.region.address
            case.model[offset : offset + length] = local[at : at + length]
        case.check_segment()
        case.engine.read_batch(case.target, offsets, lengths, case.region.address + positions)
        for offset, length, at in zip(offsets, lengths, positions, strict=True):
            local[at : at + length] = case.model[offset : offset + length]
        assert np.array_equal(case.memory, local)

    def test_an_empty_batch_does_nothing(self, case: TransportCase) -> None:
        """No requests, and requests of no bytes."""
        assert case.engine.read_batch(case.target, [], [], []).ok
        assert case.engine.write_batch(case.target, [], [], []).ok
        assert case.engine.read_batch(case.target, [0], [0], [0]).ok
        case.check_segment()

    def test_moves_ten_thousand_requests(self, case: TransportCase) -> None:
        """More requests than one system call takes."""
        rng = np.random.default_rng(14)
        count, length = 10_000, 100
        offsets = rng.permutation(case.model.size // length)[:count] * length
        addresses = case.region.address + np.arange(count) * length
        lengths = np.full(count, length)
        assert case.engine.read_batch(case.target, offsets, lengths, addresses).ok
        expected = case.model[offsets[:, None] + np.arange(length)].reshape(-1)
        assert np.array_equal(case.memory[: count * length], expected)
        case.memory[: count * length] = rng.integers(0, 256, count * length, dtype=np.uint8)
        assert case.engine.write_batch(case.target, offsets, lengths, addresses).ok
        case.model[offsets[:, None] + np.arange(length)] = case.memory[: count * length].reshape(
            count, length
        )
        case.check_segment()

    def test_reads_overlapping_ranges(self, case: TransportCase) -> None:
        """Ranges may overlap at their source."""
        offsets = np.arange(200) * 10 + 3
        lengths = np.full(200, 5000)
        addresses = case.region.address + np.arange(200) * 5000
        assert case.engine.read_batch(case.target, offsets, lengths, addresses).ok
        expected = case.model[offsets[:, None] + np.arange(5000)].reshape(-1)
        assert np.array_equal(case.memory[: 200 * 5000], expected)

    def test_refuses_bad_ranges_one_by_one(self, case: TransportCase) -> None:
        """A bad range has a status; its neighbours still move."""
        size = case.model.size
        big = (1 << 63) - 1
        offsets = [0, size, size - 1, -1, big, 8, 16, size]
        lengths = [8, 1, 2, 4, 1, -5, big, 0]
        case.memory[:] = 0xA5
        address = case.region.address
        for move in (case.engine.read_batch, case.engine.write_batch):
            done = move(case.target, offsets, lengths, [address] * 8)
            assert done.statuses.tolist() == [0, *[BAD_RANGE] * 6, 0]
            case.model[:8] = case.memory[:8]  # the same bytes after the read
        assert (case.memory[8:] == 0xA5).all()
        case.check_segment()

    def test_refuses_memory_nobody_registered(self, case: TransportCase) -> None:
        """Nothing moves when a local address is not registered."""
        address = case.region.address
        end = address + case.region.size
        before = case.memory.copy()
        for bad, length in ((end - 3, 4), (end, 1), (8, 8), (address - 1, 1), (-1, 1)):
            for move in (case.engine.read_batch, case.engine.write_batch):
                try:
                    move(case.target, [0, 0], [1, length], [address, bad])
                except InvalidArgumentError as error:
                    refusal = str(error)
                else:
                    refusal = f"none for {length} bytes at {bad:#x}"
                assert "request 1" in refusal
        assert np.array_equal(case.memory, before)
        case.check_segment()

    def test_threads_share_a_handle(self, case: TransportCase) -> None:
        """Threads read through one handle at once."""
        threads, rounds, length = 6, 20, 30_000
        each = case.memory.size // threads

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            begin = number * each
            for _ in range(rounds):
                offsets = rng.integers(0, case.model.size - length, 8)
                addresses = case.region.address + begin + np.arange(8) * length
                case.engine.read_batch(case.target, offsets, np.full(8, length), addresses).check()
                expected = case.model[offsets[:, None] + np.arange(length)].reshape(-1)
                assert np.array_equal(case.memory[begin : begin + 8 * length], expected)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))

    def test_checksums_are_those_of_the_bytes(self, case: TransportCase) -> None:
        """Checksums equal xxh3_64 of what lies in local memory."""
        rng = np.random.default_rng(15)
        lengths = np.array([1, 100, 4096, 70_001, 0, 1 << 20])
        offsets = rng.integers(0, case.model.size - (1 << 20), 6)
        offsets[1] = case.model.size  # refused: the others still count
        addresses = case.region.address + np.cumsum(lengths) - lengths
        for move in (case.engine.read_batch, case.engine.write_batch):
            done = move(case.target, offsets, lengths, addresses, checksums=True)
            assert done.statuses.tolist() == [0, BAD_RANGE, 0, 0, 0, 0]
            assert done.checksums is not None
            for at in (0, 2, 3, 4, 5):
                begin = int(addresses[at]) - case.region.address
                data = case.memory[begin : begin + lengths[at]]
                assert int(done.checksums[at]) == xxhash.xxh3_64_intdigest(data.tobytes())

    def test_a_passed_deadline_is_an_error(self, case: TransportCase) -> None:
        """No time left means nothing moves."""
        case.memory[:8] = case.model[:8] ^ 255
        for move in (case.engine.read_batch, case.engine.write_batch):
            try:
                move(case.target, [0], [8], [case.region.address], timeout_s=0.0)
            except TransferTimeoutError:
                continue
            raise AssertionError("no error")
        case.check_segment()

    def test_submits_in_the_background(self, case: TransportCase) -> None:
        """A submission ends as completed with the bytes in place."""
        offsets = np.arange(64) * 4096
        batch = (case.target, offsets, np.full(64, 4096), case.region.address + offsets)
        submission = case.engine.submit(Operation.READ, *batch)
        assert (submission.result() == COMPLETED).all()
        assert set(submission.states()) == {"completed"}
        assert np.array_equal(case.memory[: 64 * 4096], case.model[: 64 * 4096])
        assert not submission.cancel()

    def test_memory_unregistered_under_way_still_fills(self, case: TransportCase) -> None:
        """What was submitted before ends well; nothing is taken afterwards."""
        length = 8 << 20
        where = [case.region.address], [case.region.address + length]
        submissions = [
            case.engine.submit(Operation.READ, case.target, [at * length], [length], where[at])
            for at in (0, 1)
        ]
        case.engine.unregister(case.region)
        assert [submission.result(60).tolist() for submission in submissions] == [[COMPLETED]] * 2
        assert np.array_equal(case.memory[: 2 * length], case.model[: 2 * length])
        for move in (case.engine.read_batch, case.engine.write_batch):
            try:
                move(case.target, [0], [1], where[0])
            except InvalidArgumentError as error:
                refusal = str(error)
            else:
                refusal = "none"
            assert "not registered" in refusal

    def test_cancels_what_waits(self, case: TransportCase) -> None:
        """A cancelled submission ends soon, the path stays usable."""
        length = 8 << 20
        addresses = [case.region.address]
        submissions = [
            case.engine.submit(Operation.READ, case.target, [0], [length], addresses)
            for _ in range(40)
        ]
        cancelled = [submission.cancel() for submission in reversed(submissions)]
        finals = [submission.wait().tolist() for submission in submissions]
        assert all(final in ([COMPLETED], [CANCELLED]) for final in finals)
        assert any(cancelled)
        assert [CANCELLED] in finals
        # Cancelling leaves the path usable.
        assert case.engine.read_batch(case.target, [0], [length], addresses).ok
        assert np.array_equal(case.memory[:length], case.model[:length])


def _policy(name: str | None) -> Callable[[Access], bool] | None:
    if name is None:
        return None
    if name == "nobody":
        return lambda access: False
    if name == "read-only":
        return lambda access: access.operation is Operation.READ
    fence = int(name.removeprefix("fence="))
    return lambda access: access.operation is Operation.READ or access.fence >= fence


def _secret(secret: str | None, tls: dict[str, str] | None) -> Secret | None:
    if secret is None or tls is None:
        return bytes.fromhex(secret) if secret else None
    return SharedSecret(bytes.fromhex(secret), tls=Tls(**tls))


class Owner:
    """The commands of an owner process, by name."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.server = TransferServer(
            secret=_secret(options.pop("secret", None), options.pop("tls", None)),
            authorize=_policy(options.pop("policy", None)),
            **options,
        )
        self.segments: dict[str, Segment | FileSegment] = {}
        self.paths: dict[str, str] = {}

    def publish(self, size: int, seed: int, uuid: str | None) -> str:
        """Serve a new segment filled with `content(seed, size)`; return its descriptor in hex."""
        segment = Segment.create(size, uuid=bytes.fromhex(uuid) if uuid else None)
        return self._serve(segment, seed)

    def publish_map(self, path: str, size: int, seed: int) -> str:
        """Serve a mapped file or device, filled likewise; return its descriptor in hex."""
        return self._serve(Segment.map(path, size), seed)

    def _serve(self, segment: Segment, seed: int) -> str:
        np.frombuffer(segment.buffer, dtype=np.uint8)[:] = content(seed, segment.size)
        self.segments[segment.uuid.hex()] = segment
        return self.server.publish(segment).encode().hex()

    def publish_file(self, path: str, size: int, seed: int, options: dict[str, Any]) -> str:
        """Serve a file or block device, filled likewise; return its descriptor in hex."""
        make = FileSegment.open if os.path.exists(path) else FileSegment.create
        segment = make(path, size=size, **options)
        with open(path, "r+b", buffering=0) as file:
            file.write(content(seed, size).data)
            os.fsync(file.fileno())
        self.segments[segment.uuid.hex()] = segment
        self.paths[segment.uuid.hex()] = path
        return self.server.publish(segment).encode().hex()

    def digest(self, uuid: str) -> str:
        """Return the hash of the whole segment."""
        segment = self.segments[uuid]
        if isinstance(segment, Segment):
            return xxhash.xxh3_128_hexdigest(segment.buffer)
        with open(self.paths[uuid], "rb") as file:
            return xxhash.xxh3_128_hexdigest(file.read(segment.size))

    def withdraw(self, uuid: str) -> None:
        """Stop serving a segment and give its memory back."""
        segment = self.segments.pop(uuid)
        self.server.withdraw(segment)
        segment.close()

    def threads(self) -> int:
        """Return how many threads this process has."""
        return threading.active_count()


def _main() -> None:
    owner = Owner(json.loads(sys.argv[1]))
    with owner.server:
        for line in sys.stdin:
            command, arguments = json.loads(line)
            answer = getattr(owner, command)(**arguments)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main()
