"""The fuzz target runs, finds frames to damage, and finds nothing to complain about."""

from tests.fuzz.wire import fuzz


def test_a_short_fuzz_of_the_wire_finds_nothing():
    executions, frames = fuzz(seconds=1.0, seed=20)
    assert executions > 20
    assert frames > 20
