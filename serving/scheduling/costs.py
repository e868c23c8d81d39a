"""What things cost, as policies ask: one protocol for each term of the paper's predictions.

Each has `predict`; `observe` takes a measurement in, which one that knows already ignores. The
running system learns them (`learnt.py`), the simulator knows them (`simulator/predictions.py`), and
who knows better says so in `Costs`.

    time to the first token = transfer of what is pulled + load of all that need not be computed
                              + queue + prefill of the rest
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.scheduling.learnt import (
    LearntDecode,
    LearntDuration,
    LearntLoad,
    LearntPrefill,
    LearntTransfer,
)

__all__ = ["Costs", "DecodeCost", "DecodeDuration", "LoadCost", "PrefillCost", "TransferCost"]


class PrefillCost(Protocol):
    """Seconds to compute the KV of a prompt of `tokens` of which `cached` need not be computed."""

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of fixed work, a token, and a square of tokens."""

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        """A prefill took so long, without waiting and without loading."""

    def predict(self, tokens: int, cached: int) -> float:
        """How long it would take."""


class TransferCost(Protocol):
    """Seconds to move KV from a source that may be busy sending."""

    def begin(self, source: str, count: int) -> None:
        """A transfer of so many bytes starts: others from that source are slower meanwhile."""

    def end(self, source: str, count: int) -> None:
        """It ended, well or not."""

    def observe(self, source: str, count: int, seconds: float) -> None:
        """A transfer took so long."""

    def declined(self, source: str) -> None:
        """A transfer was not made because of what was predicted for it."""

    def came_to_nothing(self, source: str) -> None:
        """A transfer was given up."""

    def predict(self, source: str, count: int) -> float:
        """How long a transfer that starts now would take."""


class LoadCost(Protocol):
    """Seconds to bring KV from an instance's memory to where it computes, its accelerator's.

    What was pulled lies in that memory as well, so it counts for all that need not be computed.
    """

    def observe(self, count: int, seconds: float) -> None:
        """A load of so many bytes took so long."""

    def predict(self, count: int) -> float:
        """How long it would take."""


class DecodeCost(Protocol):
    """Seconds between two tokens of an instance that decodes `batch` requests at once.

    `tokens` is the context of the whole batch; `chunk` tokens of a prompt are computed in the same
    step, where an instance does both.
    """

    def observe(self, batch: int, tokens: int, seconds: float, chunk: int = 0) -> None:
        """A step took so long."""

    def predict(self, batch: int, tokens: int, chunk: int = 0) -> float:
        """How long a step would take; 0 for an empty batch."""


class DecodeDuration(Protocol):
    """t_d: how long a request decodes."""

    def advance(self, now: float, running: int) -> None:
        """Time passes with `running` requests decoding. Call it before anything changes."""

    def finished(self) -> None:
        """One request ended its decode."""

    @property
    def seconds(self) -> float:
        """The estimate."""


@dataclass(slots=True)
class Costs:
    """All of one cluster; what is not given is learnt. `kv_bytes` is the size of one token's KV."""

    prefill: PrefillCost = field(default_factory=LearntPrefill)
    transfer: TransferCost = field(default_factory=LearntTransfer)
    load: LoadCost = field(default_factory=LearntLoad)
    decode: DecodeCost = field(default_factory=LearntDecode)
    duration: DecodeDuration = field(default_factory=LearntDuration)
    kv_bytes: int = 0

    def learnt(self) -> dict[str, Any]:
        """What was learnt, by term, as JSON has it; a term that was given is left out."""
        terms = {"prefill": self.prefill, "load": self.load, "decode": self.decode}
        told: dict[str, Any] = {
            name: each.learnt._asdict()
            for name, each in terms.items()
            if isinstance(each, (LearntPrefill, LearntLoad, LearntDecode))
        }
        if isinstance(self.transfer, LearntTransfer):
            told["transfer"] = {
                source: each._asdict() for source, each in self.transfer.learnt.items()
            }
        return {"kv_bytes": self.kv_bytes} | told
