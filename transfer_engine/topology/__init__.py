"""Which device of this machine is near which memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.topology.scan import discover
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = ["discover"]
