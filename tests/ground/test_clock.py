"""The clocks of this machine."""

from mooncake_store.clock import Clock, SystemClock


def test_the_system_clock_moves_forward_and_knows_the_date():
    clock: Clock = SystemClock()
    first = clock.now_ns()
    assert clock.now_ns() >= first
    assert clock.wall_ns() > 1_700_000_000_000_000_000
