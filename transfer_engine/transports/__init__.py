"""One file per way to move bytes, cheapest first in `NAMES`, and the server that answers them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.base import Transport

__all__ = ["NAMES", "create"]

# By the module of this package that has it. Imported when asked for: most need few.
_CLASSES = {
    "local": "LocalTransport",
    "shm": "ShmTransport",
    "cuda": "CudaTransport",
    "file": "FileTransport",
    "rdma": "RdmaTransport",
    "tcp": "TcpTransport",
}
_PROVING = ("rdma", "tcp")
"""Those whose owners may ask for the secret."""

NAMES = tuple(_CLASSES)
"""The transports there are, cheapest first."""


def create(name: str, *, secret: bytes | None = None) -> Transport:
    """Build a transport by name; `secret` proves this process to peers that ask for it."""
    if name not in _CLASSES:
        from transfer_engine.errors import ConfigError

        raise ConfigError(f"unknown transport {name!r}", advice=f"choose from {', '.join(NAMES)}")
    kind = getattr(importlib.import_module(f"{__name__}.{name}"), _CLASSES[name])
    made: Transport = kind(secret=secret) if name in _PROVING else kind()
    return made
