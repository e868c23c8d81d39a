"""LMCache's remote tier on this store, out of tree, through both of its plug-in points.

- `MooncakePyConnectorAdapter` for engines that embed LMCache: `remote_storage_plugins`.
- `MooncakePyL2Adapter` for its server: `--l2-adapter '{"type": "plugin", ...}'`.

docs/guide/lmcache.md shows both. They store the same chunks under different names, because
LMCache names chunks in two ways.

    remote.py  asyncio, one call a batch ──┐
                                           ├── blocks.py ── link.py ── store
    l2.py      tasks and event fds ────────┘
               names.py  keys of both
"""

from typing import TYPE_CHECKING

# There is no __all__: the classes exist where LMCache does.
if TYPE_CHECKING:
    from serving.connectors.lmcache.l2 import MooncakePyL2Adapter as MooncakePyL2Adapter
    from serving.connectors.lmcache.l2 import MooncakePyL2AdapterConfig as MooncakePyL2AdapterConfig
    from serving.connectors.lmcache.remote import (
        MooncakePyConnectorAdapter as MooncakePyConnectorAdapter,
    )
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)
