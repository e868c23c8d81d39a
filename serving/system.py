"""A whole serving system on this machine: store, workers, conductor, front.

    async with ServingSystem(SystemSettings(prefill=1, decode=1)) as system:
        system.url            # http://127.0.0.1:8000

Everything but conductor and front is a child process, tied to this one by a socket: however this
process ends, `kill -9` included, they see the end of the stream and end too, and their memory,
which has no name in the filesystem, goes with them. A serving worker that dies is replaced by one
of the role it last had; the store is not (it would come back empty, and serving goes on without).
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_store import AsyncClient
from mooncake_store.errors import ConfigError, StoreError
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.program import logs
from mooncake_store.program.shell import Shell
from mooncake_store.program.web import WebServer
from serving.conductor.conductor import Conductor
from serving.engine.loading import check_model
from serving.front.app import Front, front_application
from serving.front.board import ConductorBoard
from serving.scheduling.pipelines import PipelineRule
from serving.scheduling.policies import (
    check_admission,
    check_placement,
    make_admission,
    make_engine_placement,
    make_placement,
)
from serving.scheduling.roles import RoleBalancer
from serving.scheduling.scheduler import Policies, Scheduler
from serving.scheduling.views import Slo
from serving.traces.recording import Recorder
from serving.workers.local import LocalWorkers
from serving.workers.protocol import COUPLED_ROLE, DECODE_ROLE, PREFILL_ROLE
from serving.workers.settings import settings_from
from transfer_engine.lasting import keep_going
from transfer_engine.rpc.accepting import listen
from transfer_engine.rpc.address import is_loopback

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from aiohttp import web

    from serving.scheduling.placement import PlacementPolicy
    from transfer_engine.wire.tls import Tls

__all__ = [
    "ServingSystem",
    "SystemSettings",
    "engine_placement",
    "listen",
    "serve_http",
]

log = logging.getLogger(__name__)

SUPERVISE_S = 0.25
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class SystemSettings:
    """What a system is made of. `worker` has further settings of the serving workers, by name."""

    prefill: int | None = None
    decode: int | None = None
    """Workers of a role; None is one of each, none beside coupled ones."""
    coupled: int = 0
    """Workers that have both roles."""
    model: str = "tiny"
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    insecure: bool = False
    names: tuple[str, ...] = ()
    """What the server is called besides, by those who need no token."""
    tls: Tls | None = None
    """What it answers by https with, in place of http."""
    store_url: str = ""
    """A pool that runs already; empty starts one of its own."""
    store_secret: str = ""
    """The file with that pool's secret."""
    segment: str = "1GiB"
    overcommit: bool = False
    admission: str = "forecast"
    placement: str = "thrifty"
    balancing: float = 1.5
    ttft_s: float = 30.0
    tbt_s: float = 0.5
    deadline_s: float = 300.0
    requests_max: int = 256
    fixed_roles: bool = False
    push: bool = True
    pipeline: int = 1
    record: str = ""
    """A file for a trace of the requests; empty writes none."""
    worker: dict[str, Any] = field(default_factory=dict)

    @property
    def of_roles(self) -> dict[str, int]:
        """How many workers are started, by role."""
        usual = 0 if self.coupled else 1
        prefill = usual if self.prefill is None else self.prefill
        decode = usual if self.decode is None else self.decode
        return {PREFILL_ROLE: prefill, DECODE_ROLE: decode, COUPLED_ROLE: self.coupled}

    @property
    def of_roles_text(self) -> str:
        """The same in words."""
        return ", ".join(f"{count} {role}" for role, count in self.of_roles.items() if count)

    @property
    def shell(self) -> Shell:
        """What requests have to pass."""
        own_user = not (self.token or self.insecure)
        return Shell(self.host, self.token, names=self.names, own_user=own_user)

    def check(self) -> None:
        """Raise ConfigError for what cannot work."""
        prefill, decode, coupled = counts = tuple(self.of_roles.values())
        if min(counts) < 0 or not (coupled or (prefill and decode)):
            raise ConfigError(
                f"{prefill} prefill, {decode} decode, {coupled} coupled workers cannot answer",
                advice="have at least one of each, or a coupled one",
            )
        with _as_config():
            check_admission(self.admission)
            check_placement(self.placement)
        if self.balancing < 1:
            raise ConfigError(
                f"balancing is {self.balancing}, and a worker's own prefix is never worth less",
                advice="1 or more (--balancing)",
            )
        settings_from({"model": self.model, **self.worker})
        check_model(self.model)
        if not is_loopback(self.host) and not self.token and not self.insecure:
            raise ConfigError(
                f"{self.host} can be reached from other machines",
                advice="set a token (--token-file), or --insecure",
            )
        self.shell.check()


def engine_placement(settings: SystemSettings) -> PlacementPolicy:
    """The policy among complete engines, which do not pull from each other at a front's word.

    Raises ConfigError when it cannot be made.
    """
    with _as_config():
        return make_engine_placement(settings.placement, random.Random())


@contextmanager
def _as_config() -> Iterator[None]:
    """What is wrong with a policy that was named is a mistake in the configuration."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


class ServingSystem:
    """All parts of a system; an asynchronous context manager, or `start` and `close`."""

    def __init__(self, settings: SystemSettings) -> None:
        settings.check()
        self.settings = settings
        slo = Slo(settings.ttft_s, settings.tbt_s)
        with _as_config():
            placement = make_placement(settings.placement, settings.balancing, random.Random())
            admission = make_admission(settings.admission)
        policies = Policies(
            placement=placement,
            admission=admission,
            roles=None if settings.fixed_roles else RoleBalancer(),
            pipeline=PipelineRule(settings.pipeline) if settings.pipeline > 1 else None,
        )
        self._scheduler = Scheduler(slo, policies)
        self.store: LocalCluster | None = None
        self.workers: LocalWorkers | None = None
        self.conductor = Conductor(requests_max=settings.requests_max)
        self._recorder: Recorder | None = None
        self._listener: socket.socket | None = None
        self._web: WebServer | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self.url = ""
        self.store_url = ""

    async def start(self) -> ServingSystem:
        """Start everything, or nothing; return self."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self) -> None:
        settings = self.settings
        # What is quick to see comes before what takes seconds to start.
        self._listener = listen(settings.host, settings.port)
        if settings.record:
            self._recorder = Recorder(Path(settings.record))
            self._recorder.start()
        pool: dict[str, Any] = {}
        if settings.store_secret:
            pool["secret_file"] = settings.store_secret
        if settings.store_url:
            async with AsyncClient(settings.store_url, **pool):
                self.store_url = settings.store_url
        else:
            # Nobody else reaches it, and it has no secret: the certificate is for who calls us.
            pool = dict.fromkeys(("tls_certificate", "tls_key", "tls_authority", "tls_name"), "")
            self.store = LocalCluster(
                segment=settings.segment,
                master=pool | logs.chosen(),
                worker={"overcommit": settings.overcommit, **pool, **logs.chosen()},
            )
            await asyncio.to_thread(self.store.start)
            self.store_url = self.store.url
        told: dict[str, Any] = {
            **settings.of_roles, "model": settings.model, "pool_url": self.store_url, "pool": pool,
        }  # fmt: skip
        self.workers = LocalWorkers(**(told | settings.worker))
        await asyncio.to_thread(self.workers.start)
        self.conductor = Conductor(
            self._scheduler,
            pool_url=self.store_url,
            pool=pool,
            requests_max=settings.requests_max,
            push=settings.push,
        )
        await self.conductor.start(self.workers.addresses)
        self._supervisor = asyncio.get_running_loop().create_task(
            keep_going("replacing workers", self._supervise)
        )
        front = Front(
            self.conductor,
            ConductorBoard(self.conductor),
            model=settings.name,
            deadline_s=settings.deadline_s,
            recorder=self._recorder,
        )
        front.limits()  # a tokenizer or chat template that cannot be used is told of now
        self._web, self.url = await serve_http(
            front_application(front, settings.shell),
            settings.host,
            self._listener,
            tls=settings.tls,
        )

    async def close(self) -> None:
        """End everything: no new requests first, the store last. Idempotent."""
        web, self._web = self._web, None
        listener, self._listener = self._listener, None
        if web is not None:
            await web.cleanup()
        if listener is not None:
            listener.close()
        if self._recorder is not None:
            await self._recorder.close()
        supervisor, self._supervisor = self._supervisor, None
        tasks = [task for task in (supervisor, *self._replacing.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.conductor.close()
        for part in (self.workers, self.store):
            if part is not None:
                await asyncio.to_thread(part.close)
        self.workers = self.store = None

    async def __aenter__(self) -> ServingSystem:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- workers that die

    async def _supervise(self) -> None:
        """Replace workers that ended, but for those that are being replaced already."""
        assert self.workers is not None
        await asyncio.sleep(SUPERVISE_S)
        for number, child in enumerate(self.workers.children):
            if number not in self._replacing and child.process.poll() is not None:
                task = asyncio.get_running_loop().create_task(self._replace(number))
                self._replacing[number] = task

    async def _replace(self, number: int) -> None:
        assert self.workers is not None
        address = self.workers.addresses[number]
        member = self.conductor.fleet.members.get(address)
        role = member.hello.role if member is not None else self.workers.roles[number]
        log.warning("%s ended; another %s worker is started", address, role)
        try:
            await self.conductor.leave(address)
            fresh = await asyncio.to_thread(self.workers.replace, number, role)
            await self.conductor.join(fresh)
        except StoreError as error:
            log.error("a %s worker could not be replaced: %s", role, error)
        finally:
            del self._replacing[number]


async def serve_http(
    application: web.Application, host: str, listener: socket.socket, *, tls: Tls | None = None
) -> tuple[WebServer, str]:
    """Serve an application on a port of `listen`; returns its server and its URL.

    With `tls` by https alone.
    """
    # A client that goes away has to cancel its request, wherever it is.
    server = WebServer(
        application,
        listener,
        "the HTTP port",
        tls=tls,
        handler_cancellation=True,
        shutdown_timeout=STOP_S,
    )
    await server.start()
    bound = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    return server, f"{'http' if tls is None else 'https'}://{shown}:{bound}"
