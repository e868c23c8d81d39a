"""KV in fewer bytes: what is left of it, and how quickly it gets there and back.

The codec of cold tiers on one thread, on what the embedded engine computes for random tokens: keys
and values of a block in a layer are one object, as in the pool.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from serving.engine.cache import KVCache
from serving.engine.engine import Engine
from serving.engine.loading import load_model
from serving.engine.sequence import Sequence
from serving.workers.protocol import Sampling
from transfer_engine.errors import ConfigError, StoreError
from transfer_engine.segments.codec import Codec

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report
    from serving.engine.sampling import Likelihood

__all__ = ["measure_codec"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
BLOCK_TOKENS = 64


class _Alone:
    """The owner of the only sequence: nothing is loaded, and nothing kept."""

    sequence: Sequence | None = None

    def opened(self) -> None:
        assert self.sequence is not None
        self.sequence.ready = True

    def before_layer(self, layer: int) -> None:
        """Nothing is loaded."""

    def after_layer(self, layer: int, start: int, end: int) -> None:
        """Nothing is kept."""

    def prefix_lost(self) -> None:
        """There is none."""

    def prefilled(self, token: int, likelihood: Likelihood | None) -> None:
        """One token is enough."""

    def token(self, token: int, likelihood: Likelihood | None) -> None:
        """It is not looked at."""

    def finished(self, reason: str) -> None:
        """Its blocks are looked at then."""


def measure_codec(report: Report, model: str, tokens: list[int], *, repeats: int) -> None:
    """A row for what is left, and one each way, of both kinds of numbers."""
    try:
        codec, why = Codec(), ""
    except ConfigError as error:
        why = str(error)
    for name, dtype in DTYPES.items():
        rows = {f"KV smaller/{name}, left": "%"} | {
            f"KV smaller/{name}, {way}": "GB/s" for way in ("there", "back")
        }
        if why:
            for row, unit in rows.items():
                report.row(row, unit, [], why=why)
            continue
        samples = _samples(codec, _blocks(model, dtype, tokens), repeats)
        for (row, unit), values in zip(rows.items(), samples, strict=True):
            report.row(row, unit, values, higher_is_better=unit != "%")


def _samples(
    codec: Codec, objects: list[bytes], repeats: int
) -> tuple[list[float], list[float], list[float]]:
    """Percent that is left, GB/s there and GB/s back."""
    nbytes = sum(map(len, objects))
    there, back = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        stored = [codec.encode(memoryview(each)) for each in objects]
        there.append(nbytes / 1e9 / (time.perf_counter() - began))
        memory = [bytearray(len(each)) for each in objects]
        began = time.perf_counter()
        whole = [codec.decode(a, memoryview(b)) for a, b in zip(stored, memory, strict=True)]
        back.append(nbytes / 1e9 / (time.perf_counter() - began))
        if not all(whole) or memory != objects:
            raise StoreError("what came back is not what was made smaller")
    return [100 * sum(map(len, stored)) / nbytes], there, back


def _blocks(model: str, dtype: str, tokens: list[int]) -> list[bytes]:
    """Keys and values of each block of each layer, as the engine computes them."""
    decoder = load_model(model, dtype=dtype).decoder
    count = len(tokens) // BLOCK_TOKENS
    with torch.inference_mode():
        cache = KVCache(decoder.config, count + 1, BLOCK_TOKENS, decoder.device)
    engine, owner = Engine(decoder, cache), _Alone()
    owner.sequence = Sequence(
        tokens=list(tokens),
        prompt=len(tokens),
        sampling=Sampling(),
        max_new_tokens=1,
        listener=owner,
        layers=range(decoder.config.layers),
    )
    engine.submit(owner.sequence)
    while engine.step():
        pass
    return [
        b"".join(part[block].contiguous().view(torch.uint8).numpy().tobytes() for part in layer)
        for layer in zip(cache.keys, cache.values, strict=True)
        for block in owner.sequence.blocks[:count]
    ]
