"""The storage tier of SGLang's hierarchical cache on this store, out of tree.

SGLang loads it as a dynamic backend: `--hicache-storage-backend dynamic` with
`"module_path": "serving.connectors.sglang", "class_name": "MooncakePyHiCache"` in the extra
configuration; docs/guide/sglang.md shows all of it.

    cache controller's threads ── backend.py ── blocks.py ── link.py ── store
                                    │  pools.py  where pages lie, and their keys
                                    └─ hits.py   how long a prefix of hybrid models is usable

`backend.py` is all that imports SGLang; the other files see its pools through the few attributes
they use, so they are tested without it.
"""

from typing import TYPE_CHECKING

# There is no __all__: the class exists where SGLang does.
if TYPE_CHECKING:
    from serving.connectors.sglang.backend import MooncakePyHiCache as MooncakePyHiCache
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)
