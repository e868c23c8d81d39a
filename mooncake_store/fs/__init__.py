"""The pool as a filesystem of fsspec: `mooncake://host:port/namespace/path`.

    import fsspec
    with fsspec.open("mooncake://127.0.0.1:50051/default/run/config.json", "w") as file:
        file.write("{}")

See `filesystem.py` for what it promises, docs/guide/filesystem.md for how it is used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.fs.filesystem import MooncakeFileSystem
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = ["MooncakeFileSystem"]
