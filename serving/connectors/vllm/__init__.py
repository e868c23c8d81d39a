"""The connector between vLLM's KV cache and this store, out of tree.

vLLM finds it by module path (`"kv_connector_module_path": "serving.connectors.vllm"`,
`"kv_connector": "MooncakePyConnector"`) or, with this distribution installed, by its name alone:
`register` is an entry point of vLLM's general plug-ins. docs/guide/vllm.md shows both.

    scheduler process                       each worker process
    ┌──────────────────────────────┐        ┌─────────────────────────────┐
    │ scheduler.py  plans          │ StepPlan  worker.py  moves          │
    │   lookup.py  how long a prefix├──────►│   memory.py  where blocks lie │
    │   keys       of which names  │◄──────┤                              │
    └──────────────┬───────────────┘ WorkerReport        ┬───────────────┘
                   └──── link.py ── store ── link.py ────┘

`connector.py` and `stats.py` are all that imports vLLM; the other files see its objects through the
few attributes they use, so they are tested without it.
"""

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Not in __all__: it exists where vLLM does.
    from serving.connectors.vllm.connector import MooncakePyConnector as MooncakePyConnector
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = ["register"]


def register() -> None:
    """Make `MooncakePyConnector` known to vLLM by name. Called by vLLM in each process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # It is registered already.
        KVConnectorFactory.register_connector(
            "MooncakePyConnector", "serving.connectors.vllm.connector", "MooncakePyConnector"
        )
