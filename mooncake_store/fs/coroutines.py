"""The coroutines of the filesystem (`_cat_file` and its kin), which asynchronous callers await.

Each event loop has an `AsyncClient` of its own, connected when first needed. fsspec calls the
coroutines on a loop of its own from libraries that are asynchronous inside, zarr among them.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from glob import has_magic
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.callbacks import DEFAULT_CALLBACK

from mooncake_store.client import AsyncClient
from mooncake_store.fs import listing
from mooncake_store.fs.arguments import answer, checked, piping, ranges
from mooncake_store.fs.doing import run_async

if TYPE_CHECKING:
    from mooncake_store.fs.doing import Plan
    from mooncake_store.fs.plans import Plans

__all__ = ["Coroutines"]

T = TypeVar("T")


class Coroutines(AsyncFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """See the module."""

    plans: Plans
    _settings: dict[str, Any]

    def _prepare(self, asynchronous: bool, loop: Any, batch_size: int | None) -> None:
        """What the constructor of AsyncFileSystem does, without starting its thread."""
        self.asynchronous = asynchronous
        self.batch_size = batch_size
        self._loop = loop
        self._pid = os.getpid()
        self._clients: weakref.WeakKeyDictionary[Any, asyncio.Task[AsyncClient]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def loop(self) -> Any:
        """The loop on which fsspec runs coroutines for blocking callers."""
        return self._loop or get_loop()

    async def _do_async(self, plan: Plan[T]) -> T:
        loop = asyncio.get_running_loop()
        connecting = self._clients.get(loop)
        if connecting is None or (connecting.done() and _failed(connecting)):
            connecting = loop.create_task(AsyncClient(**self._settings).connect())
            self._clients[loop] = connecting
        # Callers that come meanwhile share the connection, also when one of them is cancelled.
        client = await asyncio.shield(connecting)
        return await run_async(client, plan)

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        connecting = self._clients.pop(asyncio.get_running_loop(), None)
        if connecting is not None:
            await (await connecting).close()

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return await self._do_async(listing.info(self._strip_protocol(path)))

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        entries = await self._do_async(listing.ls(self.plans, self._strip_protocol(path)))
        return entries if detail else [entry["name"] for entry in entries]

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any
    ) -> Any:
        plan = listing.find(self.plans, self._strip_protocol(path), maxdepth, withdirs=withdirs)
        found = await self._do_async(plan)
        return found if kwargs.get("detail") else list(found)

    async def _exists(self, path: str, **kwargs: Any) -> bool:
        return await self._do_async(listing.exists(self._strip_protocol(path)))

    async def _isdir(self, path: str) -> bool:
        return await self._do_async(listing.is_directory(self._strip_protocol(path)))

    async def _isfile(self, path: str) -> bool:
        return await self._do_async(listing.is_file(self._strip_protocol(path)))

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        return await self._do_async(self.plans.read(self._strip_protocol(path), start, end))

    async def _cat(
        self,
        path: Any,
        recursive: bool = False,
        on_error: str = "raise",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        paths = await self._expand_path(path, recursive=recursive)
        if recursive:
            plan = listing.files_among(paths)
            paths = await self._do_async(plan)
        values = await self._do_async(self.plans.read_many(paths))
        single = isinstance(path, str) and paths == [self._strip_protocol(path)]
        return answer(paths, values, on_error, single=single)

    async def _cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        bounds = ranges(paths, starts, ends, max_gap)
        names = [self._strip_protocol(path) for path in paths]
        return checked(await self._do_async(self.plans.read_ranges(names, *bounds)), on_error)

    async def _pipe_file(
        self,
        path: str,
        value: Any,
        mode: str = "overwrite",
        *,
        pin: str | None = "default",
        ttl: float | str | None = None,
        **kwargs: Any,
    ) -> None:
        plan = piping(self.plans, self._strip_protocol, {path: value}, mode, pin, ttl)
        await self._do_async(plan)

    async def _pipe(
        self,
        path: Any,
        value: Any = None,
        batch_size: int | None = None,
        *,
        mode: str = "overwrite",
        pin: str | None = "default",
        ttl: float | str | None = None,
        **kwargs: Any,
    ) -> None:
        files = path if isinstance(path, dict) else {path: value}
        await self._do_async(piping(self.plans, self._strip_protocol, files, mode, pin, ttl))

    async def _cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        await self._do_async(
            self.plans.copy(self._strip_protocol(path1), self._strip_protocol(path2))
        )

    async def _mv_file(self, path1: str, path2: str) -> None:
        pair = (self._strip_protocol(path1), self._strip_protocol(path2))
        await self._do_async(self.plans.move([pair]))

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        await self._do_async(self.plans.remove([self._strip_protocol(path)], strict=True))

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        if recursive and maxdepth is None and isinstance(path, str) and not has_magic(path):
            await self._do_async(self.plans.remove_tree(self._strip_protocol(path)))
            return
        paths = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
        await self._do_async(self.plans.remove(paths, strict=not recursive))

    async def _mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Do nothing: a directory is there as soon as something is in it."""

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, as `_mkdir`."""

    # The local disk blocks whoever waits for it, so these two run in a thread, on the blocking
    # client.

    async def _get_file(
        self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, **kwargs: Any
    ) -> None:
        await asyncio.to_thread(self.get_file, rpath, lpath, callback=callback)

    async def _put_file(
        self,
        lpath: Any,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        await asyncio.to_thread(self.put_file, lpath, rpath, callback=callback, mode=mode)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
