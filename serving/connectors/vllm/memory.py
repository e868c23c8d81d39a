"""Where blocks lie in the engine's KV memory, as pieces that the client reads and writes directly.

A tensor of a layer has its blocks as first dimension; the bytes of one block may lie apart within
it (heads before tokens, say). For each contiguous run of a block there is a base address, a step
from block to block and a length, so the pieces of any set of blocks are one numpy expression.

Memory of an accelerator cannot be addressed from here: its blocks are gathered into rows of
page-locked host memory by the device and stored from there, and scattered on the way back.

Cost: O(pieces) in numpy a batch; nothing is copied for memory of the host.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mooncake_store import Pieces, Rows

__all__ = ["HostMemory", "StagedMemory", "runs_of", "with_blocks_first"]

_STAGING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous range of every block: first address, bytes from block to block, length."""

    base: int
    step: int
    length: int


def with_blocks_first(tensor: Any, blocks: int) -> Any:
    """View a layer's cache with one entry per block. Raises ConfigError for a shape not known."""
    shape = tuple(tensor.shape)
    if shape[0] == blocks:
        return tensor
    if shape[0] % blocks == 0:
        return tensor.unflatten(0, (blocks, -1))
    if len(shape) > 1 and shape[1] == blocks:
        return tensor.transpose(0, 1)
    raise ConfigError(f"a KV cache of shape {shape} does not have {blocks} blocks")


def runs_of(tensor: Any) -> list[Run]:
    """The contiguous ranges of a block, in the order of its dimensions."""
    unit = tensor.element_size()
    dims = sorted(
        (
            (stride * unit, size)
            for stride, size in zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
            if size > 1
        ),
        reverse=True,
    )
    length = unit
    while dims and dims[-1][0] == length:
        stride, size = dims.pop()
        length = stride * size
    steps = [[stride * at for at in range(size)] for stride, size in dims]
    offsets = [sum(each) for each in itertools.product(*steps)]
    base, step = tensor.data_ptr(), tensor.stride(0) * unit
    return [Run(base + offset, step, length) for offset in offsets]


class HostMemory:
    """Layers in host memory: blocks are stored from and loaded into where they lie."""

    batch_max = 1 << 30

    def __init__(self, tensors: Sequence[Any]) -> None:
        runs = [run for tensor in tensors for run in runs_of(tensor)]
        self._keep = tuple(tensors)
        self._bases = np.array([run.base for run in runs], np.int64)
        self._steps = np.array([run.step for run in runs], np.int64)
        self._lengths = np.array([run.length for run in runs], np.int64)

    @property
    def block_bytes(self) -> int:
        """Size of an object."""
        return int(self._lengths.sum())

    def buffers(self, blocks: Sequence[int]) -> Pieces:
        """Pieces of blocks."""
        from mooncake_store import Pieces  # Not before vLLM's start; see connector.py.

        numbers: NDArray[np.int64] = np.asarray(blocks, np.int64)
        addresses = self._bases + numbers[:, None] * self._steps
        runs = len(self._bases)
        return Pieces(
            addresses.ravel(),
            np.tile(self._lengths, len(numbers)),
            np.arange(0, len(numbers) * runs + 1, runs),
            keep=self._keep,
        )

    def gathered(self, blocks: Sequence[int], ready: Any) -> Pieces:
        """Pieces of blocks, which the host has computed already."""
        if ready is not None:
            ready.synchronize()
        return self.buffers(blocks)

    def scatter(self, blocks: Sequence[int], positions: Sequence[int]) -> None:
        """Nothing is left to do: loads went straight to their places."""


class StagedMemory:
    """Layers in memory of an accelerator, through rows of page-locked host memory.

    One row holds one block; the memory is made when it is first used. Used by one thread.
    """

    def __init__(self, tensors: Sequence[Any], staging_bytes: int = _STAGING_BYTES) -> None:
        self._tensors = tuple(tensors)
        self._sizes = [each[0].numel() * each.element_size() for each in tensors]
        self.block_bytes = sum(self._sizes)
        self.batch_max = max(1, staging_bytes // self.block_bytes)
        self._local = threading.local()

    def _staging(self, count: int) -> Any:
        import torch

        rows = getattr(self._local, "rows", None)
        if rows is None:
            rows = torch.empty(
                (self.batch_max, self.block_bytes),
                dtype=torch.uint8,
                pin_memory=self._tensors[0].device.type != "cpu",
            )
            self._local.rows = rows
        return rows[:count]

    def _columns(self, staging: Any) -> list[Any]:
        """The part of each row that belongs to each layer, in that layer's shape and type."""
        ends = list(itertools.accumulate(self._sizes))
        return [
            staging[:, end - size : end].contiguous().view(tensor.dtype).view(-1, *tensor.shape[1:])
            for tensor, size, end in zip(self._tensors, self._sizes, ends, strict=True)
        ]

    def buffers(self, blocks: Sequence[int]) -> Rows:
        """Rows of staging memory for blocks."""
        from mooncake_store import Rows

        staging = self._staging(len(blocks))
        return Rows(staging.data_ptr(), self.block_bytes, len(blocks), self.block_bytes)

    def gathered(self, blocks: Sequence[int], ready: Any) -> Rows:
        """Rows with the content of blocks, copied once the device has computed them."""
        import torch

        if ready is not None:
            ready.synchronize()
        staging = self._staging(len(blocks))
        start = 0
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            chosen = torch.as_tensor(list(blocks), device=tensor.device)
            picked = tensor.index_select(0, chosen).reshape(len(blocks), -1)
            staging[:, start : start + size].copy_(picked.contiguous().view(torch.uint8))
            start += size
        return self.buffers(blocks)

    def scatter(self, blocks: Sequence[int], positions: Sequence[int]) -> None:
        """Copy rows to the blocks they belong to, and wait until they are there."""
        import torch

        if not positions:
            return
        staging = self._staging(len(blocks))[list(positions)]
        for tensor, column in zip(self._tensors, self._columns(staging), strict=True):
            chosen = torch.as_tensor([blocks[at] for at in positions], device=tensor.device)
            tensor.index_copy_(0, chosen, column.to(tensor.device))
        if self._tensors[0].device.type != "cpu":
            torch.accelerator.synchronize(self._tensors[0].device)
