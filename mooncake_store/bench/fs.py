"""How fast files move: many small ones, one large one, a listing of 100,000 names.

`s3fs` is s3fs on an S3-compatible server of this machine, `local` is fsspec's LocalFileSystem on
tmpfs. All three run the same workload (`sides/files.py`) in processes of the same shape. Each side
gets many files in one call, as fsspec offers it, and each listing is asked for anew.

Ours and `local` are measured in turn. s3fs takes minutes for what takes them milliseconds, so it
is measured once per row, after them; a quick run gives it fewer small files, leaves out its listing
of 100,000 names, and only has it when `--vs s3fs` asks for it.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.harness import memory_bytes
from mooncake_store.bench.parts import s3 as s3s
from mooncake_store.bench.parts.process import Driver
from mooncake_store.bench.parts.store import StorePool
from mooncake_store.bench.sides.measuring import Pace, add_row, measure
from mooncake_store.errors import StoreError
from mooncake_store.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.bench.harness import Report

__all__ = ["Plan", "measure_all", "run"]

SMALL_BYTES = 4 * KIB
ALTERNATIVES = ("s3fs", "local")
TMPFS = "/dev/shm"
ROWS = 7


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    files: int
    s3_files: int
    names: int
    s3_names: int
    """0 leaves the listing of s3fs out."""
    large_bytes: int
    repeats: int
    total_s: float
    """From the start on; after that ours and local make no more rounds than they must."""


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure every row; `vs` may name s3fs and local, a full run has both without it."""
    usual = ALTERNATIVES[1:] if quick else ALTERNATIVES
    wanted = tuple(name for name in ALTERNATIVES if name in vs) or usual
    room = (memory_bytes("MemAvailable") or 0) // 8 // MIB * MIB
    plan = Plan(
        files=10_000,
        s3_files=200 if quick else 10_000,
        names=100_000,
        s3_names=0 if quick else 100_000,
        large_bytes=max(64 * MIB, min(256 * MIB if quick else GIB, room)),
        repeats=3 if quick else 5,
        total_s=25.0 if quick else 60.0,
    )
    measure_all(report, plan, wanted)


def measure_all(report: Report, plan: Plan, vs: tuple[str, ...]) -> None:
    """Measure what the plan says."""
    with ExitStack() as stack:
        _Bench(report, plan, vs, stack).measure()


class _Bench:
    """The sides by name, and the rows made from them."""

    def __init__(self, report: Report, plan: Plan, vs: tuple[str, ...], stack: ExitStack) -> None:
        self._report = report
        self._plan = plan
        self._vs = {name: name for name in vs}
        self._pace = Pace(plan.total_s, ROWS)
        room = 3 * plan.large_bytes + 4 * plan.files * SMALL_BYTES + 256 * MIB
        pool = stack.enter_context(StorePool(segment_bytes=room))
        self._drivers = {"ours": stack.enter_context(Driver("our filesystem", "files"))}
        self._drivers["ours"].ask("open", protocol="mooncake", root="b", options={"url": pool.url})
        if "local" in vs:
            self._local(stack)
        if "s3fs" in vs:
            try:
                self._drivers["s3fs"] = s3s.side(stack, plan.s3_names)
            except StoreError as error:
                report.row("s3fs", "", [], why=str(error))

    def _local(self, stack: ExitStack) -> None:
        folder = tempfile.mkdtemp(prefix="mooncake-bench-", dir=TMPFS)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        driver = self._drivers["local"] = stack.enter_context(Driver("local files", "files"))
        driver.ask("open", protocol="file", root=folder, options={"auto_mkdir": True})

    def measure(self) -> None:
        """Make every row."""
        plan = self._plan
        size = {"size": SMALL_BYTES}
        for side in ("ours", "local"):  # memory that nobody used before costs both sides alike
            if side in self._drivers:
                self._drivers[side].ask("write_large", size=2 * plan.large_bytes)
                self._drivers[side].ask("delete_large")

        def count(side: str) -> dict[str, int]:
            return {"count": plan.s3_files if side == "s3fs" else plan.files}

        def again(side: str, driver: Driver) -> float:
            """Delete; what was deleted before is written off the clock."""
            if side != "s3fs":
                driver.ask("write", **count(side), **size)
            return float(driver.ask("delete", **count(side)))

        self._row("small_write", "files/s", lambda s, d: d.ask("write", **count(s), **size))
        self._row(
            "small_list_s", "s", lambda s, d: d.ask("list", folder="small", **count(s)), low=True
        )
        self._row("small_read", "files/s", lambda s, d: d.ask("read", **count(s), **size))
        self._row("small_delete", "files/s", again)
        for side, driver in self._drivers.items():
            if side != "s3fs":  # its server begins with these names
                driver.ask("names", count=plan.names)
        names: dict[str, Any] = {"folder": "names", "count": plan.names}
        label, same = f"list_{plan.names // 1000}k_s", plan.s3_names == plan.names
        self._row(label, "s", lambda _, d: d.ask("list", **names), low=True, s3=same)
        large = {"size": plan.large_bytes}
        self._row("seq_write", "GB/s", lambda _, d: d.ask("write_large", **large) / 1e9)
        self._row("seq_read", "GB/s", lambda _, d: d.ask("read_large", **large) / 1e9)

    def _row(
        self,
        name: str,
        unit: str,
        call: Callable[[str, Driver], float],
        *,
        low: bool = False,
        s3: bool = True,
    ) -> None:
        """Ours and local in turn, s3fs once after them."""
        calls = {
            side: partial(call, side, driver)
            for side, driver in self._drivers.items()
            if side != "s3fs"
        }
        samples = measure(calls, self._plan.repeats, self._pace.next_s())
        if s3 and "s3fs" in self._drivers:
            try:
                samples.of["s3fs"] = [float(call("s3fs", self._drivers["s3fs"]))]
            except StoreError as error:
                # The rows after this one need what this one was to leave.
                self._report.row(f"s3fs/{name}", "", [], why=str(error))
                del self._drivers["s3fs"]
        add_row(self._report, name, unit, samples, "ours", self._vs, higher_is_better=not low)
