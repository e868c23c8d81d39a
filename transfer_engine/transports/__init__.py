"""One file per way to move bytes, cheapest first in `NAMES`, and the server that answers them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.base import Transport
    from transfer_engine.rpc.networks import Networks
    from transfer_engine.wire.keyring import Secret

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
_DIALING = ("rdma", "tcp")
"""Those that connect to an address, whose owners may ask for the secret."""

NAMES = tuple(_CLASSES)
"""The transports there are, cheapest first."""


def create(
    name: str, *, secret: Secret | None = None, networks: Networks | None = None
) -> Transport:
    """Build a transport by name; `secret` proves this process to peers that ask for it.

    `networks` are those whose addresses may be connected to; None: those where workers can be.
    """
    if name not in _CLASSES:
        from transfer_engine.errors import ConfigError

        raise ConfigError(f"unknown transport {name!r}", advice=f"choose from {', '.join(NAMES)}")
    kind = getattr(importlib.import_module(f"{__name__}.{name}"), _CLASSES[name])
    given = {"secret": secret, "networks": networks} if name in _DIALING else {}
    made: Transport = kind(**given)
    return made
