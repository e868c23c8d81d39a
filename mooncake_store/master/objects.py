"""Objects by their keys: puts, gets, leases, pins, removal and renames.

What every client does all day is answered at once: views of the request go into the core, and
arrays of the core become the reply. Only a put that found no space waits (`pending`). Replica
offsets leave here relative to the whole segment, while the core counts within its slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.names import Names
from mooncake_store.core.options import DEFAULTS, HintAction, SoftPin, StartOptions
from mooncake_store.core.records import Status
from mooncake_store.master.answers import Answer, answers
from mooncake_store.master.bounds import GROUP_BYTES_MAX
from mooncake_store.master.granting import Granting
from mooncake_store.master.pending import Put
from mooncake_store.master.site import wait_max_ms
from mooncake_store.master.words import words
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire import shard as wire
from mooncake_store.wire.shard import PutFlag, RemoveFlag
from transfer_engine.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.master.clients import Peer
    from mooncake_store.master.site import Site
    from transfer_engine.wire.schema import Ragged

__all__ = ["Objects"]

_SOFT_PINS = {1: SoftPin.ENABLE, 2: SoftPin.DISABLE}
_HINTS = frozenset(HintAction)
_NO_RECEIPTS = np.empty(0, np.int64)


class Objects:
    """Answers what is asked of keys."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._shard = site.shard
        self._now = site.now
        self._granting = Granting(site)

    @answers(
        wire.PUT_START,
        keys="digests",
        routed=("digests",),
        changes=True,
        begun="digests",
        waits=True,
    )
    def put_start(self, peer: Peer, request: Any, deadline_ms: int) -> Answer:
        """Begin objects; where there is no space, wait for it."""
        site, options = self._site, _options_of(request)
        if site.quiet:  # as if it could not be reached, since nothing of it was done
            raise UnavailableError("this shard is split or merged", operation=wire.OPEN.name)
        upsert = bool(request.flags & PutFlag.UPSERT)
        names = _names_of(request.names)
        keys = request.digests, request.sizes, names
        asked = peer.handle, peer.tenant, *keys, options, request.number
        # Groups for some keys only are refused where a put begins.
        if request.flags & PutFlag.AGAIN and len(request.groups) in (0, len(request.digests)):
            rows, replicas = site.puts.ask_again(Put(*asked, upsert))
        else:
            start = self._shard.upsert_start if upsert else self._shard.put_start
            rows, replicas = start(self._now(), *asked)
        patient = request.wait_ms and not site.stopped
        # With one replica each there are as many as accepted keys: nobody has to look.
        refused = len(replicas) < len(rows) or options.replicas > 1
        if refused and patient and (rows["status"] == Status.NO_SPACE).any():
            wait_ms = wait_max_ms(request.wait_ms, deadline_ms)
            return self._wait_for_space(peer, Put(*asked, upsert), rows, replicas, wait_ms)
        return self._placed(peer, request.digests, rows, replicas)

    async def _wait_for_space(
        self, peer: Peer, put: Put, rows: NDArray[Any], replicas: NDArray[Any], wait_ms: int
    ) -> Answer:
        placed = await self._site.puts.wait(put, rows, replicas, wait_ms * MILLISECOND_NS)
        return self._placed(peer, put.digests, *placed)

    def _placed(
        self,
        peer: Peer,
        digests: NDArray[np.uint64],
        rows: NDArray[Any],
        replicas: NDArray[Any],
    ) -> Answer:
        if peer.account is not None:
            peer.account.check_statuses(peer.address, rows["status"], wire.PUT_START.name)
        replicas = self._site.in_segments(replicas)
        if peer.asked:
            told = self._granting.to_write(peer, digests, rows, replicas)
        else:
            told = words(replicas)
        return {"rows": rows.view(np.uint64), "replicas": told}

    @answers(wire.PUT_END, keys="digests", changes=True)
    def put_end(self, peer: Peer, request: Any) -> Answer:
        """Make written objects readable."""
        digests, generations, checksums = request
        if peer.asked:
            statuses = self._granting.put_end(peer, digests, generations, checksums, _NO_RECEIPTS)
        else:
            statuses = self._shard.put_end(
                self._now(), peer.handle, digests, generations, checksums
            )
        return {"statuses": statuses}

    @answers(wire.PUT_END_SHOWN, keys="digests", changes=True)
    def put_end_shown(self, peer: Peer, request: Any) -> Answer:
        """Make objects readable whose owners have answered that they were written."""
        if peer.asked:
            return {"statuses": self._granting.put_end(peer, *request)}
        return self.put_end(peer, request[:3])

    @answers(wire.PUT_REVOKE, keys="digests", changes=True)
    def put_revoke(self, peer: Peer, request: Any) -> Answer:
        """Give up unfinished puts."""
        late, digests, generations = request
        late = bool(late) or peer.asked
        return {
            "statuses": self._shard.put_revoke(
                self._now(), peer.handle, digests, generations, late=late
            )
        }

    @answers(wire.GET, keys="digests")
    def get(self, peer: Peer, request: Any) -> Answer:
        """Say where objects are, and lease them."""
        ttl_ms, _, digests = request
        ttl_ns = self._site.lease_ns(ttl_ms)
        rows, replicas = self._shard.get(self._now(), peer.handle, digests, ttl_ns)
        replicas = self._site.in_segments(replicas)
        if peer.asked:
            told = self._granting.to_read(peer, digests, rows, replicas)
        else:
            told = words(replicas)
        return {"rows": words(rows), "replicas": told}

    @answers(wire.EXISTS, keys="digests")
    def exists(self, peer: Peer, request: Any) -> Answer:
        """Say which objects can be read."""
        return {"present": self._shard.exists(self._now(), request.digests).view(np.uint8)}

    @answers(wire.FIND_PREFIX, keys="digests")
    def find_prefix(self, peer: Peer, request: Any) -> Answer:
        """Say how many keys from the first one on can be read."""
        return {"length": self._shard.find_prefix(self._now(), request.digests)}

    @answers(wire.RENEW, keys="digests")
    def renew(self, peer: Peer, request: Any) -> Answer:
        """Prolong leases of the asking client."""
        ttl_ms, digests, generations = request
        statuses, remaining = self._shard.renew(
            self._now(), peer.handle, digests, generations, self._site.lease_ns(ttl_ms)
        )
        return {"statuses": statuses, "remaining_ns": remaining}

    @answers(wire.RELEASE, keys="digests")
    def release(self, peer: Peer, request: Any) -> Answer:
        """Take leases of the asking client back; what rights were given for runs to its end."""
        digests, generations = request
        if peer.asked:
            return {"statuses": np.zeros(len(digests), np.int16)}
        return {"statuses": self._shard.release(self._now(), peer.handle, digests, generations)}

    @answers(wire.REMOVE, keys="digests", changes=True)
    def remove(self, peer: Peer, request: Any) -> Answer:
        """Remove objects."""
        flags, digests = request
        force = bool(flags & RemoveFlag.FORCE)
        statuses = self._shard.remove(self._now(), digests, force, _reader(peer, flags))
        return {"statuses": _gone(statuses, flags)}

    @answers(wire.REMOVE_REPLICAS, keys="digests", changes=True)
    def remove_replicas(self, peer: Peer, request: Any) -> Answer:
        """Remove what lies on one segment."""
        flags, segment, digests = request
        client = _reader(peer, flags)
        statuses = self._shard.remove_replicas(self._now(), digests, segment, client)
        return {"statuses": _gone(statuses, flags)}

    @answers(
        wire.RENAME,
        keys="sources",
        routed=("sources", "targets"),
        changes=True,
        begun="targets",
    )
    def rename(self, peer: Peer, request: Any) -> Answer:
        """Give objects other keys."""
        overwrite, flags, sources, targets, names = request
        force = bool(flags & RemoveFlag.FORCE)
        wishes = _names_of(names), bool(overwrite), force, _reader(peer, flags)
        return {"statuses": self._shard.rename(self._now(), sources, targets, *wishes)}

    @answers(wire.PIN, keys="digests", changes=True)
    def pin(self, peer: Peer, request: Any) -> Answer:
        """Change soft and hard pins; the first refusal of a key is its status."""
        soft, hard, ttl_ms, digests = request
        if soft not in (0, 1, 2) or hard not in (-1, 0, 1):
            raise InvalidArgumentError(f"pin {soft}, {hard}: use 0 to 2 and -1 to 1")
        now = self._now()
        statuses = np.zeros(len(digests), np.int16)
        if soft:
            ttl_ns = None if ttl_ms < 0 else ttl_ms * MILLISECOND_NS
            statuses = self._shard.pin(now, digests, _SOFT_PINS[soft], ttl_ns)
        if hard >= 0:
            further = self._shard.set_hard_pin(now, digests, bool(hard), peer.handle)
            statuses = np.where(statuses == 0, further, statuses)
        if peer.account is not None:
            peer.account.check_statuses(peer.address, statuses, wire.PIN.name)
        return {"statuses": statuses}

    @answers(wire.HINT, keys="digests", changes=True)
    def hint(self, peer: Peer, request: Any) -> Answer:
        """Take a hint of objects of the asking namespace."""
        action, priority, ttl_ms, digests = request
        if action not in _HINTS:
            raise InvalidArgumentError(f"hint {action}: use 0 to {max(_HINTS)}")
        ttl_ns = None if ttl_ms < 0 else ttl_ms * MILLISECOND_NS
        wish = HintAction(action), priority, ttl_ns
        return {"statuses": self._shard.hint(self._now(), peer.tenant, digests, *wish)}


def _reader(peer: Peer, flags: int) -> int:
    """Whose leases do not stand in the way."""
    return peer.handle if flags & RemoveFlag.OWN_LEASES else 0


def _gone(statuses: NDArray[np.int16], flags: int) -> NDArray[np.int16]:
    """Take what is not there for removed where the request was sent before: by that, it may be."""
    if flags & RemoveFlag.AGAIN:
        statuses[np.isin(statuses, (Status.NOT_FOUND, Status.REPLICA_NOT_FOUND))] = Status.OK
    return statuses


def _names_of(names: Ragged) -> Names | None:
    """Take the names of a request as the core does; None when none came."""
    if not len(names.blob):
        return None
    offsets = names.offsets
    return Names(memoryview(names.blob), offsets[1:] - offsets[:-1])


def _options_of(request: Any) -> StartOptions:
    """Read the options of a put. Raises InvalidArgumentError for what does not exist."""
    hard_pin = bool(request.flags & PutFlag.HARD_PIN)
    named = len(request.groups) or len(request.preferred) or len(request.excluded)
    once = request.replicas == request.replicas_min == 1
    if once and not (hard_pin or named or request.soft_pin):
        return DEFAULTS  # what most puts ask for is not composed each time
    try:
        return StartOptions(
            replicas=request.replicas,
            replicas_min=request.replicas_min,
            soft_pin=SoftPin(request.soft_pin),
            soft_pin_ttl_ns=(
                None if request.soft_pin_ttl_ms < 0 else request.soft_pin_ttl_ms * MILLISECOND_NS
            ),
            hard_pin=hard_pin,
            preferred=_texts(request.preferred),
            excluded=_texts(request.excluded),
            groups=_groups_of(request.groups),
        )
    except ValueError as error:
        raise InvalidArgumentError(f"an option of the put is unknown: {error}") from error


def _groups_of(column: Ragged) -> tuple[str, ...] | None:
    longest = int(np.diff(column.offsets).max(initial=0))
    if longest > GROUP_BYTES_MAX:
        raise InvalidArgumentError(
            f"the name of a group has {longest} bytes, at most {GROUP_BYTES_MAX} are taken",
            advice="use a shorter one, such as a digest of it",
        )
    return _texts(column) or None


def _texts(column: Ragged) -> tuple[str, ...]:
    return tuple(text.decode() for text in column) if len(column) else ()
