"""What is said of standbys, in the same words by their leader and by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.admin.told import promotion, standbys_value
from mooncake_store.cli.shared.app import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.wire.standby import StandbyEntry, StandbyStatus

__all__ = ["promotion_of", "standbys_drawn", "told_promotion"]


def promotion_of(found: StandbyStatus) -> dict[str, Any]:
    """Return it as the standby itself sees it."""
    shards = found.shards
    return promotion(
        sum(shard.objects for shard in shards),
        sum(shard.head - shard.position for shard in shards),
        exact=bool(shards) and all(shard.exact for shard in shards),
    )


def told_promotion(value: dict[str, Any]) -> str:
    """Say it."""
    if value["loses"] == "unknown":
        return "what a promotion would restore is not known here"
    objects, words = value["objects"], value["lacking_words"]
    lacks = f"{words:,} words lacking, " if words > 0 else ""
    loses = "nothing that was answered is lost"
    if value["loses"] != "nothing":
        loses = "what was answered last may be lost"
    return f"a promotion restores {objects:,} objects: {lacks}{loses}"


def standbys_drawn(entries: Sequence[StandbyEntry]) -> list[Any]:
    """Return what people are shown of them."""
    if not entries:
        return []
    columns = {
        "standby": "left",
        "at": "left",
        "state": "left",
        "words behind": "right",
        "silent": "right",
    }
    rows = [
        (
            f"{each.number:016x}",
            each.address or "-",
            ("counts" if each.counts else "a copy") + ("" if each.follows else ", does not follow"),
            str(each.behind_words) if each.behind_words >= 0 else "-",
            f"{each.silent_ms / 1e3:.1f} s",
        )
        for each in entries
    ]
    told = [
        f"{value['number']}: {told_promotion(value['promotion'])}"
        for value in standbys_value(entries)
    ]
    return [table(columns, rows), *told]
