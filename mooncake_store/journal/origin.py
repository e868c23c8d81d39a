"""Whose a journal is: a shard of a cluster, and the boot of the host that it runs in.

Everything that a journal consists of says it of itself, so that nothing is taken for another's. The
boot matters because memory with a name ends with it, and because nobody can still read or write
what was lent before it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

__all__ = ["Origin", "signed", "this_boot"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_WORD = (1 << 64) - 1


def signed(number: int) -> int:
    """Return the signed word with the lowest 64 bits of a number."""
    low = number & _WORD
    return low - (1 << 64) if low >> 63 else low


@functools.cache
def this_boot() -> tuple[int, int]:
    """Return the id of this boot of this host, in two words."""
    number = int(_BOOT.read_text(encoding="ascii").strip().replace("-", ""), 16)
    return signed(number >> 64), signed(number)


@dataclass(frozen=True, slots=True)
class Origin:
    """A shard, one of `shards` of a cluster, in one boot of its host."""

    cluster: str
    shard: int
    shards: int
    boot: tuple[int, int] = field(default_factory=this_boot)

    @property
    def cluster_word(self) -> int:
        """The id of the cluster as a word: 16 hexadecimal digits are one, all else is hashed."""
        if re.fullmatch("[0-9a-f]{16}", self.cluster):
            return signed(int(self.cluster, 16))
        return signed(xxhash.xxh3_64_intdigest(self.cluster.encode()))
