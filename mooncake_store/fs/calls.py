"""The calls that fsspec has in two forms: blocking (`info`) and as a coroutine (`_info`).

Both carry out one plan. Blocking calls use blocking sockets on the caller's thread. Coroutines use
an `AsyncClient` of the running loop, connected when first needed; fsspec calls them on a loop of
its own from libraries that are asynchronous inside, zarr among them.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from glob import has_magic
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.callbacks import DEFAULT_CALLBACK

from mooncake_store.client import AsyncClient, Client
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.fs.arguments import answer, checked, pins_of_call, ranges
from mooncake_store.fs.listing import exists, files_among, find, info, is_directory, is_file, ls
from mooncake_store.fs.plan import run, run_async

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mooncake_store.fs.plan import Plan
    from mooncake_store.fs.plans import Plans

__all__ = ["PlannedCalls"]

P = ParamSpec("P")
T = TypeVar("T")


def both(
    plan: Callable[P, Plan[T]],
) -> tuple[Callable[P, T], Callable[P, Coroutine[Any, Any, T]]]:
    """The blocking call and the coroutine that carry out a plan, called `_plan_<name>`."""

    @functools.wraps(plan)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        fs: Any = args[0]
        done: T = fs._do(plan(*args, **kwargs))
        return done

    @functools.wraps(plan)
    async def coroutine(*args: P.args, **kwargs: P.kwargs) -> T:
        fs: Any = args[0]
        done: T = await fs._do_async(plan(*args, **kwargs))
        return done

    call.__name__ = plan.__name__.removeprefix("_plan_")
    coroutine.__name__ = f"_{call.__name__}"
    return call, coroutine


class PlannedCalls(AsyncFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """A filesystem of fsspec's whose calls are plans."""

    plans: Plans
    _settings: dict[str, Any]

    def _prepare(self, asynchronous: bool, loop: Any, batch_size: int | None) -> None:
        """What the constructor of AsyncFileSystem does, without starting its thread."""
        self.asynchronous = asynchronous
        self.batch_size = batch_size
        self._loop = loop
        self._clients: weakref.WeakKeyDictionary[Any, asyncio.Task[AsyncClient]] = (
            weakref.WeakKeyDictionary()
        )

    # The clients.

    @property
    def client(self) -> Client:
        """The blocking client of this filesystem, connected when first needed."""
        made = self.__dict__.get("_client")
        if made is None:
            fresh = Client(**self._settings)
            # Of threads that come together one wins; a lock could be held in a fork.
            made = self.__dict__.setdefault("_client", fresh)
            if made is not fresh:
                fresh.close()
        return made

    def close(self) -> None:
        """Close the connections of blocking calls; the next call makes new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        connecting = self._clients.pop(asyncio.get_running_loop(), None)
        if connecting is not None:
            await (await connecting).close()

    @property
    def loop(self) -> Any:
        """The loop on which fsspec runs coroutines for blocking callers."""
        return self._loop or get_loop()

    def _do(self, plan: Plan[T]) -> T:
        return run(self.client, plan)

    async def _do_async(self, plan: Plan[T]) -> T:
        loop = asyncio.get_running_loop()
        connecting = self._clients.get(loop)
        if connecting is None or (connecting.done() and _failed(connecting)):
            connecting = loop.create_task(AsyncClient(**self._settings).connect())
            self._clients[loop] = connecting
        # Callers that come meanwhile share the connection, also when one of them is cancelled.
        client = await asyncio.shield(connecting)
        return await run_async(client, plan)

    # Looking.

    def _plan_info(self, path: str, **kwargs: Any) -> Plan[dict[str, Any]]:
        """Type and size; of files also created, checksum, generation, replicas, segments, tier."""
        return info(self._strip_protocol(path))

    def _plan_ls(self, path: str, detail: bool = True, **kwargs: Any) -> Plan[list[Any]]:
        """The entries of a directory, as they are now."""
        entries = yield from ls(self.plans, self._strip_protocol(path))
        return entries if detail else [entry["name"] for entry in entries]

    def _plan_find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Plan[Any]:
        """Every file below a path."""
        path = self._strip_protocol(path)
        found = yield from find(self.plans, path, maxdepth, withdirs=withdirs)
        return found if detail else list(found)

    def _plan_exists(self, path: str, **kwargs: Any) -> Plan[bool]:
        """Whether a path is a file or a directory."""
        return exists(self._strip_protocol(path))

    def _plan_isdir(self, path: str) -> Plan[bool]:
        """Whether a path is a directory: whether anything lies below it."""
        return is_directory(self._strip_protocol(path))

    def _plan_isfile(self, path: str) -> Plan[bool]:
        """Whether a path is a file."""
        return is_file(self._strip_protocol(path))

    info, _info = both(_plan_info)
    ls, _ls = both(_plan_ls)
    find, _find = both(_plan_find)
    exists, _exists = both(_plan_exists)
    isdir, _isdir = both(_plan_isdir)
    isfile, _isfile = both(_plan_isfile)

    # Reading.

    def _plan_cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> Plan[bytes]:
        """The content of a file, or of a slice of it."""
        return self.plans.read(self._strip_protocol(path), start, end)

    cat_file, _cat_file = both(_plan_cat_file)

    def _contents(self, path: Any, paths: list[str], recursive: bool, on_error: str) -> Plan[Any]:
        if recursive:
            paths = yield from files_among(paths)
        values = yield from self.plans.read_many(paths)
        single = isinstance(path, str) and paths == [self._strip_protocol(path)]
        return answer(paths, values, on_error, single=single)

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:
        """The content of a file, or of many as a dict, read as one batch."""
        paths = self.expand_path(path, recursive=recursive)
        return self._do(self._contents(path, paths, recursive, on_error))

    async def _cat(
        self,
        path: Any,
        recursive: bool = False,
        on_error: str = "raise",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        paths = await self._expand_path(path, recursive=recursive)
        return await self._do_async(self._contents(path, paths, recursive, on_error))

    def _plan_cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> Plan[list[Any]]:
        """Slices of files, as one batch: as many requests for a thousand as for one."""
        bounds = ranges(paths, starts, ends, max_gap)
        names = [self._strip_protocol(path) for path in paths]
        return checked((yield from self.plans.read_ranges(names, *bounds)), on_error)

    cat_ranges, _cat_ranges = both(_plan_cat_ranges)

    # Writing.

    def _plan_pipe(
        self,
        path: Any,
        value: Any = None,
        mode: str = "overwrite",
        *,
        pin: str | None = "default",
        ttl: float | str | None = None,
        **kwargs: Any,
    ) -> Plan[None]:
        """Store one file, or a dict of them as one batch.

        mode="create" raises FileExistsError rather than replace one.
        """
        if mode not in ("overwrite", "create"):
            raise InvalidArgumentError(f'mode must be "overwrite" or "create", not {mode!r}')
        files = path if isinstance(path, dict) else {path: value}
        return self.plans.write_many(
            {self._strip_protocol(path): value for path, value in files.items()},
            exclusive=mode == "create",
            pins=pins_of_call(self.plans, pin, ttl),
        )

    pipe, _pipe = both(_plan_pipe)
    pipe_file, _pipe_file = pipe, _pipe

    def _plan_cp_file(self, path1: str, path2: str, **kwargs: Any) -> Plan[None]:
        """Copy a file within the store."""
        return self.plans.copy(self._strip_protocol(path1), self._strip_protocol(path2))

    cp_file, _cp_file = both(_plan_cp_file)

    async def _mv_file(self, path1: str, path2: str) -> None:
        pair = (self._strip_protocol(path1), self._strip_protocol(path2))
        await self._do_async(self.plans.move([pair]))

    def _plan_rm_file(self, path: str, **kwargs: Any) -> Plan[None]:
        """Remove a file. Whoever reads it just then goes on until the lease ends."""
        return self.plans.remove([self._strip_protocol(path)], strict=True)

    rm_file, _rm_file = both(_plan_rm_file)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, or with `recursive` all that is below directories."""
        if recursive and maxdepth is None and isinstance(path, str) and not has_magic(path):
            self._do(self.plans.remove_tree(self._strip_protocol(path)))
            return
        paths = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        self._do(self.plans.remove(paths, strict=not recursive))

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
