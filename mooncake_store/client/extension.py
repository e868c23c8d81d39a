"""What packages that build on the client use of it: `admin`, `compat`, `fs`, `page`, `serving`.

Users find all they need in `mooncake_store.client`; this is for code that changes with it. Nothing
else of the modules of this package is meant for anybody outside.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mooncake_store.client.buffers import Memory, new_bytes
from mooncake_store.client.core import Core
from mooncake_store.client.failures import BUFFER_SMALL, NOT_RENAMED, OUT_OF_RANGE, error_of
from mooncake_store.client.following import events_in
from mooncake_store.client.keys import KeyBatch
from mooncake_store.client.listing import key_named
from mooncake_store.client.sessions import PutSession
from mooncake_store.client.sinks import Sink
from mooncake_store.client.steps import CLUSTER, Call, Steps, anew, ask_all, ask_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from mooncake_store.client.blocking import Client


__all__ = [
    "BUFFER_SMALL",
    "CLUSTER",
    "Call",
    "Core",
    "NOT_RENAMED",
    "OUT_OF_RANGE",
    "KeyBatch",
    "Memory",
    "PutSession",
    "Sink",
    "Steps",
    "anew",
    "ask_all",
    "ask_one",
    "error_of",
    "events_in",
    "expect_rates",
    "key_named",
    "new_bytes",
    "rates_of",
]


def rates_of(client: Client) -> dict[tuple[str, int], tuple[Sequence[float], ...]]:
    """What a client measures, by transport and tier: for others on this host, see `Costs.known`."""
    directory, now = client._core.directory, time.monotonic()
    for target in list(directory.known.values()):
        target.outlook(now)  # takes in what was measured since
    return directory.costs.known(now)


def expect_rates(
    client: Client, rates: Mapping[Any, Mapping[tuple[str, int], Sequence[Sequence[float]]]]
) -> None:
    """Let a client that reads nothing itself predict by what others have measured.

    They read side by side: where several tell of a transport and tier, the slowest is believed.
    """
    costs, now = client._core.directory.costs, time.monotonic()
    for source, known in rates.items():
        costs.expect(known, now, source)
