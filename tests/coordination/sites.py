"""Coordinators in memory as tests see them, with a clock that moves when they wait."""

import pytest

from mooncake_store.coordination.testing import MovedPace, Site
from tests.coordination.memory import MemoryCluster, MemoryCoordinator

STEPS_MAX = 10_000


class MemorySite(Site):
    kind = MemoryCoordinator
    """Of the coordinators to be opened."""

    def __init__(self):
        self.pace = MovedPace()
        self.cluster = MemoryCluster(self.pace)
        self.opened = []

    async def open(self, namespace="c1", timeout_s=30.0):
        self.opened.append(self.kind(self.cluster, namespace, timeout_s=timeout_s))
        return self.opened[-1]

    def cut(self, coordinator, cut=True):
        coordinator.cut(cut)

    async def compact(self, revision):
        self.cluster.compact(revision)

    async def until(self, condition):
        await self.pace.settle()
        for _ in range(STEPS_MAX):
            if condition():
                return
            await self.pace.advance(0.05)
        pytest.fail("it never came to that")
