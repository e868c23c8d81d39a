"""The files of the repository, for the tests that read them."""

import ast
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


@cache
def tree(path):
    """The syntax tree of one Python file."""
    return ast.parse(text(path), filename=str(path))


@cache
def nodes(path):
    """All nodes of that tree."""
    return list(ast.walk(tree(path)))


def module_name(path):
    """`a/b/__init__.py` is the module `a.b`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def library():
    """All Python files that are shipped."""
    return files(".py", under=PACKAGES)
