"""What may be written into `kv_connector_extra_config`, checked when the engine starts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mooncake_store.errors import ConfigError

__all__ = ["Options"]

Seconds = Annotated[float, Meta(gt=0)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector. Durations are in seconds."""

    url: str = ""
    """The store; without it MOONCAKE_CLIENT_URL or its default."""
    client: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further settings of `Client`, by name."""
    segment: str = ""
    """Memory that each worker process lends to the pool, as "4GiB"."""
    model_id: str = ""
    """Names the weights; without it they are identified by their content."""
    salt: str = ""
    """Blocks of deployments with different salts never meet."""
    save_decode: bool = True
    """Keep blocks of generated tokens too."""
    layers_per_object: Annotated[int, Meta(ge=0)] = 0
    """Save this many layers at a time while the model still runs; 0: whole blocks after it."""
    lookup_wait_s: Annotated[float, Meta(ge=0)] = 0.005
    """How long a step waits for a lookup before it goes on with other requests."""
    lookup_deadline_s: Seconds = 1.0
    load_deadline_s: Seconds = 10.0
    save_deadline_s: Seconds = 5.0
    distrust_s: Seconds = 60.0
    """How long a block that could not be read is not reported as present."""
    rest_s: Seconds = 1.0
    """First pause after the store went away; doubles up to 30 s."""
    pressure_pause_s: Annotated[float, Meta(ge=0)] = 1.0
    """Pause in saving after the store had no room."""
    pinned_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Share of the KV cache that unfinished saves may hold; above it saves are skipped."""
    handoff_wait_s: Annotated[float, Meta(ge=0)] = 5.0
    """How long a decoding engine waits for blocks that a prefilling one announced."""

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Options:
        """Read options; raises ConfigError with the name of the wrong one."""
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
