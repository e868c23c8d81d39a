"""What to say of a trace to somebody who runs a pool: sizes, the knee, today's pool, policies.

    advice = advise(trace, hardware, memory_bytes=256 << 30)
    advice.knee.size_bytes

`Worth` counts; this chooses what is counted, and puts seconds in relation to the hours that the
trace lasts. Cost: that of `Worth`, and a replay of each policy at each size that is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from eviction.trace import BLOCK_TOKENS
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import format_size
from serving.traces.shape import Description, describe
from serving.traces.worth import GIB, LIMIT, Size, Worth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eviction import Trace
    from serving.simulator.hardware import Hardware
    from serving.traces.worth import Found

__all__ = ["Advice", "Comparison", "Today", "advise"]


class Today(NamedTuple):
    """What there is of a pool today."""

    memory: Size
    """Of this what is found in memory; the rest is found on disk."""
    whole: Size
    """Memory and disk: what leaves memory goes to the disk, so the pool holds as much as both."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies at one size, the one that saves most first; last the one that knows the future."""

    size_bytes: int
    found: dict[str, Found]

    @property
    def best(self) -> str:
        """The policy that saves most of those a store can run."""
        return next(name for name in self.found if name != LIMIT)

    @property
    def gain_s(self) -> float:
        """Seconds that it saves more than lru over the trace."""
        return self.found[self.best].saved_s - self.found["lru"].saved_s


@dataclass(frozen=True, slots=True)
class Advice:
    """All that is told of a trace."""

    trace: Description
    block_bytes: int
    sizes: list[Size]
    """From small to what finds all."""
    knee: Size | None
    today: Today | None
    compared: list[Comparison]

    @property
    def everything(self) -> Size:
        """What finds as much as a pool without bounds."""
        return max(self.sizes, key=lambda size: size.found.blocks)

    @property
    def reached(self) -> float:
        """Tokens that today's pool finds, as a share of those that one without bounds finds."""
        possible = self.everything.found.tokens
        return self.today.whole.found.tokens / possible if self.today and possible else 0.0

    def an_hour(self, saved_s: float) -> float | None:
        """Seconds an hour; None for a trace that takes no time."""
        return 3600 * saved_s / self.trace.lasts_s if self.trace.lasts_s else None

    def more_per_gib(self) -> list[float | None]:
        """Of each of `sizes` the seconds an hour that a GiB saves which the one before lacks."""
        rates: list[float | None] = []
        for before, size in pairwise([Size.nothing(), *self.sizes]):
            more = self.an_hour(size.found.saved_s - before.found.saved_s)
            gib = (size.size_bytes - before.size_bytes) / GIB
            rates.append(None if more is None else more / gib)
        return rates

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        more = self.more_per_gib()
        today = self.today
        return {
            "trace": self.trace.plain(),
            "block_bytes": self.block_bytes,
            "sizes": [
                self._plain(size) | {"more_per_gib_s": each}
                for size, each in zip(self.sizes, more, strict=True)
            ],
            "knee": self._plain(self.knee) if self.knee else None,
            "today": today and {
                "memory": self._plain(today.memory),
                "whole": self._plain(today.whole),
                "of_unlimited": self.reached,
            },
            "policies": [
                {
                    "size_bytes": each.size_bytes,
                    "best": each.best,
                    "gain_per_hour_s": self.an_hour(each.gain_s),
                    "found": {name: self._told(found) for name, found in each.found.items()},
                }
                for each in self.compared
            ],
        }  # fmt: skip

    def _plain(self, size: Size) -> dict[str, Any]:
        return {"size_bytes": size.size_bytes, "blocks": size.blocks, **self._told(size.found)}

    def _told(self, found: Found) -> dict[str, Any]:
        return {
            "hit_ratio": found.blocks,
            "token_hit_ratio": found.tokens,
            "saved_s": found.saved_s,
            "saved_per_hour_s": self.an_hour(found.saved_s),
        }


def advise(
    trace: Trace,
    hardware: Hardware,
    *,
    memory_bytes: int = 0,
    disk_bytes: int = 0,
    block_bytes: int = 0,
    compared: Sequence[int] = (),
) -> Advice:
    """Find out what pools would make of a trace.

    A block takes `block_bytes`, or what the hardware's KV of its tokens takes. Policies are
    compared at the sizes `compared`, without any at today's size, or else at the knee.

    Raises InvalidArgumentError for a size that has no room for a block.
    """
    if block_bytes:
        hardware = _with_blocks_of(hardware, block_bytes)
    block_bytes = block_bytes or hardware.kv_bytes * BLOCK_TOKENS
    for size_bytes in filter(None, (memory_bytes, memory_bytes + disk_bytes, *compared)):
        if size_bytes < block_bytes:
            raise InvalidArgumentError(
                f"{format_size(size_bytes)} has no room for a block of {format_size(block_bytes)}",
                advice="give a larger size, or say what a block takes with --block-bytes",
            )
    worth = Worth(trace, hardware, block_bytes)
    knee = worth.knee()
    whole_bytes = memory_bytes + disk_bytes
    today = Today(worth.size(memory_bytes), worth.size(whole_bytes)) if whole_bytes else None
    where = compared or ([whole_bytes] if today else [knee.size_bytes] if knee else [])
    named = [memory_bytes, whole_bytes, *([knee.size_bytes] if knee else [])]
    return Advice(
        trace=describe(trace),
        block_bytes=block_bytes,
        sizes=worth.sizes(also=named),
        knee=knee,
        today=today,
        compared=[Comparison(size_bytes, worth.compare(size_bytes)) for size_bytes in where],
    )


def _with_blocks_of(hardware: Hardware, block_bytes: int) -> Hardware:
    """The same with KV of another size, which takes as much longer or shorter to load."""
    if block_bytes < BLOCK_TOKENS:
        raise InvalidArgumentError(
            f"a block of {block_bytes} bytes is too small for the KV of {BLOCK_TOKENS} tokens"
        )
    return msgspec.structs.replace(hardware, kv_bytes=block_bytes // BLOCK_TOKENS)
