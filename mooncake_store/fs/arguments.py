"""Arguments and answers as fsspec has them, for blocking calls and coroutines alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.errors import InvalidArgumentError
from mooncake_store.fs.plan import copy_of
from mooncake_store.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.fs.plans import Plans

__all__ = ["answer", "checked", "part_bytes", "pin_options", "pins_of_call", "ranges"]

_PINS: dict[str | None, dict[str, Any]] = {
    "soft": {"soft_pin": True},
    "hard": {"hard_pin": True},
    None: {},
}
_PART_MIN, _PART_MAX = 1 << 10, 1 << 30


def pin_options(pin: str | None, ttl: float | str | None) -> dict[str, Any]:
    """The put options that a pin by name stands for."""
    if pin not in _PINS:
        raise InvalidArgumentError(f"pin must be 'soft', 'hard' or None, not {pin!r}")
    if ttl is None:
        return _PINS[pin]
    if pin != "soft":
        raise InvalidArgumentError("ttl is that of a soft pin", advice='use pin="soft"')
    return _PINS[pin] | {"pin_ttl": ttl}


def pins_of_call(plans: Plans, pin: str | None, ttl: float | str | None) -> dict[str, Any]:
    """The put options of one call; pin "default" stands for what the filesystem was given."""
    if pin != "default":
        return pin_options(pin, ttl)
    return plans.pins if ttl is None else pin_options("soft", ttl)


def part_bytes(size: int | str) -> int:
    """The size of parts from a storage option."""
    value = parse_size(size)
    if not _PART_MIN <= value <= _PART_MAX:
        raise InvalidArgumentError(f"part_size must be between 1KiB and 1GiB, not {size!r}")
    return value


def ranges(
    paths: Sequence[str], starts: Any, ends: Any, max_gap: int | None
) -> tuple[list[int | None], list[int | None]]:
    """Starts and ends, one for each path; a single number stands for all."""
    if max_gap is not None:
        raise NotImplementedError("max_gap: ranges are not merged here")
    if not isinstance(paths, list):
        raise TypeError(f"paths must be a list, not {type(paths).__name__}")
    lists = [
        list(bound) if isinstance(bound, list | tuple) else [bound] * len(paths)
        for bound in (starts, ends)
    ]
    if any(len(bounds) != len(paths) for bounds in lists):
        raise ValueError(f"{len(paths)} paths, {len(lists[0])} starts and {len(lists[1])} ends")
    return lists[0], lists[1]


def checked(values: list[Any], on_error: str) -> list[Any]:
    """Values and exceptions as they are, or the first exception raised."""
    if on_error == "raise":
        for value in values:
            if isinstance(value, Exception):
                raise copy_of(value)
    return values


def answer(paths: list[str], values: list[Any], on_error: str, *, single: bool) -> Any:
    """What `cat` returns: the content of one file, or a dict of contents."""
    checked(values, "raise" if single else on_error)
    if single:
        return values[0]
    return {
        path: value
        for path, value in zip(paths, values, strict=True)
        if on_error != "omit" or not isinstance(value, Exception)
    }
