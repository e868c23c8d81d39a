"""Hosts and pools on them, which end with the test."""

import contextlib

import pytest

from tests.hosts.network import Network
from tests.hosts.pool import Pool


@pytest.fixture
def make_network():
    """Make hosts of these names."""
    with contextlib.ExitStack() as stack:
        yield lambda *names, **how: stack.enter_context(Network(*names, **how))


@pytest.fixture
def make_pool(start_program, tmp_path):
    """Start a pool, each program of it on a host of its own."""
    with contextlib.ExitStack() as stack:

        def make(**how):
            made = Pool(start_program, tmp_path, **how)
            stack.callback(made.close)
            made.start()
            return made

        yield make
