"""Names that a package hands on, each loaded when it is first used.

    if TYPE_CHECKING:
        from alloc.base import Allocator
    else:
        from kernel_cache.lazy import names_of

        __getattr__ = names_of(__name__)

So `import alloc` loads no kernel, and with it neither numba nor numpy. The imports that type
checkers and editors read say where each name is at home; there is no second list that could say
something else. They are read from the source of the package, once and not before a name is asked
for, in less than a millisecond. Without its source a package has no names, nor has it kernels.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["names_of"]


def names_of(package: str) -> Callable[[str], object]:
    """The `__getattr__` of a package whose names are imported below `if TYPE_CHECKING`."""
    homes: dict[str, str] = {}

    def load(name: str) -> object:
        if not homes:
            homes.update(_homes(package))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return load


def _homes(package: str) -> dict[str, str]:
    """The module that each name comes from."""
    import ast
    import pkgutil

    tree = ast.parse(pkgutil.get_data(package, "__init__.py") or b"")
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
