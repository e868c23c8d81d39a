"""What it costs to name keys under a secret: digests and chains, keyed beside XXH3.

Rows: one key, batches of keys of 40 bytes of one length and of mixed ones, and a prompt of 100,000
tokens in blocks of 16 and of 64, from an array and from a list. The baseline `xxh3` is what a pool
with `--identity xxh3` does; both alternate in one run. Then probes, and puts with removals, of two
pools, one named each way.

It measures names only; what the store makes of them is in the other benches.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.bench.harness import alternate
from mooncake_store.client.blocking import Client
from mooncake_store.identity import KEYED, KINDS, SECRET_BYTES, UNKEYED, identity_of
from mooncake_store.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mooncake_store.bench.harness import Report

__all__ = ["run"]

ALTERNATIVES = ()
BATCHES = (128, 1024)
TOKENS = 100_000
BLOCKS = (16, 64)
SAMPLE_S, SAMPLE_QUICK_S = 0.2, 0.05
REPEATS, REPEATS_QUICK = 15, 5


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure all rows; `vs` is empty: keyed names have no counterpart elsewhere."""
    rows = _Rows(report, quick=quick)
    identities = {kind: identity_of(kind, bytes(SECRET_BYTES), "bench") for kind in KINDS}
    alone = _names(1)[0]
    rows.add(
        "digest/1", 1, {kind: partial(each.digest, alone) for kind, each in identities.items()}
    )
    for count in BATCHES:
        for label, names in (("same_length", _names(count)), ("mixed", _mixed(count))):
            calls = {kind: partial(each.digests, names) for kind, each in identities.items()}
            rows.add(f"digests/{label}/{count}", count, calls)
    array = np.random.default_rng(1).integers(0, 128_000, TOKENS)
    for size in BLOCKS:
        for form, tokens in (("array", array), ("list", array.tolist())):
            chains = {
                kind: partial(each.hash_blocks, tokens, size) for kind, each in identities.items()
            }
            rows.add(f"hash_blocks/{form}/{size}", TOKENS, chains, "tokens/s")
    with ExitStack() as stack:
        stores = {kind: _store(stack, kind) for kind in KINDS}
        for count in BATCHES:
            names = _names(count)
            probes = {kind: partial(store.exists_many, names) for kind, store in stores.items()}
            rows.add(f"exists/{count}", count, probes)
        names = _names(BATCHES[0])
        puts = {kind: partial(_put, store, names) for kind, store in stores.items()}
        rows.add(f"put_remove/{len(names)}", len(names), puts)


class _Rows:
    """Rows of keyed beside unkeyed, sampled in turn."""

    def __init__(self, report: Report, *, quick: bool) -> None:
        self._report = report
        self._repeats = REPEATS_QUICK if quick else REPEATS
        self._sample_s = SAMPLE_QUICK_S if quick else SAMPLE_S

    def add(
        self, name: str, many: int, calls: Mapping[str, Callable[[], object]], unit: str = "keys/s"
    ) -> None:
        """Measure calls that each treat so many."""
        sides = {kind: partial(self._rate, call, many) for kind, call in calls.items()}
        samples = alternate(sides, self._repeats)
        self._report.row(name, unit, samples[KEYED], vs={UNKEYED: samples[UNKEYED]})

    def _rate(self, call: Callable[[], object], many: int) -> float:
        done, began = 0, time.perf_counter()
        while (taken := time.perf_counter() - began) < self._sample_s:
            call()
            done += many
        return done / taken


def _store(stack: ExitStack, kind: str) -> Client:
    cluster = stack.enter_context(LocalCluster(segment="64MB", master={"identity": kind}))
    return stack.enter_context(Client(cluster.url))


def _put(store: Client, names: list[str]) -> None:
    """Put a batch of small objects, and remove it to make place for the next."""
    store.put_many(names, [b"x" * 64] * len(names)).check()
    store.remove_many(names).check()


def _names(count: int) -> list[str]:
    return [f"model/llama-3-8b/layer/07/block/{at:08d}" for at in range(count)]


def _mixed(count: int) -> list[str]:
    lengths = np.random.default_rng(2).integers(34, 41, count).tolist()
    return [name[-length:] for name, length in zip(_names(count), lengths, strict=True)]
