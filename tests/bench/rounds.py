"""Benches in tests: what they measure does not matter, only that they do."""

from contextlib import contextmanager

import pytest

from mooncake_store.bench import agents, conversations, identity, journal, tiers
from mooncake_store.bench.sides import measuring


@contextmanager
def one_round():
    """Have every side of a measurement called once, with no round to warm up before."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (agents, conversations, identity, journal, tiers, measuring):
            patch.setattr(module, "alternate", _once)
        yield


def _once(sides, repeats, deadline_s=None):
    return {name: [side()] for name, side in sides.items()}
