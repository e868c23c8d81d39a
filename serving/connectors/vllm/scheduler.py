"""The scheduler's side: which blocks to fetch, which to keep, and what not to believe any more.

A request that waits is looked up on a thread of its own, so that a slow store never holds up a
step: `matched` waits some milliseconds and else says "ask again". Looking up changes nothing and
leases nothing. When vLLM has given the request memory, `allocated` turns the match into a load;
`plan` hands it to the workers, together with the blocks that became full.

Memory that a save reads is held by a reference in vLLM's block pool, not by delaying the end of
requests, until every worker has reported the save. When unfinished saves hold more than a share
of the pool, further blocks are skipped: a lost save is a miss later, a full pool is a stall now.

A block that some worker could not read is distrusted for a while (`distrust_s`) or until it is
stored anew: a store that answers "present" and cannot deliver would otherwise make vLLM load,
fail, and look up the same block for ever.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooncake_store.failed_reads import FailedReads
from serving.connectors.keys import scope_prefix
from serving.connectors.vllm.lookup import present_prefix
from serving.connectors.vllm.messages import (
    GroupBlocks,
    LoadJob,
    SaveJob,
    SaveOutcome,
    StepPlan,
    WorkerReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store import Client
    from serving.connectors.link import StoreLink
    from serving.connectors.vllm.layout import Group, Layout
    from serving.connectors.vllm.options import Options

__all__ = ["HANDOFF", "SchedulerSide", "StoredRun"]

log = logging.getLogger(__name__)

HANDOFF = "store_tokens"
"""Name, among a request's transfer parameters, of how many tokens a prefilling engine stored."""

_NULL_BLOCK = 0
_FRESH_S = 0.5
"""An answer older than this is asked for again."""
_POLL_S = 0.01


@dataclass(slots=True)
class StoredRun:
    """Consecutive blocks of one request that the store did not hold before, for event feeds."""

    group: int
    block_tokens: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora: Any


@dataclass(slots=True)
class _Lookup:
    """A question to the store about one request."""

    computed: int
    answer: Future[int]
    asked: float
    waits_until: float = 0.0


@dataclass(slots=True)
class _Tracked:
    """A request that has memory: how far its blocks were offered to the store."""

    request: Any
    preemptions: int
    offered: int = 0
    loaded: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Saving:
    """A save in flight: the memory it holds, and what is to be told when it is done."""

    blocks: list[int]
    runs: list[StoredRun]
    outcome: SaveOutcome = field(default_factory=lambda: SaveOutcome(workers=0))


class SchedulerSide:
    """Plans loads and saves of one engine. `count(name, by)` receives statistics."""

    def __init__(
        self,
        layout: Layout,
        link: StoreLink,
        options: Options,
        *,
        workers: int,
        saves: bool,
        feeds: bool,
        count: Callable[[str, float], None],
    ) -> None:
        for number, scope in layout.scopes.items():
            log.info("group %d: names of blocks begin with %s", number, scope_prefix(scope.digest))
        self._layout = layout
        self._link = link
        self._options = options
        self._workers = workers
        self._saves = saves
        self._feeds = feeds
        self._count = count
        self._suffix = "/last" if options.layers_per_object else ""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="mooncake-lookup")
        self._pool: Any = None
        self._lookups: dict[str, _Lookup] = {}
        self._matches: dict[str, tuple[int, int]] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadJob] = []
        self._saving: dict[int, _Saving] = {}
        self._held = 0
        self._next_save = 0
        self._patience_s = options.lookup_wait_s
        self._doubts: FailedReads[tuple[int, bytes]] = FailedReads(options.distrust_s)
        self._stored: list[StoredRun] = []
        self._gone: list[tuple[int, bytes]] = []

    def bind(self, pool: Any) -> None:
        """Take vLLM's pool of blocks."""
        self._pool = pool

    # Lookup.

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` the store can give; None: ask again."""
        name = request.request_id
        if request.num_tokens - computed < self._layout.step_tokens:
            return 0, False
        asked = self._lookups.get(name)
        now = time.monotonic()
        if asked is None or asked.computed != computed:
            asked = self._lookups[name] = self._ask(request, computed, 0.0)
        elif asked.answer.done() and now - asked.asked > _FRESH_S:
            asked = self._lookups[name] = self._ask(request, computed, asked.waits_until)
        try:
            found = asked.answer.result(self._patience_s)
        except NotYet:
            # One wait a step, however many requests are waiting.
            self._patience_s = 0.0
            return None, False
        if self._awaits_handoff(request, asked, computed + found):
            if now - asked.asked > _POLL_S:
                self._lookups[name] = self._ask(request, computed, asked.waits_until)
            return None, False
        self._matches[name] = (computed, found)
        return found, found > 0

    def _ask(self, request: Any, computed: int, waits_until: float) -> _Lookup:
        # What another engine computed for this request is loaded whatever it takes: it is waited
        # for, and a prefix that is too slow would look like one that has not come.
        announced = (request.kv_transfer_params or {}).get(HANDOFF)
        look = present_prefix(
            self._layout,
            request.block_hashes,
            computed,
            self._suffix,
            self._trusts,
            0.0 if announced else self._options.worth_s(1),
        )
        deadline = self._options.lookup_deadline_s

        def run() -> int:
            began = time.perf_counter()
            found = self._link.call(lambda client: look(client, deadline))
            self._count("lookups", 1)
            self._count("lookup_seconds", time.perf_counter() - began)
            self._count("lookup_failures", found is None)
            return found or 0

        return _Lookup(computed, self._threads.submit(run), time.monotonic(), waits_until)

    def _awaits_handoff(self, request: Any, asked: _Lookup, available: int) -> bool:
        """Whether blocks that a prefilling engine announced are still on their way."""
        announced = (request.kv_transfer_params or {}).get(HANDOFF, 0)
        if not isinstance(announced, int) or available >= min(announced, request.num_tokens):
            return False
        if not self._link.up:
            return False
        if not asked.waits_until:
            asked.waits_until = time.monotonic() + self._options.handoff_wait_s
        return time.monotonic() < asked.waits_until

    def _trusts(self, group: int, block_hash: bytes) -> bool:
        return (group, block_hash) not in self._doubts

    # Loads.

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Note that a request has memory, and load `tokens` tokens into it."""
        name = request.request_id
        self._lookups.pop(name, None)
        computed, found = self._matches.pop(name, (0, 0))
        tracked = self._tracked.get(name)
        if tracked is None or tracked.preemptions != request.num_preemptions or tokens:
            tracked = self._tracked[name] = _Tracked(request, request.num_preemptions)
        if not tokens:
            return
        assert tokens <= found, f"{tokens} tokens to load, {found} found"
        end = computed + tokens
        tracked.loaded = (computed, end)
        tables = blocks.get_block_ids()
        groups = [
            self._blocks(
                group,
                request,
                tables[group.number],
                max(computed // group.block_tokens, group.first_needed(end)),
                end // group.block_tokens,
            )
            for group in self._layout.groups
        ]
        self._loads.append(LoadJob(name, [each for each in groups if each.hashes]))
        self._count("load_tokens", tokens)

    def _blocks(
        self,
        group: Group,
        request: Any,
        table: list[int],
        first: int,
        end: int,
        without: tuple[int, int] = (0, 0),
    ) -> GroupBlocks:
        """Blocks first up to end of a request, but those in `without` and those that are gone."""
        chosen = GroupBlocks(group.number, [], [], [])
        for at in range(first, min(end, len(table))):
            if table[at] == _NULL_BLOCK or without[0] <= at < without[1]:
                continue
            chosen.hashes.append(self._layout.block_hash(group, request.block_hashes, at))
            chosen.blocks.append(table[at])
            chosen.numbers.append(at)
        return chosen

    # Saves.

    def plan(self, step: Any) -> StepPlan:
        """What the workers do this step. Takes the loads that were waiting."""
        self._patience_s = self._options.lookup_wait_s
        for name in step.finished_req_ids:
            self.forget(name)
        plan = StepPlan(self._loads)
        self._loads = []
        if not self._saves:
            return plan
        for name, scheduled in step.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            table = step.kv_connector_block_state.get_block_ids(name) if tracked else None
            if tracked is None or table is None:
                continue
            job = self._save(tracked, table, scheduled)
            if job is not None:
                plan.saves.append(job)
        return plan

    def forget(self, name: str) -> None:
        """Drop what is known of a request that ended."""
        self._lookups.pop(name, None)
        self._matches.pop(name, None)
        self._tracked.pop(name, None)

    def _save(self, tracked: _Tracked, table: Any, scheduled: int) -> SaveJob | None:
        """The blocks that are full after this step and were not offered before."""
        request = tracked.request
        full = min(
            request.num_computed_tokens + scheduled,
            len(request.block_hashes) * self._layout.hash_tokens,
        )
        if not self._options.save_decode:
            full = min(full, request.num_prompt_tokens)
        groups = []
        for group in self._layout.groups:
            unit = group.block_tokens
            loaded = (tracked.loaded[0] // unit, tracked.loaded[1] // unit)
            blocks = self._blocks(
                group, request, table[group.number], tracked.offered // unit, full // unit, loaded
            )
            if blocks.hashes:
                groups.append(blocks)
        tracked.offered = max(full, tracked.offered)
        held = [block for blocks in groups for block in blocks.blocks]
        if not held:
            return None
        if self._held + len(held) > self._options.pinned_share * self._pool.num_gpu_blocks:
            self._count("save_skipped_busy", len(held))
            return None
        job = SaveJob(self._next_save, groups)
        self._next_save += 1
        self._pool.touch([self._pool.blocks[block] for block in held])
        self._held += len(held)
        runs = self._runs(request, groups) if self._feeds else []
        self._saving[job.number] = _Saving(held, runs)
        return job

    def _runs(self, request: Any, groups: list[GroupBlocks]) -> list[StoredRun]:
        """One run per block, with its tokens, to be told of once it is stored."""
        sizes = {group.number: group for group in self._layout.groups}
        runs = []
        for blocks in groups:
            group = sizes[blocks.group]
            unit = group.block_tokens
            for at, each in zip(blocks.numbers, blocks.hashes, strict=True):
                parent = (
                    self._layout.block_hash(group, request.block_hashes, at - 1) if at else None
                )
                tokens = list(request.all_token_ids[at * unit : (at + 1) * unit])
                runs.append(
                    StoredRun(group.number, unit, [each], parent, tokens, request.lora_request)
                )
        return runs

    # Reports.

    def report(self, report: WorkerReport) -> None:
        """Take what the workers did: free memory of saves, distrust what could not be read."""
        self._doubts.note(report.unreadable)
        if report.rates and self._link.client is not None:
            # Not when vLLM imports this.
            from mooncake_store.client.extension import expect_rates

            expect_rates(self._link.client, report.rates)
        if self._feeds:
            self._gone += report.unreadable
        for name in report.failed_requests:
            if name in self._tracked:
                self._tracked[name].loaded = (0, 0)
        for number, outcome in report.saves.items():
            saving = self._saving.get(number)
            if saving is None:
                continue
            saving.outcome.add(outcome)
            if saving.outcome.workers >= self._workers:
                self._saved(number)

    def _saved(self, number: int) -> None:
        saving = self._saving.pop(number)
        self._held -= len(saving.blocks)
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(saving.blocks)])
        kept = saving.outcome.stored - saving.outcome.refused
        self._doubts.clear(kept)
        for run in saving.runs:
            if (run.group, run.hashes[0]) in kept:
                self._extend_feed(run)

    def _extend_feed(self, run: StoredRun) -> None:
        last = self._stored[-1] if self._stored else None
        if last and last.group == run.group and last.hashes[-1] == run.parent:
            last.hashes += run.hashes
            last.tokens += run.tokens
        else:
            self._stored.append(run)

    @property
    def busy(self) -> bool:
        """Whether saves hold memory that a next step could give back."""
        return bool(self._saving)

    def take_feed(self) -> tuple[list[StoredRun], list[tuple[int, bytes]]]:
        """What was stored, and what turned out to be gone, since the last call."""
        stored, self._stored = self._stored, []
        gone, self._gone = self._gone, []
        return stored, gone

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Transfer parameters for a decoding engine, if the request asks for them."""
        tracked = self._tracked.get(request.request_id)
        params = request.kv_transfer_params or {}
        if tracked is None or not self._saves or not params.get("do_remote_decode"):
            return None
        unit = self._layout.step_tokens
        tokens = min(tracked.offered, request.num_prompt_tokens) // unit * unit
        return {"do_remote_prefill": True, "do_remote_decode": False, HANDOFF: tokens}

    def clear(self, deadline: float) -> bool:
        """Remove all blocks of this engine's key space from the store."""
        parts = [part for group in self._layout.groups for part in self._layout.parts(group)]

        def remove(client: Client) -> int:
            return sum(client.remove_prefix(part, force=True, deadline=deadline) for part in parts)

        removed = self._link.call(remove)
        self._lookups.clear()
        self._matches.clear()
        return removed is not None

    def close(self) -> None:
        """End the lookup thread. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
