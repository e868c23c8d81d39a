"""Runs a serving system, or a front for engines elsewhere, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import ConfigError
from mooncake_store.program.port_file import remove_port_file, write_port_file
from serving.front.external import ExternalFront, external_application
from serving.system import (
    ServingSystem,
    SystemSettings,
    engine_placement,
    listen,
    serve_http,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["run"]


def run(
    settings: SystemSettings,
    engines: Mapping[str, str],
    ready: Callable[[dict[str, Any]], None],
    port_file: str | None,
) -> None:
    """Serve with engines elsewhere, by name and URL, where there are any, else with our workers.

    `ready` is called with the facts when requests are taken.
    """
    if not engines:
        asyncio.run(_system(settings, ready, port_file))
        return
    settings.check()
    if settings.record:
        raise ConfigError(
            "what engines elsewhere are asked is not recorded",
            advice="leave out --record, or --backend",
        )
    for name, url in engines.items():
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the engine {name} has no http:// URL but {url!r}")
    asyncio.run(_external(settings, engines, ready, port_file))


async def _system(
    settings: SystemSettings, ready: Callable[[dict[str, Any]], None], port_file: str | None
) -> None:
    stop = _on_signals()
    starting = asyncio.get_running_loop().create_task(ServingSystem(settings).start())
    stopping = asyncio.get_running_loop().create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        # A signal while it starts: what has started ends before we do.
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await starting).close()
        return
    stopping.cancel()
    system = await starting
    try:
        what = f"{settings.model}, {settings.of_roles_text}"
        facts = {"url": system.url, "what": what, "store": system.store_url}
        await _until_stopped(stop, facts, ready, port_file)
    finally:
        await system.close()


async def _external(
    settings: SystemSettings,
    engines: Mapping[str, str],
    ready: Callable[[dict[str, Any]], None],
    port_file: str | None,
) -> None:
    stop = _on_signals()
    front = ExternalFront(engines, settings.deadline_s, engine_placement(settings))
    application = external_application(front, settings.token)
    listener = listen(settings.host, settings.port)
    server, url = await serve_http(application, settings.host, listener)
    try:
        facts = {"url": url, "what": f"{len(engines)} engines"}
        await _until_stopped(stop, facts, ready, port_file)
    finally:
        await server.cleanup()


def _on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop.set)
    return stop


async def _until_stopped(
    stop: asyncio.Event,
    facts: dict[str, Any],
    ready: Callable[[dict[str, Any]], None],
    port_file: str | None,
) -> None:
    if port_file:
        content = {"address": facts["url"], "pid": os.getpid(), **facts}
        await asyncio.to_thread(write_port_file, port_file, content)
    try:
        ready(facts)
        await stop.wait()
    finally:
        if port_file:
            await asyncio.to_thread(remove_port_file, port_file)
