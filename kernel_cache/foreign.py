"""Classes that come with other packages: by a name that a distribution gives, or by their path.

    policies = Foreign("eviction policy", "mooncake.eviction_policies", ours=("lru", "fifo"))
    policies.find("slru")                       # an entry point of that group
    policies.find("my_package.policies:Slru")   # module:Class

What is found may be anything: who asks for it checks what it is. Finding imports its module, which
runs code: names must come from whoever runs the program (a command line, a configuration), never
from a peer. Whatever goes wrong in code of others is one sentence with the place where it did.
Reading the entry points takes milliseconds, so it is done only for a name that is no path.
"""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Foreign"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Foreign:
    """Classes of one kind; `ours` are the names that no other distribution can take."""

    what: str
    group: str
    ours: tuple[str, ...]

    def find(self, name: str) -> object:
        """What a distribution calls `name`, or what is at `module:Class`.

        Raises ValueError, with the next step, when there is none or it cannot be imported.
        """
        path = name if ":" in name else self._path(name)
        module, _, attribute = path.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise ValueError(
                f"cannot import the {self.what} {path!r}: {_said(error)}; it must be importable by "
                "this program: install its package, or add its folder to PYTHONPATH"
            ) from error

    def make(self, name: str, found: Callable[..., T], *arguments: object) -> T:
        """One of the class that was found for `name`.

        Raises ValueError when it cannot be made.
        """
        try:
            return found(*arguments)
        except Exception as error:
            raise ValueError(f"cannot make the {self.what} {name!r}: {_said(error)}") from error

    def _path(self, name: str) -> str:
        """The `module:Class` of a name that some distribution gives."""
        import difflib
        from importlib import metadata

        known = {point.name: point.value for point in metadata.entry_points(group=self.group)}
        if name in known:
            return known[name]
        names = (*self.ours, *known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown {self.what} {name!r}; did you mean {near!r}? known: {', '.join(names)}, "
            "or your own as module:Class"
        )


def _said(error: Exception) -> str:
    """An error of others in a line: what it says, and where it arose unless that is here."""
    lines = str(error).splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = (__file__, importlib.__file__)
    if last.filename in inside or last.filename.startswith("<"):
        return text
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"
