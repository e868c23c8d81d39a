"""KV between workers, one-sided: memory that others are let into, and the ways to theirs.

A worker's whole cache is one segment. Who may write lies in `Grants`: a room's blocks, under a
number that its sender was told. Over tcp the owner asks it before bytes move; who shares memory
with the owner can write whatever it was told, so a room is used again only once its sender has
stopped (`receiving.py`).

    exchange = Exchange(segment, memory, settings, secret)
    room = exchange.grant(blocks)                        # tell it to who is to write
    target = other.reach(room, "127.0.0.1")              # there; may wait for a connection
    other.write(target, room, [Part(layer, 0, 64, blocks)], 5.0)     # a Submission

Thread-safe.
"""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from serving.engine.cache import cache_bytes
from serving.workers import protocol as p
from transfer_engine import (
    DeviceSegment,
    Operation,
    Segment,
    SegmentDescriptor,
    TransferEngine,
    TransferServer,
)
from transfer_engine.rpc.address import Address
from transfer_engine.transports import NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from serving.engine.config import ModelConfig
    from serving.workers.memory import KVMemory
    from serving.workers.settings import WorkerSettings
    from transfer_engine import Access, SegmentHandle, Submission

__all__ = ["WRITE_S", "Exchange", "Grants", "Part", "kv_segment"]

WRITE_S = 5.0
"""No write that was begun takes longer; whoever does not make it gives up."""
_WILDCARDS = ("0.0.0.0", "::")


def kv_segment(
    config: ModelConfig, blocks: int, block_tokens: int, device: torch.device
) -> tuple[Segment | DeviceSegment, Tensor]:
    """Make zeroed memory for a cache: a segment, and the same as a tensor of bytes."""
    size = cache_bytes(config, blocks, block_tokens)
    if device.type == "cpu":
        segment = Segment.create(size, name="kv")
        return segment, torch.from_numpy(np.frombuffer(segment.buffer, np.uint8))
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    return DeviceSegment.wrap(memory, name="kv"), memory


class Part(NamedTuple):
    """Tokens of one layer of a sequence, which lie in its blocks."""

    layer: int
    start: int
    end: int
    blocks: Sequence[int]


class Grants:
    """Which blocks may be written to, by the number that a write comes with."""

    def __init__(self, memory: KVMemory) -> None:
        self._half = memory.half
        self._blocks = memory.blocks
        # How many of the blocks before each one may be written to.
        self._counts: dict[int, NDArray[np.int64]] = {}

    def add(self, blocks: Sequence[int]) -> int:
        """Allow these from now on; return their number."""
        granted = np.zeros(self._blocks + 1, np.int64)
        granted[np.asarray(blocks, np.int64) + 1] = 1
        fence = secrets.randbits(63)
        self._counts[fence] = np.cumsum(granted)
        return fence

    def remove(self, fence: int) -> None:
        """Allow them no longer. Idempotent."""
        self._counts.pop(fence, None)

    def judge(self, access: Access) -> bool | NDArray[np.bool_]:
        """Answer the server that asks: which ranges of a batch lie in granted blocks."""
        if not access.lengths.any():
            return True  # a way is opened; a process of this user maps the memory
        counts = self._counts.get(access.fence)
        if counts is None or access.operation is not Operation.WRITE:
            return False
        plane = self._half * self._blocks  # of the keys, or the values, of one layer
        last = access.offsets + access.lengths - 1
        first_block = access.offsets % plane // self._half
        last_block = last % plane // self._half
        granted = counts[last_block + 1] - counts[first_block] == last_block - first_block + 1
        within: NDArray[np.bool_] = granted & (access.offsets // plane == last // plane)
        return within


class Exchange:
    """One worker's end: its memory, served, and what reaches that of others."""

    def __init__(
        self,
        segment: Segment | DeviceSegment,
        memory: KVMemory,
        settings: WorkerSettings,
        secret: bytes | None,
    ) -> None:
        self._memory = memory
        self._segment = segment
        self._grants = Grants(memory)
        host = settings.host
        self._server = TransferServer(
            tcp=str(Address(host, settings.data_port)),
            secret=secret,
            insecure=settings.insecure,
            authorize=self._grants.judge,
            advertise_host=host if host in _WILDCARDS else None,
            patience_s=WRITE_S,
        )
        try:
            self._engine = TransferEngine(transports=settings.transports or NAMES, secret=secret)
            self._engine.register(segment if isinstance(segment, Segment) else memory.tensor)
            self._described = self._server.publish(segment).encode()
        except BaseException:
            self._server.close()
            raise
        self._targets: dict[bytes, SegmentHandle] = {}
        self._lock = threading.Lock()

    @property
    def sound(self) -> bool:
        """Whether others can get in."""
        return self._server.sound

    def grant(self, blocks: list[int]) -> p.Room:
        """Let whoever is told of it write to these blocks."""
        fence = self._grants.add(blocks)
        return p.Room(self._described, tuple(blocks), self._memory.blocks, fence)

    def revoke(self, room: p.Room) -> None:
        """Let nobody write there any more, as far as that is asked for. Idempotent."""
        self._grants.remove(room.fence)

    def reach(self, room: p.Room, host: str) -> SegmentHandle:
        """Open the way to a room at `host`, or find it open. Raises what keeps it from opening."""
        descriptor = SegmentDescriptor.decode(room.descriptor)
        with self._lock:
            target = self._targets.get(descriptor.uuid)
        if target is None:
            if descriptor.tcp_host in _WILDCARDS:
                descriptor = msgspec.structs.replace(descriptor, tcp_host=host)
            opened = self._engine.open(descriptor, timeout_s=WRITE_S)
            with self._lock:
                target = self._targets.setdefault(descriptor.uuid, opened)
            if target is not opened:
                opened.close()
        return target

    def forget(self, target: SegmentHandle) -> None:
        """Open the way anew next time: it failed."""
        with self._lock:
            known = self._targets.get(target.descriptor.uuid) is target
            if known:
                del self._targets[target.descriptor.uuid]
        if known:
            target.close()

    def write(
        self, target: SegmentHandle, room: p.Room, parts: Sequence[Part], timeout_s: float
    ) -> Submission:
        """Begin to write parts of a sequence to where the room has them."""
        memory = self._memory
        here, there, lengths = [], [], []
        for layer, start, end, blocks in parts:
            offsets, sizes = memory.spans(layer, blocks, start, end, memory.blocks)
            here.append(offsets)
            lengths.append(sizes)
            there.append(memory.spans(layer, room.blocks, start, end, room.of_blocks)[0])
        return self._engine.submit(
            Operation.WRITE,
            target,
            np.concatenate(there),
            np.concatenate(lengths),
            memory.address + np.concatenate(here),
            timeout_s=min(timeout_s, WRITE_S),
            fence=room.fence,
        )

    def close(self) -> None:
        """Serve nobody, reach nobody. Idempotent."""
        self._server.close()
        self._engine.close()
        self._segment.close()
