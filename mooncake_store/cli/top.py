"""`mooncake top`: what the store does right now, as rates."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, console, emit, table
from mooncake_store.cli.shared.client import connected, store_options
from mooncake_store.cli.shared.keys import pressed
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from mooncake_store.client import Client
    from mooncake_store.wire.shard import ShardFigures


WIDE = 90
"""Columns of a terminal from which on all figures are shown; those on all terminals fit 50."""


@command(
    ("mooncake top", "refresh every second until q or Ctrl-C"),
    ("mooncake top --once --json", "one measurement for a program"),
)
@store_options
def top(
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Measure once and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show keys and bytes a second, the share of keys that gets find, and how full each shard is.

    Bytes and hits are those that a master hears of: what a client reads again under a lease it
    holds asks nobody. Below, what the namespace of the URL holds, and its quota if it has one.
    Refreshes on a terminal until q or Ctrl-C; elsewhere, with --once or --json it measures once.
    """
    with connected() as store:
        if once or as_json or not sys.stdout.isatty():
            before = _look(store)
            threading.Event().wait(interval)
            value = _rates(store, before, _look(store))
            emit(value, as_json=as_json, human=lambda: _drawn(value, console().width))
            return
        _follow(store, interval)


def _follow(store: Client, interval: float) -> None:
    """Draw anew after every interval, until q is pressed."""
    from rich.live import Live

    screen = console()
    with pressed() as wait, Live(console=screen, transient=True) as live:
        live.update(printable(f"{store.config.url}: measuring; q ends"))
        before = _look(store)
        while wait(interval) not in ("q", "Q"):
            after = _look(store)
            live.update(_drawn(_rates(store, before, after), screen.width))
            before = after


def _look(store: Client) -> tuple[float, list[ShardFigures]]:
    figures = store.store_stats()
    return time.monotonic(), figures


def _rates(
    store: Client, before: tuple[float, list[ShardFigures]], after: tuple[float, list[ShardFigures]]
) -> dict[str, Any]:
    """Rates between two looks, totals of the later one."""
    passed_s = max(after[0] - before[0], 1e-9)

    def rate(old: float, new: float) -> float:
        # A shard that was restarted counts from 0 again.
        return max(0.0, new - old) / passed_s

    shards = [
        {
            "shard": number,
            "requests_per_s": rate(old.requests, new.requests),
            "keys_per_s": rate(old.keys, new.keys),
            "read_bytes_per_s": rate(old.read_bytes, new.read_bytes),
            "written_bytes_per_s": rate(old.written_bytes, new.written_bytes),
            "hit_rate": _share(new.hits - old.hits, new.misses - old.misses),
            "absent_per_s": rate(old.misses_absent, new.misses_absent),
            "evicted_per_s": rate(old.evicted_objects, new.evicted_objects),
            "cpu": rate(old.cpu_s, new.cpu_s),
            "rss_bytes": new.rss_bytes,
            "objects": new.objects,
            "writing": new.writing,
            # Objects on absent segments take none of the room that `bytes_total` counts.
            "bytes_used": min(new.bytes_used, new.bytes_allocated),
            "bytes_total": new.bytes_total,
            "disk_total": new.disk_total,
            "disk_allocated": new.disk_allocated,
            "disk_hits_per_s": rate(old.disk_hits, new.disk_hits),
            "cold_total": new.cold_total,
            "cold_allocated": new.cold_allocated,
            "cold_hits_per_s": rate(old.cold_hits, new.cold_hits),
            "demoted_bytes_per_s": rate(old.demoted_bytes, new.demoted_bytes),
            "promoted_bytes_per_s": rate(old.promoted_bytes, new.promoted_bytes),
            "clients": new.clients,
            "replicas_missing": new.replicas_missing,
        }
        for number, (old, new) in enumerate(zip(before[1], after[1], strict=False))
    ]
    namespace = {
        "name": store.namespace,
        "objects": sum(figures.tenant_objects for figures in after[1]),
        "bytes_used": sum(figures.tenant_bytes for figures in after[1]),
        # 0: none.
        "quota": sum(figures.tenant_quota for figures in after[1]),
    }
    return {
        "url": store.config.url,
        "master": store.master,
        "interval_s": passed_s,
        "shards": shards,
        "namespace": namespace,
    }


def _share(hits: int, misses: int) -> float | None:
    """The share of hits; None where nobody asked, or a shard was started anew."""
    return hits / (hits + misses) if hits >= 0 and misses >= 0 and hits + misses else None


def _drawn(value: dict[str, Any], width: int) -> Any:
    from rich.console import Group

    from mooncake_store.units import format_size

    columns = dict.fromkeys(("shard", "req/s", "keys/s", "hits", "GB/s", "full"), "right")
    wide = dict.fromkeys(("evict/s", "cpu", "rss", "objects", "used"), "right")
    rows = []
    for shard in value["shards"]:
        moved = shard["read_bytes_per_s"] + shard["written_bytes_per_s"]
        used, total = shard["bytes_used"], shard["bytes_total"]
        narrow = (
            str(shard["shard"]),
            _short(shard["requests_per_s"]),
            _short(shard["keys_per_s"]),
            "-" if shard["hit_rate"] is None else f"{shard['hit_rate']:.0%}",
            f"{moved / 1e9:.2f}",
            f"{used / total:.0%}" if total else "-",
        )
        more = (
            _short(shard["evicted_per_s"]),
            f"{shard['cpu']:.0%}",
            format_size(shard["rss_bytes"]),
            _short(shard["objects"]),
            f"{format_size(used)} of {format_size(total)}",
        )
        rows.append(narrow + more if width >= WIDE else narrow)
    mine = value["namespace"]
    quota = f" of its quota of {format_size(mine['quota'])}" if mine["quota"] else ""
    held = f"{mine['objects']:,} objects, {format_size(mine['bytes_used'])}{quota}"
    told = [printable(f"namespace {mine['name']}: {held}")]
    missing = sum(shard["replicas_missing"] for shard in value["shards"])
    if missing:
        told.append(f"missing replicas: {missing:,}")
    if any(shard["disk_total"] for shard in value["shards"]):
        told.append(_of_disks(value["shards"]))
    if any(shard["cold_total"] for shard in value["shards"]):
        told.append(_of_stores(value["shards"]))
    absent = sum(shard["absent_per_s"] for shard in value["shards"])
    if absent:
        told.append(f"asked for, on absent workers: {_short(absent)} keys/s")
    shown = columns | wide if width >= WIDE else columns
    return Group(printable(value["url"]), *_led(value), table(shown, rows), *told)


def _led(value: dict[str, Any]) -> list[str]:
    """Which of several masters answers."""
    return [f"master at {value['master']}"] if "," in value["url"] else []


def _of_disks(shards: list[dict[str, Any]]) -> str:
    """How full the disks are, and what moves to them and back."""
    from mooncake_store.units import format_size

    used, total, down, up, hits = (
        sum(shard[name] for shard in shards)
        for name in (
            "disk_allocated",
            "disk_total",
            "demoted_bytes_per_s",
            "promoted_bytes_per_s",
            "disk_hits_per_s",
        )
    )
    return (
        f"disks: {format_size(used)} of {format_size(total)}, {down / 1e9:.2f} GB/s from memory, "
        f"{up / 1e9:.2f} GB/s back, {_short(hits)} keys/s read there"
    )


def _of_stores(shards: list[dict[str, Any]]) -> str:
    """How full cold segments are, and what is read there alone."""
    from mooncake_store.units import format_size

    used, total, hits = (
        sum(shard[name] for shard in shards)
        for name in ("cold_allocated", "cold_total", "cold_hits_per_s")
    )
    return f"cold: {format_size(used)} of {format_size(total)}, {_short(hits)} keys/s read there"


def _short(number: float) -> str:
    """A count in at most five characters: 999, 1.2k, 345k, 6.7M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.1f}{unit}" if unit and number < 99.5 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}T"
