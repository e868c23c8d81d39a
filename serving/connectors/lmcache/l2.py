"""LMCache's L2 adapter on this store: tasks in, event fds and bitmaps out.

LMCache's server submits batches from two controller threads and polls three file descriptors.
*Lookup and lock* is a lease of the whole batch, one round trip; a load of what is locked asks no
master at all; *unlock* gives the lease back. A lease also ends by itself (`lock_ttl_s`), so a
server that dies blocks nothing. Chunks move between LMCache's arena and the store where they lie.

Stores, lookups and loads have threads of their own, so that none waits behind another. Written for
and tested with LMCache 0.5.6.
"""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier
from msgspec import Meta

from mooncake_store.errors import InvalidArgumentError
from serving.connectors.blocks import Blocks
from serving.connectors.counts import Counts
from serving.connectors.lmcache.names import Names
from serving.connectors.options import Seconds, StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mooncake_store import Client, ListedObject, Pieces
    from serving.connectors.keys import KVScope

__all__ = ["L2Options", "MooncakePyL2Adapter", "MooncakePyL2AdapterConfig"]

log = logging.getLogger(__name__)


class L2Options(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options, the `adapter_params` of the plug-in."""

    threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Batches of each kind that are worked on at the same time."""
    lock_ttl_s: Seconds = 60.0
    """When a lock ends that nobody ends."""


class MooncakePyL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """What LMCache passes on."""

    def __init__(self, options: L2Options) -> None:
        super().__init__()
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> MooncakePyL2AdapterConfig:
        """Read the parameters; raises ConfigError that names a wrong one."""
        return cls(L2Options.parse(d, "adapter_params"))

    @classmethod
    def help(cls) -> str:
        """The parameters."""
        return (
            f"adapter_params: {', '.join(L2Options.__struct_fields__)}; see docs/guide/lmcache.md"
        )


class MooncakePyL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keeps the chunks of LMCache's server in a mooncake-store pool."""

    def __init__(self, config: MooncakePyL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        # The pool evicts by itself: LMCache need not.
        super().__init__(max_capacity_bytes=0)
        self._options = options = config.options
        self._names = Names(options)
        self.counts = Counts()
        self.link = options.link()
        self._blocks = Blocks(self.link, options, self.counts)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stored: dict[int, L2StoreResult] = {}
        self._looked_up: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._events = [create_event_notifier() for _ in range(3)]
        self._threads = {
            name: ThreadPoolExecutor(options.threads, thread_name_prefix=f"mooncake-{name}")
            for name in ("store", "lookup", "load")
        }
        self._closed = False
        self.link.warm_up()

    # Events.

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return int(self._events[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when lookups have ended."""
        return int(self._events[1].fileno())

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return int(self._events[2].fileno())

    def _submit(
        self,
        threads: str,
        event: int,
        done: dict[int, Any],
        work: Callable[[], Any],
        otherwise: Callable[[], Any],
    ) -> int:
        """Work on a thread, then keep its result for whoever asks, and say so."""
        number = next(self._numbers)

        def run() -> None:
            try:
                result = work()
            except Exception:  # A cache must not take its server down.
                log.exception("%s %d failed", threads, number)
                result = otherwise()
            with self._lock:
                done[number] = result
            self._events[event].notify()

        self._threads[threads].submit(run)
        return number

    # Stores.

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store chunks."""
        return self._submit(
            "store", 0, self._stored, lambda: self._store(keys, objects),
            lambda: L2StoreResult(False, 0),
        )  # fmt: skip

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        for key, each in zip(keys, objects, strict=True):
            self._names.learn(key, each.get_shapes(), each.get_dtypes(), over=False)
        sizes = [each.get_size() for each in objects]
        names = self._names.of_server(keys)
        stored, refused = self._blocks.write(names, lambda: _pieces(objects, sizes), sizes)
        if stored:
            self._notify_keys_stored([keys[at] for at in stored], [sizes[at] for at in stored])
        return L2StoreResult(not refused, sum(sizes[at] for at in stored))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """What became of stores, each told once."""
        with self._lock:
            done = dict(self._stored)
            self._stored.clear()
        return done

    # Lookups.

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        """Find chunks and keep those that are there from eviction."""
        return self._submit(
            "lookup", 1, self._looked_up, lambda: self._look_up(keys, group_layout_descs),
            lambda: Bitmap(len(keys)),
        )  # fmt: skip

    def _look_up(self, keys: list[Any], layouts: dict[int, Any]) -> Bitmap:
        for key in keys:
            layout = (layouts or {}).get(key.object_group_id)
            if layout is not None:
                self._names.learn(key, layout.shapes, layout.dtypes, over=True)
        names = self._names.of_server(keys)
        return _bitmap(self._blocks.lock(names, self._options.lock_ttl_s))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which chunks are there and locked; told once."""
        with self._lock:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """End locks. What a store that is away does not hear ends with the lease."""
        self._threads["lookup"].submit(self._blocks.unlock, self._names.of_server(keys))

    # Loads.

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read chunks into memory of LMCache's."""
        return self._submit(
            "load", 2, self._loaded, lambda: self._load(keys, objects), lambda: Bitmap(len(keys))
        )

    def _load(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        sizes = [each.get_size() for each in objects]
        read = self._blocks.read(self._names.of_server(keys), _pieces(objects, sizes))
        came = [key for key, nbytes in zip(keys, read, strict=True) if nbytes]
        if came:
            self._notify_keys_accessed(came)
        return _bitmap([bool(nbytes) for nbytes in read])

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which chunks were read; told once."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    # The rest.

    def delete(self, keys: list[Any]) -> None:
        """Remove chunks from the pool, for all who share it."""
        names = self._names.of_server(keys)
        within = self._options.save_deadline_s
        found = self.link.call(lambda c: c.query_many(names, deadline=within).sizes.tolist())
        gone = self._blocks.remove(names, within)
        sizes = found or [0] * len(names)
        at = [number for number, removed in enumerate(gone) if removed]
        if at:
            self._notify_keys_deleted([keys[n] for n in at], [sizes[n] for n in at])

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """A page of the chunks in the pool, whoever stored them, and where the next one starts.

        Names in the pool are hashes: what is told of are chunks of models, ranks and salts that
        this server has met. Raises ValueError for a wrong page size or cursor, RuntimeError when
        the store is away.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be positive, not {page_size}")
        number, _, after = (cursor or "0.").partition(".")
        if not number.isdecimal():
            raise ValueError(f"{cursor!r} is no cursor of a listing")
        scopes = self._names.of_models
        for at in range(int(number), len(scopes)):
            facts, scope = scopes[at]
            if model_name in (None, facts[0]):
                entries, after = self._page(facts, scope, page_size, after)
                token = f"{at}.{after}" if after else f"{at + 1}."
                last = not after and at + 1 == len(scopes)
                return KeyListPage(tuple(entries), None if last else token)
        return KeyListPage((), None)

    def _page(
        self, facts: tuple[Any, ...], scope: KVScope, limit: int, after: str
    ) -> tuple[list[KeyEntry], str]:
        within = self._options.save_deadline_s

        def ask(client: Client) -> tuple[list[ListedObject], str] | InvalidArgumentError:
            try:
                return client.list_page(scope.prefix, after=after, limit=limit, deadline=within)
            except InvalidArgumentError as error:
                return error  # The caller's fault: the store is well.

        page = self.link.call(ask)
        if isinstance(page, InvalidArgumentError):
            raise page
        if page is None:
            raise RuntimeError("the store is away; it is tried again")
        objects, following = page
        model, rank, group, salt, _ = facts
        entries = []
        for each in objects:
            chunk = bytes.fromhex(str(each.key).removeprefix(scope.prefix))
            key = ObjectKey(chunk, model, rank, group, salt)
            entries.append(KeyEntry(key.to_encoded_object_key(), each.size))
        return entries, following

    def report_status(self) -> dict[str, Any]:
        """Whether the store answers, and what is locked."""
        return {
            "is_healthy": self.link.up,
            "type": type(self).__name__,
            "outages": self.link.outages,
            "locked_key_count": self._blocks.locked,
        }

    def close(self) -> None:
        """Finish what runs, give leases back, close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        self.link.close()
        for event in self._events:
            event.close()


def _pieces(objects: Sequence[Any], sizes: list[int]) -> Pieces:
    """Where chunks lie, one piece each."""
    from mooncake_store import Pieces

    where = [each.data_ptr for each in objects]
    return Pieces(where, sizes, range(len(where) + 1), keep=tuple(objects))


def _bitmap(bits: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    bitmap.batched_set([at for at, bit in enumerate(bits) if bit])
    return bitmap
