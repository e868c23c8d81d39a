"""`mooncake top`: what the store does right now, as rates."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli._app import JsonOption, console, emit, examples, make_app, table
from mooncake_store.cli._client import SecretOption, UrlOption, connected, store_options

if TYPE_CHECKING:
    from mooncake_store.client import Client
    from mooncake_store.wire.shard import ShardFigures

app = make_app()


@app.command(
    no_args_is_help=False,
    epilog=examples(
        ("mooncake top", "refresh every second until Ctrl-C"),
        ("mooncake top --once --json", "one measurement for a program"),
    ),
)
@store_options
def top(
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600)
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Measure once and end.", show_default=False)
    ] = False,
    url: UrlOption = None,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show requests, keys and evictions a second, processor time and memory of each shard.

    Below them, what the namespace of the URL holds, and its quota if it has one.

    Refreshes on a terminal; elsewhere, with --once or with --json it measures once.
    """
    with connected(url, secret_file) as store:
        if once or as_json or not sys.stdout.isatty():
            value = _measure(store, _look(store), interval)[0]
            emit(value, as_json=as_json, human=lambda: _drawn(value))
            return
        from rich.live import Live

        before = _look(store)
        with Live(console=console(), transient=True) as live:
            while True:
                value, before = _measure(store, before, interval)
                live.update(_drawn(value))


def _look(store: Client) -> tuple[float, list[ShardFigures]]:
    figures = store.store_stats()
    return time.monotonic(), figures


def _measure(
    store: Client, before: tuple[float, list[ShardFigures]], interval: float
) -> tuple[dict[str, Any], tuple[float, list[ShardFigures]]]:
    """Rates between an earlier look and one `interval` later, which is returned too."""
    threading.Event().wait(interval)
    after = _look(store)
    passed_s = after[0] - before[0]

    def rate(old: float, new: float) -> float:
        # A shard that was restarted counts from 0 again.
        return max(0.0, new - old) / passed_s

    shards = [
        {
            "shard": number,
            "requests_per_s": rate(old.requests, new.requests),
            "keys_per_s": rate(old.keys, new.keys),
            "evicted_per_s": rate(old.evicted_objects, new.evicted_objects),
            "cpu": rate(old.cpu_s, new.cpu_s),
            "rss_bytes": new.rss_bytes,
            "objects": new.objects,
            "writing": new.writing,
            "bytes_used": new.bytes_used,
            "bytes_total": new.bytes_total,
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
    return {"interval_s": passed_s, "shards": shards, "namespace": namespace}, after


def _drawn(value: dict[str, Any]) -> Any:
    from rich.console import Group

    from mooncake_store.units import format_size

    columns = {
        # Short enough for 80 columns.
        "shard": "right", "req/s": "right", "keys/s": "right", "evict/s": "right",
        "cpu": "right", "rss": "right", "objects": "right", "used": "right",
    }  # fmt: skip
    rows = [
        (
            str(shard["shard"]),
            f"{shard['requests_per_s']:,.0f}",
            f"{shard['keys_per_s']:,.0f}",
            f"{shard['evicted_per_s']:,.0f}",
            f"{shard['cpu']:.0%}",
            format_size(shard["rss_bytes"]),
            f"{shard['objects']:,}",
            f"{format_size(shard['bytes_used'])} of {format_size(shard['bytes_total'])}",
        )
        for shard in value["shards"]
    ]
    mine = value["namespace"]
    quota = f" of its quota of {format_size(mine['quota'])}" if mine["quota"] else ""
    held = f"{mine['objects']:,} objects, {format_size(mine['bytes_used'])}{quota}"
    told = f"namespace {mine['name']}: {held}"
    missing = sum(shard["replicas_missing"] for shard in value["shards"])
    lines = [told, f"missing replicas: {missing:,}"] if missing else [told]
    return Group(table(columns, rows), *lines)
