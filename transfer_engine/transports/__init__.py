"""One file per way to move bytes, cheapest first in `NAMES`, and the server that answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.base import Transport

__all__ = ["NAMES", "create"]

NAMES = ("local", "shm", "cuda", "file", "rdma", "tcp")
"""The transports there are, cheapest first."""


def create(name: str, *, secret: bytes | None = None) -> Transport:
    """Build a transport by name; `secret` proves this process to peers that ask for it."""
    from transfer_engine.errors import ConfigError

    if name == "local":
        from transfer_engine.transports.local import LocalTransport

        return LocalTransport()
    if name == "shm":
        from transfer_engine.transports.shm import ShmTransport

        return ShmTransport()
    if name == "cuda":
        from transfer_engine.transports.cuda import CudaTransport

        return CudaTransport()
    if name == "file":
        from transfer_engine.transports.file import FileTransport

        return FileTransport()
    if name == "rdma":
        from transfer_engine.transports.rdma import RdmaTransport

        return RdmaTransport(secret=secret)
    if name == "tcp":
        from transfer_engine.transports.tcp import TcpTransport

        return TcpTransport(secret=secret)
    raise ConfigError(f"unknown transport {name!r}", advice=f"choose from {', '.join(NAMES)}")
