"""`MooncakeDistributedStore`, from its parts; `MooncakeDistributedStoreAsync` from that.

Where a call goes: values as bytes in `bytes`, memory by address in `pointers`, sessions in
`ranges`, replicas, tasks and segments in `placement`, tensors in `tensors` and `parallel`.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from mooncake_store.compat.bytes import BytesCalls
from mooncake_store.compat.parallel import ParallelCalls
from mooncake_store.compat.placement import PlacementCalls
from mooncake_store.compat.pointers import PointerCalls
from mooncake_store.compat.ranges import RangeCalls
from mooncake_store.compat.tensors import TensorCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["MooncakeDistributedStore", "MooncakeDistributedStoreAsync"]


class MooncakeDistributedStore(
    ParallelCalls, TensorCalls, RangeCalls, PointerCalls, BytesCalls, PlacementCalls
):
    """The original's store object. Threads share it freely; call `setup` first."""


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """The store object with `async_<name>` for every call, which the executor of the loop runs."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if not name.startswith("async_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        call = getattr(self, name.removeprefix("async_"))
        if not callable(call):
            raise AttributeError(f"{name!r} is no call")

        @functools.wraps(call)
        async def run(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(call, *args, **kwargs)

        return run
