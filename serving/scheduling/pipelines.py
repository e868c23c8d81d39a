"""Whether several prefill instances share one long prompt, a share of the layers each.

    rule = PipelineRule(instances_max=2)
    rule.helpers(placement, to_compute=6000, views=prefill_views)      # ("p1",) or ()
    rule.speed_up(to_compute=6000, instances=2)                        # 1.85

A prompt is cut into chunks that follow each other through the stages, so with c chunks and s stages
the work of c x s steps takes c + s - 1 of them: long prompts gain almost s times, a prompt of one
chunk nothing. Only instances with nothing to do help; whoever waits for an answer elsewhere is not
made to wait longer. Instances that decode as well take no part: stages compute whole chunks,
however many answers there are beside. Pure. O(instances).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.scheduling.views import Placement, PrefillView

__all__ = ["PipelineRule"]


@dataclass(frozen=True, slots=True)
class PipelineRule:
    """Prompts with `tokens_min` tokens to compute, or more, may use up to `instances_max`."""

    instances_max: int = 2
    tokens_min: int = 2048
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        if self.instances_max < 2:
            raise ValueError(f"a pipeline has two instances or more, not {self.instances_max}")

    def helpers(
        self, placement: Placement, to_compute: int, views: Sequence[PrefillView]
    ) -> tuple[str, ...]:
        """Who joins the chosen instance; nobody for a short prompt, or when all are busy."""
        able = {view.name: view.queue_s for view in views if view.beside is None}
        if to_compute < self.tokens_min or placement.prefill not in able:
            return ()
        idle = [name for name in able if able[name] == 0.0 and name != placement.prefill]
        return tuple(idle[: self.instances_max - 1])

    def speed_up(self, to_compute: int, instances: int) -> float:
        """How many times as fast as one instance."""
        chunks = max(1, -(-to_compute // self.chunk_tokens))
        return chunks * instances / (chunks + instances - 1)
