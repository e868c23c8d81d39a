"""An engine's life and memory: what it serves, what it may touch, whom it knows.

Transfers are in `engine.py`. Registered memory is a segment of this process's server; memory from
`allocate_managed_buffer` is shared memory, other memory is reached by socket only. Without a
secret, nothing listens on an address that other machines can reach (MOONCAKE_WORKER_INSECURE=1
says otherwise).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import threading
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.compat.codes import log
from mooncake_store.compat.config import split_hostname
from mooncake_store.compat.memory import Registry, is_mapped
from mooncake_store.compat.peers import Peer, memory_name
from mooncake_store.compat.values import TransferNotify
from mooncake_store.config.settings import WorkerConfig, load
from mooncake_store.credentials import secret_of
from mooncake_store.endpoint import is_loopback
from mooncake_store.errors import ConfigError, InvalidArgumentError, StoreError
from transfer_engine.engine import TransferEngine as NativeEngine
from transfer_engine.rpc.address import Address
from transfer_engine.segments.memory import Segment
from transfer_engine.topology import discover
from transfer_engine.transports.server import TransferServer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from transfer_engine.base import Region
    from transfer_engine.submission import Submission
    from transfer_engine.wire.keyring import Secret

__all__ = ["EngineMemory"]


class _Owned(NamedTuple):
    """Registered memory: what peers see of it, and what transfers from here may touch."""

    segment: Segment
    region: Region


class EngineMemory:
    """An engine without its transfers."""

    def __init__(self) -> None:
        self._engine: NativeEngine | None = None
        self._server: TransferServer | None = None
        self._secret: Secret | None = None
        self._lock = threading.Lock()
        self._owned: dict[int, _Owned] = {}
        self._peers: dict[str, Peer] = {}
        # With whom, and what of it is under way; by the number that callers ask about.
        self._batches: dict[int, tuple[str, list[Submission]]] = {}
        self._numbers = itertools.count(1)
        self._registry = Registry()

    # -- life

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        """Start serving this process's memory; 0, or -1.

        Peers are reached by host and port whatever `metadata_server` says; with a name other than
        P2PHANDSHAKE the port in `local_hostname` is the one taken.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "")

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,
    ) -> int:
        """Do what `initialize` does; `metadata_type` is not needed here."""
        if self._engine is not None:
            return -1
        try:
            self._server = self._serve(
                *split_hostname(local_hostname or "127.0.0.1"),
                fixed=metadata_server != "P2PHANDSHAKE",
            )
            self._engine = NativeEngine(secret=self._secret, threads=8, queue_max=4096)
        except (StoreError, ValueError, OSError) as error:
            log.error("initialize failed: %s", error)
            self.close()
            return -1
        if protocol not in ("tcp", "shm", "local", ""):
            log.warning("protocol %s is not built in: bytes move over shm and tcp", protocol)
        return 0

    def _serve(self, host: str, port: int, *, fixed: bool) -> TransferServer:
        """Listen on the port, or on any other when that fails and it is not the one agreed on."""
        config = load(WorkerConfig).value
        self._secret = secret_of(config)
        bind = "127.0.0.1" if is_loopback(host) else host

        def serve(port: int) -> TransferServer:
            address = str(Address(bind, port))
            return TransferServer(tcp=address, secret=self._secret, insecure=config.insecure)

        try:
            return serve(port)
        except ConfigError:
            if fixed or not port:
                raise
            return serve(0)

    def close(self) -> None:
        """Stop serving and give everything up, as the original does when freed. Idempotent."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()
        if self._engine is not None:
            self._engine.close()
        for owned in self._owned.values():
            owned.segment.close()
        self._owned, self._batches, self._registry = {}, {}, Registry()
        self._engine = self._server = None

    def get_rpc_port(self) -> int:
        """The port in the name by which peers call this engine; 0 before `initialize`."""
        address = None if self._server is None else self._server.tcp_address
        return 0 if address is None else address[1]

    def get_engine(self) -> Self:
        """Return this engine, to be passed to `setup` of a store."""
        return self

    def get_engine_ptr(self) -> int:
        """Return a number that names this engine; it is no pointer to anything."""
        return id(self)

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Return the nodes of this machine as JSON: the cards near each, then the other cards."""
        wanted = [name for name in (device_name or "").split(",") if name]
        cards_of = {
            location: [
                [card for card in cards if not wanted or card in wanted] for cards in kinds["rdma"]
            ]
            for location, kinds in discover(gpus=()).matrix().items()
            if location.startswith("cpu:")
        }
        return json.dumps(cards_of)

    # -- memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Allow transfers to touch memory of this process, here and from peers; 0, or -1."""
        if self._server is None or not capacity > 0 or not buffer_addr > 0:
            return -1
        if not is_mapped(buffer_addr, capacity):
            log.error("[%#x, + %d) is no memory of this process", buffer_addr, capacity)
            return -1
        memory = (ctypes.c_ubyte * capacity).from_address(buffer_addr)
        return self._own(buffer_addr, Segment.wrap(memory))

    def _own(self, address: int, segment: Segment) -> int:
        server, engine = self._server, self._engine
        if server is None or engine is None:
            return -1
        with self._lock:
            if not self._registry.add(address, segment.size):
                segment.close()
                return -1
            try:
                region = engine.register(segment)
            except StoreError as error:
                log.error("memory is not registered: %s", error)
                self._registry.discard(address)
                segment.close()
                return -1
            server.publish(segment, name=memory_name(address))
            self._owned[address] = _Owned(segment, region)
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        """Forbid what `register_memory` allowed; 0, or -1."""
        with self._lock:
            owned = self._owned.pop(buffer_addr, None)
            if owned is None or self._server is None or self._engine is None:
                return -1
            self._registry.discard(buffer_addr)
        self._server.withdraw(owned.segment)
        self._engine.unregister(owned.region)
        owned.segment.close()
        return 0

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Register all, or none; 0, or -1."""
        if len(buffer_addresses) != len(capacities):
            return -1
        done: list[int] = []
        for address, capacity in zip(buffer_addresses, capacities, strict=True):
            if self.register_memory(address, capacity, location):
                for registered in done:
                    self.unregister_memory(registered)
                return -1
            done.append(address)
        return 0

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Unregister all that are registered; 0, or -1 if one was not."""
        results = [self.unregister_memory(address) for address in buffer_addresses]
        return min(results, default=0)

    def allocate_managed_buffer(self, length: int) -> int:
        """Return the address of new registered memory, shared with peers of this host, or 0."""
        if self._server is None or length <= 0:
            return 0
        try:
            segment = Segment.create(length, name="managed")
        except (StoreError, OSError) as error:
            log.error("no managed buffer: %s", error)
            return 0
        address = segment.address
        return address if self._own(address, segment) == 0 else 0

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Give memory of `allocate_managed_buffer` back; 0, or -1."""
        return self.unregister_memory(buffer_addr)

    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes | str, length: int) -> int:
        """Copy bytes to registered memory; 0, or -1."""
        data = src_ptr.encode() if isinstance(src_ptr, str) else bytes(src_ptr)
        if length > len(data) or not self._registry.covers([dest_address], [length]).all():
            return -1
        ctypes.memmove(dest_address, data, length)
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Return bytes of registered memory; raises ValueError for other memory."""
        if length < 0 or not self._registry.covers([source_address], [length]).all():
            raise ValueError(f"[{source_address:#x}, + {length}) is not registered")
        return ctypes.string_at(source_address, length)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """The address of the first memory a peer has registered, or 0."""
        try:
            ranges = self._peer(segment_name).ranges()
        except (StoreError, ValueError) as error:
            log.error("%s: %s", segment_name, error)
            return 0
        return ranges[0][0] if ranges else 0

    # -- peers

    def get_notifies(self) -> list[TransferNotify]:
        """The notes peers left since the last call."""
        if self._server is None:
            return []
        return [
            TransferNotify(note.name, note.data.decode(errors="replace"))
            for note in self._server.take_notifications()
        ]

    def send_probe(self, peer_server_name: str) -> int:
        """0 if the peer answers, else -1."""
        try:
            self._peer(peer_server_name).probe()
        except (StoreError, ValueError) as error:
            log.info("%s does not answer: %s", peer_server_name, error)
            self._forget(peer_server_name)
            return -1
        return 0

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Do what `send_probe` does: there is nothing else to warm up."""
        return self.send_probe(segment_name)

    def _peer(self, name: str) -> Peer:
        engine = self._engine
        if engine is None:
            raise InvalidArgumentError("the engine is not initialized")
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                address = str(Address.parse(name))
                peer = self._peers[name] = Peer(address, engine, self._secret)
        return peer

    def _forget(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            peer.forget()
