"""What it costs to show rights to memory: rows `rights/...` of the bench `data`.

Two clients of one pool, both over tcp: one with a credential of a writer, of whom the owner of the
memory asks a right to each place; and one with the secret of the pool, of whom it asks nothing.
Both read the same objects, put as many, and are measured in turn; `off` is the second one.
"""

from __future__ import annotations

import secrets
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_store import credentials
from mooncake_store.bench.parts.store import StorePool
from mooncake_store.bench.sides.measuring import Pace, Samples, add_row, measure
from mooncake_store.units import KIB, MIB, format_size
from transfer_engine.wire.rights import Role

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report
    from mooncake_store.bench.parts.blocks import BlockPlan

__all__ = ["SHAPES", "measure_rights"]

SHAPES = ((4 * KIB, 128), (64 * KIB, 1), (64 * KIB, 16), (MIB, 1))
"""Bytes of an object, and objects of a batch."""
POOL_BUFFERS = 4
LEASE_TTL = "2s"


def measure_rights(report: Report, plan: BlockPlan) -> None:
    """Add a row for each shape and operation."""
    pace = Pace(plan.total_s, 2 * len(SHAPES))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        drivers = _clients(stack, folder, plan.buffer_bytes)
        for size, batch in SHAPES:
            count = max(batch, plan.buffer_bytes // size // 2)
            objects: dict[str, Any] = {"prefix": format_size(size), "count": count, "size": size}
            label = f"{format_size(size)}/b{batch}"
            if batch * size > plan.buffer_bytes:
                for command in ("get", "put"):
                    add_row(report, f"rights/{command}/{label}", "GB/s", Samples(), "on", {})
                continue
            drivers["off"].ask("fill", **objects)
            for command in ("get", "put"):
                options = objects if command == "get" else {"count": count, "size": size}
                options = options | {"batch": batch, "budget_s": plan.budget_s}
                calls = {
                    side: partial(_rate, driver, command, options)
                    for side, driver in drivers.items()
                }
                samples = measure(calls, plan.repeats, pace.next_s())
                name = f"rights/{command}/{label}"
                add_row(report, name, "GB/s", samples, "on", {"off": "off"})
            drivers["off"].ask("drop", prefix=objects["prefix"], count=count)


def _rate(driver: Any, command: str, options: dict[str, Any]) -> float:
    return float(driver.ask(command, **options)) / 1e9


def _clients(stack: ExitStack, folder: Path, buffer_bytes: int) -> dict[str, Any]:
    """Start a pool with credentials, and both clients."""
    secret, directory = secrets.token_hex(32), str(folder / "credentials")
    files = {"off": folder / "pool.secret", "on": folder / "writer.secret"}
    files["off"].touch(mode=0o600)
    files["off"].write_text(secret)
    made = credentials.make(directory, "writer", Role.WRITER, namespaces=["default"])
    credentials.write_text(files["on"], made)
    told = {"secret_file": str(files["off"]), "credentials": directory}
    pool = stack.enter_context(
        StorePool(
            segment_bytes=POOL_BUFFERS * buffer_bytes,
            secret=secret.encode(),
            master=told,
            worker=told,
        )
    )
    settings = {"transports": ["tcp"], "lease_cache": False, "lease_ttl": LEASE_TTL}
    return {
        side: pool.client(buffer_bytes, secret_file=str(files[side]), **settings)
        for side in ("on", "off")
    }
