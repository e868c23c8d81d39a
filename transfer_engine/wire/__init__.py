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

_HOME = {
    "Cold": "cold",
    "Column": "schema",
    "Packed": "schema",
    "Ragged": "schema",
    "Operation": "registry",
    "Registry": "registry",
    "describe": "registry",
    "decode_error": "faults",
    "encode_error": "faults",
    "VERSION": "frame",
    "VERSIONS": "frame",
    "Frame": "frame",
    "FrameDecoder": "frame",
    "VersionRange": "frame",
    "encode_frame": "frame",
    "ClientHandshake": "handshake",
    "Identity": "handshake",
    "ServerHandshake": "handshake",
    "Session": "handshake",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"transfer_engine.wire.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
