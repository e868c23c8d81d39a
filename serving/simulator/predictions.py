"""Cost models that predict exactly what simulated machines take, so that policies alone differ.

What a running system would have learnt is known here from the start, and measurements are not
taken in. How long decodes last is learnt as in the product, or fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.scheduling.costs import Costs, DecodeCost, DecodeDuration, PrefillCost, TransferCost

if TYPE_CHECKING:
    from serving.simulator.hardware import Hardware

__all__ = ["exact_costs"]


class _Prefill(PrefillCost):
    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self._hardware = hardware

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        """Is known."""

    def predict(self, tokens: int, cached: int) -> float:
        return self._hardware.prefill_s(tokens, cached)


class _Decode(DecodeCost):
    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self._hardware = hardware

    def observe(self, batch: int, tokens: int, seconds: float, chunk: int = 0) -> None:
        """Is known."""

    def predict(self, batch: int, tokens: int, chunk: int = 0) -> float:
        return self._hardware.step_s(batch, tokens) if batch > 0 else 0.0


class _Transfer(TransferCost):
    def observe(self, source: str, count: int, seconds: float) -> None:
        """Is known."""

    def declined(self, source: str) -> None:
        """Is no reason to try again."""


class _Fixed(DecodeDuration):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    @property
    def seconds(self) -> float:
        return self._seconds


def exact_costs(hardware: Hardware, decode_s: float = 0.0) -> Costs:
    """The models of a cluster of such nodes, where decodes last so long; 0 learns that."""
    return Costs(
        prefill=_Prefill(hardware),
        transfer=_Transfer(hardware.network_bytes_per_s, 0.0),
        decode=_Decode(hardware),
        duration=_Fixed(decode_s) if decode_s else DecodeDuration(),
        kv_bytes=hardware.kv_bytes,
    )
