"""The few things of vLLM that the connector's pure parts look at, and a store in a dictionary."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mooncake_store.client import ReadCosts
from mooncake_store.errors import (
    ChecksumMismatchError,
    NoSpaceError,
    NotFoundError,
    TruncatedError,
)
from serving.connectors.keys import KVScope
from serving.connectors.vllm.layout import Group, Layout

BLOCK = 4


def layout(*groups: Group, tensor_ranks: int = 1, pipeline_ranks: int = 1) -> Layout:
    """A layout of hash units as long as a block of `BLOCK` tokens."""
    groups = groups or (Group(0, BLOCK, 1, 0, 1),)
    scopes = {
        group.number: KVScope(
            model="model",
            dtype="float32",
            layout="test",
            tp_size=tensor_ranks,
            pp_size=pipeline_ranks,
            kv_heads=0 if group.copies == tensor_ranks else tensor_ranks // group.copies,
            group=str(group.number),
        )
        for group in groups
    }
    return Layout(scopes, groups, BLOCK)


def hashes(count: int, salt: bytes = b"") -> list[bytes]:
    """Hashes of a chain of blocks."""
    return [salt + bytes([number]) * 4 for number in range(1, count + 1)]


@dataclass
class Request:
    """A request as the scheduler sees it."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None

    def __post_init__(self):
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens
        self.all_token_ids = list(range(self.num_tokens))


class Blocks:
    """What a request was given: one table per group."""

    def __init__(self, *tables: list[int]):
        self.tables = tables

    def get_block_ids(self):
        return self.tables


class Pool:
    """Counts references, as vLLM's pool does."""

    def __init__(self, count: int):
        self.num_gpu_blocks = count
        self.blocks = list(range(count))
        self.references = [0] * count

    def touch(self, blocks):
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, blocks):
        for block in blocks:
            self.references[block] -= 1


def step(scheduled: dict[str, int], tables: dict[str, tuple[list[int], ...]], finished=()):
    """A scheduler's output."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


@dataclass
class Store:
    """A client that keeps objects in a dictionary and does as it is told."""

    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    corrupt: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    full: bool = False
    leases: int = 0
    object_s: float = 0.0  # what a read of each takes, as measured
    hoped_s: float | None = None  # and what is hoped for, if that is another

    def find_prefix(self, keys, **options):
        self.calls.append("find_prefix")
        return next((at for at, key in enumerate(keys) if key not in self.objects), len(keys))

    def exists_many(self, keys, **options):
        self.calls.append("exists_many")
        return np.array([key in self.objects for key in keys])

    def read_cost(self, keys, **options):
        self.calls.append("read_cost")
        statuses = np.array([0 if key in self.objects else -704 for key in keys], np.int16)
        lines, places = np.zeros((2, len(keys)), np.int64), {}
        hoped_s = self.object_s if self.hoped_s is None else self.hoped_s
        columns = np.zeros((2, 2, len(keys)))
        columns[:, 1] = np.array([[self.object_s], [hoped_s]])
        return ReadCosts(keys, statuses, None, np.ones(len(keys), np.int64), columns, lines, places)

    def put_many(self, keys, values, **options):
        self.calls.append("put_many")
        present = np.array([key in self.objects for key in keys])
        statuses = np.zeros(len(keys), np.int16)
        for at, key in enumerate(keys):
            if self.full and not present[at]:
                statuses[at] = -200
            elif not present[at]:
                self.objects[key] = b"".join(
                    ctypes.string_at(*piece) for piece in _pieces(values, at)
                )
        return Result(statuses, {-200: NoSpaceError("full")}, present)

    def get_into_many(self, keys, buffers, **options):
        self.calls.append("get_into_many")
        statuses = np.zeros(len(keys), np.int16)
        for at, key in enumerate(keys):
            if key not in self.objects:
                statuses[at] = -704
            elif key in self.unreadable:
                statuses[at] = -800
            elif key in self.corrupt:
                statuses[at] = -801
            elif key in self.lost:
                statuses[at] = -802
            else:
                data = self.objects[key]
                for address, length in _pieces(buffers, at):
                    ctypes.memmove(address, data[:length], length)
                    data = data[length:]
        return Result(
            statuses,
            {
                -704: NotFoundError("gone"),
                -800: OSError("lost"),
                -801: ChecksumMismatchError("wrong"),
                -802: TruncatedError("ended"),
            },
            sizes=np.array([len(self.objects.get(key, b"")) for key in keys]) * (statuses == 0),
        )

    def remove_many(self, keys, **options):
        self.calls.append("remove_many")
        for key in keys:
            self.objects.pop(key, None)

    def remove_prefix(self, prefix, **options):
        gone = [key for key in self.objects if key.startswith(prefix)]
        for key in gone:
            del self.objects[key]
        return len(gone)


def _pieces(buffers, at):
    if hasattr(buffers, "starts"):
        rows = range(buffers.starts[at], buffers.starts[at + 1])
        return [(int(buffers.addresses[row]), int(buffers.lengths[row])) for row in rows]
    return [(buffers.address + at * buffers.stride, buffers.nbytes)]


class Result:
    """A batch's answer."""

    def __init__(self, statuses, errors, present=None, sizes=None):
        self.sizes = sizes
        self.statuses = statuses
        self.failed = np.flatnonzero(statuses)
        self.already_present = present
        self._errors = errors

    def error(self, at):
        return self._errors.get(int(self.statuses[at]))


class Link:
    """A link to a `Store` that may be away."""

    client = None  # it measures nothing

    def __init__(self, store: Store):
        self.store = store
        self.up = True
        self.outages = 0

    def doubt(self):
        """Nothing to renew."""

    def call(self, function):
        return function(self.store) if self.up else None
