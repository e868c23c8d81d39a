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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["fingerprint", "identify", "installed_version", "kv_heads", "short_name"]

_SAMPLE_BYTES = 64
_SPREAD = 256
_HEADER_MAX = 100_000_000
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def identify(model: str, revision: str | None = None) -> str:
    """What tells these weights from others: content where it is on disk, else name and revision."""
    path = Path(model)
    if path.is_dir():
        return fingerprint(path)
    if path.is_file():
        return f"{path.stat().st_size} bytes"
    return f"{model} {_commit(model, revision) or revision}"


def short_name(model: str) -> str:
    """The last part of a name or path, for people who read keys."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def installed_version(*packages: str) -> str:
    """The version of the first of these packages that is installed; empty without any."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def kv_heads(model: str, revision: str | None = None) -> int:
    """How many KV heads a model's configuration names; 0 where it cannot be found out."""
    path = Path(model) / "config.json"
    found = path if path.is_file() else _cached_config(model, revision)
    try:
        config = json.loads(found.read_bytes()) if found else {}
    except (OSError, ValueError):
        return 0
    heads = config.get("text_config", config).get("num_key_value_heads", 0)
    return heads if isinstance(heads, int) else 0


def _commit(name: str, revision: str | None) -> str | None:
    """The commit of a model of the hub that is in the local cache."""
    config = _cached_config(name, revision)
    return config.parent.name if config else None


def _cached_config(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # No name of the hub.
        return None
    return Path(found) if isinstance(found, str) else None


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
