"""Options that the connectors of all engines have, checked when the engine starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from mooncake_store.errors import ConfigError
from serving.connectors.link import StoreLink

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Pause", "Seconds", "StoreOptions", "WeighedOptions"]

Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
SAVED_MIN = 0.1
"""What a load saves at least of the time that computing takes: behind it a first token still waits
for a step of the engine, and others for the disk or link that it takes meanwhile."""


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every connector has to know of the store. Durations are in seconds."""

    url: str = ""
    """The store; without it MOONCAKE_CLIENT_URL or its default."""
    client: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further settings of `Client`, by name."""
    segment: str = ""
    """Memory that each process which holds KV blocks lends to the pool, as "4GiB"."""
    model_id: str = ""
    """Names the weights; without it they are identified by their content."""
    salt: str = ""
    """Blocks of deployments with different salts never meet."""
    lookup_deadline_s: Seconds = 1.0
    load_deadline_s: Seconds = 10.0
    save_deadline_s: Seconds = 5.0
    distrust_s: Seconds = 60.0
    """How long a block that could not be read is not reported as present."""
    rest_s: Seconds = 1.0
    """First pause after the store went away; doubles up to 30 s."""
    pressure_pause_s: Pause = 1.0
    """Pause in saving after the store had no room."""

    @classmethod
    def parse(cls, given: object, where: str) -> Self:
        """Read options; raises ConfigError that names the wrong one, and `where` it stands."""
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}") from None

    def link(self, *, lends: bool = True) -> StoreLink:
        """Connect, with the segment of this process if it `lends` one."""
        settings = dict(self.client)
        if lends and self.segment:
            settings["segment"] = self.segment
        return StoreLink(self.url, settings, rest_s=self.rest_s)


class WeighedOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of connectors that load only what comes sooner than it would be computed."""

    prefill_tokens_per_s: Pause = 0.0
    """Tokens a second that the engine computes; what would not load at least a tenth sooner is a
    miss. 0: nothing is."""

    def worth_s(self, tokens: float) -> float:
        """The seconds that loading so many tokens may take; 0 if that is not known."""
        rate = self.prefill_tokens_per_s
        return tokens * (1 - SAVED_MIN) / rate if rate else 0.0
