"""What the benches `data` and `transfer` share: sides that move the same blocks, rows of GB/s.

Each way that a transport of ours goes has a row, and beside it what the original and bare calls
reach; all sides are processes of one shape and move the blocks in turn. The time of a sample is
bounded, not its bytes, except that a batch is never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.parts import upstream
from mooncake_store.bench.parts.process import Driver
from mooncake_store.bench.sides.measuring import Pace, Samples, add_row, measure
from mooncake_store.units import format_size

if TYPE_CHECKING:
    from contextlib import ExitStack

    from mooncake_store.bench.harness import Report

__all__ = ["AGAINST", "ALTERNATIVES", "BATCHES", "RAW", "TRANSPORTS", "BlockBench", "BlockPlan"]

ALTERNATIVES = ("upstream", "raw")
BATCHES = (1, 32, 128)
RAW = {"tcp": "sockets", "shm": "memcpy", "local": "memcpy"}
"""The bare calls beside each transport."""
TRANSPORTS = tuple(RAW)
AGAINST = {way: {"upstream": "upstream", "raw": bare} for way, bare in RAW.items()}
"""The sides beside each transport, by what the report calls them."""
COMMANDS = {"get": ("prefix", "count", "size"), "put": ("count", "size")}
"""What a driver is told of the blocks: those that are put are new ones."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """What is measured, and for how long."""

    sizes: tuple[int, ...]
    batches: tuple[int, ...] = BATCHES
    transports: tuple[str, ...] = TRANSPORTS
    operations: tuple[str, ...] = ("get", "put")
    buffer_bytes: int
    budget_s: float
    repeats: int
    total_s: float
    """From the start on; after that a measurement makes no more rounds than it must."""
    too_large: str = ""
    """Why a batch that does not fit into the buffer is left out, if there is more to say."""


class BlockBench:
    """The sides by name, and the rows made from them."""

    _against = AGAINST

    def __init__(
        self, report: Report, plan: BlockPlan, vs: tuple[str, ...], stack: ExitStack
    ) -> None:
        self._report = report
        self._plan = plan
        self._vs = vs
        self._stack = stack
        self._upstream = upstream.wanted(report, vs)
        self._drivers: dict[str, Driver] = {}
        self._pace = Pace(plan.total_s, len(plan.sizes) * len(plan.batches) * len(plan.operations))

    def _start(self, side: str, driver: Driver, **options: Any) -> None:
        """Add a side whose process opens with these options."""
        self._stack.enter_context(driver)
        driver.ask("open", **options)
        driver.ask("buffer", nbytes=self._plan.buffer_bytes)
        self._drivers[side] = driver

    def _start_bare(self) -> None:
        """Add the bare calls, if they are asked for."""
        for side in dict.fromkeys(RAW[way] for way in self._plan.transports if "raw" in self._vs):
            self._start(side, Driver(f"bare {side}", side), nbytes=self._plan.buffer_bytes)

    def _rates(self, operation: str, blocks: dict[str, Any]) -> None:
        """Add a row of GB/s for each batch and transport."""
        plan, label = self._plan, blocks["prefix"]
        command = "get" if operation in ("get", "read") else "put"
        options = {name: value for name, value in blocks.items() if name in COMMANDS[command]}

        def sample(batch: int, driver: Driver) -> float:
            return float(driver.ask(command, **options, batch=batch, budget_s=plan.budget_s)) / 1e9

        for batch in plan.batches:
            if batch * blocks["size"] > plan.buffer_bytes:
                room = format_size(plan.buffer_bytes)
                why = plan.too_large or f"{batch} such blocks do not fit into {room}"
                samples = Samples(failures=dict.fromkeys(plan.transports, why))
            else:
                calls = {side: partial(sample, batch, each) for side, each in self._drivers.items()}
                samples = measure(calls, plan.repeats, self._pace.next_s())
            for way in plan.transports:
                name = f"{operation}/{way}/{label}/b{batch}"
                add_row(self._report, name, "GB/s", samples, way, self._beside(way))

    def _beside(self, way: str) -> dict[str, str]:
        """The sides that are asked for, by what the report calls them."""
        return {name: side for name, side in self._against[way].items() if name in self._vs}
