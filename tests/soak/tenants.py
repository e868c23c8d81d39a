"""What tenants may try on each other: rows of `tests.soak.abuse`, against the programs of a pool.

One has come to know digests, generations and names of another, and asks for everything that can be
asked of them. Readers give back what others have leased. Who chooses keys, or writes prompts, has
found two of them that meet in a digest that has no secret.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store import Digests
from mooncake_store.core.records import EVENT, Status
from mooncake_store.errors import AuthError
from mooncake_store.ids import shard_of
from mooncake_store.wire import shard as wire
from tests.hashing.meeting import meeting_keys, meeting_tokens
from tests.master.wires import digests
from tests.soak.insiders import SHARDS, Row, of_shard, refused

if TYPE_CHECKING:
    from mooncake_store import Client
    from tests.master.wires import ShardWire
    from tests.soak.insiders import Insider

__all__ = ["ROWS", "Known", "known"]

VALUE = b"of the owner" * 100
LONG_MS = 60_000
NOBODY_ELSES = np.array([[7, 7]], np.uint64)
BLOCK = 64


class Known:
    """An object of a shard, and all that its owner knows of it."""

    def __init__(self, owner: Client, shard: int = 0, value: bytes = VALUE) -> None:
        self.owner, self.value = owner, value
        names = [f"known {secrets.token_hex(4)}" for _ in range(64)]
        where = shard_of(owner.identity.digests(names), SHARDS)
        self.name = names[int(np.flatnonzero(where == shard)[0])]
        owner.put(self.name, value, preferred=["w"])
        self.digests = owner.identity.digests([self.name])

    def is_whole(self) -> bool:
        """Whether it is what its owner has put."""
        return bytes(self.owner.get(self.name)) == self.value

    def forget(self) -> None:
        """Remove it."""
        self.owner.remove(self.name, force=True)


def known(who: Insider, shard: int = 0, value: bytes = VALUE, **settings: object) -> Known:
    """An object of the namespace "mine", by a client with a credential for that alone."""
    return Known(who.pool.client("mine", "owner", **settings), shard, value)


def keys_of_others(who: Insider, count: int) -> float:
    """All that can be asked of a key, by who knows those of another namespace."""
    longest, one = 0.0, known(who)
    with one.owner, who.wires(secret=who.pool.tenant, namespace="other") as wires:
        shard = wires.shard()
        refused(lambda: wires.shard(namespace="mine"), AuthError)
        for _ in range(count):
            asked_of(shard, one)
        hidden_from(shard, one)
        longest = who.asks()
        assert one.is_whole(), "the object is another one"
        one.owner.put(one.name, one.value, upsert=True)
        assert one.is_whole()
        one.forget()
    return longest


def asked_of(shard: ShardWire, one: Known) -> None:
    """Ask for each thing once; all have to answer as for what is not there."""
    generation, zero = np.array([1], np.uint32), np.zeros(1, np.uint64)
    assert not shard.call(wire.EXISTS, digests=one.digests).present.any()
    assert not shard.call(wire.FIND_PREFIX, digests=one.digests).length
    got = shard.call(wire.GET, ttl_ms=LONG_MS, stop_at_miss=0, digests=one.digests)
    assert not got.replicas.any(), "it was told where the object is, or what"
    digest = one.digests[0].tobytes()
    assert not shard.cold(wire.STAT, wire.StatRequest(digest)).found
    task = shard.cold(wire.SUBMIT_TASK, wire.SubmitTask(0, digest, (0,)))
    assert task.status == Status.NOT_FOUND
    spare = np.array([[secrets.randbits(63), 1]], np.uint64)
    changes: tuple[tuple[Any, dict[str, Any]], ...] = (
        (wire.REMOVE, {"flags": wire.RemoveFlag.FORCE}),
        (wire.REMOVE_REPLICAS, {"flags": 0, "segment": 0}),
        (wire.PIN, {"soft_pin": 1, "hard_pin": 1, "ttl_ms": -1}),
        (wire.HINT, {"action": 3, "priority": 0, "ttl_ms": -1}),
        (wire.RELEASE, {"generations": generation}),
        (wire.RENEW, {"ttl_ms": LONG_MS, "generations": generation}),
        (wire.PUT_END, {"generations": generation, "checksums": zero}),
        (wire.PUT_REVOKE, {"late": 0, "generations": generation}),
    )
    for operation, more in changes:
        told = shard.call(operation, digests=one.digests, **more).statuses.tolist()
        nobody = shard.call(operation, digests=NOBODY_ELSES, **more).statuses.tolist()
        assert told == nobody, f"{operation.name} answers {told}, {nobody} where nothing is"
    wish = {"overwrite": 1, "flags": wire.RemoveFlag.FORCE, "names": [b"mine now"]}
    out = shard.call(wire.RENAME, sources=one.digests, targets=spare, **wish)
    assert out.statuses.tolist() == [Status.NOT_FOUND], "it was renamed"
    refused(lambda: shard.call(wire.RENAME, sources=spare, targets=one.digests, **wish), AuthError)
    for flags in 0, wire.PutFlag.UPSERT:
        begun = shard.put_request([b"mine now"], 100, flags=flags) | {"digests": one.digests}
        refused(lambda begun=begun: shard.call(wire.PUT_START, **begun), AuthError)


def hidden_from(shard: ShardWire, one: Known) -> None:
    """Look through all that is listed."""
    names = one.name.encode()
    assert names not in shard.list(limit=wire.BATCH_MAX)[1], "its name is listed"
    removal = wire.RemoveMatching(one.name, "prefix", force=True)
    assert shard.cold(wire.REMOVE_MATCHING, removal).removed == 0
    key = tuple(one.digests[0].tolist())
    shown = {tuple(each) for each in shard.call(wire.SNAPSHOT, cursor=0).digests.tolist()}
    assert key not in shown, "a snapshot has its digest"
    last = shard.stats().event_number
    first = max(1, last - 1000)
    _, events, _ = shard.events(first, limit=1000)
    told = {(int(each["digest_lo"]), int(each["digest_hi"])) for each in events.view(EVENT)}
    assert key not in told, "an event has its digest"


def leases_of_others(who: Insider, count: int) -> float:
    """Others who give back, and cut short, what somebody has leased."""
    with who.wires() as wires, who.wires(reads=True) as reading:
        (name,) = names = of_shard(0, secrets.token_hex(4).encode(), 1)
        writer, reader = wires.shard(), wires.shard()
        writer.put(names, 1000)
        rows, _ = reader.get(names, ttl_ms=LONG_MS)
        generations = np.ascontiguousarray(rows["generation"])
        for number in range(count):
            thief = (wires, reading)[number % 2].shard()
            keys = {"digests": digests(name), "generations": generations}
            thief.call(wire.RELEASE, **keys)
            thief.call(wire.RENEW, ttl_ms=1, **keys)
            thief.call(wire.RELEASE, **keys)
            thief.close()
        longest = who.asks()
        assert writer.remove(names) == [Status.HAS_LEASE], "somebody's lease was taken from him"
        reader.call(wire.RELEASE, digests=digests(name), generations=generations)
        assert writer.remove(names) == [Status.OK]
    return longest


def keys_that_meet(who: Insider, _: int) -> float:
    """Two printable keys that have one XXH3 in this namespace: each has its own bytes."""
    namespace, one, other = meeting_keys()
    with who.pool.client(namespace) as client:
        client.put(one, b"1")
        client.put(other, b"2")
        assert (client.get(one), client.get(other)) == (b"1", b"2")
        client.remove_many([one, other], force=True)
    return who.asks()


def tokens_that_meet(who: Insider, _: int) -> float:
    """A prompt whose block has the XXH3 of another one's: what follows it is not that one's."""
    tokens, crafted = meeting_tokens()
    with who.pool.client() as client:
        mine, others = (client.identity.hash_blocks(each, BLOCK) for each in (tokens, crafted))
        client.put_many(Digests(others), [b"of the attacker"] * len(others)).check()
        assert not any(client.exists_many(Digests(mine))), "a prompt of another has taken its place"
        client.put_many(Digests(mine), [b"of the victim"] * len(mine)).check()
        assert client.get_many(Digests(mine)).values == [b"of the victim"] * len(mine)
        client.remove_many(Digests(np.concatenate([mine, others])), force=True)
    return who.asks()


ROWS = (
    Row("keys of other tenants", 100, keys_of_others),
    Row("leases of others", 200, leases_of_others),
    Row("keys that meet", 1, keys_that_meet),
    Row("tokens that meet", 1, tokens_that_meet),
)
