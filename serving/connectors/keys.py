"""Names of KV blocks in the store: everything that decides what the bytes mean is in the name.

Two processes share a block only if they would have computed the same bytes, laid out the same way.
A name that leaves something out gives one engine another's bytes: two models in directories of one
name, one model in two revisions, a cache in another precision or layout. `KVScope` lists what
matters and hashes it once; a block's key is then its prefix hash in that scope:

    scope = KVScope(model="meta-llama/Llama-3.1-8B", revision="d04e592", dtype="bfloat16",
                    layout="NHD/16", tp_rank=1, tp_size=8, kv_heads=8)
    scope.key(block_hash)        # "kv1/3f0a.../t1of8.p0of1/00ab..."
    scope.blocks(client.identity, tokens, 16)     # digests of a prompt's blocks, for batches

Ranks that hold the same bytes share one key, and one of them writes it (`is_writer`): all tensor
ranks of a latent-attention model, and ranks that replicate a KV head because there are fewer heads
than ranks. Salt separates tenants; it is part of the hash, not readable in the key.

No I/O. A scope costs one hash when it is made, a key one string.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mooncake_store.identity import Identity

__all__ = ["KVScope", "KeyParts", "parse_key", "scope_prefix"]

_VERSION = "kv1"
_SCOPE_HEX = 32
_NAME = re.compile(rf"{_VERSION}/([0-9a-f]+)/t(\d+)of(\d+)\.p(\d+)of(\d+)/([^/]+)(?:/(.+))?")


class KeyParts(NamedTuple):
    """What the key of a block says: which scope, which piece of it, and the block's hash."""

    scope: str
    piece: tuple[int, int]
    """Shard and stage of a rank."""
    pieces: int
    """How many there are of a block."""
    block_hash: str
    part: str
    """Which layers, where those of a block are several objects."""


def parse_key(name: str) -> KeyParts | None:
    """Read a key that `KVScope` made; None for any other name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    scope, shard, shards, stage, stages, block_hash, part = found.groups()
    piece = (int(shard), int(stage))
    return KeyParts(scope, piece, int(shards) * int(stages), block_hash, part or "")


def scope_prefix(digest: str = "") -> str:
    """What all keys begin with; with the digest of a scope, all of its."""
    return f"{_VERSION}/{digest}/" if digest else f"{_VERSION}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScope:
    """What KV blocks must agree on to be the same bytes, as seen from one rank.

    `model` is a full name or path, `revision` what distinguishes its versions (commit, checksum),
    `layout` how a block's bytes are arranged, with its size in tokens. `kv_heads` is the number of
    KV heads of the whole model; 0 says that every rank holds everything (latent attention). `lora`
    and `salt` keep adapters and tenants apart; `group` names one of several caches of a model.
    Raises ValueError for an empty name or a rank out of range.
    """

    model: str
    dtype: str
    layout: str
    revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    kv_heads: int = 0
    group: str = ""
    lora: str = ""
    salt: str = ""
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "layout"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be named: it decides what the bytes mean")
        for rank, size in ((self.tp_rank, self.tp_size), (self.pp_rank, self.pp_size)):
            if not 0 <= rank < size:
                raise ValueError(f"rank {rank} of {size} ranks")
        if self.kv_heads < 0:
            raise ValueError(f"kv_heads must be 0 or more, not {self.kv_heads}")
        object.__setattr__(self, "digest", self._hashed())

    def _hashed(self) -> str:
        """A cryptographic hash: nobody can make two scopes meet."""
        digest = hashlib.sha256()
        parts = (
            self.model, self.revision, self.dtype, self.layout, self.group, self.lora, self.salt,
            str(self.kv_heads), str(self.shards), str(self.pp_size),
        )  # fmt: skip
        for part in parts:
            data = part.encode()
            # With its length before it no part can run into the next one.
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()[:_SCOPE_HEX]

    @property
    def shards(self) -> int:
        """How many different pieces the tensor ranks hold: 1 where all of them are alike."""
        if self.kv_heads == 0:
            return 1
        return min(self.tp_size, self.kv_heads)

    @property
    def shard(self) -> int:
        """Which of these pieces this rank holds."""
        return self.tp_rank * self.shards // self.tp_size

    @property
    def is_writer(self) -> bool:
        """Whether this rank, of those that hold the same bytes, is the one that puts them."""
        return self.tp_rank == 0 or (self.tp_rank - 1) * self.shards // self.tp_size != self.shard

    @property
    def prefix(self) -> str:
        """What all keys of this scope begin with, for listings and removal."""
        place = f"t{self.shard}of{self.shards}.p{self.pp_rank}of{self.pp_size}"
        return f"{_VERSION}/{self.digest}/{place}/"

    def key(self, block_hash: bytes | str | int) -> str:
        """The key of a block an engine has hashed itself: its hash must cover its whole prefix."""
        if isinstance(block_hash, int):
            text = f"{block_hash:016x}"
        else:
            text = block_hash.hex() if isinstance(block_hash, bytes) else block_hash
        if not text:
            raise ValueError("a block hash is empty")
        return self.prefix + text

    def keys(self, block_hashes: Sequence[bytes | str | int]) -> list[str]:
        """The keys of a batch."""
        return [self.key(block_hash) for block_hash in block_hashes]

    def blocks(
        self, identity: Identity, tokens: Sequence[int] | NDArray[np.int64], block_size: int
    ) -> NDArray[np.uint64]:
        """Digests of a prompt's complete blocks, chained and salted with this scope."""
        return identity.hash_blocks(tokens, block_size, salt=self.prefix)

    def of_rank(self, tp_rank: int, pp_rank: int = 0) -> KVScope:
        """The scope of another rank: a scheduler asks for the keys of all of them."""
        return replace(self, tp_rank=tp_rank, pp_rank=pp_rank)

    def all_ranks(self) -> list[KVScope]:
        """One scope for each different piece: a block is usable when all of these have it."""
        ranks = {self.of_rank(rank).shard: rank for rank in reversed(range(self.tp_size))}
        return [
            self.of_rank(rank, stage)
            for stage in range(self.pp_size)
            for rank in sorted(ranks.values())
        ]
