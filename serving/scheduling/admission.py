"""Whether a request is taken at all: load against the SLOs, now or as predicted.

Load is a predicted time over its SLO; above 1 the SLO is missed. All policies refuse a request
whose first token would come too late. They differ in how they look at decode instances:

    AtDecode    not at all on arrival: the decode instance refuses after prefill, whose work is lost
    ByLoad      the load now of the one that is chosen. While a prefill runs the picture changes, so
                prefill and decode instances take turns at being overloaded and idle
    ByForecast  its load when this request would begin to decode: those that decode there by then,
                less those that have ended, if decodes last t_d on average

What ends while a request waits for its prefill is counted off, what ends while it is computed is
not: others that come meanwhile, with shorter prompts, begin before it. Decodes are taken as likely
to end in any second. If each lasted t_d, those that outlast it would be missing: of answers as in
the paper's conversation trace that is a quarter of all that decode.

On a coupled instance each step counts with a chunk of a prompt: the prompt of the request that asks
slows the answers that are there, and further ones will slow its own.

A request that would have its instance for itself is taken whatever is predicted: refusing it helps
nobody, and an estimate that became too high would never see another measurement.

Pure: time is in the outlook. O(instances), and for the forecast one pass over a column of the
requests under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from serving.scheduling.views import Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.scheduling.costs import Costs
    from serving.scheduling.under_way import UnderWay
    from serving.scheduling.views import DecodeView, Slo

__all__ = ["AdmissionPolicy", "AtDecode", "ByForecast", "ByLoad", "Outlook", "decode_load"]

_RETRY_MIN_S = 0.1


class Outlook(NamedTuple):
    """What is known when a request asks for admission.

    `ttft_s` is predicted for it, `queue_s` the part of it spent behind others, `tokens` the length
    of its prompt. `decode` is the instance that is chosen to decode it, with what it decodes now;
    `under_way` says when all requests decode, and where.
    """

    now: float
    slo: Slo
    ttft_s: float
    queue_s: float
    tokens: int
    decode: DecodeView
    under_way: UnderWay
    costs: Costs


class AdmissionPolicy(Protocol):
    """Decides on arrival."""

    def refusal(self, outlook: Outlook) -> Rejection | None:
        """Return why the request is not taken; None when it is."""
        ...


def decode_load(decodes: Sequence[DecodeView], costs: Costs, slo: Slo) -> float:
    """Mean over the instances of the time between tokens over its SLO."""
    if not decodes:
        return 0.0
    total = sum(
        costs.decode.predict(each.batch, each.tokens, each.chunk_tokens) for each in decodes
    )
    return total / len(decodes) / slo.tbt_s


def _prefill_refusal(outlook: Outlook) -> Rejection | None:
    late_s = outlook.ttft_s - outlook.slo.ttft_s
    if late_s <= 0 or outlook.queue_s <= 0:
        return None
    return Rejection(
        "prefill_busy",
        f"the first token would take {outlook.ttft_s:.2f} s, above the SLO of "
        f"{outlook.slo.ttft_s:g} s: prefill instances are busy",
        max(_RETRY_MIN_S, late_s),
    )


def _decode_refusal(load: float, outlook: Outlook, when: str) -> Rejection | None:
    if load <= 1.0:
        return None
    # Requests leave at an even pace within t_d, so this share of it brings the load down to 1.
    wait_s = outlook.costs.duration.seconds * (1.0 - 1.0 / load)
    return Rejection(
        "decode_busy",
        f"tokens would come {load:.2f} times as slowly as the SLO of {outlook.slo.tbt_s:g} s "
        f"allows: decode instances {when} busy",
        max(_RETRY_MIN_S, wait_s),
    )


class AtDecode:
    """Look at prefill only; decode instances refuse for themselves, later."""

    def refusal(self, outlook: Outlook) -> Rejection | None:
        """Refuse by the time to the first token."""
        return _prefill_refusal(outlook)


class ByLoad:
    """Early rejection: also by what the decode instances do now."""

    def refusal(self, outlook: Outlook) -> Rejection | None:
        """Refuse by the larger of both loads, the request itself included."""
        decode, cost = outlook.decode, outlook.costs.decode
        if decode.batch == 0:
            return _prefill_refusal(outlook)
        tokens = decode.tokens + outlook.tokens
        tbt_s = cost.predict(decode.batch + 1, tokens, decode.chunk_tokens)
        return _prefill_refusal(outlook) or _decode_refusal(
            tbt_s / outlook.slo.tbt_s, outlook, "are"
        )


class ByForecast:
    """Early rejection by the load predicted for the moment when the request begins to decode."""

    def refusal(self, outlook: Outlook) -> Rejection | None:
        """Refuse by the larger of prefill load and the decode load of that moment."""
        return _prefill_refusal(outlook) or _decode_refusal(self.load(outlook), outlook, "will be")

    def load(self, outlook: Outlook) -> float:
        """The load of its decode instance then, the request itself included; 0 if it is alone."""
        now, decode, costs = outlook.now, outlook.decode, outlook.costs
        begins, computed_from = now + outlook.ttft_s, now + outlook.queue_s
        others, tokens = outlook.under_way.at(
            decode.name, now, begins, computed_from, costs.duration.seconds
        )
        batch = round(others) + 1
        if batch == 1:
            return 0.0
        context = round(tokens) + outlook.tokens
        return costs.decode.predict(batch, context, decode.chunk_tokens) / outlook.slo.tbt_s
