"""What this program says when it is asked about itself (`wire.about`). Three system calls."""

from __future__ import annotations

from mooncake_store import __version__
from mooncake_store.wire.about import About
from transfer_engine.surroundings import surroundings

__all__ = ["about"]


def about() -> About:
    """Return what is so now."""
    return About(__version__, surroundings())
