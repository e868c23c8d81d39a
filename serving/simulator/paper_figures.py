"""What the paper says of each of its three traces, and how far off a simulation may be.

    CONVERSATION.is_it(read_trace("conversation_trace.jsonl"))      # whether it is that one

Figures are those of its text where it has them, else read off its pictures. What is allowed was
set for the conversation and the synthetic trace; where nothing was for a trace, it is as for the
conversation. Plain data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from eviction import Trace

__all__ = ["CONVERSATION", "SYNTHETIC", "TOOLAGENT", "Published"]


class Published(NamedTuple):
    """One trace."""

    name: str
    requests: int
    input_tokens: int
    """Of a prompt, on average."""
    curve: tuple[tuple[float, float], ...]
    """Figure 9: tokens of capacity, hit ratio."""
    curve_off: tuple[float, float]
    """How much of it a simulation may lack, least and most."""
    uncached_s: float
    """Figure 8: mean seconds of a prefill without a cache; with Mooncake; and with vLLM's."""
    mooncake_s: float
    vllm_s: float
    saved: float
    """What Mooncake saves of the first, in %."""
    off: tuple[float, float, float]
    """What these three may be off, as shares."""
    found: tuple[float, float]
    """Figure 10: tokens found by all nodes together, and by each alone."""
    found_s: float
    """Mean seconds of a prefill with all together."""
    within: tuple[float, ...] = ()
    """Figures 1 and 6: % of requests within 40, 50, ... 100 ms between tokens, where compared."""

    def is_it(self, trace: Trace) -> bool:
        """Whether a trace is the one that was published, by its size."""
        if len(trace) != self.requests:
            return False
        return abs(float(trace.input_tokens.mean()) / self.input_tokens - 1) <= 0.001


CONVERSATION = Published(
    name="conversation",
    requests=12_031,
    input_tokens=12_035,
    curve=(
        (1e4, 0.045), (1e5, 0.073), (1e6, 0.087), (2e6, 0.120), (4e6, 0.215), (5e6, 0.247),
        (8e6, 0.300), (1e7, 0.326), (5e7, 0.398), (1e8, 0.401),
    ),
    curve_off=(0.0, 0.042),
    uncached_s=1.660,
    mooncake_s=1.062,
    vllm_s=1.522,
    saved=36,
    off=(0.05, 0.06, 0.08),
    found=(0.375, 0.169),
    found_s=1.051,
    within=(0.5, 3.5, 14.7, 37.8, 66.3, 86.7, 96.6),
)  # fmt: skip

TOOLAGENT = Published(
    name="toolagent",
    requests=23_608,
    input_tokens=8_596,
    curve=(
        (1e4, 0.174), (1e5, 0.363), (1e6, 0.386), (2e6, 0.414), (4e6, 0.484), (5e6, 0.505),
        (8e6, 0.544), (1e7, 0.561), (5e7, 0.595), (1e8, 0.595),
    ),
    curve_off=CONVERSATION.curve_off,
    uncached_s=1.116,
    mooncake_s=0.528,
    vllm_s=0.740,
    saved=53,
    off=CONVERSATION.off,
    found=(0.581, 0.420),
    found_s=0.521,
    within=(0.9, 9.5, 27.7, 50.6, 72.3, 86.3, 93.2),
)  # fmt: skip

SYNTHETIC = Published(
    name="synthetic",
    requests=3_993,
    input_tokens=15_325,
    curve=(
        (1e4, 0.001), (1e5, 0.012), (1e6, 0.146), (2e6, 0.235), (4e6, 0.381), (5e6, 0.435),
        (8e6, 0.545), (1e7, 0.589), (5e7, 0.658),
    ),
    curve_off=(-0.005, 0.025),
    uncached_s=2.020,
    mooncake_s=0.733,
    vllm_s=1.895,
    saved=64,
    off=(0.10, 0.12, 0.08),
    found=(0.622, 0.264),
    found_s=0.783,
)  # fmt: skip
