"""The pool as a filesystem of fsspec: `mooncake://host:port/namespace/path`.

    import fsspec
    with fsspec.open("mooncake://127.0.0.1:50051/default/run/config.json", "w") as file:
        file.write("{}")

See `filesystem.py` for what it promises, docs/guide/filesystem.md for how it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.fs.filesystem import MooncakeFileSystem

__all__ = ["MooncakeFileSystem"]


def __getattr__(name: str) -> object:
    if name == "MooncakeFileSystem":
        from mooncake_store.fs.filesystem import MooncakeFileSystem

        return MooncakeFileSystem
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
