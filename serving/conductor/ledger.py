"""Who does what: instances, and the requests under way on them, with what is predicted of each.

The Conductor writes down what it assigned and what instances report; policies get views made from
it. A request is waiting or computing on its prefill instance, then decoding on its decode instance.
Its predicted seconds stand until reports replace them: a prefill that runs for longer than
predicted counts as about to end, never as negative work.

Pure: time is an argument. Views cost O(requests under way).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.conductor.views import DecodeView, Expected, PrefillView

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Flight", "Instance", "Ledger"]

PREFILL, DECODE = "prefill", "decode"


@dataclass(slots=True)
class Instance:
    """A worker: its role, its room for KV, and whether it may be given work."""

    name: str
    role: str
    kv_tokens: int = 1 << 60
    usable: bool = True


@dataclass(slots=True)
class Flight:
    """A request under way. `began` is when its present stage began, None while it waits."""

    request: str
    tokens: int
    max_new_tokens: int
    priority: int
    prefill: str
    decode: str
    arrived: float
    predicted_s: float
    ttft_s: float
    stage: str = PREFILL
    began: float | None = None
    generated: int = 0
    helpers: tuple[str, ...] = ()
    """Further prefill instances that compute a share of its layers."""


@dataclass(slots=True)
class Ledger:
    """Instances by name and requests by id."""

    instances: dict[str, Instance] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)

    # -- instances

    def join(self, instance: Instance) -> None:
        """An instance is there, or came back."""
        self.instances[instance.name] = instance

    def leave(self, name: str) -> None:
        """An instance is gone."""
        self.instances.pop(name, None)

    def on(self, name: str) -> list[Flight]:
        """The requests whose present stage is on an instance."""
        return [
            flight
            for flight in self.flights.values()
            if (_computes(flight, name) if flight.stage == PREFILL else flight.decode == name)
        ]

    def of_role(self, role: str) -> list[Instance]:
        """The usable instances of a role, in the order in which they joined."""
        return [each for each in self.instances.values() if each.role == role and each.usable]

    # -- requests

    def assign(self, flight: Flight) -> None:
        """A request is given to instances; a former assignment of it is replaced."""
        self.flights[flight.request] = flight

    def started(self, now: float, request: str) -> None:
        """Its prefill left the queue."""
        flight = self.flights.get(request)
        if flight is not None and flight.stage == PREFILL:
            flight.began = now

    def decoding(self, now: float, request: str) -> None:
        """Its first token is there; it decodes from now on."""
        flight = self.flights.get(request)
        if flight is not None and flight.stage == PREFILL:
            flight.stage, flight.began = DECODE, now

    def ended(self, request: str) -> Flight | None:
        """It ended, however; returns it once."""
        return self.flights.pop(request, None)

    # -- views

    def prefill_views(self, now: float, priority: int = 0) -> list[PrefillView]:
        """The prefill instances with the work ahead of a request of this priority."""
        return [
            PrefillView(each.name, self.queue_s(now, each.name, priority))
            for each in self.of_role(PREFILL)
        ]

    def queue_s(self, now: float, name: str, priority: int = 0) -> float:
        """Predicted seconds of work that a new request would wait for on a prefill instance."""
        total = 0.0
        for flight in self.flights.values():
            if flight.stage != PREFILL or not _computes(flight, name):
                continue
            if flight.began is not None:
                total += max(0.0, flight.predicted_s - (now - flight.began))
            elif flight.priority >= priority:
                total += flight.predicted_s
        return total

    def decode_views(self, *, assigned: bool) -> list[DecodeView]:
        """The decode instances with their batches.

        With `assigned`, what is still in prefill counts for the instance it will decode on.
        """
        views = []
        for each in self.of_role(DECODE):
            batch = tokens = reserved = 0
            for flight in self.flights.values():
                if flight.decode != each.name:
                    continue
                reserved += flight.tokens + flight.max_new_tokens
                if assigned or flight.stage == DECODE:
                    batch += 1
                    tokens += flight.tokens + flight.generated
            views.append(DecodeView(each.name, batch, tokens, each.kv_tokens - reserved))
        return views

    def under_way(self, now: float) -> list[Expected]:
        """When each request begins to decode, or began."""
        return [self._expected(now, flight) for flight in self.flights.values()]

    def _expected(self, now: float, flight: Flight) -> Expected:
        if flight.stage == DECODE:
            at = now if flight.began is None else flight.began
        else:
            at = max(now, flight.arrived + flight.ttft_s)
        return Expected(at, flight.tokens + flight.generated)

    def decoding_now(self) -> int:
        """How many requests decode."""
        return sum(1 for flight in self.flights.values() if flight.stage == DECODE)

    def check_integrity(self, expected: Iterable[str] | None = None) -> None:
        """Requests name instances that exist or existed; ids agree. For tests."""
        for request, flight in self.flights.items():
            assert flight.request == request
            assert flight.stage in (PREFILL, DECODE)
        if expected is not None:
            assert set(expected) == set(self.flights)


def _computes(flight: Flight, name: str) -> bool:
    """Whether an instance computes a prompt, or a share of it."""
    return flight.prefill == name or name in flight.helpers
