"""Who is there and what is under way on them, with what is predicted of each.

The Conductor writes down what it assigned and what instances report; policies get views made from
it. A request is waiting or computing on its prefill instance, then decoding on its decode instance.
Its predicted seconds stand until reports replace them: a prefill that runs for longer than
predicted counts as about to end, never as negative work.

Sums are kept as requests come and go, so a view costs O(instances + prefills that run), however
many requests wait or decode, and what an instance decodes is put together anew only after it has
changed. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from serving.scheduling.under_way import UnderWay
from serving.scheduling.views import DecodeView, PrefillView

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Flight", "Instance", "Ledger"]

PREFILL, DECODE, COUPLED = "prefill", "decode", "coupled"
"""An instance that is coupled has both of the other roles."""


@dataclass(slots=True)
class Instance:
    """A worker: its role, its room for KV, and whether it may be given work."""

    name: str
    role: str
    kv_tokens: int = 1 << 60
    usable: bool = True
    chunk_tokens: int = 0
    """Of prompts, that each step of its answers may have beside it."""


@dataclass(slots=True)
class Flight:
    """A request under way. `began` is when its present stage began, None while it waits.

    Once it is assigned, the ledger alone changes it.
    """

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
    context: int = 0
    """Tokens of prompt and answer so far."""
    helpers: tuple[str, ...] = ()
    """Further prefill instances that compute a share of its layers."""
    slot: int = field(default=-1, compare=False)
    """Its number in what predicts who decodes when."""

    @property
    def predicted_ns(self) -> int:
        """As a whole number, whose sums stay exact."""
        return round(1e9 * self.predicted_s)


@dataclass(slots=True)
class _Work:
    """What is under way on one instance, or will be."""

    flights: dict[str, Flight] = field(default_factory=dict)
    """Those whose present stage is here."""
    computing: dict[str, Flight] = field(default_factory=dict)
    """Prompts that are being computed."""
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Prompts that wait, by priority: how many, and nanoseconds of work."""
    batch: int = 0
    tokens: int = 0
    """Of those that decode here; further ones that will: """
    coming: int = 0
    coming_tokens: int = 0
    reserved: int = 0
    """Tokens that all of these may come to have."""
    view: DecodeView | None = field(default=None, compare=False)
    """The last one of this, if nothing has changed since."""

    @property
    def nothing(self) -> bool:
        """Whether nothing is."""
        return not self.flights and not self.coming

    def wait(self, flight: Flight, by: int) -> None:
        """One more waits, or (-1) one less."""
        count, work_ns = self.waiting.get(flight.priority, (0, 0))
        if count + by:
            self.waiting[flight.priority] = count + by, work_ns + by * flight.predicted_ns
        else:
            del self.waiting[flight.priority]

    def queue_s(self, now: float, priority: int) -> float:
        """Predicted seconds that a new request of this priority would wait for."""
        total = 0.0
        if self.waiting:
            waits_ns = 0
            for level, (_, work_ns) in self.waiting.items():
                if level >= priority:
                    waits_ns += work_ns
            total = 1e-9 * waits_ns
        for flight in self.computing.values():
            assert flight.began is not None
            left_s = flight.predicted_s - (now - flight.began)
            if left_s > 0.0:
                total += left_s
        return total


@dataclass(slots=True)
class Ledger:
    """Instances by name and requests by id."""

    instances: dict[str, Instance] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)
    under_way: UnderWay = field(default_factory=UnderWay)
    """When they decode."""
    _work: dict[str, _Work] = field(default_factory=dict)
    _idle: dict[str, PrefillView] = field(default_factory=dict, compare=False)
    """Views of prefill instances that have nothing to do, which are always the same."""
    _decoding: int = 0

    # -- instances

    def join(self, instance: Instance) -> None:
        """An instance is there, or came back."""
        self.instances[instance.name] = instance
        self._idle[instance.name] = PrefillView(instance.name)
        if instance.name in self._work:
            self._work[instance.name].view = None  # its room may be another one

    def leave(self, name: str) -> None:
        """An instance is gone; requests on it are until they end."""
        self.instances.pop(name, None)
        self._idle.pop(name, None)

    def on(self, name: str) -> list[Flight]:
        """The requests whose present stage is on an instance."""
        return list(self._work[name].flights.values()) if name in self._work else []

    def of_role(self, role: str) -> list[Instance]:
        """The usable instances that have a role, in the order in which they joined."""
        able = (role, COUPLED)
        return [each for each in self.instances.values() if each.role in able and each.usable]

    # -- requests

    def assign(self, flight: Flight) -> None:
        """A request that waits is given to instances; a former assignment of it is replaced."""
        self.ended(flight.request)
        self.flights[flight.request] = flight
        flight.context = flight.tokens
        begins = flight.arrived + flight.ttft_s
        flight.slot = self.under_way.add(begins, flight.context, flight.decode)
        for name in _computers(flight):
            work = self._on(name)
            work.flights[flight.request] = flight
            work.wait(flight, 1)
        decode = self._on(flight.decode)
        self._coming(decode, flight, 1)
        decode.reserved += flight.tokens + flight.max_new_tokens

    def started(self, now: float, request: str) -> None:
        """Its prefill left the queue."""
        flight = self.flights.get(request)
        if flight is None or flight.stage != PREFILL:
            return
        if flight.began is None:
            for name in _computers(flight):
                work = self._work[name]
                work.wait(flight, -1)
                work.computing[request] = flight
        flight.began = now

    def redirect(self, request: str, decode: str) -> None:
        """Another instance will decode it."""
        flight = self.flights.get(request)
        if flight is None or flight.stage != PREFILL or flight.decode == decode:
            return
        for name, by in ((flight.decode, -1), (decode, 1)):
            work = self._on(name)
            self._coming(work, flight, by)
            work.reserved += by * (flight.tokens + flight.max_new_tokens)
        self._forget(flight.decode)
        flight.decode = decode
        self.under_way.move(flight.slot, decode)

    def decoding(self, now: float, request: str) -> None:
        """Its first token is there; it decodes from now on."""
        flight = self.flights.get(request)
        if flight is None or flight.stage != PREFILL:
            return
        self._computed(flight)
        flight.stage, flight.began = DECODE, now
        self.under_way.began(flight.slot, now)
        work = self._on(flight.decode)
        work.flights[request] = flight
        self._coming(work, flight, -1)
        work.batch += 1
        work.tokens += flight.context
        self._decoding += 1

    def grew(self, request: str, context: int) -> None:
        """Prompt and answer have so many tokens by now. Harmless when it is not known."""
        flight = self.flights.get(request)
        if flight is None:
            return
        more, flight.context = context - flight.context, context
        self.under_way.resize(flight.slot, context)
        work = self._on(flight.decode)
        if flight.stage == DECODE:
            work.tokens += more
        else:
            work.coming_tokens += more

    def ended(self, request: str) -> Flight | None:
        """It ended, however; returns it once."""
        flight = self.flights.pop(request, None)
        if flight is None:
            return None
        self.under_way.remove(flight.slot)
        work = self._on(flight.decode)
        work.reserved -= flight.tokens + flight.max_new_tokens
        if flight.stage == DECODE:
            del work.flights[request]
            work.batch -= 1
            work.tokens -= flight.context
            self._decoding -= 1
        else:
            self._coming(work, flight, -1)
            self._computed(flight)
        self._forget(flight.decode)
        return flight

    # -- views

    def prefill_views(self, now: float, priority: int = 0) -> list[PrefillView]:
        """The prefill instances with the work ahead of a request of this priority."""
        views, works = [], self._work
        for name, each in self.instances.items():
            if (each.role == PREFILL or each.role == COUPLED) and each.usable:
                work = works.get(name)
                if work is None and each.role == PREFILL:
                    views.append(self._idle[name])
                    continue
                queue_s = 0.0 if work is None else work.queue_s(now, priority)
                beside = None if each.role == PREFILL else self._decode_view(each)
                views.append(PrefillView(name, queue_s, beside))
        return views

    def queue_s(self, now: float, name: str, priority: int = 0) -> float:
        """Predicted seconds of work that a new request would wait for on a prefill instance."""
        return self._work[name].queue_s(now, priority) if name in self._work else 0.0

    def decode_views(self) -> list[DecodeView]:
        """The decode instances with their batches."""
        views, works = [], self._work
        for name, each in self.instances.items():
            if (each.role == DECODE or each.role == COUPLED) and each.usable:
                work = works.get(name)
                # Most have not changed since the last time, and need no call.
                view = None if work is None else work.view
                views.append(self._decode_view(each) if view is None else view)
        return views

    def _decode_view(self, instance: Instance) -> DecodeView:
        work, name, chunk = self._work.get(instance.name), instance.name, instance.chunk_tokens
        if work is None:
            return DecodeView(name, free_tokens=instance.kv_tokens, chunk_tokens=chunk)
        if work.view is None:
            work.view = DecodeView(
                name,
                work.batch,
                work.tokens,
                instance.kv_tokens - work.reserved,
                work.coming,
                work.coming_tokens,
                chunk,
            )
        return work.view

    def decoding_now(self) -> int:
        """How many requests decode."""
        return self._decoding

    # -- parts

    def _on(self, name: str) -> _Work:
        """What is under way on an instance, to be changed."""
        work = self._work.get(name)
        if work is None:
            work = self._work[name] = _Work()
        work.view = None
        return work

    def _forget(self, name: str) -> None:
        """Keep nothing of an instance on which nothing is under way."""
        if name in self._work and self._work[name].nothing:
            del self._work[name]

    def _computed(self, flight: Flight) -> None:
        """Its prompt is nobody's work any more."""
        for name in _computers(flight):
            work = self._work[name]
            del work.flights[flight.request]
            if flight.began is None:
                work.wait(flight, -1)
            else:
                del work.computing[flight.request]
            self._forget(name)

    @staticmethod
    def _coming(work: _Work, flight: Flight, by: int) -> None:
        work.coming += by
        work.coming_tokens += by * flight.context

    def check_integrity(self, expected: Iterable[str] | None = None) -> None:
        """Sums are those of the requests. For tests; O(requests)."""
        fresh = Ledger(self.instances, _idle=self._idle)
        for request, flight in self.flights.items():
            assert flight.request == request
            fresh.assign(replace(flight, stage=PREFILL, began=None))
            fresh.grew(request, flight.context)
            if flight.began is not None:
                (fresh.started if flight.stage == PREFILL else fresh.decoding)(
                    flight.began, request
                )
        assert fresh.flights == self.flights
        assert fresh._work == self._work
        assert fresh.decode_views() == self.decode_views()
        assert fresh._decoding == self._decoding
        assert len(self.under_way) == len(self.flights)
        if expected is not None:
            assert set(expected) == set(self.flights)


def _computers(flight: Flight) -> set[str]:
    """Who computes a prompt, or a share of it."""
    return {flight.prefill, *flight.helpers}
