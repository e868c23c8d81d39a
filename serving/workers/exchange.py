"""KV between workers, one-sided: memory that others are let into, and the ways to theirs.

A worker has two memories: the cache that its engine computes in, where others write what they
computed for it, and the blocks it keeps of finished requests, which others read. Both have the
layout of the cache (`KVMemory.spans`), each with its own number of blocks.

    room = exchange.grant(blocks)                        # tell it to who is to write
    target = other.reach(room, "127.0.0.1")              # there; may wait for a connection
    other.write(target, room, [Part(layer, 0, 64, blocks)], 5.0)     # a Submission

    room = exchange.lend(slots)                          # tell it to who is to read
    other.read(target, room, layer, blocks, 5.0)         # there; whether it is there now

Thread-safe.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from serving.engine.cache import cache_bytes
from serving.workers import protocol as p
from serving.workers.grants import Grants
from transfer_engine import (
    DeviceSegment,
    Operation,
    Segment,
    SegmentDescriptor,
    TransferEngine,
    TransferServer,
)
from transfer_engine.errors import PeerLostError, StoreError, UnavailableError
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

__all__ = ["MOVE_S", "Exchange", "Part", "kv_segment"]

MOVE_S = 5.0
"""No write or read that was begun takes longer; whoever does not make it gives up."""
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


class Exchange:
    """One worker's end: its memories, served, and what reaches those of others."""

    def __init__(
        self,
        segment: Segment | DeviceSegment,
        memory: KVMemory,
        settings: WorkerSettings,
        secret: bytes | None,
    ) -> None:
        self._memory = memory
        self._slots = max(1, settings.own_blocks)
        kept = Segment.create(self._slots * memory.layers * memory.object_bytes, name="kept")
        self._segments = segment, kept
        self._rooms = Grants(Operation.WRITE, memory.half, memory.blocks)
        self._lent = Grants(Operation.READ, memory.half, self._slots)
        host = settings.host
        self._server = TransferServer(
            tcp=str(Address(host, settings.data_port)),
            secret=secret,
            insecure=settings.insecure,
            authorize=self._judge,
            advertise_host=host if host in _WILDCARDS else None,
            patience_s=MOVE_S,
        )
        try:
            self._described, self._kept = (
                self._server.publish(each).encode() for each in self._segments
            )
            # To others by the ways that are allowed; between its own two memories by none of them.
            self._engine = TransferEngine(
                transports=settings.transports or NAMES,
                secret=secret,
                networks=settings.data_networks,
            )
            self._here = TransferEngine(transports=["local"], threads=1)
            for engine in (self._engine, self._here):
                engine.register(segment if isinstance(segment, Segment) else memory.tensor)
            self._own = self._here.open(SegmentDescriptor.decode(self._kept))
        except BaseException:
            self._server.close()
            raise
        self._targets: dict[bytes, SegmentHandle] = {}
        self._lock = threading.Lock()

    def _judge(self, access: Access) -> bool | NDArray[np.bool_]:
        grants = self._lent if access.segment == self._segments[1].uuid else self._rooms
        return grants.judge(access)

    @property
    def sound(self) -> bool:
        """Whether others can get in."""
        return self._server.sound

    # -- what others do here

    def grant(self, blocks: Sequence[int]) -> p.Room:
        """Let whoever is told of it write to these blocks of the cache."""
        fence = self._rooms.add(blocks)
        return p.Room(self._described, tuple(blocks), self._memory.blocks, fence)

    def revoke(self, room: p.Room) -> None:
        """Let nobody write there any more, as far as that is asked for. Idempotent."""
        self._rooms.remove(room.fence)

    def lend(self, slots: Sequence[int]) -> p.Room:
        """Let whoever is told of it read these slots of what is kept."""
        return p.Room(self._kept, tuple(slots), self._slots, self._lent.add(slots))

    def take_back(self, room: p.Room) -> None:
        """Let nobody read there any more, likewise. Idempotent."""
        self._lent.remove(room.fence)

    # -- what is done to others

    def reach(self, room: p.Room, host: str) -> SegmentHandle:
        """Open the way to a room at `host`, or find it open. Raises what keeps it from opening."""
        descriptor = SegmentDescriptor.decode(room.descriptor)
        with self._lock:
            target = self._targets.get(descriptor.uuid)
        if target is None:
            if descriptor.tcp_host in _WILDCARDS:
                descriptor = msgspec.structs.replace(descriptor, tcp_host=host)
            opened = self._engine.open(descriptor, timeout_s=MOVE_S)
            with self._lock:
                target = self._targets.setdefault(descriptor.uuid, opened)
            if target is not opened:
                opened.close()
        return target

    def failed(self, target: SegmentHandle, error: Exception) -> None:
        """Open the way anew next time, if that is what it failed for."""
        if not isinstance(error, PeerLostError | UnavailableError):
            return
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
            timeout_s=min(timeout_s, MOVE_S),
            fence=room.fence,
        )

    def read(
        self,
        target: SegmentHandle,
        room: p.Room,
        layer: int,
        blocks: Sequence[int],
        timeout_s: float,
    ) -> bool:
        """Read a layer of the first blocks of a room into these of the cache; whether all came."""
        return self._read(self._engine, target, room, layer, blocks, timeout_s)

    def _read(
        self,
        engine: TransferEngine,
        target: SegmentHandle,
        room: p.Room,
        layer: int,
        blocks: Sequence[int],
        timeout_s: float,
    ) -> bool:
        memory = self._memory
        end = len(blocks) * memory.block_tokens
        here, lengths = memory.spans(layer, blocks, 0, end, memory.blocks)
        there, _ = memory.spans(layer, room.blocks, 0, end, room.of_blocks)
        try:
            result = engine.read_batch(
                target,
                there,
                lengths,
                memory.address + here,
                timeout_s=min(timeout_s, MOVE_S),
                fence=room.fence,
            )
        except StoreError as error:
            self.failed(target, error)
            return False
        return result.ok

    # -- between its own memories

    def keep(self, blocks: Sequence[int], slots: Sequence[int]) -> Submission:
        """Begin to copy all layers of blocks of the cache into slots of what is kept."""
        memory = self._memory
        end = len(blocks) * memory.block_tokens
        here, there = [], []
        for layer in range(memory.layers):
            offsets, lengths = memory.spans(layer, blocks, 0, end, memory.blocks)
            here.append(offsets)
            there.append(memory.spans(layer, slots, 0, end, self._slots)[0])
        return self._here.submit(
            Operation.WRITE,
            self._own,
            np.concatenate(there),
            np.tile(lengths, memory.layers),
            memory.address + np.concatenate(here),
        )

    def read_own(self, slots: Sequence[int], layer: int, blocks: Sequence[int]) -> bool:
        """Copy a layer of slots of what is kept into blocks of the cache."""
        room = p.Room(self._kept, tuple(slots), self._slots, 0)
        return self._read(self._here, self._own, room, layer, blocks, MOVE_S)

    def close(self) -> None:
        """Serve nobody, reach nobody. Idempotent."""
        self._server.close()
        for engine in (self._engine, self._here):
            engine.close()
        for segment in self._segments:
            segment.close()
