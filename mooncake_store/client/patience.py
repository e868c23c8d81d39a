"""How long calls wait for a store that was there a moment ago and cannot be reached just now.

A master that is started again is back within moments, mostly with all it held. Calls that find it
away ask again, after pauses drawn at random so that many clients do not come at once. A store that
stays away costs a client RETURN_S once: then calls fail at once, until it is met again. One that
was never met is not waited for, because its address may be wrong. Where several masters are named,
another one may be told to lead, which takes whoever tells it longer: TAKEOVER_S. So it does where
shards lead on several hosts, and one may be on its way to another.

No I/O, and no lock: threads may share it, and what one of them loses to another is a pause.
"""

from __future__ import annotations

import math
import random
import time

from mooncake_store.errors import (
    OverloadedError,
    PeerLostError,
    RemoteProtocolError,
    UnavailableError,
)

__all__ = ["Patience", "overloaded_s", "unreachable"]

RETURN_S = 2.0
TAKEOVER_S = 20.0
_PAUSES_S = (0.05, 0.25)


def unreachable(outcome: object) -> bool:
    """Whether a call failed before any of it was sent, so that it may be made again.

    Another service that answers counts too: ports of a master that ended go to whoever asks next.
    """
    if not isinstance(outcome, UnavailableError | PeerLostError | RemoteProtocolError):
        return False
    return outcome.operation in ("connect", "open")


def overloaded_s(error: object, until: float) -> float | None:
    """For how long to wait before a service that has too much to do is asked again.

    None if that is not what it failed with, or there is not so much time. A bit longer than it
    said, by chance, so that not all who were refused come at once.
    """
    if not isinstance(error, OverloadedError):
        return None
    pause_s = error.retry_after_s * random.uniform(1.0, 2.0)
    return pause_s if time.monotonic() + pause_s < until else None


class Patience:
    """The patience of one client with its store."""

    def __init__(self, *, several: bool = False) -> None:
        self.several = several
        """Whether another process may answer in place of the one that is away."""
        self._met = False
        self._away_since: float | None = None

    def met(self) -> None:
        """Note that the store is there."""
        self._met, self._away_since = True, None

    def pause_s(self, until: float) -> float | None:
        """Return for how long to wait before asking again; None if that is not worth it."""
        if not self._met:
            return None
        now, since = time.monotonic(), self._away_since
        if since is None:
            since = self._away_since = now
        pause_s = random.uniform(*_PAUSES_S)
        if now + pause_s >= since + (TAKEOVER_S if self.several else RETURN_S):
            self._away_since = -math.inf  # else a shorter pause might fit in once more
            return None
        return pause_s if now + pause_s < until else None
