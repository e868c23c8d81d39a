"""Sweeps: one test over many cases, of which the default suite has some and `make sweeps` all.

    @sweep("seed", range(4), usual=2)
    def test_whatever_is_done(seed): ...

For cases that tell the same of one more seed. What is a case of its own belongs in each run.
"""

import os

import pytest

ALL = bool(os.environ.get("MOONCAKE_TEST_SWEEPS"))


def sweep(names, cases, usual):
    """As `pytest.mark.parametrize`; the default suite has the first `usual` cases."""
    cases = list(cases)
    assert 0 < usual < len(cases)

    def marked(test):
        some = pytest.mark.parametrize(names, cases if ALL else cases[:usual])
        return pytest.mark.sweep(some(test))

    return marked
