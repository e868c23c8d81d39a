"""The routes of one open segment: which one is used, what happened to the others, and probes.

A route is one way of a transport to the owner. A handle has at most a handful: local, shm, one
rdma route per card of this host, one tcp route per network that the owner listens on. `Routes`
opens them as they are needed, keeps their remote ends, and asks the policy (`policy.py`) which to
use; the policy's books are only touched under the lock here.

A route that fails while there is another rests, and a thread of the engine (`Prober`) tries to
open it again when its pause is over; nobody's transfer waits for that. When the last route fails
the caller gets its error, and the next call tries it again at once: a peer that restarted is
reached as soon as it is back. A change of transport is logged once, with the reason.

Cost: nothing per batch while a single route is in use.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

from transfer_engine.base import held
from transfer_engine.errors import NotFoundError, StoreError, TransferTimeoutError
from transfer_engine.lasting import LastingThread
from transfer_engine.paths.policy import PathPolicy, PathSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transfer_engine.base import RemoteSegment, SegmentDescriptor, Transport
    from transfer_engine.paths.policy import PathHealth

__all__ = ["PathReport", "Prober", "Route", "Routes", "routes_of"]

_log = logging.getLogger(__name__)
_PROBE_S = 1.0


class PathReport(NamedTuple):
    """Why a transport is, or is not, the one that serves a segment."""

    transport: str
    chosen: bool
    reason: str


class Route(NamedTuple):
    """A way of a transport to the owner. Routes of one tier carry batches together."""

    transport: Transport
    name: str
    tier: int
    open: Callable[[float], RemoteSegment]


def routes_of(descriptor: SegmentDescriptor, usable: Sequence[Transport]) -> list[Route]:
    """Return the routes to a segment over transports that can reach it, best first."""
    return [
        Route(transport, way.name, tier, way.open)
        for tier, transport in enumerate(usable)
        for way in transport.ways(descriptor)
    ]


class Routes:
    """The routes of one handle; thread-safe. Routes come best tier first."""

    def __init__(
        self, descriptor: SegmentDescriptor, routes: Sequence[Route], prober: Prober
    ) -> None:
        self.descriptor = descriptor
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        """Notified whenever a slice ends; taken before `lock` where both are."""
        self.used: tuple[Transport, RemoteSegment] | None = None
        """The route of batches that are not cut, once it was opened."""
        self.sliced = False
        """Whether large batches may use several routes at once."""
        self.several = len(routes) > 1
        self.policy = PathPolicy([PathSpec(route.name, route.tier) for route in routes])
        self._routes = tuple(routes)
        self._remotes: list[RemoteSegment | None] = [None] * len(routes)
        # What was open on routes that failed; batches that have not noticed yet still use it.
        self._left: list[RemoteSegment | None] = [None] * len(routes)
        self.prober = prober
        self._current = 0
        self._closed = False

    @property
    def name(self) -> str:
        """The transport in use."""
        return "closed" if self._closed else self._routes[self._current].transport.name

    def find(self, deadline: float) -> tuple[Transport, RemoteSegment]:
        """Return the route in use, opening the best one that works."""
        used = self.used
        if used is not None:
            return used
        with held(self.lock, deadline, "open", str(self.descriptor)):
            first: StoreError | None = None
            while self.used is None:
                if self._closed:
                    raise self._gone()
                at = self.policy.best()
                try:
                    self._use(at, self._open(at, deadline))
                except StoreError as error:
                    first = first or error.again()
                    if isinstance(error, TransferTimeoutError) or not self._leave(at, error):
                        raise first.again() from None
            return self.used

    def _gone(self) -> NotFoundError:
        return NotFoundError(f"{self.descriptor} was closed", advice="open it again")

    def _use(self, at: int, remote: RemoteSegment) -> None:
        self._current = at
        self.used = self._routes[at].transport, remote
        tier = self._routes[at].tier
        self.sliced = sum(route.tier == tier for route in self._routes) > 1

    def _open(self, at: int, deadline: float) -> RemoteSegment:
        remote = self._remotes[at]
        if remote is None:
            remote = self._routes[at].open(deadline)
            self._hold(at, remote)
        return remote

    def _hold(self, at: int, remote: RemoteSegment | None) -> None:
        """Note the open end of a route, or that it has none any more. Held: the lock.

        What is left behind is released one change later, so that no more than one piles up.
        """
        left = self._left[at]
        self._left[at], self._remotes[at] = self._remotes[at], remote
        if left is not None:
            self._routes[at].transport.release(left)

    def remote(self, at: int, deadline: float) -> tuple[Transport, RemoteSegment]:
        """Return one route, opened: for a slice that was given to it."""
        route, remote = self._routes[at], self._remotes[at]
        if remote is None:
            # Without the lock: a network that does not answer must not hold up the others.
            opened = route.open(deadline)
            with self.lock:
                remote = self._opened(at, opened)
            if remote is None:
                raise self._gone()
        return route.transport, remote

    def _opened(self, at: int, opened: RemoteSegment) -> RemoteSegment | None:
        """Take what was opened without the lock, which is held now; return what is in use.

        That is what another thread opened meanwhile, or None once the handle was closed.
        """
        if not self._closed and self._remotes[at] is None:
            self._hold(at, opened)
        else:
            self._routes[at].transport.release(opened)
        return self._remotes[at]

    def fail_over(self, remote: RemoteSegment, error: StoreError) -> bool:
        """Leave the route that failed under a batch; return whether there is another."""
        with self.lock:
            if self.used is None or self.used[1] is not remote:
                return True  # another thread already did
            return self._leave(self._current, error)

    def _leave(self, at: int, error: StoreError) -> bool:
        """Do without a route for now, if there is another. Held: the lock."""
        if self.policy.healthy() < 2:
            return False
        self._hold(at, None)
        self.used = None
        if error.retryable:
            self.policy.started(at, 0, time.monotonic())
            self.policy.failed(at, 0, time.monotonic(), f"failed: {error}")
            self.prober.watch(self)
        else:
            self.policy.exclude(at, f"failed: {error}")
        self._log_change(at, error)
        return True

    def slice_failed(self, at: int, length: int, error: StoreError) -> None:
        """Tell that a slice failed on a route, which rests from now on."""
        with self.lock:
            was = self.policy.healthy()
            self.policy.failed(at, length, time.monotonic(), f"failed: {error}")
            if self.policy.healthy() < was:
                if self._current == at:
                    self.used = None
                self._hold(at, None)
                self.prober.watch(self)
                self._log_change(at, error)

    def _log_change(self, at: int, error: StoreError) -> None:
        taken = self.policy.best()
        if taken == at:
            return  # nothing else is left, which is an error of the transfer
        left = self._routes[at].name
        _log.warning(
            "%s is not reached over %s but over %s: %s",
            self.descriptor,
            left,
            self._routes[taken].name,
            error,
        )

    def probe(self) -> float | None:
        """Try routes whose pause is over; return when the next one is due.

        Whatever a probe raises is its answer: nobody else would try that route again.
        """
        with self.lock:
            due = [] if self._closed else self.policy.due(time.monotonic())
        for at in due:
            if self.prober.closed:
                return None
            try:
                remote = self._routes[at].open(time.monotonic() + _PROBE_S)
            except Exception as error:
                with self.lock:
                    self.policy.still_failing(at, time.monotonic(), f"failed: {error}")
                if not isinstance(error, StoreError | OSError):  # as when short of descriptors
                    name = self._routes[at].name
                    _log.exception("%s cannot be probed over %s", self.descriptor, name)
            else:
                self._revive(at, remote)
        with self.lock:
            return None if self._closed else self.policy.next_due()

    def _revive(self, at: int, remote: RemoteSegment) -> None:
        route = self._routes[at]
        with self.lock:
            self.policy.revived(at)
            if self._opened(at, remote) is None:
                return
            if route.tier < self._routes[self._current].tier:
                # Batches under way end where they are; the next one takes the better route.
                self.used = None
        _log.info("%s is reached over %s again", self.descriptor, route.name)

    def report(self, survey: Sequence[PathReport]) -> list[PathReport]:
        """Return the survey made on opening, with what happened since."""
        with self.lock:
            health = self.policy.report(time.monotonic())
            name = self.name
        told = []
        for path in survey:
            mine = [
                state
                for route, state in zip(self._routes, health, strict=True)
                if route.transport.name == path.transport
            ]
            if mine and all(state.why for state in mine):
                told.append(PathReport(path.transport, False, mine[0].why))
            elif path.transport == name and not path.chosen:
                failed = [state.name for state in health if state.why]
                reason = f"after {', '.join(failed)}" if failed else path.reason
                told.append(PathReport(path.transport, True, reason))
            elif path.chosen and path.transport != name:
                told.append(path._replace(chosen=False))
            else:
                told.append(path)
        return told

    def health(self) -> list[PathHealth]:
        """Return how every route stands."""
        with self.lock:
            return self.policy.report(time.monotonic())

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self.lock:
            self._closed = True
            self.used = None
            held = list(zip(self._routes, self._remotes, self._left, strict=True))
            self._remotes = [None] * len(self._routes)
            self._left = [None] * len(self._routes)
        for route, *remotes in held:
            for remote in remotes:
                if remote is not None:
                    route.transport.release(remote)


class Prober:
    """A thread that probes resting routes; it exists only while some rest."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Routes] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: LastingThread | None = None
        self._again = False
        self.closed = False

    def watch(self, routes: Routes) -> None:
        """Probe what rests of these routes when it is due."""
        with self._changed:
            if self.closed:
                return
            self._watched.add(routes)
            self._again = True
            if self._thread is None:
                thread = LastingThread("mooncake-prober", self._round)
                with contextlib.suppress(RuntimeError):  # no more threads: the next failure asks
                    thread.start()
                    self._thread = thread
            self._changed.notify()

    def _round(self) -> bool:
        """Probe what is due and wait for the next; return False when nothing rests any more.

        Holds no handle while it waits: those that are dropped meanwhile are gone from the set.
        """
        with self._changed:
            self._again = False
            watched = list(self._watched)
        first, routes = None, None
        for routes in watched:
            due = routes.probe()
            if due is None:
                with self._changed:
                    if not self._again:
                        self._watched.discard(routes)
            else:
                first = due if first is None else min(first, due)
        del watched, routes
        with self._changed:
            if self.closed or (first is None and not self._again):
                self._thread = None
                return False
            if not self._again and first is not None:
                self._changed.wait(max(0.0, first - time.monotonic()))
            return True

    def close(self) -> None:
        """Begin no other probe. Idempotent."""
        with self._changed:
            self.closed = True
            self._changed.notify()

    def join(self) -> None:
        """Wait, once closed, for the probe under way, which ends soon if it does not at once."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join(_PROBE_S)

    def after_fork(self) -> None:
        """In a forked child there is no thread; one starts when a route rests."""
        self._changed = threading.Condition()
        self._thread = None
