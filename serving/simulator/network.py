"""Links of nodes that carry many flows at once.

Every node sends through one link and receives through another. A flow goes at the smaller of its
shares of the two, where all flows of a link share it evenly; what one of them cannot use, because
its other link is fuller, stays unused. That is less than real networks get out of unequal flows,
and needs no knowledge beyond two links. `Fifo` instead sends one flow of a node after the other.

Flows of a node that fails end without their `done`; `Fifo` lets them go on, to nobody's use, since
it has planned all of them. A change of a flow concerns those that share a link with it: O(flows of
two links).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.simulator.timeline import Timeline

__all__ = ["FairShare", "Fifo", "Network"]


class Network(Protocol):
    """Moves bytes between nodes, by number."""

    def send(
        self, source: int, target: int, count: float, done: Callable[..., object], *arguments: Any
    ) -> None:
        """Begin now; `done` is called when all of it has come."""
        ...

    def cut(self, node: int) -> None:
        """A node has failed: nothing comes from it, or to it, of what is under way."""
        ...


class _Flow:
    __slots__ = ("arguments", "done", "left", "rate", "since", "source", "target", "version")

    def __init__(
        self,
        source: int,
        target: int,
        left: float,
        since: float,
        done: Callable[..., object],
        arguments: tuple[Any, ...],
    ) -> None:
        self.source = source
        self.target = target
        self.left = left
        self.since = since
        self.done = done
        self.arguments = arguments
        self.rate = 0.0
        self.version = 0


class FairShare:
    """Flows that share links evenly."""

    def __init__(self, timeline: Timeline, bytes_per_s: float) -> None:
        self._timeline = timeline
        self._capacity = bytes_per_s
        # Flows in the order in which they began, so that what ends at once ends in that order.
        self._sending: dict[int, dict[_Flow, None]] = {}
        self._receiving: dict[int, dict[_Flow, None]] = {}

    def send(
        self, source: int, target: int, count: float, done: Callable[..., object], *arguments: Any
    ) -> None:
        """Begin now, and make room for it."""
        flow = _Flow(source, target, count, self._timeline.now, done, arguments)
        self._sending.setdefault(source, {})[flow] = None
        self._receiving.setdefault(target, {})[flow] = None
        self._share(flow)

    def _share(self, changed: _Flow) -> None:
        sending, receiving = self._sending, self._receiving
        now, capacity = self._timeline.now, self._capacity
        beside, towards = sending[changed.source], receiving[changed.target]
        if not beside and not towards:
            return  # nobody is concerned
        for flow in beside | towards:
            rate = capacity / max(len(sending[flow.source]), len(receiving[flow.target]))
            if rate == flow.rate:
                continue
            flow.left -= flow.rate * (now - flow.since)
            flow.since, flow.rate = now, rate
            flow.version += 1
            self._timeline.at(now + max(0.0, flow.left) / rate, self._end, flow, flow.version)

    def _end(self, flow: _Flow, version: int) -> None:
        if version != flow.version:
            return  # it went on at another rate
        self._take_out(flow)
        flow.done(*flow.arguments)

    def _take_out(self, flow: _Flow) -> None:
        flow.version = -1
        del self._sending[flow.source][flow], self._receiving[flow.target][flow]
        self._share(flow)

    def cut(self, node: int) -> None:
        """End the flows of a node, which others may have the room of."""
        for flow in self._sending.get(node, {}) | self._receiving.get(node, {}):
            self._take_out(flow)


class Fifo:
    """Each node sends, and receives, one flow after the other."""

    def __init__(self, timeline: Timeline, bytes_per_s: float) -> None:
        self._timeline = timeline
        self._capacity = bytes_per_s
        self._sends_from: dict[int, float] = {}
        self._receives_from: dict[int, float] = {}

    def send(
        self, source: int, target: int, count: float, done: Callable[..., object], *arguments: Any
    ) -> None:
        """Begin as soon as both nodes have done with what came before."""
        begin = max(
            self._timeline.now,
            self._sends_from.get(source, 0.0),
            self._receives_from.get(target, 0.0),
        )
        end = begin + count / self._capacity
        self._sends_from[source] = self._receives_from[target] = end
        self._timeline.at(end, done, *arguments)

    def cut(self, node: int) -> None:
        """What comes next need not wait for what was under way."""
        self._sends_from.pop(node, None)
        self._receives_from.pop(node, None)
