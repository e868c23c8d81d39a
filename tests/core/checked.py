"""A shard and its reference model side by side: every call goes to both, every reply is compared.

Keys are small numbers. `Checked` holds the arguments' translation to arrays, the comparison, and
the following of free choices; what is legal is the model's business (`model.py`), what to call
next is the rules' (`rules.py`).
"""

from __future__ import annotations

import fnmatch
import re
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.records import Flag, SegmentState, State, Status
from mooncake_store.core.state import as_words
from tests.core import audit
from tests.core.checked_hints import HintCalls
from tests.core.checked_segments import SegmentCalls
from tests.core.keeping import Kept
from tests.core.lab import START, digests_of, names_of
from tests.core.model import NO_ROOM, OK, UNREADABLE, Reference
from tests.core.nouns import Object, Tenant, Version
from tests.core.renamed import expect_rename, renamed
from tests.core.shares import share_out
from tests.core.space import Extent, expect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mooncake_store.core.options import ShardConfig, StartOptions

WRONG_WRITER = {Status.INVALID_WRITE, Status.ILLEGAL_CLIENT}


def tag_of(checksum: int) -> int:
    """Of the content that has this checksum, what a writer says who makes tags, of most."""
    return checksum << 40 | checksum if checksum % 3 else 0


class Checked(SegmentCalls, HintCalls):
    """Calls both, compares, and keeps the last calls for the failure report."""

    def __init__(self, config: ShardConfig, slack: int) -> None:
        self.keeping = Kept(config)
        self.shard = self.keeping.shard
        self.model = Reference(config, slack)
        self.now = START
        self.log: deque[str] = deque(maxlen=40)
        self.asked = {}

    def note(self, what: str, *details: object) -> None:
        self.log.append(f"t={self.now - START} {what} {' '.join(map(str, details))}")

    def at(self, nanoseconds: int) -> None:
        """Let time pass."""
        self.now += nanoseconds
        self.model.advance(self.now)

    def probe(self, keys: list[int]) -> list[bool]:
        return [bool(there) for there in self.shard.exists(self.now, digests_of(keys))]

    def stat(self, key: int) -> Any:
        return self.shard.stat(self.now, digests_of([key])[0])

    def kept(self, item: Object) -> bool:
        """Whether the core still has what the model calls absent."""
        found, version = self.stat(item.key), item.current
        assert version is not None
        return bool(found and found.absent and found.generation == version.generation)

    def went(self) -> list[int]:
        """Keys of complete objects that the core let go by itself."""
        model = self.model
        keys = [key for key in model.objects if model.readable(key)]
        there = dict(zip(keys, self.probe(keys), strict=True))
        away = [key for key, item in model.objects.items() if model.absent(item)]
        there |= {key: self.kept(model.objects[key]) for key in away}
        return [key for key in model.objects if not there.get(key, True)]

    def still_writing(self, key: int) -> bool:
        """Whether the core still knows the unfinished put that the model knows."""
        found = self.stat(key)
        version = self.model.objects[key].writing
        assert version is not None
        return found is not None and found.state == State.WRITING

    def upsert_runs(self, key: int) -> bool:
        """Whether a second generation is still known; no reply tells, so this looks inside."""
        state = self.shard
        row = int(state.table.find(as_words(digests_of([key])))[0])
        return row >= 0 and bool(int(state.rows["flags"][row]) & Flag.UPSERT)

    def follow_upserts(self) -> None:
        """Follow second generations that were given up after their deadline, never before."""
        for key, item in list(self.model.objects.items()):
            version = item.writing
            if version is None or item.current is None or not self.model.expired(version):
                continue
            if not self.upsert_runs(key):
                self.model.forget_writing(item, fenced=False)

    def follow_late(self) -> None:
        """Follow unfinished puts that any request may have reclaimed after their last deadline."""
        self.follow_upserts()
        for key, item in list(self.model.objects.items()):
            version = item.writing
            if version is None or item.current is not None or not self.model.expired(version):
                continue
            if not self.still_writing(key):
                self.model.forget_writing(item, fenced=False)

    # Cluster

    def tenant(self, name: str, quota: int | None) -> int:
        number = self.shard.tenant(name, quota)
        self.model.tenants.setdefault(number, Tenant()).quota = quota
        return number

    def open_client(self, uuid: int, epoch: int) -> int:
        self.note("open_client", uuid, epoch)
        client = self.shard.open_client(self.now, uuid.to_bytes(16, "big"), epoch, f"host{uuid}")
        self.model.clients.add(client)
        return client

    def restart_client(self, old: int, uuid: int, epoch: int) -> int:
        """The same program under a new epoch: its segments are still its own."""
        client = self.open_client(uuid, epoch)
        expect(client != old, "a new epoch has the handle of the old one")
        self._closed(old, fenced=False)
        for segment in self.model.segments.values():
            if segment.owner == old:
                segment.owner = client
        return client

    def close_client(self, client: int, fenced: bool) -> None:
        self.note("close_client", client, fenced)
        self.shard.close_client(self.now, client, fenced)
        self._closed(client, fenced)

    def _closed(self, client: int, fenced: bool) -> None:
        for number, task in list(self.model.tasks.items()):
            if task.client == client:
                self.model.copy_ends(number, ok=False, fenced=fenced)
        self.model.close_client(client, fenced=fenced)
        self.follow_tasks()

    # Put

    def put_start(
        self,
        client: int,
        keys: Sequence[int],
        sizes: Sequence[int],
        options: StartOptions,
        tenants: Callable[[int], int],
        names: Callable[[int], str],
        *,
        upsert: bool = False,
    ) -> None:
        """One batch; all its keys belong to one tenant."""
        self.note("upsert" if upsert else "put", client, list(keys), list(sizes), options)
        model = self.model
        call = self.shard.upsert_start if upsert else self.shard.put_start
        rows, replicas = call(
            self.now,
            client,
            tenants(keys[0]) if keys else 0,
            digests_of(keys),
            np.array(sizes, np.int64),
            names_of([names(key) for key in keys]),
            options,
        )
        statuses = [Status(int(row["status"])) for row in rows]
        self.note("  ->", [int(status) for status in statuses])
        self._check_put_statuses(client, keys, sizes, options, statuses, upsert)
        granted = {key for key, status in zip(keys, statuses, strict=True) if status == OK}
        stolen = set()
        if not upsert:
            stolen = {key for key in granted if model.readable(key)}
            self._follow_renewed(keys, statuses)
        model.follow_evicted(stolen | set(self.went()), "put_start")
        self.follow_upserts()
        self._follow_preempted(keys, statuses)
        model.follow_reclaimed(self._may_be_there(granted))
        self._begin(client, keys, sizes, options, rows, replicas, tenants, names)
        for key, size, status in zip(keys, sizes, statuses, strict=True):
            if status in NO_ROOM:
                model.check_refused(tenants(key), key, size, options, status)

    def _follow_renewed(self, keys: Sequence[int], statuses: Sequence[Status]) -> None:
        """What was absent made way for a put that found room."""
        for key, status in zip(keys, statuses, strict=True):
            item = self.model.objects.get(key)
            if item is None or not self.model.absent(item) or status != OK:
                continue
            if item.writing is not None:
                self.model.forget_writing(item, fenced=False, overtaken=True)
            self.model.forget_current(item)

    def _follow_preempted(self, keys: Sequence[int], statuses: Sequence[Status]) -> None:
        """Writers that were in the way of what found room are gone, and no others."""
        for key, status in zip(keys, statuses, strict=True):
            item = self.model.objects.get(key)
            if item is not None and item.writing is not None and status == OK:
                self.model.forget_writing(item, fenced=False, overtaken=True)

    def _may_be_there(self, granted: set[int]) -> Callable[[int], bool]:
        """Ask the core only about puts past their deadline: others are audited now and then."""

        def there(key: int) -> bool:
            version = self.model.objects[key].writing
            assert version is not None
            if key in granted or not self.model.expired(version):
                return True
            return self.still_writing(key)

        return there

    def _check_put_statuses(
        self,
        client: int,
        keys: Sequence[int],
        sizes: Sequence[int],
        options: StartOptions,
        statuses: list[Status],
        upsert: bool,
    ) -> None:
        first: dict[int, Status] = {}
        asked = list(zip(keys, sizes, statuses, strict=True))
        # Of equal keys the first is put, but the last is upserted.
        for key, size, status in reversed(asked) if upsert else asked:
            if not self.model.valid_size(size) or not options.replicas:
                allowed = {Status.INVALID_PARAMS}
            elif key in first and upsert and client in self.model.clients:
                allowed = {Status.SUPERSEDED}
            elif key in first:
                allowed = {Status.ALREADY_EXISTS, first[key]} - {OK}
                if first[key] in NO_ROOM:
                    allowed |= NO_ROOM | {OK}
            else:
                allowed = self.model.expect_put(key, client, upsert=upsert)
                first[key] = status
            expect(status in allowed, f"put of {key}: {status!r}, allowed {allowed}")

    def _begin(
        self,
        client: int,
        keys: Sequence[int],
        sizes: Sequence[int],
        options: StartOptions,
        rows: Any,
        replicas: Any,
        tenants: Callable[[int], int],
        names: Callable[[int], str],
    ) -> None:
        at = 0
        for place, (key, size, row) in enumerate(zip(keys, sizes, rows, strict=True)):
            count = int(row["replicas"])
            if row["status"] != OK:
                expect(count == 0, f"refused put of {key} lists {count} replicas")
                continue
            extents = [
                Extent(int(replica["segment"]), int(replica["offset"]), size)
                for replica in replicas[at : at + count]
            ]
            at += count
            version = Version(int(row["generation"]), size, client, self.now, options, extents)
            version.name = names(key)
            if options.groups is not None:
                version.group = options.groups[place]
            item = self.model.objects.get(key)
            if item is None:
                item = Object(key, tenants(key), names(key))
                item.group = version.group
            self.model.begin(item, version)
        expect(at == len(replicas), f"{len(replicas)} replicas listed, {at} announced")

    def put_end(
        self,
        client: int,
        keys: Sequence[int],
        generations: Sequence[int],
        *,
        revoke: bool = False,
        late: bool = False,
    ) -> None:
        """Commit or revoke a batch."""
        self.note("revoke" if revoke else "put_end", client, list(keys), list(generations), late)
        stamps = np.array(generations, np.uint32)
        checksums = np.arange(len(keys), dtype=np.uint64) + np.uint64(self.now & 0xFFFF)
        if revoke:
            out = self.shard.put_revoke(self.now, client, digests_of(keys), stamps, late=late)
        else:
            given, asked = (digests_of(keys), stamps, checksums), client in self.model.asked
            tags = np.array([tag_of(int(each)) for each in checksums], np.uint64)
            wishes = {"asked": True, "tags": tags} if asked else {}
            out = self.shard.put_end(self.now, client, *given, **wishes)
        seen: set[int] = set()
        plain: list[Object] = []
        swapped: list[Object] = []
        for key, generation, checksum, code in zip(keys, generations, checksums, out, strict=True):
            status = Status(int(code))
            allowed = self.model.expect_end(key, client, generation, revoke=revoke)
            if key in seen and allowed & (WRONG_WRITER | {Status.SUPERSEDED}):
                # What a repetition meets depends on the order inside the batch.
                allowed |= WRONG_WRITER | {Status.NOT_FOUND, OK}
            seen.add(key)
            expect(
                status in allowed,
                f"{'revoke' if revoke else 'put_end'} of {key}: {status!r}, allowed {allowed}",
            )
            item = self.model.objects.get(key)
            if status != OK and not late:
                self.model.writer_done(client, generation)
            if item is None or item.writing is None or item.writing.generation != generation:
                continue
            if revoke and status == OK:
                self.model.forget_writing(item, fenced=not late)
            elif status == OK:
                (plain if item.current is None else swapped).append(item)
                self.model.commit(key, int(checksum))
                self._adopt(item)
        for item in (*plain, *swapped):  # the order in which one batch becomes readable
            self.model.touch(item)
        self.model.lose_dead()

    def _adopt(self, item: Object) -> None:
        """Follow what a new generation may take over or set anew: hard pin and group."""
        found = self.stat(item.key)
        if found is not None:
            expect(
                found.hard_pin or not (item.current and item.current.options.hard_pin),
                f"hard pin of {item.key} was lost",
            )
            item.hard_pin = found.hard_pin

    # Read

    def get(self, client: int, keys: Sequence[int], ttl: int) -> None:
        self.note("get", client, list(keys), ttl)
        rows, replicas = self.shard.get(self.now, client, digests_of(keys), ttl)
        tags = self.shard.tell_tags(self.now, digests_of(keys), rows).view(np.uint64)
        at = 0
        for key, row, tag in zip(keys, rows, tags[:, 0].tolist(), strict=True):
            wanted = self.model.expect_get(key)
            status, count = Status(int(row["status"])), int(row["replicas"])
            expect(status == wanted, f"get of {key}: {status!r}, not {wanted!r}")
            if status != OK:
                expect(count == tag == 0, f"get of {key}: {status!r} with replicas, or a tag")
                continue
            item = self.model.objects[key]
            version = item.current
            assert version is not None
            told = (int(row["size"]), int(row["checksum"]), int(row["generation"]))
            known = (version.size, version.checksum, version.generation)
            expect(told == known, f"get of {key} told {told}, not {known}")
            made = tag_of(version.checksum) if version.owner in self.model.asked else 0
            expect(tag == made, f"get of {key} told the tag {tag}, not {made}")
            places = {(int(r["segment"]), int(r["offset"])) for r in replicas[at : at + count]}
            at += count
            alive = {(e.segment, e.offset) for e in self.model.alive(version)}
            expect(places == alive, f"get of {key} lists {places}, not {alive}")
            left = int(row["lease_ns"])
            remaining = self.model.lease(item, client, ttl, left)
            expect(left == remaining, f"get of {key} leases {left} ns, not {remaining}")
        expect(at == len(replicas), "get lists replicas of nobody")

    def exists(self, keys: Sequence[int]) -> None:
        self.note("exists", list(keys))
        wanted = [self.model.readable(key) is not None for key in keys]
        found = self.probe(list(keys))
        expect(found == wanted, f"exists {list(keys)}: {found}, not {wanted}")
        run = next((at for at, there in enumerate(wanted) if not there), len(wanted))
        prefix = self.shard.find_prefix(self.now, digests_of(keys))
        expect(prefix == run, f"find_prefix {prefix}, not {run}")

    def renew(self, client: int, keys: Sequence[int], generations: Sequence[int], ttl: int) -> None:
        self.note("renew", client, list(keys), list(generations), ttl)
        out, left = self.shard.renew(
            self.now, client, digests_of(keys), np.array(generations, np.uint32), ttl
        )
        for key, generation, code, ns in zip(keys, generations, out, left, strict=True):
            told = int(code), int(ns)
            known = self.model.renew(client, key, generation, ttl, int(ns))
            expect(told == known, f"renew of {key}: {told}, not {known}")

    def release(self, client: int, keys: Sequence[int], generations: Sequence[int]) -> None:
        self.note("release", client, list(keys), list(generations))
        numbers = np.array(generations, np.uint32)
        out = self.shard.release(self.now, client, digests_of(keys), numbers)
        for key, generation, code in zip(keys, generations, out, strict=True):
            known = self.model.release(client, key, generation)
            expect(int(code) == known, f"release of {key}: {int(code)}, not {known!r}")

    # Remove and evict

    def remove(self, client: int, keys: Sequence[int], force: bool) -> None:
        self.note("remove", client, list(keys), force)
        out = self.shard.remove(self.now, digests_of(keys), force, client)
        for key, code in zip(keys, out, strict=True):
            status = Status(int(code))
            allowed = self.model.expect_remove(client, key, force=force)
            expect(status in allowed, f"remove of {key}: {status!r}, allowed {allowed}")
            if status == OK:
                self.model.removed(key)

    def rename(
        self,
        client: int,
        keys: Sequence[int],
        targets: Sequence[int],
        names: Sequence[str],
        overwrite: bool,
        force: bool,
    ) -> None:
        self.note("rename", client, list(keys), list(targets), overwrite, force)
        arguments = digests_of(keys), digests_of(targets), names_of(names), overwrite, force, client
        out = self.shard.rename(self.now, *arguments)
        for key, target, name, code in zip(keys, targets, names, out, strict=True):
            status = Status(int(code))
            rules = {"overwrite": overwrite, "force": force}
            allowed = expect_rename(self.model, client, key, target, **rules)
            expect(status in allowed, f"rename of {key}: {status!r}, allowed {allowed}")
            if status == OK:
                renamed(self.model, key, target, name)

    def remove_matching(
        self, client: int, tenant: int, pattern: str, kind: str, force: bool, page: int
    ) -> None:
        self.note("remove_matching", client, tenant, repr(pattern), kind, force, page)
        removed, cursor = 0, 0
        for _ in range(100_000):
            some, cursor = self.shard.remove_matching(
                self.now, tenant, pattern, kind, force, cursor, page, client
            )
            removed += some
            if not cursor:
                break
        went = 0
        for item in list(self.model.objects.values()):
            if item.tenant != tenant or not _matches(item.name, pattern, kind):
                continue
            takes = self.model.expect_match(client, item, force=force)
            if takes is None:
                takes = not self._known(item.key)
            if takes:
                self.model.removed(item.key)
                went += 1
        expect(removed == went, f"remove_matching took {removed}, not {went}")

    def _known(self, key: int) -> bool:
        return self.stat(key) is not None

    def evict(self, ratio: float, floor: float | None) -> None:
        self.note("evict", ratio, floor)
        model = self.model
        before = dict(model.objects)
        pinned = {key for key, item in before.items() if model.soft_pinned(item)}
        report = self.shard.evict(self.now, ratio, floor)
        victims = model.follow_evicted(self.went(), "evict")
        self.follow_upserts()
        model.follow_reclaimed(self._may_be_there(set()))
        expect(
            report.objects == len(victims),
            f"evict reports {report.objects}, {len(victims)} objects left",
        )
        self._check_order([v for v in victims if not v.group], pinned)
        stay = [item for item in model.objects.values() if model.readable(item.key)]
        if ratio >= 1.0:
            left = [
                item.key
                for item in stay
                if item.key not in pinned
                and all(map(model.evictable, model.unit(item)))
                and not any(mate.key in pinned for mate in model.unit(item))
            ]
            expect(not left, f"evict of everything left {left}")

    def make_way(self, sizes: Sequence[int], options: StartOptions, wait: int) -> None:
        """Have objects leave for a put that found no room and waits."""
        until = min(self.now + wait, self.now + self.shard.config.lease_ttl_ns)
        self.note("make_way", list(sizes), options, wait)
        asked = np.array(sizes, np.int64), options, self.now + wait
        expect(self.shard.make_way(self.now, *asked) == until, "it is to be asked again elsewhen")
        victims = self.model.follow_evicted(self.went(), "make_way", until)
        self.follow_upserts()
        expect(bool(sizes) or not victims, f"{victims} left for nothing")

    def _check_order(self, victims: list[Object], pinned: set[int]) -> None:
        """Coldest first among the objects that belong to no group; by last use, if that decides."""
        model, by_use = self.model, self.shard.config.eviction_policy == "lru"
        rest = [
            item
            for item in model.objects.values()
            if model.readable(item.key) and not item.group and model.evictable(item)
        ]
        plain = [item for item in rest if item.key not in pinned]
        coldest = min((item.stamp for item in plain), default=model.clock + 1)
        for victim in victims:
            if victim.key in pinned:
                expect(not plain, f"soft-pinned {victim.key} left before plain objects")
                lower = [item.key for item in rest if item.priority < victim.priority]
                expect(not lower, f"{victim.key} left before {lower} of a lower priority")
            elif by_use:
                expect(
                    victim.stamp <= coldest,
                    f"{victim.key} left though colder objects stayed: {victim.stamp} > {coldest}",
                )

    def tick(self) -> None:
        self.note("tick")
        model = self.model
        crowded = any(
            info.used > model.config.high_watermark * info.nbytes
            for info in self.shard.segments()
            if info.state not in UNREADABLE
        )
        share_out(model)
        self.shard.tick(self.now)
        model.end_soft_pins()
        for segment in model.segments.values():
            if segment.deadline is not None and self.now >= segment.deadline:
                segment.state, segment.deadline = SegmentState.GONE, None
        model.lose_dead()
        self.follow_tasks()
        victims = model.follow_evicted(self.went(), "tick")
        self.follow_upserts()
        expect(crowded or not victims, f"tick evicted {len(victims)} though nothing was crowded")
        for item in list(model.objects.values()):
            version = item.writing
            if version is not None and model.released(version):
                expect(
                    item.current is not None or not self.still_writing(item.key),
                    f"put of {item.key} outlived its release",
                )
                model.forget_writing(item, fenced=False)
        model.follow_reclaimed(self._may_be_there(set()))

    # Pins

    def pin(self, keys: Sequence[int], enable: bool, ttl: int | None) -> None:
        from mooncake_store.core.options import SoftPin

        self.note("pin", list(keys), enable, ttl)
        action = SoftPin.ENABLE if enable else SoftPin.DISABLE
        out = self.shard.pin(self.now, digests_of(keys), action, ttl)
        config = self.model.config
        self.model.clock += 1
        for key, code in zip(keys, out, strict=True):
            item = self.model.readable(key)
            if item is None:
                expect(int(code) != OK, f"pin of unreadable {key} answered OK")
                continue
            expect(int(code) == OK, f"pin of {key} answered {int(code)}")
            wanted = config.soft_pin_ttl_ns if ttl is None else ttl
            until = self.now + min(wanted, config.soft_pin_ttl_max_ns)
            if item.soft_pin_end and not (enable and wanted):
                item.stamp = self.model.clock
            item.soft_pin_end = until if enable and wanted else 0
            item.priority = 1

    def hard_pin(self, client: int, keys: Sequence[int], pinned: bool) -> None:
        self.note("hard_pin", client, list(keys), pinned)
        out = self.shard.set_hard_pin(self.now, digests_of(keys), pinned, client)
        for key, code in zip(keys, out, strict=True):
            item = self.model.readable(key)
            if item is None:
                expect(int(code) != OK, f"hard pin of unreadable {key} answered OK")
            elif int(code) == OK:
                if item.hard_pin and not pinned:
                    self.model.touch(item)
                item.hard_pin = pinned
            else:
                expect(pinned and int(code) == Status.PINS_FULL, f"hard pin: {int(code)}")

    def check(self) -> None:
        """Cheap comparison after each step: the core's own invariants."""
        self.shard.check_integrity()

    def audit(self, keys: Sequence[int], tenants: Sequence[int]) -> None:
        """Compare everything that can be asked, key by key."""
        audit.audit(self, keys, tenants)


def _matches(name: str, pattern: str, kind: str) -> bool:
    if kind == "prefix":
        return name.startswith(pattern)
    if kind == "glob":
        return fnmatch.fnmatchcase(name, pattern)
    if kind == "regex":
        return re.search(pattern, name) is not None
    return True
