"""Costs that are exactly what simulated machines take, so that policies alone differ.

What a running system would have learnt is known here from the start, and measurements are not
taken in. How long decodes last is learnt as in the product, or fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.scheduling.costs import Costs
from serving.scheduling.learnt import LearntDuration, LearntTransfer

if TYPE_CHECKING:
    from serving.simulator.hardware import Hardware

__all__ = ["exact_costs"]


class _Prefill:
    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self._hardware.prefill

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        """Is known."""

    def predict(self, tokens: int, cached: int) -> float:
        return self._hardware.compute_s(tokens, cached)


class _Load:
    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def observe(self, count: int, seconds: float) -> None:
        """Is known."""

    def predict(self, count: int) -> float:
        return self._hardware.load_s(count)


class _Decode:
    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def observe(self, batch: int, tokens: int, seconds: float, chunk: int = 0) -> None:
        """Is known."""

    def predict(self, batch: int, tokens: int, chunk: int = 0) -> float:
        return self._hardware.step_s(batch, tokens) if batch > 0 else 0.0


class _Transfer(LearntTransfer):
    """What a source sends already is counted as in the product; its bandwidth is known."""

    def observe(self, source: str, count: int, seconds: float) -> None:
        """Is known."""

    def declined(self, source: str) -> None:
        """Is no reason to try again."""


class _Fixed:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def advance(self, now: float, running: int) -> None:
        """Changes nothing."""

    def finished(self) -> None:
        """Changes nothing."""


def exact_costs(hardware: Hardware, decode_s: float = 0.0) -> Costs:
    """The costs of a cluster of such nodes, where decodes last so long; 0 learns that."""
    return Costs(
        prefill=_Prefill(hardware),
        transfer=_Transfer(hardware.network_bytes_per_s, 0.0),
        load=_Load(hardware),
        decode=_Decode(hardware),
        duration=_Fixed(decode_s) if decode_s else LearntDuration(),
        kv_bytes=hardware.kv_bytes,
    )
