"""Runs a serving system, or a front for engines elsewhere, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import ConfigError
from mooncake_store.program.port_file import remove_port_file, write_port_file
from mooncake_store.program.token_file import TokenFile
from serving.front.external import ExternalFront, external_application
from serving.system import (
    ServingSystem,
    SystemSettings,
    engine_placement,
    listen,
    serve_http,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

__all__ = ["EngineSettings", "run"]

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]]+)"
_ENGINE = re.compile(rf"https?://{_HOST}(?::[0-9]{{1,5}})?(?:/[^\s?#@]*)?")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Engines elsewhere, by name and URL, and what is theirs alone."""

    engines: Mapping[str, str] = field(default_factory=dict)
    backend_key: str = ""
    """What they ask their clients for."""
    admin_token: str = ""
    """Who may register engines; empty makes one for those who run as the same user."""
    networks: tuple[str, ...] = ()
    """Where others than those of `engines` may publish their events."""
    judge: ssl.SSLContext | None = None
    """Whom to believe of those that are reached by https; None is as usual."""


def run(
    settings: SystemSettings,
    elsewhere: EngineSettings,
    ready: Callable[[dict[str, Any]], None],
    port_file: str | None,
) -> None:
    """Serve with engines elsewhere, where there are any, else with our workers.

    `ready` is called with the facts when requests are taken.
    """
    engines = elsewhere.engines
    if not engines:
        if replace(elsewhere, judge=None) != EngineSettings():
            raise ConfigError(
                "what is said of engines elsewhere is of no use without any",
                advice="name one with --backend",
            )
        asyncio.run(_system(settings, ready, port_file))
        return
    settings.check()
    if settings.record:
        raise ConfigError(
            "what engines elsewhere are asked is not recorded",
            advice="leave out --record, or --backend",
        )
    for name, url in engines.items():
        if not _ENGINE.fullmatch(url):
            raise ConfigError(
                f"the engine {name} has no URL such as http://10.0.0.5:8000",
                advice="leave out users and queries; a key comes in a file (--backend-key-file)",
            )
    asyncio.run(_external(settings, elsewhere, ready, port_file))


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
    elsewhere: EngineSettings,
    ready: Callable[[dict[str, Any]], None],
    port_file: str | None,
) -> None:
    stop = _on_signals()
    front = ExternalFront(
        elsewhere.engines,
        settings.deadline_s,
        engine_placement(settings),
        key=elsewhere.backend_key,
        networks=elsewhere.networks,
        judge=elsewhere.judge,
    )
    facts = {"what": f"{len(elsewhere.engines)} engines"}
    token, made = elsewhere.admin_token, None
    with listen(settings.host, settings.port) as listener:
        if not token:
            made = TokenFile.make("serve", listener.getsockname()[1])
            token, facts["admin_token_file"] = made.token, str(made.path)
        shell = replace(settings.shell, admin_token=token)
        application = external_application(front, shell)
        try:
            server, facts["url"] = await serve_http(
                application, settings.host, listener, tls=settings.tls
            )
            try:
                await _until_stopped(stop, facts, ready, port_file)
            finally:
                await server.cleanup()
        finally:
            if made is not None:
                made.remove()


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
