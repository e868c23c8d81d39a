"""The workers of a conductor: connections, who is there, what they report.

A member is asked for its load a few times a second. One that does not answer leaves the ledger, so
nothing new is placed there; it is asked on and joins again when it answers, with whatever role it
then has. Requests on it notice for themselves. All members serve the same model, by its content;
another one is refused when it joins.

What members report goes to the cost models, and which blocks they keep to the index. `changed`
wakes those who wait for an instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mooncake_store.errors import ConfigError, StoreError
from mooncake_store.program.logs import StateLog
from serving.scheduling.ledger import COUPLED, PREFILL, Instance
from serving.workers.naming import split
from transfer_engine.lasting import keep_going

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.scheduling.index import PrefixIndex
    from serving.scheduling.scheduler import Scheduler
    from serving.workers.client import WorkerClient
    from serving.workers.protocol import Held, Hello, Load, ModelCard

__all__ = ["Fleet", "Member"]

log = logging.getLogger(__name__)

POLL_S = 0.25
ANSWER_S = 3.0
"""A worker that does not say how busy it is for this long is given nothing new."""
CHANGES_MAX = 8


@dataclass(slots=True)
class Member:
    """One worker: who it said it is, and how busy it said it was last."""

    address: str
    client: WorkerClient
    hello: Hello
    heard: float
    """When it last answered."""
    load: Load | None = None
    there: bool = True
    changing: bool = False
    changes: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    """When it took another role, and which; the last ones."""
    watching: list[asyncio.Task[None]] = field(default_factory=list, repr=False)


class Fleet:
    """The members by address; belongs to one event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        index: PrefixIndex,
        connect: Callable[[str], WorkerClient],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._index = index
        self._connect = connect
        self._clock = clock
        self._states = StateLog(log)
        self._changed = asyncio.Event()
        self.members: dict[str, Member] = {}
        self.card: ModelCard | None = None

    async def join(self, address: str) -> Hello:
        """Take a worker in. Raises what keeps it from answering, or ConfigError."""
        client = self._connect(address)
        try:
            hello = await client.hello()
            self._check_model(address, hello)
        except BaseException:
            await client.close()
            raise
        await self.leave(address)
        member = Member(address, client, hello, self._clock())
        self.members[address] = member
        self._enter(member, hello)
        for what, turn in (("load", self._watch), ("blocks", self._follow)):
            going = keep_going(f"watching {hello.worker_id}'s {what}", partial(turn, member))
            task = asyncio.get_running_loop().create_task(
                going, name=f"conductor-{what}-{hello.worker_id}"
            )
            member.watching.append(task)
        return hello

    def _check_model(self, address: str, hello: Hello) -> None:
        if self.card is None:
            self.card = hello.model
        elif hello.model.revision != self.card.revision or hello.model.dtype != self.card.dtype:
            raise ConfigError(
                f"the worker at {address} serves {hello.model.name} "
                f"({hello.model.revision}, {hello.model.dtype}), the others "
                f"{self.card.name} ({self.card.revision}, {self.card.dtype})",
                advice="start it with the same model",
            )

    def _enter(self, member: Member, hello: Hello) -> None:
        if hello.role != member.hello.role:
            member.changes.append((self._clock(), hello.role))
        member.hello = hello
        tokens = hello.kv_blocks * hello.model.block_tokens
        self._scheduler.costs.kv_bytes = hello.model.kv_bytes_per_token
        chunk = hello.chunk_tokens if hello.role == COUPLED else 0
        instance = Instance(member.address, hello.role, tokens, chunk_tokens=chunk)
        self._scheduler.ledger.join(instance)
        self._states.change(hello.worker_id, "there", f"{hello.role} at {member.address}")
        self.wake()

    async def leave(self, address: str) -> None:
        """Let a worker go, if it is a member."""
        member = self.members.pop(address, None)
        if member is None:
            return
        self._scheduler.ledger.leave(address)
        self._states.forget(member.hello.worker_id)
        for task in member.watching:
            task.cancel()
        await asyncio.gather(*member.watching, return_exceptions=True)
        await member.client.close()
        self.wake()

    async def close(self) -> None:
        """Let all of them go. Idempotent."""
        for address in list(self.members):
            await self.leave(address)

    def wake(self) -> None:
        """Somebody came or went: let those look who wait for an instance."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when somebody came or went, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def lost(self, address: str, why: object) -> None:
        """A worker failed a request or a question: nothing new goes there until it answers."""
        member = self.members.get(address)
        if member is None or not member.there:
            return
        member.there = False
        self._scheduler.ledger.leave(address)
        self._states.change(member.hello.worker_id, "lost", str(why), logging.WARNING)
        self.wake()

    async def _watch(self, member: Member) -> None:
        """Ask a member once, after a pause."""
        await asyncio.sleep(POLL_S)
        if member.changing:
            return
        try:
            load = await member.client.load(ANSWER_S)
            if not member.there or load.role != member.hello.role:
                await self._meet_again(member)  # somebody else may have changed its role
            self._learn(member, load)
        except StoreError as error:
            self.lost(member.address, error)
        except Exception as error:
            self.lost(member.address, error)
            raise

    async def _follow(self, member: Member) -> None:
        """Keep the index in step with what a member keeps, for as long as it can be reached."""
        try:
            await member.client.follow_kept(partial(self._held, member.address))
        except StoreError as error:
            log.debug("what %s keeps is not known: %s", member.hello.worker_id, error)
        finally:
            self._index.forget(member.address)
        await asyncio.sleep(POLL_S)

    def _held(self, address: str, held: Held) -> None:
        if held.whole:
            self._index.forget(address)
        self._index.discard(address, split(held.removed))
        self._index.add(address, split(held.stored))

    async def _meet_again(self, member: Member) -> None:
        hello = await member.client.hello(ANSWER_S)
        self._check_model(member.address, hello)
        member.there = True
        self._enter(member, hello)

    def _learn(self, member: Member, load: Load) -> None:
        before, member.load, member.heard = member.load, load, self._clock()
        instance = self._scheduler.ledger.instances.get(member.address)
        if instance is not None:
            instance.usable = not load.draining
        stale = before is not None and before.steps == load.steps
        if load.role != PREFILL and load.steps and not stale:
            batch, chunk, seconds = load.steps[-1]
            views = self._scheduler.ledger.decode_views()
            tokens = next((view.tokens for view in views if view.name == member.address), 0)
            self._scheduler.costs.decode.observe(batch, tokens, seconds, chunk)

    async def change_role(self, address: str, role: str, drain_s: float) -> None:
        """Let a worker finish what it runs and take another role. Raises what it fails with."""
        member = self.members[address]
        instance = self._scheduler.ledger.instances.get(address)
        if member.hello.role == role or instance is None:
            return
        member.changing = True
        instance.usable = False
        try:
            await member.client.set_role(role, drain_s=drain_s)
            self._enter(member, await member.client.hello(ANSWER_S))
        finally:
            member.changing = False
            instance.usable = True
            self.wake()
