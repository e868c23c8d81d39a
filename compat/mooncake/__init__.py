"""The original's import names, served by `mooncake_store.compat`.

Refuses to stand where the original is installed: two packages of one name mix their files, and
which one a program gets would depend on which was installed last.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _original() -> str:
    """Where the original is installed, or ""."""
    for name in ("store", "engine"):
        for found in _HERE.glob(f"{name}*.so"):
            return str(found)
    for place in dict.fromkeys(sys.path):
        for found in Path(place or ".").glob("mooncake_transfer_engine*.dist-info"):
            return str(found)
    return ""


_found = _original()
if _found:
    raise ImportError(
        "mooncake-store-dropin does not shadow the original Mooncake, which is installed: "
        f"{_found}. Uninstall one of them: pip uninstall mooncake-store-dropin, or the original"
    )


def __getattr__(name: str) -> object:
    if name in ("BufferPool", "RegisteredBufferPool"):
        from mooncake_store.compat import buffer_pool

        return getattr(buffer_pool, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
