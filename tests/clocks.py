"""A clock that moves only when told to."""


class ManualClock:
    """Both of its hands, the one for intervals and the one for dates, move together."""

    def __init__(self, now_ns=0, wall_ns=1_700_000_000_000_000_000):
        self._now_ns = now_ns
        self._wall_offset_ns = wall_ns - now_ns

    def now_ns(self):
        return self._now_ns

    def wall_ns(self):
        return self._now_ns + self._wall_offset_ns

    def advance(self, delta_ns):
        assert delta_ns >= 0
        self._now_ns += delta_ns
