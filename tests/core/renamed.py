"""What the reference model says of renames: who may get another key, and what goes along."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.core.records import Status

if TYPE_CHECKING:
    from tests.core.model import Reference

OK = Status.OK


def expect_rename(
    model: Reference, client: int, key: int, target: int, *, overwrite: bool, force: bool
) -> set[Status]:
    """Statuses that a rename of one key may answer."""
    item = model.objects.get(key)
    if item is None:
        return {Status.NOT_FOUND}
    if item.task is not None:
        return {Status.BUSY}
    if item.writing is not None:
        if model.placed_somewhere(item.writing):
            return {Status.NOT_READY}
        either = {Status.NOT_READY, Status.NOT_FOUND}
    else:
        either = set()
    if not model.readable(key):
        return either | {Status.NOT_FOUND}
    if model.leased_to_others(item, client) and not force:
        return either | {Status.HAS_LEASE}
    if key == target or target not in model.objects:
        return either | {OK}
    if model.readable(target) and not overwrite:
        return either | {Status.ALREADY_EXISTS}
    removal = model.expect_remove(client, target, force=force)
    return either | {OK if status == Status.NOT_FOUND else status for status in removal}


def renamed(model: Reference, key: int, target: int, name: str) -> None:
    """Follow a granted rename: all of the object goes along, nothing but its name is new."""
    if key == target:
        return
    model.removed(target)
    item = model.objects[key]
    if item.writing is not None:
        model.forget_writing(item, fenced=False)
    assert item.current is not None
    model.objects[target] = model.objects.pop(key)
    item.key, item.name = target, name
    model.generations.setdefault(target, set()).add(item.current.generation)
