"""What may be written into `kv_connector_extra_config`, checked when the engine starts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from serving.connectors.options import Pause, WeighedOptions

__all__ = ["Options"]


class Options(WeighedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector. Durations are in seconds."""

    save_decode: bool = True
    """Keep blocks of generated tokens too."""
    layers_per_object: Annotated[int, Meta(ge=0)] = 0
    """Save this many layers at a time while the model still runs; 0: whole blocks after it."""
    lookup_wait_s: Pause = 0.005
    """How long a step waits for a lookup before it goes on with other requests."""
    pinned_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Share of the KV cache that unfinished saves may hold; above it saves are skipped."""
    handoff_wait_s: Pause = 5.0
    """How long a decoding engine waits for blocks that a prefilling one announced."""

    def __post_init__(self) -> None:
        if self.layers_per_object and self.prefill_tokens_per_s:
            raise ValueError(
                "prefill_tokens_per_s goes with whole blocks: with layers_per_object a lookup asks "
                "for the last layers only, and cannot tell what all of them take"
            )
