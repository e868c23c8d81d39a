"""One serving worker: the service on its socket, and the life of its requests.

    worker = Worker(settings_from({"model": "tiny", "role": "prefill"}))
    address = await worker.start()
    ...
    await worker.stop()

Three kinds of threads: the event loop answers, one thread computes (`computing.py`), two move KV to
and from the pool (`pool_side.py`). Whatever ends a request (its answer, its deadline, a cancel, the
end of its connection, a reader who takes nothing) ends it once and gives its blocks back.

A worker has one role: prefill, decode, or coupled, which is both. `set_role` lets what runs finish,
then changes which requests it takes; model, cache and connections stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from serving.engine.cache import KVCache
from serving.engine.engine import Engine
from serving.engine.forms.known import Forms
from serving.engine.loading import load_model
from serving.engine.tokenizer import load_tokenizer
from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.coming import Coming
from serving.workers.computing import Computing
from serving.workers.decoding import Decoding
from serving.workers.exchange import Exchange, kv_segment
from serving.workers.jobs import Generating, Job, Parts, Prefilling
from serving.workers.keeping import Keeping
from serving.workers.memory import KVMemory
from serving.workers.news import News, Telling
from serving.workers.pool_side import PoolSide
from serving.workers.prefixes import Prefixes
from serving.workers.receiving import Receiving
from serving.workers.stages import Leading, Stage
from transfer_engine.errors import (
    InvalidArgumentError,
    NotFoundError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.lasting import keep_going
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.rpc.server import Server
from transfer_engine.wire.schema import Packed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from serving.engine.loading import LoadedModel
    from serving.engine.vocabulary import Vocabulary
    from serving.workers.pushing import Pusher
    from serving.workers.settings import WorkerSettings
    from transfer_engine.rpc.serving import Connection, Reply
    from transfer_engine.wire.frame import Frame

__all__ = ["Worker"]

log = logging.getLogger(__name__)

_LIMITS = ServerLimits(in_flight_max=8192)


@dataclass(slots=True)
class Owned:
    """Requests asked for, and tags of KV pushed, over one connection."""

    news: News | None = None
    """What it is told, once it listens."""
    jobs: set[Job] = field(default_factory=set)
    incoming: set[bytes] = field(default_factory=set)


class Worker:
    """Serves one model. `start` loads it, and blocks the loop while it does."""

    def __init__(self, settings: WorkerSettings, *, secret: bytes | None = None) -> None:
        settings.check()
        self.settings = settings
        self.role = settings.role
        self.draining = False
        self._secret = secret
        self._jobs: dict[str, Job] = {}  # whose last event was not told yet
        self._active: set[Job] = set()  # that have not given all back
        self._idle = asyncio.Event()
        self._idle.set()
        self._stages: dict[bytes, Stage] = {}
        self._peers: dict[str, WorkerClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._listeners: dict[Connection, News] = {}
        self._handlers: dict[int, Callable[[Connection, Any], Any]] = {
            p.HELLO.opcode: lambda _connection, _message: self.hello(),
            p.PREFILL.opcode: self._prefill,
            p.DECODE.opcode: self._decode,
            p.GENERATE.opcode: self._generate,
            p.CANCEL.opcode: self._cancel,
            p.LOAD.opcode: lambda _connection, _message: self.load(),
            p.SET_ROLE.opcode: self._set_role,
            p.DRAIN.opcode: self._drain,
            p.KV_OPEN.opcode: self._kv_open,
            p.KV_CLOSE.opcode: lambda _connection, message: self._receiving.sender_done(message),
            p.KV_LEND.opcode: lambda _connection, message: self.parts.keeping.lend(message),
            p.KV_RETURN.opcode: lambda _c, message: self.parts.keeping.give_back(message.fence),
            p.STAGE_OPEN.opcode: self._stage_open,
            p.STAGE_CHUNK.opcode: self._stage_chunk,
        }

    # Life.

    async def start(self) -> str:
        """Load the model, reach the pool, listen; return the address."""
        torch.set_num_threads(self.settings.threads)
        settings = self.settings
        self.model = load_model(
            settings.model, dtype=settings.dtype, device=settings.device, exact=settings.exact
        )
        decoder = self.model.decoder
        size = settings.kv_blocks, settings.block_tokens
        with torch.inference_mode():
            segment, memory_of_all = kv_segment(decoder.config, *size, decoder.device)
            cache = KVCache(decoder.config, *size, decoder.device, memory=memory_of_all)
        engine = Engine(
            decoder,
            cache,
            forms=Forms(self._vocabulary, decoder.config.vocabulary),
            chunk_tokens=settings.chunk_tokens,
            running_max=settings.running_max,
            step_tokens=settings.step_tokens,
        )
        self.card = model_card(self.model, settings.block_tokens)
        memory = KVMemory(cache)
        exchange = Exchange(segment, memory, settings, self._secret)
        loop = asyncio.get_running_loop()
        pool = PoolSide(
            settings.pool_url, settings.pool, self.card, memory,
            store_deadline_s=settings.store_deadline_ms / 1000,
        )  # fmt: skip
        keeping = Keeping(exchange, loop, settings)
        prefixes = Prefixes(pool.names, pool, keeping, exchange, loop, self._peer)
        telling = Telling(loop)
        computing = Computing(
            engine, lambda error: loop.call_soon_threadsafe(self._broken, error), telling.flush
        )
        self.parts = Parts(
            loop,
            telling,
            computing,
            pool,
            memory,
            exchange,
            keeping,
            Coming(),
            prefixes,
            pool.names,
            settings,
            self._over,
        )
        self._receiving = Receiving(self.parts)
        computing.start()
        self._server = Server(
            p.WORKER,
            self._handle,
            secret=self._secret,
            insecure=settings.insecure,
            limits=_LIMITS,
        )
        address = await self._server.listen(settings.host, settings.port)
        self._sweeper = loop.create_task(keep_going("saying that it is there", self._beat))
        return str(address)

    async def stop(self) -> None:
        """Fail what runs, put down what is being stored, close. Idempotent."""
        if self._server is None:
            return
        if self._sweeper is not None:
            self._sweeper.cancel()
        for request in list(self._active):
            request.fail("draining", "the worker stops", "send it elsewhere", retryable=True)
        self._receiving.close()
        server, self._server = self._server, None
        await server.stop(grace_s=1.0)
        await self._until_idle(10.0)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.parts.prefixes.close)
        await loop.run_in_executor(None, self.parts.pool.close)
        await loop.run_in_executor(None, self.parts.computing.stop)
        await loop.run_in_executor(None, self.parts.exchange.close)
        for peer in self._peers.values():
            await peer.close()

    def _vocabulary(self) -> Vocabulary | None:
        """The bytes of the model's tokens, read by whoever asks for an answer in a form first."""
        return load_tokenizer(self.model.directory).vocabulary

    def _peer(self, address: str) -> WorkerClient:
        """The connection to another worker."""
        if address not in self._peers:
            self._peers[address] = WorkerClient(address, secret=self._secret)
        return self._peers[address]

    # Answering.

    def _handle(self, connection: Connection, frame: Frame) -> Reply | Awaitable[Reply]:
        """Answer a request. Events of those that are taken come as answers to `listen`."""
        operation = p.WORKER.by_opcode[frame.opcode]
        if operation in (p.LISTEN, p.FOLLOW_KEPT):
            follow = self._listen if operation is p.LISTEN else self.parts.keeping.follow
            follow(connection, frame)
            return None
        message = operation.request.unpack(frame.body)
        answer = self._handlers[frame.opcode](connection, message)
        if asyncio.iscoroutine(answer):
            return _packed_later(operation, answer)
        return _packed(operation, answer)

    def hello(self) -> p.Hello:
        """Who this is."""
        settings, engine = self.settings, self.parts.computing.engine
        return p.Hello(
            settings.worker_id, self.role, os.getpid(), self.card, settings.pool_url,
            engine.cache.blocks, engine.running_max, settings.queued_tokens_max,
            engine.chunk_most,
        )  # fmt: skip

    def takes(self, role: str) -> bool:
        """Whether it takes requests of a role now."""
        return self.role in (role, p.COUPLED_ROLE)

    def load(self) -> p.Load:
        """How busy it is. Raises UnavailableError when a part of it cannot go on."""
        parts, computing, pool = self.parts, self.parts.computing, self.parts.pool
        sound = (each.sound for each in (computing, pool, parts.prefixes, parts.exchange))
        if not all(sound):
            raise UnavailableError(
                "a thread of the worker cannot go on", operation="load",
                advice="its log says why; start it anew",
            )  # fmt: skip
        engine = computing.engine
        return p.Load(
            role=self.role,
            draining=self.draining,
            queued=len(engine.waiting) + len(engine.opened),
            running=len(engine.running),
            kv_blocks=engine.cache.blocks,
            kv_blocks_used=engine.cache.used,
            tbt_s=computing.tbt_s,
            steps=tuple(computing.steps),
            pending_puts=pool.pending,
        )

    def _listen(self, connection: Connection, asked: Frame) -> None:
        owned = self._owned(connection)
        if owned.news is not None:
            raise InvalidArgumentError("this connection listens already")
        news = owned.news = News(self.parts.loop, connection, asked)
        self._listeners[connection] = news
        connection.on_close(partial(self._listeners.__delitem__, connection))

    def _cancel(self, _connection: Connection, message: p.Cancel) -> None:
        job = self._jobs.get(message.request_id)
        if job is not None:
            job.fail("cancelled", "it was cancelled")

    # Requests.

    def _prefill(self, connection: Connection, message: p.Prefill) -> None:
        if self._refused(connection, message, p.PREFILL_ROLE, message.max_new_tokens):
            return
        # One chunk would only pass through the stages one after the other.
        whole = 4 * self.parts.computing.engine.chunk_tokens
        group = message.group if len(message.tokens) > whole else ()
        if group:
            peers = [self._peer(address) for address in group]
            request: Prefilling = Leading(self.parts, message, peers, self.card.revision)
        else:
            request = Prefilling(self.parts, message)
        self._admit(connection, request)
        if message.decode_at:
            self._spawn(self._begin_pushing(request, message, 1 + len(group)))
        else:
            request.begin()

    async def _begin_pushing(self, request: Prefilling, message: p.Prefill, senders: int) -> None:
        """Ask the decode worker for room, then start the request; fail it without."""
        pusher = request.pusher_to(self._peer(message.decode_at))
        try:
            opened = await pusher.open(
                len(request.prompt), senders=senders, max_new_tokens=message.max_new_tokens,
                card=self.card,
            )  # fmt: skip
            if opened.room is not None:
                await pusher.reach(opened.room)
        except (StoreError, OSError) as error:
            pusher.abort()
            request.lose_peer(
                f"the decode worker {message.decode_at}: {error}", "choose another decode worker"
            )
            return
        if opened.room is None:
            request.fail(
                "overloaded", f"the decode worker {message.decode_at} has no room: {opened.reason}",
                f"ask again in {opened.retry_after_ms} ms, or choose another", retryable=True,
            )  # fmt: skip
            return
        if request.ended:
            pusher.abort()  # It was cancelled meanwhile: the room is not needed.
            return
        request.pusher = pusher
        request.begin()

    def _generate(self, connection: Connection, message: p.Generate) -> None:
        if not self._refused(connection, message, "", message.max_new_tokens):
            request = Generating(self.parts, message)
            self._admit(connection, request)
            request.begin()

    def _decode(self, connection: Connection, message: p.Decode) -> None:
        if self._refused(connection, message, p.DECODE_ROLE, message.max_new_tokens):
            return
        incoming = self._receiving.take(message.request_id) if message.kv.pushed else None
        request = Decoding(self.parts, message, incoming)
        self._admit(connection, request)
        request.begin()

    def _refused(
        self, connection: Connection, message: Any, role: str, max_new_tokens: int
    ) -> bool:
        """Answer what this worker does not take with a failure; whether it did."""
        news = self._owned(connection).news
        if news is None:
            raise InvalidArgumentError(
                "nobody would be told of it", advice="listen on this connection first"
            )
        problem = self._problem(message, role, max_new_tokens)
        if problem is None:
            return False
        news.add(message.request_id, problem)
        return True

    def _problem(self, message: Any, role: str, max_new_tokens: int) -> p.Failed | None:
        """Why a request is not taken, None if it is."""
        if message.request_id in self._jobs:
            raise InvalidArgumentError(f"request {message.request_id} exists already")
        tokens = p.unpack_tokens(message.tokens)
        total = len(tokens) + max_new_tokens
        engine = self.parts.computing.engine
        if self.draining:
            return p.Failed("draining", "this worker takes nothing new", "ask another", True)
        if role and not self.takes(role):
            return p.Failed("wrong_role", f"this is a {self.role} worker", "ask another", True)
        known = range(self.card.vocabulary)
        banned = all(token in known for token in message.sampling.banned)
        if max_new_tokens < 1 or tokens.max() not in known or not banned:
            return p.Failed(
                "bad_request", f"max_new_tokens is {max_new_tokens}, and tokens must be below "
                f"{self.card.vocabulary}", "use the tokenizer of this model",
            )  # fmt: skip
        if total > self.card.context_max or engine.cache.needed(total) > engine.cache.blocks:
            limit = min(self.card.context_max, engine.cache.blocks * engine.cache.block_tokens)
            return p.Failed(
                "too_long", f"{len(tokens)} tokens and {max_new_tokens} to come are above {limit}",
                "shorten the prompt, or ask for fewer tokens",
            )  # fmt: skip
        try:
            if message.sampling.form and engine.forms is not None:
                engine.forms.check(message.sampling.form)
        except StoreError as error:
            return p.Failed("bad_request", f"the form of the answer: {error}")
        queued = engine.queued_tokens
        if role != p.DECODE_ROLE and queued + len(tokens) > self.settings.queued_tokens_max:
            return p.Failed(
                "overloaded", f"{queued} tokens wait here already", "ask another, or later", True
            )
        return None

    def _admit(self, connection: Connection, job: Job) -> None:
        """Count a request in; its connection answers for it."""
        owned = self._owned(connection)
        assert owned.news is not None, "`_refused` looked"

        def ended(job: Job) -> None:
            del self._jobs[job.request_id]
            owned.jobs.discard(job)

        self._active.add(job)
        self._idle.clear()
        self._jobs[job.request_id] = job
        owned.jobs.add(job)
        job.told_to(owned.news, ended)

    def _owned(self, connection: Connection) -> Owned:
        """What ends with a connection."""
        if connection.context is None:
            connection.context = Owned()
            connection.on_close(partial(self._gone, connection.context))
        owned: Owned = connection.context
        return owned

    def _gone(self, owned: Owned) -> None:
        """Whoever asked is gone: end its requests, and what it was pushing."""
        for job in list(owned.jobs):
            job.fail("cancelled", "the connection of its reader ended")
        self._receiving.sender_gone(owned.incoming)

    def _over(self, request: Job) -> None:
        """A request has given everything back."""
        self._active.discard(request)
        tag = p.request_tag(request.request_id)
        if self._stages.get(tag) is request:
            del self._stages[tag]
        if not self._active:
            self._idle.set()

    def _broken(self, error: Exception) -> None:
        """A step raised: which request it was about cannot be known, so all of them fail."""
        for request in list(self._active):
            request.fail(
                "internal", f"the engine failed: {error}", "see the log of the worker",
                retryable=True,
            )  # fmt: skip

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        """Tell all that listen that this worker is there; end those that take nothing."""
        await asyncio.sleep(p.BEAT_S)
        for connection, news in list(self._listeners.items()):
            if news.stuck_s > p.ABANDONED_S:
                log.warning("%s took nothing for %g s", connection.peer, p.ABANDONED_S)
                connection.close()
            else:
                news.beat(p.BEAT_S / 2)
        self.parts.keeping.beat()

    # What other workers bring.

    async def _kv_open(self, connection: Connection, message: p.KVOpen) -> p.KVOpened:
        own = self.card.revision, self.card.layout
        if (message.revision, message.layout) != own:
            raise InvalidArgumentError(
                f"KV of model {message.revision}, laid out as {message.layout}, does not fit "
                f"{self.card.revision}, {self.card.layout}",
                advice="send requests among workers with one model and the same settings",
            )
        if self.draining or not self.takes(p.DECODE_ROLE):
            return p.KVOpened(None, "it takes no decodes now", 1000)
        return await self._receiving.open(message, self._owned(connection).incoming)

    def _stage_open(self, connection: Connection, message: p.StageOpen) -> None:
        stage = None
        try:
            stage = self._stage(connection, message)
        finally:
            if stage is None and message.room is not None:
                self._spawn(self._push_nothing(message))
        if stage is None:
            return
        if message.room is not None:
            pusher = stage.pusher_to(self._peer(message.decode_at))
            self._spawn(self._begin_stage(stage, pusher, message.room))
        else:
            stage.begin()

    def _stage(self, connection: Connection, message: p.StageOpen) -> Stage | None:
        """Admit a stage; None if it was refused."""
        if self._refused(connection, message, p.PREFILL_ROLE, 1):
            return None
        own = (self.card.revision, self.parts.computing.engine.chunk_tokens)
        share = 0 < message.stage < message.stages <= self.card.layers
        if (message.revision, message.chunk_tokens) != own or not share:
            raise InvalidArgumentError(
                "stages of one prompt must have one model and one size of chunks",
                advice="start all workers of a group with the same settings",
            )
        following = self._peer(message.following) if message.following else None
        stage = Stage(self.parts, message, following)
        self._stages[p.request_tag(message.request_id)] = stage
        self._admit(connection, stage)
        return stage

    async def _push_nothing(self, message: p.StageOpen) -> None:
        """Tell who waits for KV of a stage that none comes from here; unheard, it waits longer."""
        with contextlib.suppress(StoreError, OSError):
            close = p.KVClose(message.request_id, abort=True)
            await self._peer(message.decode_at).kv_close(close)

    async def _begin_stage(self, stage: Stage, pusher: Pusher, room: p.Room) -> None:
        """Find the way to where its KV goes, then start it; fail it without."""
        try:
            await pusher.reach(room)
        except (StoreError, OSError) as error:
            pusher.abort()
            stage.lose_peer(f"the decode worker: {error}", "choose another decode worker")
            return
        if stage.ended:
            pusher.abort()
            return
        stage.pusher = pusher
        stage.begin()

    def _stage_chunk(self, _connection: Connection, message: Any) -> None:
        stage = self._stages.get(bytes(message.request))
        if stage is None or stage.ended:
            raise NotFoundError("no such stage is open here", advice="its request ended")
        stage.take(message)

    # Roles.

    async def _until_idle(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _set_role(self, _connection: Connection, message: p.SetRole) -> None:
        if message.role not in p.ROLES:
            raise InvalidArgumentError(
                f"there is no role {message.role!r}", advice=f"one of {', '.join(p.ROLES)}"
            )
        if message.role == self.role:
            return
        await self._drained(message.drain_ms)
        self.role = message.role
        self.draining = False
        log.info("%s is a %s worker now", self.settings.worker_id, self.role)

    async def _drain(self, _connection: Connection, message: p.Drain) -> None:
        if message.resume:
            self.draining = False
        else:
            await self._drained(message.drain_ms)

    async def _drained(self, drain_ms: int) -> None:
        """Take nothing new until nothing runs; on failure take requests again.

        That whoever asked is gone is a failure, too: nobody would let it take requests again.
        """
        self.draining, idle = True, False
        try:
            idle = await self._until_idle(drain_ms / 1000) and not self._receiving.expected
        finally:
            self.draining = idle
        if not idle:
            raise TransferTimeoutError(
                f"{len(self._active)} requests still run",
                elapsed_s=drain_ms / 1000,
                advice="allow more time, or cancel them",
            )


def _packed(operation: Any, answer: Any) -> bytes:
    """The body of a reply; handlers that have nothing to say return None."""
    if isinstance(operation.reply, Packed):
        return bytes(operation.reply.pack())
    body: bytes = operation.reply.pack(p.Ok() if answer is None else answer)
    return body


async def _packed_later(operation: Any, answer: Awaitable[Any]) -> bytes:
    return _packed(operation, await answer)


def model_card(model: LoadedModel, block_tokens: int) -> p.ModelCard:
    """What a worker says of its model."""
    config = model.config
    arithmetic = "exact" if model.decoder.exact else "fast"
    return p.ModelCard(
        name=config.name,
        revision=model.revision,
        dtype=config.dtype,
        layout=f"{block_tokens}x{config.kv_heads}x{config.head_dim}/{arithmetic}",
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocabulary,
        context_max=config.context_max,
        block_tokens=block_tokens,
        kv_bytes_per_token=config.kv_bytes_per_token,
        eos=config.eos,
        directory=model.directory,
    )
