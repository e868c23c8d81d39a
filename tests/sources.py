"""The files of the repository, for the tests that read them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("alloc", "eviction", "transfer_engine", "mooncake_store", "serving")

_NOT_OURS = {"__pycache__", ".venv", ".git", "build", "dist", "node_modules"}


@cache
def files(*suffixes, under=(".",)):
    """Paths of the repository relative to its root, sorted, generated folders left out."""
    found = set()
    for folder in under:
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT)
            hidden = any(part.startswith(".") for part in relative.parts[:-1])
            if path.suffix in suffixes and not hidden and not _NOT_OURS & set(relative.parts):
                found.add(relative)
    return sorted(found)


@cache
def text(path):
    """The text of one file."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree(path):
    """The syntax tree of one Python file."""
    return ast.parse(text(path), filename=str(path))


def module_name(path):
    """`a/b/__init__.py` is the module `a.b`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def library():
    """All Python files that are shipped."""
    return files(".py", under=PACKAGES)
