"""The workers' side: fill blocks from the store, and store blocks, on two threads beside the model.

A load is one batch: one round trip to the master, and the bytes go straight to where the blocks
lie. What could not be read is reported, so that vLLM computes it, and the scheduler stops believing
in it; an object whose bytes were wrong is removed, so that the next save can store it.

A save offers blocks in one batch; those that are there already cost their part of the first round
trip and no bytes. Saves never fail a request: without room, or without a store, blocks are skipped
and counted. With several objects a block (`layers_per_object`) a block that failed once is not
offered further, so that its last object, which stands for the whole, never appears alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serving.connectors.moves import Moves, joined
from serving.connectors.vllm.memory import HostMemory, StagedMemory, with_blocks_first
from serving.connectors.vllm.messages import GroupBlocks, SaveOutcome, WorkerReport
from transfer_engine.lasting import LastingThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from serving.connectors.counts import Counts
    from serving.connectors.link import StoreLink
    from serving.connectors.vllm.layout import Group, Layout
    from serving.connectors.vllm.messages import LoadJob, SaveJob, StepPlan
    from serving.connectors.vllm.options import Options

__all__ = ["WorkerSide"]

log = logging.getLogger(__name__)

_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class _Slab:
    """Some layers of one group: what makes one object of each block."""

    group: Group
    part: str
    suffix: str
    layers: frozenset[str]
    memory: HostMemory | StagedMemory

    def names(self, hashes: Sequence[bytes]) -> list[str]:
        """Keys of blocks."""
        return [f"{self.part}{each.hex()}{self.suffix}" for each in hashes]


@dataclass(slots=True)
class _Saving:
    """A save under way; `done` slabs have been handed to the thread."""

    job: SaveJob
    done: int = 0
    outcome: SaveOutcome = field(default_factory=SaveOutcome)


class WorkerSide:
    """Loads and saves of one worker; its two ranks say which slice of each block it holds."""

    def __init__(
        self,
        layout: Layout,
        link: StoreLink,
        options: Options,
        counts: Counts,
        *,
        tensor_rank: int,
        pipeline_rank: int,
    ) -> None:
        self._layout = layout
        self._options = options
        self._counts = counts
        self._moves = Moves(link, options, counts)
        self._ranks = (tensor_rank, pipeline_rank)
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()
        self._step: list[_Saving] = []
        self._layers_left: list[set[str]] = []
        self._outages = 0
        self._loads: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            LastingThread("mooncake-load", self._load_next),
            LastingThread("mooncake-save", self._save_next),
        ]

    # Memory.

    def register(self, caches: Mapping[str, Any], groups: Sequence[Any], blocks: int) -> None:
        """Learn where the engine's blocks lie; `groups` are vLLM's, by number. Starts the threads.

        Raises ConfigError for memory whose shape is not known.
        """
        per_object = self._options.layers_per_object
        for group in self._layout.groups:
            layers = _distinct(
                {
                    name: with_blocks_first(caches[name], blocks)
                    for name in groups[group.number].layer_names
                    if name in caches
                }
            )
            names = list(layers)
            step = per_object or len(names) or 1
            starts = range(0, len(names), step)
            for number, start in enumerate(starts):
                chosen = names[start : start + step]
                suffix = "" if not per_object else f"/{number}"
                if per_object and start == starts[-1]:
                    suffix = "/last"
                tensors = [layers[name] for name in chosen]
                on_host = all(tensor.device.type == "cpu" for tensor in tensors)
                self._slabs.append(
                    _Slab(
                        group,
                        self._layout.part(group, *self._ranks),
                        suffix,
                        frozenset(chosen),
                        HostMemory(tensors) if on_host else StagedMemory(tensors),
                    )
                )
        for thread in self._threads:
            thread.start()

    # What vLLM calls each step.

    def begin(self, plan: StepPlan) -> None:
        """Start this step's loads."""
        for job in plan.loads:
            self._loads.put(job)

    def layer_saved(self, plan: StepPlan, layer: str, ready: Callable[[], Any]) -> None:
        """A layer of this step is computed: store what is whole by now."""
        if not self._options.layers_per_object or not plan.saves:
            return
        self._begin_saves(plan)
        for left in self._layers_left:
            left.discard(layer)
        self._hand_over(ready, all_of_it=False)

    def save(self, plan: StepPlan, ready: Callable[[], Any]) -> None:
        """The step is computed: store all the rest."""
        self._begin_saves(plan)
        self._hand_over(ready, all_of_it=True)
        self._step = []

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended, and those of them that failed as a whole."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
        return loaded, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks that were not filled."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """What the scheduler has to know."""
        with self._lock:
            report, self._report = self._report, WorkerReport()
        return report if report else None

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call."""
        self._counts.add("outages", self._moves.link.outages - self._outages)
        self._outages = self._moves.link.outages
        return self._counts.take()

    def close(self) -> None:
        """Finish what is queued, within bounds, and end the threads. Idempotent."""
        self._loads.put(None)
        self._saves.put(None)
        until = time.monotonic() + _DRAIN_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    # Loads.

    def _load_next(self) -> bool:
        job = self._loads.get()
        if job is None:
            return False
        try:
            self._load(job)
        except Exception:  # A cache must not take its engine down.
            log.exception("a load failed; its blocks are computed")
            self._load_ended(job, [(blocks, set(blocks.hashes)) for blocks in job.groups])
        return True

    def _load(self, job: LoadJob) -> None:
        by_group = {blocks.group: blocks for blocks in job.groups}
        wanted = [(slab, by_group[slab.group.number]) for slab in self._slabs
                  if slab.group.number in by_group]  # fmt: skip
        bad: dict[int, set[bytes]] = {blocks.group: set() for blocks in job.groups}
        if all(isinstance(slab.memory, HostMemory) for slab, _ in wanted):
            self._load_in_place(wanted, bad)
        else:
            for slab, blocks in wanted:
                self._load_staged(slab, blocks, bad)
        self._load_ended(job, [(blocks, bad[blocks.group]) for blocks in job.groups])
        if self._options.prefill_tokens_per_s:
            rates = self._moves.rates()
            with self._lock:
                self._report.rates[self._ranks] = rates

    def _load_in_place(
        self, wanted: list[tuple[_Slab, GroupBlocks]], bad: dict[int, set[bytes]]
    ) -> None:
        """All objects of a request in one batch."""
        names = [name for slab, blocks in wanted for name in slab.names(blocks.hashes)]
        owners = [(blocks.group, each) for _, blocks in wanted for each in blocks.hashes]
        pieces: list[Any] = [slab.memory.buffers(blocks.blocks) for slab, blocks in wanted]
        for nbytes, (group, each) in zip(
            self._moves.read(names, joined(pieces)), owners, strict=True
        ):
            if not nbytes:
                bad[group].add(each)

    def _load_staged(self, slab: _Slab, blocks: GroupBlocks, bad: dict[int, set[bytes]]) -> None:
        """Through host memory, as many blocks at a time as it holds."""
        step = slab.memory.batch_max
        for start in range(0, len(blocks.hashes), step):
            hashes = blocks.hashes[start : start + step]
            places = blocks.blocks[start : start + step]
            buffers = slab.memory.buffers(places)
            read = self._moves.read(slab.names(hashes), buffers)
            bad[blocks.group].update(hashes[at] for at, nbytes in enumerate(read) if not nbytes)
            slab.memory.scatter(places, [at for at, nbytes in enumerate(read) if nbytes])

    def _load_ended(self, job: LoadJob, bad: list[tuple[GroupBlocks, set[bytes]]]) -> None:
        with self._lock:
            failed = False
            for blocks, hashes in bad:
                for each, block in zip(blocks.hashes, blocks.blocks, strict=True):
                    if each in hashes:
                        failed = True
                        self._report.unreadable.add((blocks.group, each))
                        if len(self._layout.groups) == 1:
                            self._bad_blocks.add(block)
            if failed:
                self._report.failed_requests.add(job.request)
                if len(self._layout.groups) > 1:
                    # Block numbers are unique within a group only, so vLLM is told the request.
                    self._failed.add(job.request)
            self._loaded.add(job.request)

    # Saves.

    def _begin_saves(self, plan: StepPlan) -> None:
        if self._step or not plan.saves:
            return
        self._step = [_Saving(job) for job in plan.saves]
        self._layers_left = [set(slab.layers) for slab in self._slabs]

    def _hand_over(self, ready: Callable[[], Any], *, all_of_it: bool) -> None:
        """Queue slabs in their order, the next one only when all its layers are computed."""
        for saving in self._step:
            while saving.done < len(self._slabs):
                if self._layers_left[saving.done] and not all_of_it:
                    break
                self._queue(saving, saving.done, ready())
                saving.done += 1

    def _queue(self, saving: _Saving, number: int, ready: Any) -> None:
        self._saves.put(lambda: self._save(saving, number, ready))

    def _save_next(self) -> bool:
        work = self._saves.get()
        if work is None:
            return False
        work()
        return True

    def _save(self, saving: _Saving, number: int, ready: Any) -> None:
        slab = self._slabs[number]
        for blocks in saving.job.groups:
            if blocks.group != slab.group.number:
                continue
            try:
                self._store(slab, self._mine(slab.group, blocks, saving.outcome), saving, ready)
            except Exception:  # As for loads.
                log.exception("a save failed; its blocks are not kept")
                saving.outcome.refused.update((blocks.group, each) for each in blocks.hashes)
        if number == len(self._slabs) - 1:
            with self._lock:
                self._report.aggregate(WorkerReport({saving.job.number: saving.outcome}))

    def _mine(self, group: Group, blocks: GroupBlocks, outcome: SaveOutcome) -> GroupBlocks:
        """This rank's share of blocks, without those that failed before."""
        mine = GroupBlocks(blocks.group, [], [], [])
        for each, block, number in zip(blocks.hashes, blocks.blocks, blocks.numbers, strict=True):
            turn = number % group.copies == self._ranks[0] % group.copies
            if turn and (blocks.group, each) not in outcome.refused:
                mine.hashes.append(each)
                mine.blocks.append(block)
        return mine

    def _store(self, slab: _Slab, blocks: GroupBlocks, saving: _Saving, ready: Any) -> None:
        outcome, group = saving.outcome, blocks.group
        step = slab.memory.batch_max
        for start in range(0, len(blocks.hashes), step):
            hashes = blocks.hashes[start : start + step]
            stored, refused = self._write(slab, hashes, blocks.blocks[start : start + step], ready)
            outcome.refused.update((group, hashes[at]) for at in refused)
            outcome.stored.update((group, hashes[at]) for at in stored)

    def _write(
        self, slab: _Slab, hashes: list[bytes], blocks: list[int], ready: Any
    ) -> tuple[list[int], list[int]]:
        """Offer a batch; positions of what is new in the store, and of what is not in it."""
        return self._moves.write(
            slab.names(hashes),
            lambda: slab.memory.gathered(blocks, ready),
            [slab.memory.block_bytes] * len(hashes),
            groups=[each.hex() for each in hashes] if slab.suffix else None,
        )


def _distinct(layers: dict[str, Any]) -> dict[str, Any]:
    """Layers that share memory (as shared KV does) once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in layers.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept
