"""How shards are named on a command line: `0-3,6`."""

import re

from mooncake_store.errors import ConfigError

__all__ = ["shards_in"]

_PART = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


def shards_in(text: str, count: int | None = None) -> list[int]:
    """Return the numbers that a text names, in order; below `count`, if that is known.

    Raises ConfigError for anything else.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{text!r} names no shards; write them like 0-3 or 0,2,5-7")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if count is not None and max(found) >= count:
        raise ConfigError(
            f"there is no shard {max(found)} of {count}", advice="number them from 0 on"
        )
    return sorted(found)
