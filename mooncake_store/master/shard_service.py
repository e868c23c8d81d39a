"""The service of one shard: requests in columns, one core call each, replies in columns.

    service = ShardService(Shard(config), ShardPlace(0, 1), times, clock)
    server = Server(SHARD, service.handle)
    service.start()

What answers an operation is declared beside its handler (`answers`): keys in `objects`, listings
and totals in `contents`, events in `following`, copies in `copying`. A tick every 10 ms does a
bounded share of the core's duties; the next one is scheduled when it is done, so ticks never pile
up behind a long request.

A connection speaks for one client and one tenant, named by its first request.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mooncake_store.master.answers import AnswerTable
from mooncake_store.master.bounds import NEW_NAMESPACES_OF_READERS_MAX, check_label
from mooncake_store.master.clients import Peer
from mooncake_store.master.contents import Contents
from mooncake_store.master.copying import Copying
from mooncake_store.master.following import Following
from mooncake_store.master.objects import Objects
from mooncake_store.master.overseeing import Overseeing
from mooncake_store.master.shipping import Shipping
from mooncake_store.master.site import ShardPlace, ShardTimes, Site
from mooncake_store.program.about import about
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire import shard as wire
from mooncake_store.wire.about import ABOUT
from mooncake_store.wire.standby import JOURNAL
from transfer_engine.errors import (
    InvalidArgumentError,
    RemoteProtocolError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from mooncake_store.clock import Clock
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.accounts import Account
    from mooncake_store.master.keeping import Keeper
    from mooncake_store.program.fence import Fence
    from transfer_engine.rpc.serving import Connection, Reply
    from transfer_engine.wire.frame import Frame

__all__ = ["ShardService"]

log = logging.getLogger(__name__)

TICK_S = 0.010
IDLE_TICK_S = 0.050


class ShardService:
    """Answers the requests of one shard; belongs to one event loop."""

    def __init__(
        self,
        shard: Shard,
        place: ShardPlace,
        times: ShardTimes,
        clock: Clock,
        keeper: Keeper | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._fence = fence
        self.site = site = Site(shard, place, times, clock, keeper)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seen = 0  # requests up to the last tick
        self._of_readers = 0  # namespaces that readers named first
        self._timer: asyncio.TimerHandle | None = None
        nouns = (
            Objects(site), Contents(site), Following(site), Copying(site), Overseeing(site),
        )  # fmt: skip
        self._table = AnswerTable(site, nouns)
        self.shipping = Shipping(site)

    def start(self) -> None:
        """Begin to tick."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Tick no more and let nobody wait any longer. Idempotent."""
        self.site.stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.site.puts.give_up()
        self.site.followers.give_up()
        if self.site.keeper is not None:
            self.site.keeper.counting.attendance.give_up()
        self.shipping.give_up()

    def close(self) -> None:
        """Have all that the shard has written down brought to files, on this thread. Idempotent."""
        if self.site.keeper is not None:
            self.site.keeper.close()

    def _tick(self) -> None:
        site = self.site
        try:
            if not site.yielded:
                self._do_duties(site.now())
        except Exception as error:
            # A broken invariant: whoever started this shard has to end it, loudly.
            log.exception("shard %d failed", site.place.shard)
            if not self.failure.done():
                self.failure.set_exception(error)
            return
        # Nobody notices that a shard which nobody uses expires things a little later.
        idle = site.requests == self._seen and site.puts.empty and site.followers.empty
        self._seen = site.requests
        delay_s = IDLE_TICK_S if idle else TICK_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _do_duties(self, now: int) -> None:
        site = self.site
        site.shard.tick(now)
        site.puts.retry(now)
        site.clients.expire(now)
        if not site.followers.empty:
            site.followers.wake(site.shard.events.next_number)

    def handle(self, connection: Connection, frame: Frame) -> Reply | Awaitable[Reply]:
        """Answer one request."""
        if self._fence is not None:
            self._fence.check()
        self.site.requests += 1
        if self.site.yielded and frame.opcode != JOURNAL.opcode:
            self.site.check_led()
        peer = connection.context
        if peer is None:
            if frame.opcode == ABOUT.opcode:  # nor is who only looks
                ABOUT.request.unpack(frame.body)
                return ABOUT.reply.pack(about())
            if frame.opcode == JOURNAL.opcode:  # a standby is no client
                return self.shipping.answer(connection, frame)
            return self._open(connection, frame)
        answer = self._table.answer(peer, frame)
        if answer is None:
            raise RemoteProtocolError(
                "this connection is open already",
                advice="open another connection to speak for another client or namespace",
            )
        return answer

    def _open(self, connection: Connection, frame: Frame) -> bytes:
        site = self.site
        if frame.opcode != wire.OPEN.opcode:
            raise RemoteProtocolError(
                "the first request on a connection must be open",
                advice="send open with uuid, epoch, host and namespace",
            )
        request = wire.OPEN.request.unpack(frame.body)
        if len(request.uuid) != 16:
            raise InvalidArgumentError(f"a client uuid has 16 bytes, not {len(request.uuid)}")
        check_label("host", request.host)
        namespace, rights = request.namespace or "default", connection.session.rights
        rights.check_namespace(namespace, wire.OPEN.name, connection.peer)
        account = site.accounts.admit(rights, request.uuid, connection.peer)
        tenant = self._tenant(namespace, connection, account)
        address = connection.peer.rpartition(":")[0]
        run = site.clients.enroll(site.now(), request.uuid, request.epoch, request.host, address)
        site.clients.connect(run, connection, rights.principal)
        if account is not None:
            connection.on_close(account.connect(run.uuid, run.handle), stays=False)
        connection.context = Peer(
            run.handle,
            tenant,
            confined=bool(rights.namespaces),
            who=rights.who,
            asked=rights.asked,
            namespaces=rights.namespaces,
            address=connection.peer,
            account=account,
        )
        connection.on_close(
            lambda: site.clients.disconnect(site.now(), run, connection), stays=False
        )
        return wire.OPEN.reply.pack(
            wire.Opened(
                site.place.shard,
                site.place.shards,
                site.times.lease_ttl_ns // MILLISECOND_NS,
                site.times.lease_ttl_max_ns // MILLISECOND_NS,
                wire.BATCH_MAX,
                connection.context.asked,
            )
        )

    def _tenant(self, namespace: str, connection: Connection, account: Account | None) -> int:
        """Return the number of a namespace, which may be new; refuse one too many."""
        check_label("namespace", namespace)
        shard, read_only = self.site.shard, connection.session.read_only
        new = namespace not in shard.tenants
        if new and account is not None:
            account.check_name(connection.peer)
        few = not read_only or self._of_readers < NEW_NAMESPACES_OF_READERS_MAX
        tenant = shard.tenant(namespace) if few or not new else -1
        if tenant < 0:
            raise UnavailableError(
                "the shard knows too many namespaces", advice="use one that it knows"
            )
        self._of_readers += new and read_only
        if new and account is not None:
            account.named()
        return tenant
