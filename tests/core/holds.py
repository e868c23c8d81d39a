"""What the reference model knows of the leases on one object: whose, how often, until when."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Hold:
    """The lease of one client."""

    times: int = 0
    end: int = 0


@dataclass(slots=True)
class Holds:
    """The leases of all clients; those that ended are nobody's any more."""

    by_client: dict[int, Hold] = field(default_factory=dict)
    end: int = 0
    """When the last of them ends: kept, because a model asks all its objects again and again."""

    def of_others(self, client: int, now: int) -> bool:
        others = (hold for owner, hold in self.by_client.items() if owner != client)
        return any(hold.end > now for hold in others)

    def grant(self, client: int, now: int, ttl: int) -> None:
        hold = self._of(client, now)
        hold.times += 1
        self._prolong(hold, now + ttl)

    def renew(self, client: int, now: int, ttl: int) -> int:
        """Prolong what a client has, or grant it; return what remains."""
        hold = self._of(client, now)
        hold.times = max(hold.times, 1)
        self._prolong(hold, now + ttl)
        return hold.end - now

    def release(self, client: int, now: int) -> None:
        """One grant of this client's, if it has one; nothing of anybody else's."""
        hold = self._of(client, now)
        hold.times -= 1
        if hold.times <= 0:
            del self.by_client[client]
            self.end = max((each.end for each in self.by_client.values()), default=0)

    def _prolong(self, hold: Hold, end: int) -> None:
        hold.end = max(hold.end, end)
        self.end = max(self.end, hold.end)

    def _of(self, client: int, now: int) -> Hold:
        running = {owner: hold for owner, hold in self.by_client.items() if hold.end > now}
        self.by_client = running
        return running.setdefault(client, Hold())
