"""`make demo`: two prompts share a prefix, and its KV-cache blocks are stored and computed once.

One process, no server: a segment of shared memory, a directory of keys, and the prefix chain
`key_i = hash(key_{i-1}, tokens_i)` that makes equal prefixes equal keys. What a model would compute
is stood in for by bytes derived from the key, so that every get can be checked. The directory is
a plain dict and nothing is ever evicted: this shows the idea, not the store.
"""

import sys
import time
from dataclasses import dataclass, field

import xxhash

from mooncake_store.cli._app import console, table
from mooncake_store.errors import AlreadyExistsError, NoSpaceError, NotFoundError
from mooncake_store.units import KIB, MIB, format_size
from transfer_engine.segment import Segment

BLOCK_TOKENS = 16
BLOCK_BYTES = 64 * KIB
SEGMENT_BYTES = 4 * MIB

SYSTEM = "You are a careful assistant. Answer in one sentence and name your source. " * 4
QUESTIONS = ("Why is the sky blue at noon and red at dusk?", "How does a heat pump work?")


@dataclass
class TinyPool:
    """Immutable objects in one segment, found by key."""

    segment: Segment
    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    used: int = 0

    def exists(self, key: bytes) -> bool:
        """Whether a get of this key would succeed."""
        return key in self.places

    def put(self, key: bytes, value: bytes) -> None:
        """Store `value`; an object never changes, so a second put of its key is refused."""
        if key in self.places:
            raise AlreadyExistsError("the key is taken", key=key)
        if self.used + len(value) > self.segment.size:
            raise NoSpaceError("the segment is full", key=key)
        self.segment.buffer[self.used : self.used + len(value)] = value
        self.places[key] = (self.used, len(value))
        self.used += len(value)

    def get(self, key: bytes) -> memoryview:
        """A read-only view of the object, where it lies."""
        if key not in self.places:
            raise NotFoundError("no such object", key=key)
        return self.segment.view(*self.places[key])


def block_keys(tokens: list[int]) -> list[bytes]:
    """The keys of the full blocks of a prompt; equal prefixes have equal keys. O(tokens)."""
    keys, parent = [], b""
    for start in range(0, len(tokens) - len(tokens) % BLOCK_TOKENS, BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        packed = b"".join(token.to_bytes(4, "little") for token in block)
        parent = xxhash.xxh3_128_digest(parent + packed)
        keys.append(parent)
    return keys


def compute_block(key: bytes) -> bytes:
    """What a model would compute for a block; any function of the key will do here."""
    return key * (BLOCK_BYTES // len(key))


def serve(pool: TinyPool, prompt: str) -> tuple[int, int]:
    """Get what is stored and compute and put the rest; returns how many blocks of each."""
    keys = block_keys([ord(letter) for letter in prompt])
    found = computed = 0
    for key in keys:
        if pool.exists(key):
            found += 1
        else:
            pool.put(key, compute_block(key))
            computed += 1
        if pool.get(key) != compute_block(key):
            raise AssertionError(f"the bytes of {key.hex()} are not what was put")
    return found, computed


def main() -> int:
    """Run the demo and say what it did."""
    started = time.perf_counter()
    rows = []
    with Segment.create(SEGMENT_BYTES, name="demo") as segment:
        pool = TinyPool(segment)
        for question in QUESTIONS:
            found, computed = serve(pool, SYSTEM + question)
            rows.append((question, str(found + computed), str(found), str(computed)))
        listing = [f"{key.hex()}  {size} bytes" for key, (_, size) in pool.places.items()]
        held = format_size(pool.used)
    columns = {"prompt": "left", "blocks": "right", "found": "right", "computed": "right"}
    out = console()
    out.print("One process puts, gets and lists KV-cache blocks; each prompt starts alike.\n")
    out.print(table(columns, rows))
    out.print(f"the pool lists {len(listing)} objects, {held} in all; the first three:")
    out.print("\n".join(f"  {line}" for line in listing[:3]))
    out.print(
        f"every block read back equal to what was put, in {time.perf_counter() - started:.3f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
