"""Which engine holds how much of a prompt, from the events that engines publish.

    index = EngineIndex()
    source = index.register(Registration(instance_id="vllm-0", model="m", block_size=16, ...))
    source.apply(Stored(hashes, parent, tokens, medium="GPU"))
    index.query(ScopeKey("m", 16), tokens)     # {"default": {"vllm-0": {"longest_matched": ...}}}

Engines name blocks by hashes of their own making. A stored event says which tokens they stand for,
so blocks are named here by their tokens (a keyed `Identity`, the scope as salt), and an engine's
hashes only lead to these names. So a query needs no engine's hash function, and engines of one
scope that hash differently still compare. A scope is tenant, model, adapter, block size and salt.

Tiers are counted as routers expect: GPU <= CPU <= DISK, each from the first block on with all
faster tiers counted in. Pools shared by all engines of a scope (`type` Mooncake) name blocks by
hashes they were given, and are found where an engine has told the same hash. What refers to a
block nobody told of is dropped. No I/O. O(blocks) an event and a query.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.identity import SECRET_BYTES, Keyed
from serving.scheduling.index import PrefixIndex
from serving.workers.naming import chain_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mooncake_store.identity import Identity

__all__ = ["Cleared", "EngineIndex", "Registration", "Removed", "ScopeKey", "Source", "Stored"]

TIERS = ("GPU", "CPU", "DISK")
SHARED = "mooncake"
BLOCKS_OF_SOURCE_MAX = 1 << 22
"""About 2 GB: what an engine tells beyond it is dropped."""
NAMES_LEAST = 1 << 20
"""Hashes of one scope that are remembered though nobody has the blocks any more, at least."""
BlockHash = int | bytes | str
Instances = dict[str, dict[str, Any]]
"""Tokens by instance and tier, as routers expect them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow `parent` are there now; `tokens` may be empty for hashes told before.

    `lora` is the adapter they were computed with, where the engine says so.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: tuple[int, ...]
    medium: str = "GPU"
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are gone from a medium, or from all of them when it is empty."""

    hashes: tuple[BlockHash, ...]
    medium: str = ""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything of the source is gone."""


class ScopeKey(NamedTuple):
    """What must agree for blocks to be the same."""

    model: str
    block_size: int
    tenant: str = "default"
    lora: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """An engine, or a pool, whose events are to be followed."""

    instance_id: str
    model: str
    block_size: int
    endpoint: str = ""
    replay_endpoint: str = ""
    kind: str = "vLLM"
    tenant: str = "default"
    lora: str = ""
    salt: str = ""
    dp_rank: int = 0

    @property
    def name(self) -> str:
        """As routers name it: instance, tenant, rank; an adapter is a registration of its own."""
        name = f"{self.instance_id}|{self.tenant}|{self.dp_rank}"
        return f"{name}|{self.lora}" if self.lora else name

    @property
    def scope(self) -> ScopeKey:
        """Whose blocks are the same as its."""
        return ScopeKey(self.model, self.block_size, self.tenant, self.lora, self.salt)

    @property
    def shared(self) -> bool:
        """Whether it is a pool that all engines of the scope read from."""
        return self.kind.lower() == SHARED


@dataclass(slots=True)
class _Scope:
    """Blocks of one scope: who holds them, and which names engines' hashes lead to."""

    identity: Identity
    salt: str
    block_size: int
    index: PrefixIndex = field(default_factory=PrefixIndex)
    names: dict[BlockHash, bytes] = field(default_factory=dict)
    trim_at: int = 0

    def trim(self) -> None:
        """Forget hashes of blocks that nobody has, where they are many. O(1) for each one told."""
        if len(self.names) > max(NAMES_LEAST, self.trim_at):
            for told in [told for told, name in self.names.items() if not self.index.count(name)]:
                del self.names[told]
            self.trim_at = 2 * len(self.names)

    def chain(self, tokens: Sequence[int], parent: bytes | None = None) -> list[bytes]:
        """Names of the complete blocks of some tokens."""
        return chain_of(self.identity.hash_blocks(tokens, self.block_size, parent, self.salt))

    def known(self, hashes: Iterable[BlockHash]) -> list[bytes]:
        """Names of blocks, up to the first hash that nobody told of."""
        names = map(self.names.get, hashes)
        return [name for name in takewhile(lambda name: name is not None, names) if name]


class Source:
    """One registration: its events go in here, in order."""

    def __init__(self, registration: Registration, scope: _Scope) -> None:
        self.registration = registration
        self._scope = scope
        # Tiers a block is in, as bits.
        self._tiers: dict[bytes, int] = {}
        self.dropped = 0
        """Blocks that could not be named, as what they follow was never told, or are too many."""

    @property
    def blocks(self) -> int:
        """How many blocks it holds, in whatever tier."""
        return len(self._tiers)

    def apply(self, event: Stored | Removed | Cleared) -> None:
        """Take one event in."""
        if isinstance(event, Stored):
            self._stored(event)
        elif isinstance(event, Removed):
            self._removed(event)
        else:
            self.clear()

    def _stored(self, event: Stored) -> None:
        names = self._scope.names
        if event.lora and event.lora != self.registration.lora:
            return  # the same tokens, but not the same KV; another registration may be of these
        if event.tokens:
            parent = None if event.parent is None else names.get(event.parent)
            if event.parent is not None and parent is None:
                self.dropped += len(event.hashes)
                return
            chain = self._scope.chain(event.tokens, parent)
            names.update(zip(event.hashes, chain, strict=False))
        known = [names[each] for each in event.hashes if each in names]
        self.dropped += len(event.hashes) - len(known)
        bit = 1 << _tier(event.medium)
        for block in known:
            if block in self._tiers or len(self._tiers) < BLOCKS_OF_SOURCE_MAX:
                self._set(block, self._tiers.get(block, 0) | bit)
            else:
                self.dropped += 1
        self._scope.trim()

    def _removed(self, event: Removed) -> None:
        keep = ~(1 << _tier(event.medium)) if event.medium else 0
        for each in event.hashes:
            block = self._scope.names.get(each)
            if block is not None and block in self._tiers:
                self._set(block, self._tiers[block] & keep)

    def _set(self, block: bytes, tiers: int) -> None:
        """Enter a block for each tier that it is at least as fast as."""
        for at in range(len(TIERS)):
            holder = self._holder(at)
            if tiers & ((2 << at) - 1):
                self._scope.index.add(holder, (block,))
            else:
                self._scope.index.discard(holder, (block,))
        if tiers:
            self._tiers[block] = tiers
        else:
            self._tiers.pop(block, None)

    def _holder(self, tier: int) -> str:
        return f"{self.registration.name}|{TIERS[tier]}"

    def clear(self) -> None:
        """Everything of it is gone: it said so, or events of it are missing."""
        for at in range(len(TIERS)):
            self._scope.index.forget(self._holder(at))
        self._tiers.clear()

    def counts(self, found: dict[str, int]) -> list[int]:
        """Blocks by tier, out of a match of the scope's index."""
        return [found.get(self._holder(at), 0) for at in range(len(TIERS))]


class EngineIndex:
    """All registrations, and the blocks of their scopes."""

    def __init__(self) -> None:
        self._identity = Keyed(secrets.token_bytes(SECRET_BYTES))
        self._scopes: dict[ScopeKey, _Scope] = {}
        self.sources: dict[str, Source] = {}

    def register(self, registration: Registration) -> Source:
        """Begin to keep the blocks of an engine; an older registration of its name ends."""
        self.unregister(registration.name)
        key = registration.scope
        if key not in self._scopes:
            self._scopes[key] = _Scope(self._identity, "\0".join(map(str, key)), key.block_size)
        source = self.sources[registration.name] = Source(registration, self._scopes[key])
        return source

    def unregister(self, name: str) -> bool:
        """Forget an engine by its full name; returns whether it was there."""
        source = self.sources.pop(name, None)
        if source is None:
            return False
        source.clear()
        scope = source.registration.scope
        if all(each.registration.scope != scope for each in self.sources.values()):
            # The last of a scope takes the names of its blocks along.
            del self._scopes[scope]
        return True

    def matching(self, instance_id: str, tenant: str = "", dp_rank: int | None = None) -> list[str]:
        """Full names of an instance's registrations."""
        return [
            name
            for name, source in self.sources.items()
            if source.registration.instance_id == instance_id
            and (not tenant or source.registration.tenant == tenant)
            and (dp_rank is None or source.registration.dp_rank == dp_rank)
        ]

    def query(
        self, key: ScopeKey, tokens: Sequence[int], instance_id: str = ""
    ) -> dict[str, Instances]:
        """How many tokens of a prompt each engine holds, by tenant, instance and tier."""
        scope = self._scopes.get(key)
        return {key.tenant: self._held(scope, scope.chain(tokens), instance_id) if scope else {}}

    def query_hashes(
        self, key: ScopeKey, hashes: Sequence[BlockHash], instance_id: str = ""
    ) -> dict[str, Instances]:
        """Answer for blocks named by engines' hashes; one that nobody told of ends a match."""
        scope = self._scopes.get(key)
        return {key.tenant: self._held(scope, scope.known(hashes), instance_id) if scope else {}}

    def _held(self, scope: _Scope, chain: list[bytes], instance_id: str) -> Instances:
        found = scope.index.match(chain)
        sources = [each for each in self.sources.values() if each._scope is scope]
        shared = [0] * len(TIERS)
        for source in sources:
            if source.registration.shared:
                shared = [max(pair) for pair in zip(shared, source.counts(found), strict=True)]
        instances: Instances = {}
        for source in sources:
            entry = source.registration
            if entry.shared or (instance_id and entry.instance_id != instance_id):
                continue
            own = source.counts(found)
            size = entry.block_size
            gpu, cpu, disk = (size * max(pair) for pair in zip(own, shared, strict=True))
            answer = instances.setdefault(
                entry.instance_id, {"longest_matched": 0, "GPU": 0, "DP": {}, "CPU": 0, "DISK": 0}
            )
            answer["DP"][str(entry.dp_rank)] = gpu
            for name, tokens in (
                ("longest_matched", disk),
                ("GPU", gpu),
                ("CPU", cpu),
                ("DISK", disk),
            ):
                answer[name] = max(answer[name], tokens)
        return instances

    def chain(self, key: ScopeKey, tokens: Sequence[int]) -> list[bytes]:
        """Names of the complete blocks of a prompt; none in a scope that nobody is in."""
        scope = self._scopes.get(key)
        return scope.chain(tokens) if scope else []

    def matches(self, key: ScopeKey, chain: list[bytes]) -> dict[str, int]:
        """Tokens each instance holds, in whatever tier, of blocks as `chain` names them."""
        scope = self._scopes.get(key)
        found = self._held(scope, chain, "") if scope else {}
        return {name: each["longest_matched"] for name, each in found.items()}


def _tier(medium: str) -> int:
    """GPU where an event says nothing: engines left the field out before they had other tiers."""
    name = medium.upper()
    if name.startswith("CPU") or name in ("DRAM", "MEMORY", "HOST"):
        return 1
    return 2 if name.startswith(("DISK", "SSD", "FILE", "NVME", "STORAGE")) else 0
