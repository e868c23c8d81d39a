"""What all calls of the drop-in share: setup and close, options, and errors as numbers.

Every call of the original answers a number, never an exception, except for arguments of a wrong
type (TypeError). The reason behind a number is logged, at most a few lines a minute.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from mooncake_store.client.extension import BUFFER_SMALL, OUT_OF_RANGE
from mooncake_store.compat.codes import NOT_FOUND, NOT_SUPPORTED, OK, code_of, codes, log
from mooncake_store.compat.memory import Registry
from mooncake_store.compat.setup import Wanted, connect, lend, lend_disk
from mooncake_store.compat.values import ReplicateConfig, SoftPinAction
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.failed_reads import FailedReads
from mooncake_store.program.descriptors import lendable
from transfer_engine.base import default_timeout_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.client import Client, ClientStats, PutOptions
    from mooncake_store.client.results import BatchResult
    from mooncake_store.compat.disks import LentDisk
    from mooncake_store.worker.worker import Worker

__all__ = ["Base", "Unsupported", "require_keys", "require_text"]

_HEALTH_S = 1.0
_LEASES_S = 1.0
_QUIET_S = 10.0
_open: weakref.WeakSet[Base] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for store in list(_open):
        store.close()


class Unsupported(StoreError):
    """Something the original does and this store does not."""

    code = NOT_SUPPORTED


class Base:
    """One store as the original's programs hold it."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._wanted = Wanted("localhost")
        self._worker: Worker | None = None
        self._extra_workers: dict[str, Worker] = {}
        self._places = threading.BoundedSemaphore(0)  # for more of them
        self._disk: LentDisk | None = None
        self._hostname = ""
        self._registry = Registry()
        self._doubts: FailedReads[str] = FailedReads()
        self._engine: object = None
        self._http: Any = None
        self._told_s: dict[str, float] = {}
        self._pid = os.getpid()

    # -- life

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Connect to a master and lend memory to the pool; 0, or a negative number.

        Takes the original's positional arguments, or one dictionary with their names.
        """
        given = args[0] if args else kwargs.get("config")
        if len(args) + len(kwargs) == 1 and isinstance(given, dict):
            return self._setup_with(given)
        return self._setup_with(_named(*args, **kwargs))

    def _setup_with(self, given: dict[str, Any]) -> int:
        self.close()
        try:
            wanted = Wanted.of(given)
            wanted.check()
            self._client = connect(wanted)
            self._places = threading.BoundedSemaphore(lendable(self._client._core.shards))
            self._wanted = wanted
            self._registry = Registry(unchecked=wanted.unchecked_pointers)
            self._worker, self._hostname = lend(wanted, self._client)
            self._disk = lend_disk(wanted, self._client, self._hostname)
            if wanted.http_port is not None:
                from mooncake_store.compat.http import Endpoint

                self._http = Endpoint(self.health_check, self._stats, wanted.http_port)
        except (StoreError, ValueError, OSError) as error:
            log.error("setup failed: %s", error)
            self.close()
            return code_of(error)
        self._engine = given.get("engine")
        self._pid = os.getpid()
        _open.add(self)
        return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect without lending memory; `alloc_from_mem_pool` then gives registered memory.

        There is no real client in between: `server_address` is the master's, unless
        MOONCAKE_MASTER names it.
        """
        _require_int(mem_pool_size, local_buffer_size)
        return self._setup_with(
            {
                "local_hostname": "localhost",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": 0,
                "local_buffer_size": local_buffer_size,
                "master_server_addr": os.getenv("MOONCAKE_MASTER") or require_text(server_address),
                "tenant_id": os.getenv("MOONCAKE_TENANT_ID", "default"),
            }
        )

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16 << 20) -> int:
        """Set up with MOONCAKE_MASTER, or a master on this machine."""
        return self.setup(
            "localhost", "P2PHANDSHAKE", mount_segment_size, 16 << 20, protocol, device_name,
            os.getenv("MOONCAKE_MASTER", "127.0.0.1:50051"),
        )  # fmt: skip

    def close(self) -> int:
        """Take the memory back and disconnect; `setup` may follow. Always 0."""
        client, self._client = self._client, None
        workers = [self._worker, *self._extra_workers.values()]
        self._worker, self._extra_workers = None, {}
        disk, self._disk = self._disk, None
        http, self._http = self._http, None
        _open.discard(self)
        if http is not None:
            http.close()
        if client is not None:
            with contextlib.suppress(StoreError):
                client.close()
        for worker in workers:
            if worker is not None and self._pid == os.getpid():
                worker.stop(leases_s=_LEASES_S)
        if disk is not None and self._pid == os.getpid():
            disk.close(leases_s=_LEASES_S)
        self._doubts = FailedReads()
        return OK

    def tearDownAll(self) -> int:
        """Do what `close` does."""
        return self.close()

    def health_check(self) -> int:
        """0 if the store answers, 1 before `setup` or after `close`, 2 if the master is away."""
        if self._client is None:
            return 1
        try:
            self._client.status(deadline=_HEALTH_S)
        except StoreError:
            return 2
        return 0

    def _stats(self) -> ClientStats | None:
        return None if self._client is None else self._client.stats()

    def get_hostname(self) -> str:
        """The name of this node, "host:port": what preferred segments are called."""
        return self._hostname

    @property
    def client(self) -> Client:
        """The native client, for what the original's API cannot say (such as a plain probe)."""
        return self._require()

    # -- what calls share

    def _require(self) -> Client:
        if self._client is None:
            raise Unset("the store is not set up", advice="call setup()")
        return self._client

    def _failed(self, what: str, error: Exception) -> int:
        """Log a failure, seldom; return its number."""
        number = code_of(error)
        now = time.monotonic()
        kind = f"{what} {number}"
        if now - self._told_s.get(kind, -_QUIET_S) >= _QUIET_S:
            self._told_s[kind] = now
            log.warning("%s: %s", what, error)
        return number

    def _tell(self, what: str, result: BatchResult) -> None:
        """Log the first failure of a batch that is no absence, seldom."""
        if not result.ok:
            failed = result.failed
            told = failed[result.statuses[failed] != NOT_FOUND]
            error = result.error(int(told[0])) if len(told) else None
            if error is not None:
                self._failed(what, error)

    def _options(
        self, config: ReplicateConfig | None, count: int, nbytes: int, *, upsert: bool = False
    ) -> PutOptions:
        """A configuration as options of the native put; raises InvalidArgumentError."""
        options: PutOptions = {"deadline": default_timeout_s(nbytes)}
        if upsert:
            options["upsert"] = True
        if config is None:
            return options
        if not isinstance(config, ReplicateConfig):
            raise TypeError(f"config is a ReplicateConfig, not {type(config).__name__}")
        if config.nof_replica_num or config.dfs_replica_num or config.preferred_nof_segments:
            raise Unsupported("replicas on NVMe-oF and DFS are not placed by requests here")
        if config.replica_num != 1:
            options["replicas"] = config.replica_num
        if config.soft_pin_ttl_ms is not None:
            if config.soft_pin_action is not SoftPinAction.ENABLE:
                raise InvalidArgumentError("soft_pin_ttl_ms is for SoftPinAction.ENABLE only")
            options["pin_ttl"] = config.soft_pin_ttl_ms / 1000
        if config.soft_pin_action is not SoftPinAction.PRESERVE:
            options["soft_pin"] = config.soft_pin_action is SoftPinAction.ENABLE
        if config.with_hard_pin:
            options["hard_pin"] = True
        preferred = [name for name in (config.preferred_segment,) if name]
        preferred += [name for name in config.preferred_segments if name not in preferred]
        if config.prefer_alloc_in_same_node and self._hostname not in preferred:
            preferred.append(self._hostname)
        if preferred:
            options["preferred"] = preferred
        if config.group_ids is not None:
            if len(config.group_ids) != count:
                raise InvalidArgumentError(f"{len(config.group_ids)} group_ids for {count} objects")
            options["group"] = config.group_ids
        return options

    def _put(
        self,
        what: str,
        keys: Sequence[str],
        values: Any,
        nbytes: int,
        config: ReplicateConfig | None,
        *,
        upsert: bool,
        buffered: bool = True,
    ) -> list[int]:
        """Put a batch; a number per key. Keys in doubt are replaced rather than left alone.

        `buffered` values are no registered memory: the original stages them, and refuses them where
        it was given no local buffer. Nothing is staged here, but programs rely on that.
        """
        try:
            if buffered and not self._wanted.local_buffer_size:
                raise InvalidArgumentError(
                    "the store was set up without a local buffer, which values need",
                    advice="give setup() a local_buffer_size, or put from registered memory",
                )
            doubted = bool(self._doubts) and any(key in self._doubts for key in keys)
            options = self._options(config, len(keys), nbytes, upsert=upsert or doubted)
            result = self._require().put_many(keys, values, **options)
        except StoreError as error:
            return [self._failed(what, error)] * len(keys)
        if self._doubts:
            stored = (result.statuses == 0) & ~result.already_present & ~result.superseded
            self._doubts.clear(key for key, good in zip(keys, stored.tolist(), strict=True) if good)
        self._tell(what, result)
        return codes(result.statuses)

    def _judge_reads(self, what: str, keys: Sequence[str], result: BatchResult) -> None:
        """Doubt what could not be read though it is there, and say why; trust what could."""
        if self._doubts:
            judged = zip(keys, result.statuses.tolist(), strict=True)
            self._doubts.clear(key for key, status in judged if status == 0)
        if not result.ok:
            failed = [(at, int(result.statuses[at])) for at in result.failed.tolist()]
            self._doubts.note(keys[at] for at, status in failed if status not in _INNOCENT)
            self._tell(what, result)


# Absent, or asked for in a way that cannot be: that says nothing about the object.
_INNOCENT = (-704, -703, BUFFER_SMALL, OUT_OF_RANGE)


class Unset(StoreError):
    """The store was not set up; the original's number for that is -1."""

    code = -1


def _named(
    local_hostname: str,
    metadata_server: str,
    global_segment_size: int,
    local_buffer_size: int,
    protocol: str,
    rdma_devices: str,
    master_server_addr: str,
    engine: object = None,
    enable_ssd_offload: bool = False,
    ssd_offload_path: str = "",
    tenant_id: str = "default",
    enable_client_http_server: bool = False,
    client_http_port: int = 9300,
) -> dict[str, Any]:
    """The positional form as the dictionary; Python raises the TypeErrors."""
    _require_int(global_segment_size, local_buffer_size, client_http_port)
    for text in (local_hostname, metadata_server, protocol, rdma_devices, master_server_addr):
        require_text(text)
    require_text(ssd_offload_path)
    require_text(tenant_id)
    return dict(locals())


_named.__qualname__ = "setup"  # what its TypeErrors speak of


def _require_int(*values: object) -> None:
    for value in values:
        if not isinstance(value, int):
            raise TypeError(f"an int is expected, not {value!r}")


def require_text(value: object) -> str:
    """A str, or TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"a str is expected, not {type(value).__name__}")
    return value


def require_keys(keys: object) -> list[str]:
    """A list of str, or TypeError."""
    if not isinstance(keys, list | tuple) or not all(type(key) is str for key in keys):
        raise TypeError("keys are a list of str")
    return list(keys)
