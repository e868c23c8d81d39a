"""Comparing everything the core can be asked with what the model knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.core.records import SegmentState, State
from tests.core.space import expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.core.checked import Checked
    from tests.core.nouns import Object


def audit(checked: Checked, keys: Sequence[int], tenants: Sequence[int]) -> None:
    """Compare everything that can be asked, key by key."""
    model = checked.model
    checked.note("audit")
    checked.follow_late()
    for key in keys:
        found, item = checked.stat(key), model.objects.get(key)
        if item is None or not (item.current or _placed(checked, item)):
            expect(
                found is None or found.state != State.READABLE,
                f"{key} is unknown to the model: {found}",
            )
            continue
        expect(found is not None, f"the core forgot {key}: {item}")
        _compare(checked, item, found)
    for tenant in tenants:
        _compare_listing(checked, tenant)
    stats = checked.shard.stats()
    readable = sum(model.readable(key) is not None for key in model.objects)
    expect(stats.objects >= readable, f"stats.objects {stats.objects} < {readable}")
    current = [item.current for item in model.objects.values() if item.current is not None]
    missing = sum(max(0, v.options.replicas - len(v.extents)) for v in current)
    # Of many objects on a segment that is gone, a tick looks at a share.
    swept = all(s.state != SegmentState.GONE for s in checked.shard.segments())
    told = stats.replicas_missing
    expect(told == missing or (told < missing and not swept), f"{missing} missing, told {told}")


def _placed(checked: Checked, item: Object) -> bool:
    return item.writing is not None and checked.model.placed_somewhere(item.writing)


def _compare(checked: Checked, item: Object, found: Any) -> None:
    model, version = checked.model, item.current
    if version is None:
        expect(found.state == State.WRITING, f"{item.key} is readable too early: {found}")
        return
    expect(found.state == State.READABLE, f"{item.key} is not complete: {found}")
    expect(found.absent == model.absent(item), f"{item.key} is absent or not: {found}")
    told = (found.size, found.generation, found.checksum, found.hard_pin, found.tenant)
    known = (version.size, version.generation, version.checksum, item.hard_pin, item.tenant)
    expect(told == known, f"stat of {item.key} tells {told}, not {known}")
    lease = max(item.lease_end - checked.now, 0)
    expect(found.lease_ns == lease, f"lease of {item.key}: {found.lease_ns}, not {lease}")
    pin = max(item.soft_pin_end - checked.now, 0)
    expect(found.soft_pin_ns == pin, f"soft pin of {item.key}: {found.soft_pin_ns}, not {pin}")


def _compare_listing(checked: Checked, tenant: int) -> None:
    names: set[bytes] = set()
    cursor = 0
    for _ in range(10_000):
        rows, blob, cursor = checked.shard.list_objects(checked.now, tenant, b"", cursor, 7)
        at = 0
        for row in rows:
            name = bytes(blob[at : at + int(row["name_bytes"])])
            expect(name not in names, f"{name!r} is listed twice")
            names.add(name)
            at += len(name)
        if not cursor:
            break
    known = {
        item.name.encode()
        for item in checked.model.objects.values()
        if item.tenant == tenant and item.name and checked.model.readable(item.key)
    }
    expect(names == known, f"listing differs: {names ^ known}")
