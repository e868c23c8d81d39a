"""The original's REST service over a store: put, get, exist, remove, and memory lent or taken back.

It listens on loopback, or anywhere with a token that every request has to carry; bodies and keys
are bounded. Calls of the store run in threads, so that a slow one does not hold up the others.
Needs `aiohttp`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mooncake_store._endpoint import is_loopback
from mooncake_store.compat.config import MooncakeConfig
from mooncake_store.compat.store import MooncakeDistributedStore
from mooncake_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["main", "rest_application"]

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 100 << 20


def rest_application(store: MooncakeDistributedStore, token: str = "") -> web.Application:
    """The routes over a store that is set up."""

    @web.middleware
    async def authorized(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return _answer(401, error="a token is required")
        return await handler(request)

    routes = _Routes(store)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[authorized])
    app.add_routes(
        [
            web.put("/api/put", routes.put),
            web.get("/api/get/{key:.+}", routes.get),
            web.get("/api/exist/{key:.+}", routes.exist),
            web.delete("/api/remove/{key:.+}", routes.remove),
            web.delete("/api/remove_all", routes.remove_all),
            web.post("/api/mount", routes.mount),
            web.post("/api/unmount", routes.unmount),
        ]
    )
    return app


def _answer(status: int, /, **content: Any) -> web.Response:
    return web.json_response(content, status=status)


async def _body(request: web.Request, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """The fields of a JSON body; a 400 when one is missing or of another type."""
    try:
        found = await request.json()
    except ValueError:
        found = None
    if not isinstance(found, dict) or any(
        not isinstance(found.get(name), kind) for name, kind in kinds.items()
    ):
        raise web.HTTPBadRequest(text=f"a JSON object with {', '.join(kinds)} is expected")
    return found


class _Routes:
    """Handlers."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store

    async def put(self, request: web.Request) -> web.Response:
        """Store a text."""
        body = await _body(request, key=str, value=str)
        number = await asyncio.to_thread(self._store.put, body["key"], body["value"].encode())
        if number != 0:
            return _answer(500, error=f"PUT operation failed with code {number}")
        return _answer(200, status="success")

    async def get(self, request: web.Request) -> web.Response:
        """Answer an object's bytes."""
        handle = await asyncio.to_thread(self._store.get_buffer, request.match_info["key"])
        if handle is None:
            return _answer(404, error="Key not found")
        return web.Response(body=bytes(handle), content_type="application/octet-stream")

    async def exist(self, request: web.Request) -> web.Response:
        """Say whether there is an object."""
        found = await asyncio.to_thread(self._store.is_exist, request.match_info["key"])
        return _answer(200, exists=bool(found))

    async def remove(self, request: web.Request) -> web.Response:
        """Remove an object."""
        number = await asyncio.to_thread(self._store.remove, request.match_info["key"])
        if number == 0:
            return _answer(200, status="success")
        status = 404 if number == -704 else 409 if number == -706 else 500
        return _answer(status, error=f"Remove operation failed with code {number}")

    async def remove_all(self, request: web.Request) -> web.Response:
        """Remove what nobody reads."""
        count = await asyncio.to_thread(self._store.remove_all)
        if count < 0:
            return _answer(500, error=f"RemoveAll operation failed with code {count}")
        return _answer(200, status="success", removed=count)

    async def mount(self, request: web.Request) -> web.Response:
        """Lend more memory."""
        body = await _body(request, size=int)
        found = await asyncio.to_thread(self._store.allocate_and_mount_segment, body["size"])
        return _answer(200 if found["ret"] == 0 else 500, **found)

    async def unmount(self, request: web.Request) -> web.Response:
        """Take memory back."""
        body = await _body(request, segment_ids=list)
        names = [str(name) for name in body["segment_ids"]]
        grace = int(body.get("grace_period_seconds", 0))
        number = await asyncio.to_thread(self._store.unmount_and_free_segment, names, grace)
        return _answer(200 if number == 0 else 404, ret=number)


async def _serve(config: MooncakeConfig, host: str, port: int, token: str) -> None:
    store = MooncakeDistributedStore()
    number = await asyncio.to_thread(
        store.setup,
        {
            "local_hostname": config.local_hostname,
            "metadata_server": config.metadata_server,
            "global_segment_size": config.global_segment_size,
            "local_buffer_size": config.local_buffer_size,
            "protocol": config.protocol,
            "master_server_addr": config.master_server_address,
            "tenant_id": config.tenant_id,
            "enable_client_http_server": config.enable_client_http_server,
            "client_http_port": config.client_http_port,
        },
    )
    if number != 0:
        raise SystemExit(f"the store could not be set up: {number}")
    runner = web.AppRunner(rest_application(store, token))
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop.set)
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        log.warning("the REST service listens on %s", runner.addresses[0])
        await stop.wait()
    finally:
        await runner.cleanup()
        await asyncio.to_thread(store.close)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the service until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", help="JSON file, else MOONCAKE_CONFIG_PATH or variables")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on")
    parser.add_argument("--token-file", help="file with the token that requests must carry")
    options = parser.parse_args(arguments)
    token = Path(options.token_file).read_text("utf-8").strip() if options.token_file else ""
    if not token and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines",
            advice="pass --token-file, or listen on 127.0.0.1",
        )
    if options.config:
        config = MooncakeConfig.from_file(options.config)
    else:
        config = MooncakeConfig.load_from_env()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(config, options.host, options.port, token))
