"""What packages that build on the client use of it: `compat` and `fs`.

Users find all they need in `mooncake_store.client`; this is for code that changes with it. Nothing
else of the modules whose names begin with an underscore is meant for anybody outside.
"""

from mooncake_store.client.buffers import Memory, locate_one, new_bytes
from mooncake_store.client.failures import BUFFER_SMALL, NOT_RENAMED, OUT_OF_RANGE
from mooncake_store.client.keys import KeyBatch
from mooncake_store.client.reads import Sink
from mooncake_store.client.sessions import PutSession
from mooncake_store.client.steps import CLUSTER, ask_one

__all__ = [
    "BUFFER_SMALL",
    "CLUSTER",
    "NOT_RENAMED",
    "OUT_OF_RANGE",
    "KeyBatch",
    "Memory",
    "PutSession",
    "Sink",
    "ask_one",
    "locate_one",
    "new_bytes",
]
