"""Hints, given to a shard and its model; part of `Checked`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mooncake_store.core.options import CLIPPED, HintAction
from mooncake_store.core.records import Status
from tests.core.lab import digests_of
from tests.core.model import OK
from tests.core.space import expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.core.nouns import Object

CHILLED = -1_000_000_000
"""Before the stamp of everything that was used."""
NO_COPY = {Status.NO_SPACE, Status.INVALID_PARAMS, Status.TENANT_QUOTA, Status.TASK_LIMIT}


class HintCalls:
    """What `Checked` does about hints."""

    shard: Any
    model: Any
    now: int
    note: Any

    def hint(
        self,
        tenant: int,
        keys: Sequence[int],
        action: HintAction,
        priority: int,
        ttl: int | None,
    ) -> None:
        self.note("hint", tenant, list(keys), action.name, priority, ttl)
        out = self.shard.hint(self.now, tenant, digests_of(keys), action, priority, ttl).tolist()
        said: dict[int, int] = {}
        for key, code in zip(keys, out, strict=True):
            item = self.model.readable(key)
            if key in said:
                expect(code == said[key], f"hint of {key}: {code} and {said[key]} in one batch")
            elif item is None or item.tenant != tenant:
                expect(code in (Status.NOT_FOUND, Status.NOT_READY), f"hint of {key}: {code}")
            else:
                self._follow_hint(item, code, action, priority, ttl)
            said[key] = code

    def _follow_hint(
        self, item: Object, code: int, action: HintAction, priority: int, ttl: int | None
    ) -> None:
        pinned = self.model.soft_pinned(item)
        if action == HintAction.SHARE:
            allowed = NO_COPY | {OK} if item.task is None else {Status.BUSY}
            expect(code in allowed, f"sharing {item.key}: {code}")
            version = item.current
            assert version is not None
            count = len(version.extents)
            if code == OK and version.options.replicas <= count:
                version.options = dataclasses.replace(version.options, replicas=count + 1)
        elif action == HintAction.DEMOTE:
            wanted = Status.PINNED if pinned or item.hard_pin else OK
            expect(code == wanted, f"demoting {item.key}: {code}, not {wanted!r}")
            self.model.clock += code == OK
            item.stamp = item.stamp if code else CHILLED + self.model.clock
        elif action == HintAction.PREFETCH:
            expect(code == OK, f"prefetching {item.key} from memory: {code}")
        elif priority == 0:
            expect(code == OK, f"retaining {item.key}: {code}")
            self.model.touch(item)
        else:
            config = self.model.config
            most = config.soft_pin_ttl_max_ns
            wanted = CLIPPED if ttl is not None and ttl > most else OK
            expect(code == wanted, f"pinning {item.key}: {code}, not {wanted}")
            end = self.now + (config.soft_pin_ttl_ns if ttl is None else min(ttl, most))
            if action == HintAction.RETAIN and pinned:
                end, priority = max(end, item.soft_pin_end), max(priority, item.priority)
            item.soft_pin_end, item.priority = end, priority
