"""Random runs of a small pool of tiers, in which every byte that is read is compared."""

from __future__ import annotations

import random

import pytest

from mooncake_store.core.options import Offload, ShardConfig, SoftPin
from mooncake_store.core.records import Tier
from tests.core.lab import MIB, SECOND
from tests.core.worlds import World

KEYS = 60
SIZES = (100, 4096, 16_384, 65_536)


class Run:
    """A world, and what may happen in it next."""

    def __init__(self, seed: int, tiers: str) -> None:
        self.rng = rng = random.Random(seed)
        config = ShardConfig(
            objects_max=4096,
            segments_max=16,
            offload=rng.choice([Offload.EVICT, Offload.EVICT, Offload.WRITE, Offload.NONE]),
            eviction_policy=rng.choice(("lru", "fifo", "sieve", "lfu")),
            promotion_hits=rng.choice((0, 1, 2)),
            promotion_ahead=rng.choice((0, 1, 8)),
            seed=seed,
        )
        self.world = World(rng, config)
        self.offloads = [config.offload, *random.Random(seed).sample(list(Offload), 2)]
        self.tell_namespaces()
        for number in range(2):
            self.world.mount(f"memory{number}", MIB // 2, Tier.MEMORY)
            if tiers != "memory, cold":
                self.world.mount(f"disk{number}", MIB, Tier.DISK)
        if tiers != "memory, disk":
            self.world.mount("cold", 2 * MIB, Tier.COLD)
        self.restarted = False
        self.rules = {
            self.put: 20,
            self.upsert: 4,
            self.remove: 3,
            self.get: 16,
            self.pin: 2,
            self.tick: 16,
            self.wait: 2,
            self.fetch: 8,
            self.copy_halfway: 4,
            self.report: 10,
            self.forget: 1,
            self.haul: 4,
            self.hide: 2,
            self.restart: 1,
        }

    def step(self) -> None:
        (rule,) = self.rng.choices(list(self.rules), list(self.rules.values()))
        rule()
        self.world.check()

    def tell_namespaces(self) -> None:
        """Have each of three namespaces move by a policy of its own."""
        for number, offload in enumerate(self.offloads):
            tenant = self.world.shard.tenant(f"n{number}") if number else 0
            self.world.shard.set_offload(tenant, offload)

    def key(self) -> int:
        return self.rng.randrange(KEYS)

    def put(self) -> None:
        rng = self.rng
        options = {}
        if rng.random() < 0.2:
            options = rng.choice(
                [
                    {"replicas": 2},
                    {"replicas": 3},
                    {"soft_pin": SoftPin.ENABLE, "soft_pin_ttl_ns": 5 * SECOND},
                    {"hard_pin": True},
                    {"groups": ("g",)},
                    {"preferred": ("disk1",)},
                ]
            )
        key = self.key()
        self.world.put(key, rng.choice(SIZES), tenant=key % len(self.offloads), **options)

    def upsert(self) -> None:
        key, size = self.key(), self.rng.choice(SIZES)
        self.world.put(key, size, upsert=True, tenant=key % len(self.offloads))

    def remove(self) -> None:
        key = self.key()
        if key in self.world.objects:
            self.world.remove(key, force=self.rng.random() < 0.5)

    def get(self) -> None:
        key = self.key()
        if key in self.world.objects:
            self.world.get(key, self.rng.choice((0, SECOND // 10, 5 * SECOND)))

    def pin(self) -> None:
        from tests.core.lab import digests_of

        self.world.shard.set_hard_pin(
            self.world.now, digests_of([self.key()]), self.rng.random() < 0.3
        )

    def tick(self) -> None:
        self.world.pass_time(self.rng.randrange(1, SECOND // 10))

    def wait(self) -> None:
        self.world.pass_time(self.rng.choice((SECOND, 30 * SECOND, 70 * SECOND)))

    def fetch(self) -> None:
        self.world.fetch(self.rng.randrange(4), self.rng.choice(self.world.devices()))

    def copy_halfway(self) -> None:
        """Write some of what a haul says, perhaps long after it was given up."""
        if self.world.running:
            haul = self.rng.choice(self.world.running)
            self.world.copy(haul, [self.rng.randrange(2) for _ in haul.sizes])

    def report(self) -> None:
        if self.world.running:
            haul = self.rng.choice(self.world.running)
            good = self.rng.random() < 0.8
            self.world.carry(haul, [0 if good else self.rng.choice((0, -1)) for _ in haul.sizes])

    def forget(self) -> None:
        """A worker does not know any more what it was told, and never says so."""
        if self.world.running:
            self.world.running.remove(self.rng.choice(self.world.running))

    def haul(self) -> None:
        """What somebody who hints would ask for."""
        import numpy as np

        rows = np.array([self.rng.randrange(KEYS) for _ in range(5)], np.int32)
        if self.rng.random() < 0.5:
            self.world.shard.hauls.promote(rows)
        else:
            self.world.shard.hauls.demote(rows, keep=self.rng.random() < 0.5)
        self.world.shard.tick(self.world.now)  # an operation ends: it is written down

    def hide(self) -> None:
        """A worker is away for a moment."""
        index = self.rng.choice(list(self.world.segments))
        self.world.shard.set_absent(self.world.now, index, True)
        for _ in range(3):
            self.rng.choice([self.put, self.get, self.report, self.tick])()
            self.world.shard.check_integrity()
        self.world.shard.set_absent(self.world.now, index, False)

    def restart(self) -> None:
        if not self.restarted:
            self.world.restart()
            self.tell_namespaces()  # as the master does with what its settings say
            self.restarted = True


@pytest.mark.parametrize("tiers", ["memory, disk", "memory, cold", "all"])
def test_runs_of_tiers_read_what_was_put(tiers: str) -> None:
    moved = []
    for seed in range(6 if tiers == "memory, disk" else 4):
        run = Run(seed, tiers)
        for step in range(250):
            try:
                run.step()
            except AssertionError as error:
                error.add_note(f"seed {seed}, step {step}")
                raise
        moved.append(run.world.moved_before + run.world.moved())
    assert sum(count > 0 for count in moved) >= len(moved) - 2, f"hardly under pressure: {moved}"


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_while_the_disks_have_room(seed: int) -> None:
    """Whatever the workers do: eviction waits for them, and what failed is tried again."""
    rng = random.Random(seed)
    world = World(rng, ShardConfig(objects_max=4096, segments_max=8, seed=seed))
    world.mount("memory", MIB, Tier.MEMORY)
    world.mount("disk", 16 * MIB, Tier.DISK)
    for key in range(300):
        while world.shard.space.all()[0].used > 0.95 * MIB:
            world.pass_time(SECOND // 100)
            world.fetch()
            for haul in list(world.running):
                world.carry(haul, [rng.choice((0, 0, 0, -1)) for _ in haul.sizes])
        assert world.put(key, 16_384) == 0
        world.pass_time(SECOND // 1000)
    world.check()
    assert all(world.get(key) for key in range(300))
    assert world.shard.stats().evicted_objects == 0
