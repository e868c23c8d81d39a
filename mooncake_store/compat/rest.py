"""The original's REST service over a store: objects, and memory lent or taken back.

    service = MooncakeStoreService("config.json")
    await service.start_store_service()
    await service.start_http_service(8080)

Every request carries a token: one that is given, or on loopback one that is made for those who run
as the same user (`program.token_file`), since the store may do more than any process of a machine
should. With `insecure` none is asked for, as the original asks for none. Bodies and keys are
bounded, and the only files it lends are those of /dev/shm. Calls of the store run in threads, so
that a slow one does not hold up the others. What a call answers is what the original answers, but
that where an object is put or removed it has a status of its own that there is none, that it is
being read, and that it could be none.
Needs `aiohttp`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the REST service needs aiohttp; pip install aiohttp", name=error.name
    ) from None

from mooncake_store.compat.config import MooncakeConfig
from mooncake_store.compat.rest_api import (
    API,
    KEYS,
    Grace,
    Mode,
    Mount,
    MountFile,
    Put,
    Unmount,
)
from mooncake_store.compat.store import MooncakeDistributedStore
from mooncake_store.config import ClientConfig, load
from mooncake_store.credentials import http_tls
from mooncake_store.endpoint import is_loopback
from mooncake_store.errors import ConfigError
from mooncake_store.program import logs
from mooncake_store.program.descriptors import raise_limit
from mooncake_store.program.shell import Shell, shelled
from mooncake_store.program.token_file import TokenFile
from mooncake_store.program.web import WebServer
from transfer_engine.rpc.accepting import listen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from transfer_engine.wire.tls import Tls

    Method: TypeAlias = Callable[["MooncakeStoreService", web.Request], Awaitable[web.Response]]

__all__ = ["MooncakeStoreService", "main", "sync_main"]

T = TypeVar("T")

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 100 << 20
RETRY_S = 1.0
_NO_SEGMENTS = "Missing segment_ids, or invalid grace_period_seconds"
_STATUS = {-600: 400, -704: 404, -706: 409}
"""What is answered where an object is put or removed, by the number of the call; 500 else."""
_SHARED_MEMORY = PurePosixPath("/dev/shm")
_IN_SETUP = {"device_name": "rdma_devices", "master_server_address": "master_server_addr"}
"""What `setup` calls settings that a configuration calls otherwise."""


class _Refused(Exception):
    """A request that cannot be meant: answered with 400 and this text."""


def _answer(status: int, /, **content: Any) -> web.Response:
    return web.json_response(content, status=status)


def _ended(what: str, number: int, why: str = "", /, **content: Any) -> web.Response:
    """The answer that tells how something ended, and what came of it."""
    if number != 0:
        return _answer(500, error=_failure(what, number, why))
    return _answer(200, status="success", **content)


def _failure(what: str, number: int, why: str) -> str:
    return f"{what} failed, ret={number}" + (f": {why}" if why else "")


def _answered(method: Method) -> Method:
    """Whatever a handler raises is the answer to its request, not the end of a connection."""

    @wraps(method)
    async def handler(self: MooncakeStoreService, request: web.Request) -> web.Response:
        try:
            return await method(self, request)
        except _Refused as reason:
            return _answer(400, error=str(reason))
        except web.HTTPException:
            raise
        except Exception as error:
            log.exception("a request of the REST service failed")
            return _answer(500, error=str(error))

    return handler


async def _read(request: web.Request, kind: type[T], refusal: str) -> T:
    """The body of a request; where it is no such object, `refusal` and the reason are answered."""
    try:
        return msgspec.convert(await request.json(), kind)
    except msgspec.ValidationError as error:
        raise _Refused(f"{refusal}: {error}") from None
    except (ValueError, LookupError, RecursionError):  # in a charset that is none, or too deep
        raise _Refused("Malformed JSON body") from None


def _shm_name_to_path(name: object) -> str | None:
    """The file of a name of shared memory; None for what is no such name, as the original's."""
    if not isinstance(name, str):
        return None
    plain = name.removeprefix("/")
    if not plain or "/" in plain or plain in (".", ".."):
        return None
    return str(_SHARED_MEMORY / plain)


def _is_shared_memory(path: str) -> bool:
    return path == _shm_name_to_path(PurePosixPath(path).name)


class MooncakeStoreService:
    """One store and the routes to it.

    `config_path` names a JSON file; without one, `MOONCAKE_CONFIG_PATH` or variables are read.
    `cli_config` overrides single settings.
    """

    _web: WebServer | None = None
    _made: TokenFile | None = None

    def __init__(
        self, config_path: str | None = None, cli_config: Mapping[str, Any] | None = None
    ) -> None:
        self.store: MooncakeDistributedStore | None = None
        self.config = (
            MooncakeConfig.from_file(config_path) if config_path else MooncakeConfig.load_from_env()
        )
        for name, value in (cli_config or {}).items():
            if hasattr(self.config, name):
                setattr(self.config, name, value)
        self.current_mode = "prefill"
        self.mounted_segment_ids: list[str] = []
        self.last_mount_info: dict[str, Any] = {}
        self._state_lock = asyncio.Lock()

    # -- life

    async def start_store_service(
        self, max_wait_time: float = 60, shutdown_event: asyncio.Event | None = None
    ) -> bool:
        """Set the store up, again each second until it answers; whether it did in that time.

        Nothing else is served before, so this holds the event loop up while an attempt lasts.
        """
        stopped = shutdown_event or asyncio.Event()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_time
        while not stopped.is_set():
            try:
                self._set_up()
            except Exception as error:
                left_s = deadline - loop.time()
                log.warning("the store cannot be set up, %.0f s left: %s", max(0, left_s), error)
                if left_s <= 0:
                    return False
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), min(RETRY_S, left_s))
                continue
            await asyncio.sleep(0)  # A signal that came meanwhile is heard now.
            if not stopped.is_set():
                return True
            await self.stop()
        return False

    def _set_up(self) -> None:
        self.store = MooncakeDistributedStore()
        number = self.store.setup(
            {_IN_SETUP.get(name, name): value for name, value in vars(self.config).items()}
        )
        if number != 0:
            raise ConfigError(f"setup answered {number}", advice="see the line before this one")

    def application(self, shell: Shell) -> web.Application:
        """The routes behind a shell."""
        return shelled(
            shell,
            API,
            {each.name: getattr(self, f"handle_{each.name}") for each in API.operations},
            refusal=lambda status, message, _code: _answer(status, error=message),
            bytes_max=BODY_BYTES_MAX,
            keys=KEYS,
        )

    async def start_http_service(
        self,
        port: int = 8080,
        host: str = "127.0.0.1",
        token: str = "",
        *,
        insecure: bool = False,
        names: tuple[str, ...] = (),
        tls: Tls | None = None,
    ) -> bool:
        """Listen; always True. Raises ConfigError where others could reach it without a token."""
        if not (token or insecure or is_loopback(host)):
            raise ConfigError(
                f"--host {host} can be reached from other machines",
                advice="pass --token-file, or listen on 127.0.0.1",
            )
        Shell(names=names).check()
        listener = listen(host, port)
        asked = "no token is asked for" if insecure else "requests carry the token that was given"
        if not (token or insecure):
            self._made = TokenFile.make("rest", listener.getsockname()[1])
            token, asked = self._made.token, f"requests carry the token in {self._made.path}"
        application = self.application(Shell(host, token, names=names))
        self._web = WebServer(application, listener, "the REST port", tls=tls)
        await self._web.start()
        log.warning("the REST service listens on %s; %s", self._web.address, asked)
        return True

    async def stop(self) -> None:
        """Serve no more and close the store. Idempotent."""
        web, self._web = self._web, None
        if web is not None:
            await web.cleanup()
        made, self._made = self._made, None
        if made is not None:
            made.remove()
        store, self.store = self.store, None
        if store is not None:
            number = await asyncio.to_thread(store.close)
            if number != 0:
                log.warning("close returned %d", number)

    @property
    def _open(self) -> MooncakeDistributedStore:
        if self.store is None:
            raise ConfigError("the store is not set up", advice="call start_store_service()")
        return self.store

    # -- objects

    @_answered
    async def handle_put(self, request: web.Request) -> web.Response:
        """Store a text."""
        body = await _read(request, Put, "Missing key or value")
        number = await asyncio.to_thread(self._open.put, body.key, body.value.encode())
        if number != 0:
            return _answer(_STATUS.get(number, 500), error="PUT operation failed")
        return _answer(200, status="success")

    @_answered
    async def handle_get(self, request: web.Request) -> web.Response:
        """Answer an object's bytes."""
        key = request.match_info["key"]
        value: bytes | None = await asyncio.to_thread(self._open.get, key)
        if value is None:
            return _answer(500, error="GET operation failed")
        if not value:  # An object of no bytes, or none.
            found = await asyncio.to_thread(self._open.is_exist, key)
            if found < 0:
                return _answer(500, error="Exist check failed")
            if not found:
                return _answer(404, error="Key not found")
        return web.Response(body=value, content_type="application/octet-stream")

    @_answered
    async def handle_exist(self, request: web.Request) -> web.Response:
        """Say whether there is an object."""
        found = await asyncio.to_thread(self._open.is_exist, request.match_info["key"])
        if found < 0:
            return _answer(500, error="Exist check failed")
        return _answer(200, exists=found > 0)

    @_answered
    async def handle_remove(self, request: web.Request) -> web.Response:
        """Remove an object."""
        number = await asyncio.to_thread(self._open.remove, request.match_info["key"])
        if number == 0:
            return _answer(200, status="success")
        return _answer(_STATUS.get(number, 500), error="Remove operation failed")

    @_answered
    async def handle_remove_all(self, _request: web.Request) -> web.Response:
        """Remove what nobody reads."""
        count = await asyncio.to_thread(self._open.remove_all)
        if count < 0:
            return _answer(500, error="RemoveAll operation failed")
        return _answer(200, status=f"success removed {count} keys")

    # -- memory

    @_answered
    async def handle_mount(self, request: web.Request) -> web.Response:
        """Lend more memory."""
        body = await _read(request, Mount, "Invalid size, protocol or location")
        found = await asyncio.to_thread(
            self._open.allocate_and_mount_segment, body.size, *self._how(body)
        )
        lent = {name: found[name] for name in ("segment_ids", "allocated_size")}
        return _ended("Allocate and mount", found["ret"], found.get("error", ""), **lent)

    @_answered
    async def handle_unmount(self, request: web.Request) -> web.Response:
        """Take memory back."""
        body = await _read(request, Unmount, _NO_SEGMENTS)
        number = await asyncio.to_thread(
            self._open.unmount_and_free_segment, body.names, body.grace_period_seconds
        )
        return _ended("Unmount and free", number)

    @_answered
    async def handle_mount_shm(self, request: web.Request) -> web.Response:
        """Lend a file of shared memory."""
        refusal = "Missing or invalid name or size"
        body = await _read(request, MountFile, refusal)
        path = _shm_name_to_path(body.name)
        if path is None:
            raise _Refused(f"{refusal}: {body.name!r} names no file of {_SHARED_MEMORY}")
        found = await self._mount_file(path, body)
        return _ended(
            "Mount", found["ret"], found.get("error", ""), segment_ids=found["segment_ids"]
        )

    @_answered
    async def handle_unmount_shm(self, request: web.Request) -> web.Response:
        """Take such files back; those that cannot be are named."""
        body = await _read(request, Unmount, _NO_SEGMENTS)
        async with self._state_lock:
            failed = await self._unmount_each(body.names, body.grace_period_seconds)
            gone = set(body.names) - set(failed)
            self.mounted_segment_ids = [n for n in self.mounted_segment_ids if n not in gone]
            if not self.mounted_segment_ids:
                self.current_mode = "prefill"
        if failed:
            return _answer(
                500, error="Unmount failed for one or more segments", failed_segment_ids=failed
            )
        return _answer(200, status="success")

    @_answered
    async def handle_unmount_local_disk(self, request: web.Request) -> web.Response:
        """Take the disk of this store back, if it lends one."""
        body = await _read(request, Grace, "Invalid grace_period_seconds")
        number = await asyncio.to_thread(
            self._open.unmount_local_disk_segment, body.grace_period_seconds
        )
        return _ended("Unmount local disk", number)

    @_answered
    async def handle_reconfigure(self, request: web.Request) -> web.Response:
        """Lend a file of shared memory ("decode"), or nothing beside the own ("prefill")."""
        invalid = "Invalid mode. Use 'decode' or 'prefill'"
        mode = (await _read(request, Mode, invalid)).mode.lower()
        if mode == "decode":
            body = await _read(request, MountFile, "Missing path or size for decode mode")
            if not body.path:
                raise _Refused("Missing path or size for decode mode")
            if not _is_shared_memory(body.path):
                raise _Refused(f"Invalid path, only files of {_SHARED_MEMORY} are lent")
            async with self._state_lock:
                return await self._to_decode(body)
        if mode == "prefill":
            async with self._state_lock:
                return await self._to_prefill()
        raise _Refused(invalid)

    async def _to_decode(self, body: MountFile) -> web.Response:
        """Lend the new file first, then take back what was lent before."""
        before = self.mounted_segment_ids
        found = await self._mount_file(body.path, body)
        if found["ret"] != 0:
            error = f"{_failure('Mount', found['ret'], found.get('error', ''))}; "
            if before:
                error += "keeping previous decode segments"
            else:
                self.current_mode, self.last_mount_info = "prefill", {}
                error += "rolled back to prefill"
            return _answer(500, error=error, mode=self.current_mode)
        self.mounted_segment_ids = list(found["segment_ids"]) + await self._unmount_each(before)
        self.current_mode = "decode"
        self.last_mount_info = {"path": body.path, "offset": body.offset, "size": body.size}
        return _answer(
            200,
            status="success",
            mode=self.current_mode,
            segment_ids=self.mounted_segment_ids,
        )

    async def _to_prefill(self) -> web.Response:
        if self.mounted_segment_ids:
            number = await asyncio.to_thread(self._open.unmount_segment, self.mounted_segment_ids)
            if number != 0:
                return _ended("Unmount", number)
        self.mounted_segment_ids, self.last_mount_info = [], {}
        self.current_mode = "prefill"
        return _answer(200, status="success", mode=self.current_mode)

    def _how(self, body: Mount) -> tuple[str, str]:
        return self.config.protocol if body.protocol is None else body.protocol, body.location

    async def _mount_file(self, path: str, body: MountFile) -> dict[str, Any]:
        return await asyncio.to_thread(
            self._open.mount_segment, path, body.size, body.offset, *self._how(body)
        )

    async def _unmount_each(self, names: list[str], grace_s: int = 0) -> list[str]:
        """Take segments back one by one; the names of those that could not be."""
        return [
            name
            for name in names
            if await asyncio.to_thread(self._open.unmount_segment, [name], grace_s) != 0
        ]


def _install_shutdown_signal_handlers(
    loop: asyncio.AbstractEventLoop, shutdown_event: asyncio.Event
) -> None:
    def asked(number: int) -> None:
        log.info("signal %d: shutting down", number)
        shutdown_event.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, asked, each)


def parse_arguments() -> argparse.Namespace:
    """The program's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", help="JSON file, else MOONCAKE_CONFIG_PATH or variables")
    parser.add_argument(
        "-D", "--define", action="append", default=[], metavar="NAME=VALUE", type=_definition,
        help="override one setting of the configuration",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on")
    parser.add_argument(
        "--token-file", dest="token", metavar="FILE", default="", type=_token,
        help="file with the token that requests must carry; on loopback one is made without it",
    )  # fmt: skip
    parser.add_argument(
        "--insecure", action="store_true", help="answer without a token, as the original does"
    )
    parser.add_argument(
        "--allow-host", dest="names", metavar="NAME", action="append", default=[],
        help="a further name of this service, for requests without a token",
    )  # fmt: skip
    parser.add_argument(
        "--max-wait-time", type=float, default=60, help="seconds to wait for the store"
    )
    parser.add_argument(
        "--log-json", action="store_true", help="log one JSON object a line, requests as well"
    )
    return parser.parse_args()


def _definition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _token(path: str) -> str:
    return Path(path).read_text("utf-8").strip() if path else ""


async def main() -> None:
    """Run the service until SIGTERM or Ctrl-C; SystemExit when the store stays away."""
    options = parse_arguments()
    if options.log_json:
        logs.configure(as_json=True)
    service = MooncakeStoreService(options.config, dict(options.define))
    stopped = asyncio.Event()
    _install_shutdown_signal_handlers(asyncio.get_running_loop(), stopped)
    try:
        if not await service.start_store_service(options.max_wait_time, stopped):
            if stopped.is_set():
                return
            raise SystemExit("the store could not be set up")
        await service.start_http_service(
            options.port,
            options.host,
            options.token,
            insecure=options.insecure,
            names=tuple(options.names),
            tls=http_tls(load(ClientConfig).value, options.host),
        )
        await stopped.wait()
    finally:
        await service.stop()


def sync_main() -> None:
    """Run `main` as a program."""
    raise_limit()
    asyncio.run(main())
