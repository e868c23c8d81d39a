"""What identifies the weights of a model in a directory: their content, not the path.

Two models in directories of one name must never share blocks, and one model in different places
should. Reading whole weights would take minutes, so a fingerprint takes the configuration, the
header of every weight file (names, types and shapes of tensors) and the first bytes of every
tensor. It does not notice a model that differs in later elements only; name such a model by hand.

Cost: two reads a weight file and one a tensor.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fingerprint"]

_SAMPLE_BYTES = 64
_SPREAD = 256
_HEADER_MAX = 100_000_000
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def fingerprint(directory: Path) -> str:
    """A hash of a model's content, without its path or dates."""
    digest = hashlib.blake2b(digest_size=16)
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    for name in names:
        path = directory / name
        if name == "config.json":
            digest.update(path.read_bytes())
        elif name.endswith(_WEIGHTS):
            digest.update(f"{name}:{path.stat().st_size};".encode())
            _add_weights(digest, path)
    return digest.hexdigest()


def _add_weights(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = b""
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size, _HEADER_MAX) else b""
        digest.update(header)
        for offset in _samples(header, size):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))


def _samples(header: bytes, size: int) -> list[int]:
    """Where tensors begin; evenly spread places when the file does not say."""
    try:
        tensors = json.loads(header) if header else {}
        starts = [
            8 + len(header) + entry["data_offsets"][0]
            for name, entry in tensors.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError):
        starts = []
    return starts or [size * step // _SPREAD for step in range(_SPREAD)]
