"""The setting of programs that show their figures at a port of their own."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from mooncake_store.config.checks import check_address
from mooncake_store.config.guarded import Guarded
from mooncake_store.endpoint import split_rail

__all__ = ["Watched"]


class Watched(Guarded, frozen=True, kw_only=True):
    """What is watched by Prometheus."""

    metrics: Annotated[
        str,
        Meta(
            description="Where to show figures for Prometheus, as host or host:port, at /metrics, "
            "for whoever reaches it. Empty: nowhere."
        ),
    ] = ""

    def check_metrics(self) -> None:
        """Refuse what is no address.

        Raises:
            Contradiction: if it is none.
        """
        if self.metrics:
            check_address(self.table, "metrics", self.metrics, split_rail)
