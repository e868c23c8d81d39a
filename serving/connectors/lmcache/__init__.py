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

_HOME = {
    "MooncakePyConnectorAdapter": "serving.connectors.lmcache.remote",
    "MooncakePyL2Adapter": "serving.connectors.lmcache.l2",
    "MooncakePyL2AdapterConfig": "serving.connectors.lmcache.l2",
}


def __getattr__(name: str) -> object:
    # There is no __all__: the classes exist where LMCache does.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
