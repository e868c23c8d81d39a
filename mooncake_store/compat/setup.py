"""From the arguments of `setup` to a client, and a worker that lends this process's memory.

Two forms: the positional one, where anything it does not know is a TypeError (callers probe with
that), and a dictionary, where sizes may have units and unknown names are ignored. Only what means
something here is used: the metadata server is not (peers are found through the master), a device
is not, and the local buffer is a bound for `BufferPool`, since nothing is staged. Where the
original writes files of objects, a disk is lent (`disks.py`).

A host name that other machines can reach needs a secret, or `MOONCAKE_WORKER_INSECURE=1`; next to
a master on loopback everything stays on loopback.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.client import Client
from mooncake_store.compat.codes import log
from mooncake_store.compat.config import PROTOCOLS, parse_flag, parse_size, split_hostname
from mooncake_store.compat.disks import DiskWanted, LentDisk
from mooncake_store.config.settings import WorkerConfig, load
from mooncake_store.credentials import secret_of
from mooncake_store.endpoint import ETCD_SCHEME, is_loopback
from mooncake_store.errors import ConfigError
from transfer_engine import transports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mooncake_store.worker.worker import Worker

__all__ = ["Wanted", "connect", "lend", "lend_disk"]

MASTER_DEFAULT = "127.0.0.1:50051"
SIZE_DEFAULT = 16 << 20
SEGMENT_BYTES_MIN = 1 << 20
# Where the original takes ports from; some callers check that.
_PORTS = range(12_300, 14_301)
_ATTEMPTS = 4
"""How many ports that others took meanwhile are stepped over."""


@dataclass(slots=True)
class Wanted:
    """What a call of `setup` asks for."""

    local_hostname: str
    master: str = MASTER_DEFAULT
    global_segment_size: int = SIZE_DEFAULT
    local_buffer_size: int = SIZE_DEFAULT
    protocol: str = "tcp"
    tenant_id: str = "default"
    unchecked_pointers: bool = False
    http_port: int | None = None
    file: str = ""
    """A file whose first `global_segment_size` bytes are lent instead of memory."""
    disk: DiskWanted | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Wanted:
        """Read the dictionary form; raises ValueError for what is missing or impossible."""
        for name in ("local_hostname", "metadata_server"):
            if not isinstance(given.get(name), str) or not given[name]:
                raise ValueError(f"{name} is required")
        address = given.get("master_server_addr") or given.get("master_server_address")
        http = parse_flag(given.get("enable_client_http_server", False))
        memory_bytes = parse_size(given.get("global_segment_size", SIZE_DEFAULT))
        return cls(
            local_hostname=given["local_hostname"],
            master=str(address or MASTER_DEFAULT),
            global_segment_size=memory_bytes,
            local_buffer_size=parse_size(given.get("local_buffer_size", SIZE_DEFAULT)),
            protocol=str(given.get("protocol", "tcp")),
            tenant_id=str(given.get("tenant_id") or "default"),
            unchecked_pointers=parse_flag(
                given.get("unchecked_pointers", os.getenv("MOONCAKE_COMPAT_UNCHECKED_POINTERS", ""))
            ),
            http_port=int(given.get("client_http_port", 9300)) if http else None,
            disk=DiskWanted.of(given, memory_bytes),
        )

    def check(self) -> None:
        """Refuse what cannot be, and say once what is not done as asked."""
        if self.global_segment_size < 0 or self.local_buffer_size < 0:
            raise ValueError("sizes must not be negative")
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol {self.protocol!r} is unknown, use 'tcp' or 'rdma'")
        if self.protocol != "tcp" and self.protocol not in transports.NAMES:
            log.warning(
                "protocol %s is not built in: bytes move over %s",
                self.protocol, ", ".join(transports.NAMES),
            )  # fmt: skip


def connect(wanted: Wanted) -> Client:
    """Return a client of the store; raises what keeps it from connecting."""
    return Client(f"{_store_of(wanted.master)}/{wanted.tenant_id}")


def _store_of(master: str) -> str:
    """The URL of a store without its namespace.

    The original writes semicolons between addresses, of masters as of the etcd that knows them;
    what the pool is called there is in a variable. The URL of a store is taken as well.
    """
    places = master.removeprefix("http://").replace(";", ",").rstrip("/")
    scheme, separator, hosts = places.partition("://")
    if not separator:
        return f"mooncake://{places}"
    if scheme not in ("etcd", "mooncake+etcd"):
        raise ConfigError(
            f"{master!r} names a service that knows where the master is, which this store does "
            "not ask",
            advice="name the masters themselves, such as host1:50051,host2:50051, or the etcd of "
            "their pool, such as etcd://host1:2379;host2:2379",
        )
    if "/" in hosts:
        return ETCD_SCHEME + hosts
    return f"{ETCD_SCHEME}{hosts}/{os.getenv('MC_STORE_CLUSTER_ID') or 'default'}"


def lend(wanted: Wanted, client: Client) -> tuple[Worker | None, str]:
    """Lend `global_segment_size` bytes to the pool; return the worker, and its name."""
    host, named = split_hostname(wanted.local_hostname)
    port = named or _free_port(host)
    if wanted.global_segment_size < SEGMENT_BYTES_MIN:
        return None, f"{host}:{port}"
    for _ in range(_ATTEMPTS):
        try:
            return _worker(wanted, client, host, port), f"{host}:{port}"
        except ConfigError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
            # The original listens elsewhere than its name says, so programs name one port twice.
            other = _free_port(host)
            log.log(
                logging.WARNING if port == named else logging.DEBUG,
                "port %d is in use, %d is taken instead", port, other,
            )  # fmt: skip
            port = other
    return _worker(wanted, client, host, port), f"{host}:{port}"


def lend_disk(wanted: Wanted, client: Client, hostname: str) -> LentDisk | None:
    """Lend the disk that is wanted beside what is lent as `hostname`."""
    if wanted.disk is None:
        return None
    host, _ = split_hostname(wanted.local_hostname)
    with wanted.disk.new_path() as path:
        place = f"{path}:{wanted.disk.nbytes()}"
        try:
            return LentDisk(_start(client, f"{hostname}/disk", host, 0, files=(place,)), path)
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise


def _worker(wanted: Wanted, client: Client, host: str, port: int) -> Worker:
    """Start a worker that listens there."""
    nbytes = wanted.global_segment_size
    lent: dict[str, Any] = {"segments": str(nbytes)}
    if wanted.file:
        lent = {"files": (f"{wanted.file}:{nbytes}",)}
    return _start(client, f"{host}:{port}", host, port, **lent)


def _start(client: Client, name: str, host: str, port: int, **lent: Any) -> Worker:
    """Start a worker that listens there and lends this."""
    from mooncake_store.worker.worker import Worker

    masters = client._driver.setup.masters
    on_loopback = is_loopback(host) or all(is_loopback(each.host) for each in masters.named)
    settings = load(
        WorkerConfig,
        overrides={
            "master": str(masters),
            "etcd_file": client.config.etcd_file or None,
            "name": name,
            "host": "127.0.0.1" if on_loopback else host,
            "port": port,
            "segments": (),
            "files": (),
        }
        | lent,
    ).value
    if settings.memory == "auto":
        # It has a name, and ends with its program, which nobody expects to leave memory behind.
        settings = msgspec.structs.replace(settings, memory="anonymous")
    secret = secret_of(settings)
    worker = Worker(settings, secret=secret)
    worker.start(timeout_s=client.config.deadline_s)
    return worker


def _free_port(host: str) -> int:
    """A port of the original's range that is free now; another process may still be faster."""
    start = random.randrange(len(_PORTS))
    for port in (*_PORTS[start:], *_PORTS[:start]):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1" if is_loopback(host) else "", port))
            except OSError:
                continue
            return int(port)
    return 0
