"""Bytes of bf16 and fp16 numbers made smaller without loss, and back.

    codec = Codec()
    stored = codec.encode(data)          # at most HEAD_BYTES longer than data
    codec.decode(stored, memory)         # False: `stored` is not what was encoded, of this length

The upper bytes of such numbers, sign and exponent, are much alike; the lower ones are noise. So
they are put side by side, upper bytes first, and of each half a compressor (zstd) makes what it
can: of KV in bf16 about two thirds are left, nearly all of it the lower half. What gets less than
a tenth smaller stays as it is.

Thread-safe; it needs the package `zstandard`. Cost: the compressor's, some hundred MB/s.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HEAD_BYTES", "Codec"]

_HEAD = struct.Struct("<4sBxxxII")  # magic, which halves are compressed, the length of each
_MAGIC = b"mkz1"
HEAD_BYTES = _HEAD.size
_UPPER, _LOWER, _AS_IT_IS = 1, 2, 4
_LEAST_GAIN = 0.9
_SAMPLE_BYTES = 1 << 16
_LEVEL = 1
"""Higher levels take longer and gain no more of bytes that are drawn from few."""


class Codec:
    """Raises ConfigError where there is no compressor."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(
                "what is stored in fewer bytes needs the package zstandard",
                advice="pip install zstandard",
            ) from error
        self._zstd: Any = zstandard

    def gains(self, data: memoryview) -> bool:
        """Whether bytes like the first of these get smaller by a tenth."""
        sample = data[:_SAMPLE_BYTES]
        return len(self.encode(sample)) < _LEAST_GAIN * len(sample)

    def encode(self, data: memoryview) -> bytes:
        """Return bytes of which `decode` makes these again."""
        numbers = np.frombuffer(data, np.uint8)
        kind, halves = 0, []
        for bit, half in ((_UPPER, numbers[1::2].tobytes()), (_LOWER, numbers[0::2].tobytes())):
            stored = self._smaller(half)
            kind |= 0 if stored is None else bit
            halves.append(half if stored is None else stored)
        if not kind:
            return _HEAD.pack(_MAGIC, _AS_IT_IS, len(numbers), 0) + bytes(data)
        return b"".join([_HEAD.pack(_MAGIC, kind, *map(len, halves)), *halves])

    def _smaller(self, half: bytes) -> bytes | None:
        """Compress a half, unless that gains nothing; noise is known by its beginning."""
        compressor = self._zstd.ZstdCompressor(level=_LEVEL)
        sample = half[:_SAMPLE_BYTES]
        if len(sample) < len(half) and len(compressor.compress(sample)) > _LEAST_GAIN * len(sample):
            return None
        stored: bytes = compressor.compress(half)
        return stored if len(stored) <= _LEAST_GAIN * len(half) else None

    def decode(self, stored: bytes, memory: memoryview) -> bool:
        """Fill memory with what was encoded; whether that was as long, and is undamaged so far."""
        if len(stored) < HEAD_BYTES:
            return False
        magic, kind, upper, lower = _HEAD.unpack_from(stored)
        body = memoryview(stored)[HEAD_BYTES:]
        if magic != _MAGIC or upper + lower != len(body):
            return False
        if kind == _AS_IT_IS:
            if upper != len(memory):
                return False
            memory[:] = body
            return True
        numbers = np.frombuffer(memory, np.uint8)
        parts = (
            (kind & _UPPER, body[:upper], numbers[1::2]),
            (kind & _LOWER, body[upper:], numbers[0::2]),
        )
        return all(self._expand(bool(coded), part, half) for coded, part, half in parts)

    def _expand(self, coded: bool, part: memoryview, half: NDArray[np.uint8]) -> bool:
        found: bytes | memoryview = part
        if coded:
            try:
                # Memory is made for what a frame says of itself.
                if self._zstd.get_frame_parameters(part).content_size != len(half):
                    return False
                found = self._zstd.ZstdDecompressor().decompress(part, allow_extra_data=False)
            except self._zstd.ZstdError:
                return False
        if len(found) != len(half):
            return False
        half[:] = np.frombuffer(found, np.uint8)
        return True
