"""What may happen to a shard next: each rule draws its arguments from a `random.Random`.

The soak draws from a seeded generator, the Hypothesis machine from one whose every draw it
controls and shrinks; both run the same rules against the same `Checked` pair. Pools are small, so
that most runs work under pressure, and times are odd, so that no deadline is hit exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.core.options import (
    PRIORITY_MAX,
    HintAction,
    Placement,
    ShardConfig,
    SoftPin,
    StartOptions,
)
from mooncake_store.core.records import SIZE_MAX, SegmentState
from tests.core.checked import Checked
from tests.core.lab import MIB, SECOND

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

KEYS = 120
KEYS_OF_WIDE_RUNS = 3000
BATCH_OF_WIDE_RUNS = 1000
SEGMENT_BYTES = 1 * MIB
SLACK = SEGMENT_BYTES // 2
SMALL = (1, 100, 4096, 5000, 16_384)
LARGE = (40_000, 65_536, 131_072)
MANY = (960, 1024, 2000)
"""Sizes of keys of which there are many: most of a batch has room."""


def tenant_of(key: int) -> int:
    return 1 if key % 8 == 7 else 0


def name_of(key: int) -> str:
    return f"model{key % 3}/layer{key % 5}/{key}"


def group_of(key: int) -> str:
    return f"group{key // 20}" if key % 10 < 3 and tenant_of(key) == 0 else ""


class Rules:
    """One run: a checked shard, its clients and segments, and a weighted choice of rules.

    Some runs are wide: of many keys, put and asked for in batches of up to a thousand, without
    groups, so that evictions take their shorter way as well.
    """

    def __init__(
        self, rng: random.Random, check_every: int = 1, *, wide: bool | None = None
    ) -> None:
        self.rng = rng
        self.wide = rng.random() < 0.15 if wide is None else wide
        self.known: Sequence[int] = range(KEYS_OF_WIDE_RUNS if self.wide else KEYS)
        self.known_of = [[key for key in self.known if tenant_of(key) == each] for each in (0, 1)]
        self.check_every = check_every
        config = ShardConfig(
            seed=rng.randrange(1 << 30),
            placement=rng.choice(list(Placement)),
            evict_soft_pinned=rng.random() < 0.8,
            allocator=rng.choice(("composite", "offset")),
            eviction_policy=rng.choice(("lru", "lru", "fifo", "sieve", "lfu")),
            objects_max=100_000,
        )
        self.checked = Checked(config, SLACK)
        self.model = self.checked.model
        self.checked.tenant("guest", 3 * SEGMENT_BYTES // 2)
        self.clients = [self.checked.open_client(number, 1) for number in range(3)]
        self.epochs = [1, 1, 1]
        self.hostile = self.checked.open_client(9, 1)
        for number in range(4):
            self._mount(number)
        self.steps = 0
        self.rules: dict[Callable[[], None], int] = {
            self.put: 18,
            self.upsert: 6,
            self.put_end: 22,
            self.put_revoke: 4,
            self.get: 14,
            self.exists: 4,
            self.renew: 4,
            self.release: 8,
            self.attack: 5,
            self.remove: 8,
            self.rename: 5,
            self.remove_matching: 1,
            self.evict: 2,
            self.hold_all: 2,
            self.make_way: 2,
            self.tick: 6,
            self.sleep: 6,
            self.pin: 3,
            self.hard_pin: 2,
            self.hint: 3,
            self.copy: 4,
            self.copy_end: 5,
            self.fetch: 2,
            self.mend: 1,
            self.restart_client: 1,
            self.change_segment: 2,
            self.fall_silent: 2,
            self.audit: 2,
        }

    def step(self) -> None:
        """Run one rule, chosen by weight, and check the core's own invariants."""
        (rule,) = self.rng.choices(list(self.rules), list(self.rules.values()))
        self.run(rule)

    def run(self, rule: Callable[[], None]) -> None:
        """Run one rule after a short while."""
        self.steps += 1
        self.checked.at(self.rng.randrange(1, 50_000_000))
        self.checked.follow_late()
        try:
            rule()
            if self.steps % self.check_every == 0:
                self.checked.check()
        except AssertionError as error:
            error.add_note("the last calls were:\n" + "\n".join(self.checked.log))
            raise

    # Drawing arguments

    def _keys(self, most: int = 8) -> list[int]:
        """Keys of one tenant; sometimes twice the same, in wide runs now and then very many."""
        count = self.rng.randrange(0, most + 1)
        if self.wide and self.rng.random() < 0.3:
            count = int(BATCH_OF_WIDE_RUNS ** self.rng.random())
        tenant = 1 if self.rng.random() < 0.15 else 0
        keys = self.known_of[tenant]
        return [self.rng.choice(keys) for _ in range(count)]

    def _some_client(self) -> int:
        return self.rng.choice(self.clients)

    def _generations(self, keys: list[int]) -> list[int]:
        """Mostly the current generation, at times another one."""
        out = []
        for key in keys:
            item = self.model.objects.get(key)
            version = item and (item.current or item.writing)
            known = version.generation if version else self.rng.randrange(100)
            out.append(known if self.rng.random() < 0.9 else (known + 1) % (1 << 32))
        return out

    def _ttl(self) -> int:
        seconds = self.rng.choice((0.5, 2, 10, 10, 30, 1000))
        return int(seconds * SECOND) + self.rng.randrange(1000)

    def _options(self, keys: list[int]) -> StartOptions:
        rng = self.rng
        if rng.random() < 0.5:
            return StartOptions()
        replicas = rng.choice((1, 1, 1, 2, 3))
        names = [segment.name for segment in self.model.segments.values()]
        return StartOptions(
            replicas=replicas,
            replicas_min=rng.choice((1, 1, 1, replicas)),
            soft_pin=rng.choice((SoftPin.PRESERVE, SoftPin.PRESERVE, *SoftPin)),
            soft_pin_ttl_ns=rng.choice((None, 0, 5 * SECOND + 1, 100_000 * SECOND)),
            hard_pin=rng.random() < 0.03,
            preferred=(rng.choice(names),) if rng.random() < 0.2 else (),
            excluded=(rng.choice(names),) if rng.random() < 0.1 else (),
            groups=None if self.wide else tuple(map(self._group_wished, keys)),
        )

    def _group_wished(self, key: int) -> str:
        """The group of a key; none for an object without one, as the model lets no object join."""
        item = self.model.objects.get(key)
        return group_of(key) if item is None or item.group else ""

    def _sizes(self, keys: list[int]) -> list[int]:
        odd = (0, -1, SIZE_MAX, SEGMENT_BYTES * 5)
        draw = self.rng.random
        usual = MANY if self.wide else SMALL
        large = 0.3 if len(keys) < 20 else 0.001
        return [
            self.rng.choice(odd)
            if draw() < 0.01
            else self.rng.choice(LARGE if draw() < large else usual)
            for _ in keys
        ]

    # Rules

    def put(self) -> None:
        keys = self._keys()
        self.checked.put_start(
            self._some_client(), keys, self._sizes(keys), self._options(keys), tenant_of, name_of
        )

    def upsert(self) -> None:
        keys = self._keys(4)
        running = [
            item.key
            for item in self.model.objects.values()
            if item.writing and item.tenant == tenant_of(item.key)
        ]
        if running and self.rng.random() < 0.3:  # overtake another
            keys = [self.rng.choice(running)]
        self.checked.put_start(
            self._some_client(),
            keys,
            self._sizes(keys),
            self._options(keys),
            tenant_of,
            name_of,
            upsert=True,
        )

    def _finish(self, *, revoke: bool) -> None:
        """Commit or revoke what one client writes, with strangers and stale numbers mixed in."""
        client = self._some_client()
        own = [
            (item.key, item.writing.generation)
            for item in self.model.objects.values()
            if item.writing and (item.writing.owner == client or self.rng.random() < 0.05)
        ]
        own += [
            (entry.writer[2], entry.writer[1])  # it lost its place, and does not know
            for entry in self.model.quarantine
            if entry.writer and (entry.writer[0] == client or self.rng.random() < 0.05)
        ]
        self.rng.shuffle(own)
        late = revoke and self.rng.random() < 0.3
        if revoke:
            own = own[:2]
        strays = self._keys(1)
        own += zip(strays, self._generations(strays), strict=True)
        if own and self.rng.random() < 0.1:
            own.append(own[0])
        keys, generations = [key for key, _ in own], [generation for _, generation in own]
        self.checked.put_end(client, keys, generations, revoke=revoke, late=late)

    def put_end(self) -> None:
        self._finish(revoke=False)

    def put_revoke(self) -> None:
        self._finish(revoke=True)

    def get(self) -> None:
        ttl = 0 if self.rng.random() < 0.3 else self._ttl()
        self.checked.get(self._some_client(), self._keys(12), ttl)

    def exists(self) -> None:
        self.checked.exists(self._keys(12))

    def renew(self) -> None:
        keys = self._keys(4)
        self.checked.renew(self._some_client(), keys, self._generations(keys), self._ttl())

    def release(self) -> None:
        keys = self._keys(2) + self._leased(4)
        self.checked.release(self._some_client(), keys, self._generations(keys))

    def attack(self) -> None:
        """Somebody gives back and renews what is not his, and more often than he took it."""
        keys = self._leased(6)
        for _ in range(self.rng.randrange(1, 4)):
            self.checked.release(self.hostile, keys, self._generations(keys))
        if self.rng.random() < 0.5:
            self.checked.get(self.hostile, keys[:3], self._ttl())
            self.checked.renew(self.hostile, keys, self._generations(keys), self._ttl())
        for _ in range(self.rng.randrange(1, 4)):
            self.checked.release(self.hostile, keys, self._generations(keys))
        self.checked.remove(self.hostile, keys[:2], False)

    def hold_all(self) -> None:
        """Somebody leases all there is for as long as he can, and once more what he has."""
        keys = [key for key in self.model.objects if self.model.readable(key)]
        self.checked.get(self.hostile, keys, 1000 * SECOND)
        if self.rng.random() < 0.5:
            self.checked.renew(self.hostile, keys, self._generations(keys), 1000 * SECOND)

    def _leased(self, most: int) -> list[int]:
        leased = [item.key for item in self.model.objects.values() if self.model.leased(item)]
        return self.rng.sample(leased, min(len(leased), most))

    def remove(self) -> None:
        self.checked.remove(self._some_client(), self._keys(4), self.rng.random() < 0.3)

    def rename(self) -> None:
        """Within a tenant and group; also chains, swaps and keys renamed to themselves."""
        tenant, pick = 1 if self.rng.random() < 0.15 else 0, self.rng.choice
        keys = self.known_of[tenant]
        objects = self.model.objects.items()
        there = [key for key, item in objects if item.tenant == tenant] or keys
        count = self.rng.randrange(0, 4)
        sources = [pick(there if self.rng.random() < 0.8 else keys) for _ in range(count)]
        targets = [
            pick([key for key in keys if group_of(key) == group_of(source)]) for source in sources
        ]
        names = [name_of(key) if self.rng.random() < 0.9 else "" for key in targets]
        draw = self.rng.random
        client = self._some_client()
        self.checked.rename(client, sources, targets, names, draw() < 0.6, draw() < 0.4)

    def remove_matching(self) -> None:
        kind, pattern = self.rng.choice(
            (
                ("prefix", "model1/"),
                ("prefix", "nothing"),
                ("glob", "model?/layer2/*"),
                ("regex", "^model[02]/layer[1-3]/"),
                ("all", ""),
            )
        )
        if kind == "all" and self.rng.random() < 0.8:
            return
        page = self.rng.choice((5, 50, 65_536))
        force = self.rng.random() < 0.2
        client, tenant = self._some_client(), self.rng.choice((0, 0, 1))
        self.checked.remove_matching(client, tenant, pattern, kind, force, page)

    def evict(self) -> None:
        ratio = self.rng.choice((0.0, 0.05, 0.1, 0.3, 0.8, 1.0))
        self.checked.evict(ratio, self.rng.choice((None, ratio)))

    def make_way(self) -> None:
        keys = self._keys(3)
        sizes = [size for size in self._sizes(keys) if size > 0]
        wait = self.rng.choice((1, 5 * SECOND, 60 * SECOND))
        self.checked.make_way(sizes, self._options(keys), wait)

    def tick(self) -> None:
        self.checked.tick()

    def sleep(self) -> None:
        seconds = self.rng.choice((0.1, 1, 1, 3, 11, 11, 31, 61, 300, 601))
        self.checked.note("sleep", seconds)
        self.checked.at(int(seconds * SECOND) + self.rng.randrange(1000))
        if self.rng.random() < 0.7:
            self.checked.tick()

    def pin(self) -> None:
        ttl = self.rng.choice((None, 0, 7 * SECOND + 3, 200_000 * SECOND))
        self.checked.pin(self._keys(4), self.rng.random() < 0.7, ttl)

    def hard_pin(self) -> None:
        client = self.rng.choice((*self.clients, self.hostile))
        self.checked.hard_pin(client, self._keys(3), self.rng.random() < 0.4)

    def hint(self) -> None:
        action, pick = self.rng.choice(list(HintAction)), self.rng.choice
        least = 1 if action == HintAction.PIN else 0
        priority = self.rng.randrange(least, PRIORITY_MAX + 1)
        ttl = pick((None, 7 * SECOND + 3, 60 * SECOND + 1, 200_000 * SECOND))
        tenant = pick((0, 0, 0, 0, 1))
        self.checked.hint(tenant, self._keys(5), action, priority, ttl)

    def copy(self) -> None:
        readable = [key for key in self.model.objects if self.model.readable(key)]
        if not readable or self.rng.random() < 0.1:
            key, held = self.rng.choice(self.known), []
        else:
            key = self.rng.choice(readable)
            held = [extent.segment for extent in self.model.alive(self.model.objects[key].current)]
        move = self.rng.random() < 0.4
        source = self.rng.choice([None, *held, *held, *list(self.model.segments)[:1]])
        count = 1 if move else self.rng.choice((1, 1, 2))
        targets = self.rng.sample(list(self.model.segments), min(count, len(self.model.segments)))
        if self.rng.random() < 0.1 and not move:
            targets += targets[:1]
        worker = self.checked.submit(key, targets, source, move)
        if worker is not None and self.rng.random() < 0.9:
            self.checked.fetch(worker, self.known, 100)

    def copy_end(self) -> None:
        if not self.model.tasks:
            return
        number, task = self.rng.choice(list(self.model.tasks.items()))
        client = task.client if self.rng.random() < 0.9 else self._some_client()
        self.checked.copy_end(client, number, self.rng.random() < 0.7)

    def fetch(self) -> None:
        """Workers take tasks, at times newly submitted ones."""
        if self.rng.random() < 0.5:
            targets = self.rng.sample(list(self.model.segments), 1)
            asking = self.clients[self.steps % len(self.clients)]
            self.checked.submit(self.rng.choice(self.known), targets, client=asking)
        self.checked.fetch(self._some_client(), self.known)

    def mend(self) -> None:
        """All workers do their tasks for a while; mostly there is room for what is missing."""
        if self.rng.random() < 0.3:
            self.checked.evict(self.rng.choice((0.0, 0.5, 0.7)), None)
            self.checked.mend(self.known, self.clients)

    def restart_client(self) -> None:
        """A client leaves, or comes back under a new epoch; its unfinished puts are over."""
        place = self.rng.randrange(len(self.clients))
        old = self.clients[place]
        self.epochs[place] += 1
        if self.rng.random() < 0.5:
            self.checked.close_client(old, self.rng.random() < 0.5)
            self.clients[place] = self.checked.open_client(place, self.epochs[place])
        else:
            self.clients[place] = self.checked.restart_client(old, place, self.epochs[place])

    def _mount(self, number: int) -> None:
        self.checked.mount(self.clients[0], number, SEGMENT_BYTES, f"host{number % 3}")

    def change_segment(self) -> None:
        number = self.rng.randrange(5)
        there = [
            index
            for index, segment in self.model.segments.items()
            if segment.uuid == number.to_bytes(16, "big") and segment.state != SegmentState.GONE
        ]
        if not there:
            self._mount(number)
            return
        draw = self.rng.random()
        if draw < 0.2:
            self._mount(number)
        elif draw < 0.6:
            self.checked.suspect(there[0], self.rng.random() < 0.4)
        elif draw < 0.8:
            self.checked.unmount(self._some_client(), there[0], force=False)
        else:
            self.checked.unmount(self.clients[1], there[0], force=True)

    def fall_silent(self) -> None:
        """A worker is absent from now on, or is back."""
        segments = self.model.segments.items()
        away = [index for index, known in segments if known.state == SegmentState.ABSENT]
        there = [index for index, known in segments if known.state != SegmentState.GONE]
        if there:
            back = bool(away) and self.rng.random() < 0.6
            self.checked.absent(self.rng.choice(away if back else there), not back)

    def audit(self) -> None:
        self.checked.audit(self.known, (0, 1))
