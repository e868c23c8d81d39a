"""The sans-I/O wire codec: frames, packed and cold bodies, registries, errors, handshake."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.faults import decode_error, encode_error
    from transfer_engine.wire.frame import (
        VERSION,
        VERSIONS,
        Frame,
        FrameDecoder,
        VersionRange,
        encode_frame,
    )
    from transfer_engine.wire.handshake import ClientHandshake, Identity, ServerHandshake, Session
    from transfer_engine.wire.registry import Operation, Registry, describe
    from transfer_engine.wire.schema import Column, Packed, Ragged
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = [
    # What the owner of a service declares.
    "Cold",
    "Column",
    "Operation",
    "Packed",
    "Ragged",
    "Registry",
    "describe",
    # What a driver needs.
    "VERSION",
    "VERSIONS",
    "ClientHandshake",
    "Frame",
    "FrameDecoder",
    "Identity",
    "ServerHandshake",
    "Session",
    "VersionRange",
    "decode_error",
    "encode_error",
    "encode_frame",
]
