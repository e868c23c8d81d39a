"""Benchmarks: one module per bench, each with one function that fills a report.

    def run(report: Report, *, quick: bool, vs: tuple[str, ...], **own_options) -> None

`mooncake bench <name>` finds the module by its name, so adding a bench is adding a file here and
a subcommand in `mooncake_store/cli/bench.py`. What benches share is in `harness` and in modules
with an underscore; importing this package costs nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report, alternate

__all__ = ["Report", "alternate"]

_HOME = {"Report": "mooncake_store.bench.harness", "alternate": "mooncake_store.bench.harness"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
