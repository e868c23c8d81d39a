"""LMCache's remote connector on this store.

LMCache awaits it on its event loop; the blocking client works on threads beside. Batches stay
batches: one round trip to look up a prefix, one to read chunks, two to store them. With
`save_chunk_meta: false` chunks move between LMCache's memory and the store's where they lie. With
LMCache's default, a header with shapes goes before each chunk, and a read is copied once more.

It is a cache: what fails is a miss. LMCache's wrapper releases the memory of what was put. Written
for and tested with LMCache 0.5.6.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from msgspec import Meta

from mooncake_store.errors import ConfigError
from serving.connectors.blocks import Blocks
from serving.connectors.counts import Counts
from serving.connectors.lmcache.names import Names
from serving.connectors.options import Seconds, WeighedOptions

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Sequence

__all__ = ["MooncakePyConnector", "MooncakePyConnectorAdapter", "RemoteOptions"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_PLUGIN = "mooncake_py"
_PING_S = 1.0


class RemoteOptions(WeighedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options, in LMCache's `extra_config` under the name of the plug-in."""

    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Batches that are moved at the same time."""
    lookup_lease_s: Seconds = 10.0
    """How long chunks that a lookup found, to be loaded at once, are kept from eviction."""


class MooncakePyConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes connectors for `remote_storage_plugins: ["mooncake_py"]`, or "mooncake_py.NAME"."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{_PLUGIN}")

    def can_parse(self, url: str) -> bool:
        """Whether an address names this plug-in."""
        scheme, _, name = url.partition("://")
        return scheme == "plugin" and extract_plugin_type(name) == _PLUGIN

    def create_connector(self, context: Any) -> MooncakePyConnector:
        """A connector with the options of the instance that the context names."""
        extra = (context.config.extra_config if context.config else None) or {}
        name = context.plugin_name or _PLUGIN
        options = RemoteOptions.parse(extra.get(name, {}), f"extra_config, {name!r}")
        if context.metadata is None:
            raise ConfigError("LMCache has no metadata of the model: chunks cannot be named")
        return MooncakePyConnector(
            context.config, context.metadata, context.local_cpu_backend, options
        )


class MooncakePyConnector(RemoteConnector):  # type: ignore[misc]
    """Keeps LMCache's chunks in a mooncake-store pool."""

    def __init__(self, config: Any, metadata: Any, memory: Any, options: RemoteOptions) -> None:
        super().__init__(config, metadata)
        self._memory = memory
        self._options = options
        # Layer by layer, a key is a chunk of one layer.
        parts = metadata.kv_shape[0] if config.use_layerwise else 1
        self._each_s = options.worth_s(metadata.chunk_size) / parts
        self._names = Names(options)
        self._layout = json.dumps(
            [
                list(metadata.kv_shape), str(metadata.kv_dtype), metadata.use_mla,
                metadata.chunk_size, bool(self.save_chunk_meta), bool(config.use_layerwise),
            ],
        )  # fmt: skip
        self.counts = Counts()
        self.link = options.link(lends=getattr(metadata, "role", None) != "scheduler")
        self._blocks = Blocks(self.link, options, self.counts)
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="mooncake-lmcache")
        self.link.warm_up()

    async def _beside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run on a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def _named(self, keys: Sequence[Any]) -> list[str]:
        return self._names.of_engine(keys, self._layout)

    # Lookups.

    async def exists(self, key: Any) -> bool:
        """Whether a chunk is there."""
        return await self._beside(self.exists_sync, key)

    def exists_sync(self, key: Any) -> bool:
        """Whether a chunk is there, asked on the calling thread."""
        return self._blocks.leading(self._named([key]), each_s=self._each_s) == 1

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many chunks from the first one on are there."""
        return self._blocks.leading(self._named(keys), each_s=self._each_s)

    def support_batched_async_contains(self) -> bool:
        """Yes."""
        return True

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """How many chunks from the first one on are there; `pin` keeps them for a load."""
        lease_s = self._options.lookup_lease_s if pin else 0.0
        return await self._beside(
            lambda: self._blocks.leading(self._named(keys), lease_s, each_s=self._each_s)
        )

    # Reads.

    async def get(self, key: Any) -> Any:
        """Read a chunk into LMCache's memory; None if it cannot be had."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Yes."""
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """Read chunks; None for each that cannot be had."""
        if not keys:
            return []
        read = self._read_with_header if self.save_chunk_meta else self._read_in_place
        return await self._beside(read, self._named(keys))

    def support_batched_get_non_blocking(self) -> bool:
        """Yes."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """Read chunks up to the first that cannot be had."""
        found = await self.batched_get(keys)
        end = found.index(None) if None in found else len(found)
        for chunk in found[end:]:
            if chunk is not None:
                chunk.ref_count_down()
        return found[:end]

    def _read_in_place(self, names: list[str]) -> list[Any]:
        """Chunks of the engine's own shape, each into memory for a full one."""
        chunks = [
            self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt) for _ in names
        ]
        having = [at for at, chunk in enumerate(chunks) if chunk is not None]
        if not having:
            return chunks
        buffers = [_bytes_of(chunks[at]) for at in having]
        read = self._blocks.read([names[at] for at in having], buffers)
        found: list[Any] = [None] * len(names)
        for at, nbytes in zip(having, read, strict=True):
            try:
                if nbytes:
                    found[at] = self.reshape_partial_chunk(chunks[at], nbytes)
            except ValueError:  # Not a whole number of tokens.
                found[at] = None
            if found[at] is None:
                chunks[at].ref_count_down()
        return found

    def _read_with_header(self, names: list[str]) -> list[Any]:
        """Chunks whose shape only their header tells."""
        return [
            None if value is None else self._unpacked(value) for value in self._blocks.values(names)
        ]

    def _unpacked(self, value: bytes) -> Any:
        try:
            header = RemoteMetadata.deserialize(value[: self.remote_metadata_bytes])
        except Exception:  # It is not LMCache's: whatever it raises, there is no chunk.
            log.warning("an object under the key of a chunk has no header; it counts as missing")
            return None
        body = memoryview(value)[self.remote_metadata_bytes :]
        if len(body) != header.length:
            return None
        chunk = self._memory.allocate(header.shapes, header.dtypes, header.fmt)
        if chunk is None:
            return None
        if chunk.get_size() != len(body):
            chunk.ref_count_down()
            return None
        _bytes_of(chunk)[:] = body
        return chunk

    # Writes.

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Yes."""
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """Store chunks."""
        if keys:
            await self._beside(self._write, self._named(keys), memory_objs)

    def _write(self, names: list[str], chunks: list[Any]) -> None:
        from mooncake_store import Pieces

        where = [[chunk.data_ptr] for chunk in chunks]
        sizes = [[chunk.get_size()] for chunk in chunks]
        headers = [self._header(chunk) for chunk in chunks] if self.save_chunk_meta else []
        for at, header in enumerate(headers):
            where[at].insert(0, ctypes.addressof(header))
            sizes[at].insert(0, len(header))
        self._blocks.write(names, lambda: Pieces.of(where, sizes), list(map(sum, sizes)))
        del headers  # They had to live until here.

    def _header(self, chunk: Any) -> Any:
        """A header's bytes at an address of their own."""
        data = RemoteMetadata(
            chunk.get_size(), chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format()
        ).serialize()
        return ctypes.create_string_buffer(data, len(data))

    # The rest.

    def remove_sync(self, key: Any) -> bool:
        """Remove a chunk; whether it was there."""
        return self._blocks.remove(self._named([key]), self._options.save_deadline_s)[0]

    async def list(self) -> list[str]:
        """The names of all chunks of the models seen so far."""
        return await self._beside(self._list)

    def _list(self) -> builtins.list[str]:
        found = self.link.call(
            lambda c: [str(each.key) for prefix in self._names.prefixes for each in c.list(prefix)]
        )
        return found or []

    def support_ping(self) -> bool:
        """Yes: LMCache goes on without a store that does not answer."""
        return True

    async def ping(self) -> int:
        """0 if the store answers."""
        there = await self._beside(self.link.call, lambda c: [c.exists("ping", deadline=_PING_S)])
        return 0 if there else 1

    async def close(self) -> None:
        """Finish what runs, give leases back, close. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.link.close()

    def __repr__(self) -> str:
        return f"MooncakePyConnector({self._options.url!r})"


def _bytes_of(chunk: Any) -> memoryview:
    """The memory of a chunk, writable, without the padding behind it."""
    size = chunk.get_size()
    return memoryview((ctypes.c_ubyte * size).from_address(chunk.data_ptr)).cast("B")
