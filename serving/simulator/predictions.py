"""Costs that are exactly what simulated machines take, so that policies alone differ.

What a running system would have learnt is known here from the start, and measurements are not
taken in. How long decodes last is learnt as in the product, or fixed; what loading takes is learnt
where blocks lie on disks too, since nobody tells the scheduler which of them do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.scheduling.costs import Costs
from serving.scheduling.learnt import LearntDuration, LearntLoad, LearntTransfer

if TYPE_CHECKING:
    from serving.simulator.hardware import Hardware

__all__ = ["exact_costs"]


class _Prefill:
    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.predict = hardware.compute_s

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self._hardware.prefill

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        """Is known."""


class _Load:
    def __init__(self, hardware: Hardware) -> None:
        self.predict = hardware.load_s

    def observe(self, count: int, seconds: float) -> None:
        """Is known."""


class _Decode:
    def __init__(self, hardware: Hardware) -> None:
        self._step = hardware.step

    def observe(self, batch: int, tokens: int, seconds: float, chunk: int = 0) -> None:
        """Is known."""

    def predict(self, batch: int, tokens: int, chunk: int = 0) -> float:
        if batch <= 0:
            return 0.0
        fixed_s, sequence_s, token_s = self._step  # asked for each node: without another call
        return fixed_s + sequence_s * (batch - 1) + token_s * tokens


class _Transfer(LearntTransfer):
    """What a source sends already is counted as in the product; its bandwidth is known."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s, 0.0)
        self._byte_s = 1 / bytes_per_s

    def observe(self, source: str, count: int, seconds: float) -> None:
        """Is known."""

    def declined(self, source: str) -> None:
        """Is no reason to try again."""

    def predict(self, source: str, count: int) -> float:
        return self._byte_s * (count + self._in_flight.get(source, 0)) if count > 0 else 0.0


class _Fixed:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def advance(self, now: float, running: int) -> None:
        """Changes nothing."""

    def finished(self) -> None:
        """Changes nothing."""


def exact_costs(hardware: Hardware, decode_s: float = 0.0, *, disks: bool = False) -> Costs:
    """The costs of a cluster of such nodes, where decodes last so long; 0 learns that."""
    return Costs(
        prefill=_Prefill(hardware),
        transfer=_Transfer(hardware.network_bytes_per_s),
        load=LearntLoad(hardware.load_bytes_per_s) if disks else _Load(hardware),
        decode=_Decode(hardware),
        duration=_Fixed(decode_s) if decode_s else LearntDuration(),
        kv_bytes=hardware.kv_bytes,
    )
