"""What engines say of their load: vLLM's metrics, asked of each engine again and again.

    load, missing = read_load(text)          # an EngineLoad, and the names that were not there
    watch = EngineWatch(engines, router)
    watch.start(session)                     # on the event loop that serves

The names are those of vLLM 0.32; a figure without which nothing can be said leaves no load at all,
and what is missing is told by its name, once. An engine that answers anything else than its figures
is there, and is routed to without them. One that does not answer within the deadline, or says that
it is broken, is passed over by the router until it answers again. Of an answer only so many bytes
are read. Needs `prometheus_client`. A question costs an engine what a scrape by Prometheus does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from mooncake_store.errors import RemoteProtocolError
from serving.scheduling.routing import EngineLoad
from transfer_engine.lasting import keep_going

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.scheduling.routing import EngineRouter

__all__ = ["EngineWatch", "read_load"]

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
DEADLINE_S = 3.0
METRICS_BYTES_MAX = 4 << 20
_PIECE_BYTES = 1 << 16

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USED = "vllm:kv_cache_usage_perc"
KV_ROOM = "vllm:cache_config_info"
SLEEP = "vllm:engine_sleep_state"
NAMES = (RUNNING, WAITING, KV_USED, KV_ROOM, SLEEP)


def read_load(text: str) -> tuple[EngineLoad | None, list[str]]:
    """The load that metrics tell of, ranks together, and the names of what they do not tell.

    Raises RemoteProtocolError for what are no metrics.
    """
    # The rest is many times as much, histograms mostly.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(NAMES))
    values: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in NAMES}
    try:
        for family in text_string_to_metric_families(lines + "\n"):
            for sample in family.samples:
                if sample.name in values:
                    values[sample.name].append((sample.labels, float(sample.value)))
    except (ValueError, IndexError) as error:
        raise RemoteProtocolError(f"metrics cannot be read: {error}") from error
    if any(not 0 <= value < math.inf for found in values.values() for _, value in found):
        raise RemoteProtocolError("a metric is no count")
    free = _free_tokens(values)
    missing = [name for name in NAMES if not values[name]]
    if free is None and KV_ROOM not in missing:
        missing.append(f"{KV_ROOM}{{kv_cache_size_tokens}}")
    if RUNNING in missing or WAITING in missing:
        return None, missing
    awake = [value for labels, value in values[SLEEP] if labels.get("sleep_state") == "awake"]
    return (
        EngineLoad(
            running=round(sum(value for _, value in values[RUNNING])),
            waiting=round(sum(value for _, value in values[WAITING])),
            free_tokens=free,
            awake=all(awake),
        ),
        missing,
    )


def _free_tokens(values: Mapping[str, list[tuple[dict[str, str], float]]]) -> int | None:
    """Room for KV that no request under way has, of all ranks that tell of it."""
    used = {labels.get("engine"): value for labels, value in values[KV_USED]}
    sizes = {
        labels.get("engine"): int(labels["kv_cache_size_tokens"])
        for labels, _ in values[KV_ROOM]
        if labels.get("kv_cache_size_tokens", "").isdecimal()
    }
    both = used.keys() & sizes.keys()
    if not both:
        return None
    return int(sum(sizes[rank] * max(0.0, 1 - used[rank]) for rank in both))


class EngineWatch:
    """Asks engines about their load and tells the router."""

    def __init__(self, engines: Mapping[str, str], router: EngineRouter) -> None:
        self._engines = engines
        self._router = router
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[str, str] = {}
        self.loads: dict[str, dict[str, Any]] = {}
        """What each engine told last, to be shown."""

    def start(self, session: aiohttp.ClientSession) -> None:
        """Begin to ask; `session` stays the caller's."""
        self._session = session
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(keep_going(f"asking {name} about its load", partial(self._turn, name)))
            for name in self._engines
        ]

    async def close(self) -> None:
        """End. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _turn(self, name: str) -> None:
        await self.ask(name)
        await asyncio.sleep(INTERVAL_S)

    async def ask(self, name: str) -> None:
        """Ask one engine, and tell the router what it said, or that it said nothing."""
        before = self._router.pending(name)
        try:
            async with asyncio.timeout(DEADLINE_S):
                text = await self._metrics(name)
            load, missing = read_load(text)
        except RemoteProtocolError as error:
            load, missing = None, [error.what]
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"no answer within {DEADLINE_S:.0f} s"
            self._router.silent(name)
            self._say(name, f"does not tell its load, others are preferred: {why}")
            self.loads[name] = {"silent": why}
            return
        self._router.told(time.monotonic(), name, load, before)
        self._say(name, f"does not tell its load in full: {', '.join(missing)}" if missing else "")
        self.loads[name] = {"missing": missing} | (
            {}
            if load is None
            else {
                "running": load.running,
                "waiting": load.waiting,
                "free_tokens": load.free_tokens,
                "awake": load.awake,
            }
        )

    async def _metrics(self, name: str) -> str:
        """An engine's metrics, empty where it has none."""
        assert self._session is not None, "start() comes first"
        url, headers = self._engines[name] + "/metrics", {"Accept-Encoding": "identity"}
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status >= 500:
                raise aiohttp.ClientPayloadError(f"it answers {answer.status}")
            if answer.status != 200:
                return ""
            raw = bytearray()
            while piece := await answer.content.read(_PIECE_BYTES):
                raw += piece
                if len(raw) > METRICS_BYTES_MAX:
                    raise RemoteProtocolError(f"metrics have more than {METRICS_BYTES_MAX} bytes")
            return raw.decode("utf-8", "replace")

    def _say(self, name: str, what: str) -> None:
        """Log what is the matter with an engine's figures when it changes."""
        if self._said.get(name, "") == what:
            return
        self._said[name] = what
        if what:
            log.warning("engine %s %s", name, what)
        else:
            log.info("engine %s tells its load again", name)
