"""The files of the repository, for the tests that read them."""

import ast
import gc
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("alloc", "eviction", "kernel_cache", "transfer_engine", "mooncake_store", "serving")

_NOT_OURS = {"__pycache__", "build", "dist", "node_modules"}


@cache
def files(*suffixes, under=(".",)):
    """Paths of the repository relative to its root, sorted, generated folders left out."""
    found = set()
    for start in under:
        for folder, inner, names in os.walk(ROOT / start):
            # Pruned here, because .venv alone holds more files than the whole repository.
            inner[:] = [n for n in inner if not n.startswith(".") and n not in _NOT_OURS]
            paths = (Path(folder, name).relative_to(ROOT) for name in names)
            found.update(path for path in paths if path.suffix in suffixes)
    return sorted(found)


@cache
def text(path):
    """The text of one file."""
    return (ROOT / path).read_text(encoding="utf-8")


def tree(path):
    """The syntax tree of one Python file."""
    return _trees()[path][0]


def nodes(path):
    """All nodes of that tree."""
    return _trees()[path][1]


@cache
def _trees():
    """All trees, read at once and left alone by later collections.

    They are two million objects that live as long as the process: collections took half of the
    time to read them, and a second each afterwards.
    """
    gc.collect()
    gc.disable()
    try:
        found = {path: ast.parse(text(path), filename=str(path)) for path in files(".py")}
        return {path: (each, list(ast.walk(each))) for path, each in found.items()}
    finally:
        gc.freeze()
        gc.enable()


def module_name(path):
    """`a/b/__init__.py` is the module `a.b`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def library():
    """All Python files that are shipped."""
    return files(".py", under=PACKAGES)
