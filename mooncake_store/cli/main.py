"""The entry point of `mooncake`.

Everything else is imported inside, so that a Ctrl-C in the first moments, while modules load, ends
as quietly as a later one.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; `argv` excludes the program's name."""
    try:
        from mooncake_store.cli.shared.tree import run
    except KeyboardInterrupt:
        return 130
    return run(sys.argv[1:] if argv is None else argv)
