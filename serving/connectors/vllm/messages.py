"""What the two sides of the connector tell each other once a step. Plain data, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["GroupBlocks", "LoadJob", "Rates", "SaveJob", "SaveOutcome", "StepPlan", "WorkerReport"]

Rates: TypeAlias = dict[tuple[str, int], tuple[tuple[float, ...], ...]]
"""What reads take, now and in calm, by transport and tier."""


@dataclass(slots=True)
class GroupBlocks:
    """Blocks of one group: the hash of each, and where it lies in the engine's memory."""

    group: int
    hashes: list[bytes]
    blocks: list[int]
    numbers: list[int]
    """Position of each within its request; ranks with the same bytes share the work by it."""


@dataclass(slots=True)
class LoadJob:
    """Blocks to fill for a request that waits for them."""

    request: str
    groups: list[GroupBlocks]


@dataclass(slots=True)
class SaveJob:
    """Full blocks to store. Their memory is held until every worker has reported `number`."""

    number: int
    groups: list[GroupBlocks]


@dataclass(slots=True)
class StepPlan:
    """From the scheduler to every worker."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass(slots=True)
class SaveOutcome:
    """What became of a save: how many workers are done, and which hashes are new or not kept."""

    workers: int = 1
    stored: set[tuple[int, bytes]] = field(default_factory=set)
    refused: set[tuple[int, bytes]] = field(default_factory=set)

    def add(self, other: SaveOutcome) -> None:
        """Count further workers in."""
        self.workers += other.workers
        self.stored |= other.stored
        self.refused |= other.refused


@dataclass(slots=True)
class WorkerReport:
    """From the workers to the scheduler; vLLM merges those of one step with `aggregate`."""

    saves: dict[int, SaveOutcome] = field(default_factory=dict)
    unreadable: set[tuple[int, bytes]] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    rates: dict[tuple[int, int], Rates] = field(default_factory=dict)
    """What reads of each worker take, by its ranks: the scheduler's process reads nothing itself,
    and a load is over when the slowest of them is."""

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Add another worker's report."""
        for number, theirs in other.saves.items():
            self.saves.setdefault(number, SaveOutcome(workers=0)).add(theirs)
        self.unreadable |= other.unreadable
        self.failed_requests |= other.failed_requests
        self.rates |= other.rates
        return self

    def __bool__(self) -> bool:
        return bool(self.saves or self.unreadable or self.failed_requests or self.rates)
