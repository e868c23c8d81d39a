"""What callers pass besides keys and memory, checked: refused with a hint, not by what uses it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mooncake_store.core.records import SIZE_MAX
from mooncake_store.errors import InvalidArgumentError

__all__ = ["count_of", "flag_of", "items_of", "text_of"]


def text_of(value: Any, what: str) -> bytes:
    """The UTF-8 form of a str, or bytes as they are."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{what} is a str or bytes, not {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{what} has no UTF-8 form: {error}") from None


def items_of(values: Any, what: str) -> list[Any]:
    """What can be iterated over, as a list."""
    try:
        return list(values)
    except TypeError:
        raise InvalidArgumentError(
            f"{what} must be a sequence, not {type(values).__name__}", advice="wrap it in a list"
        ) from None


def flag_of(value: Any, what: str) -> bool:
    """True or False; 0 and 1 of other kinds of numbers count as well."""
    if isinstance(value, (int, np.integer, np.bool_)) and value in (0, 1):
        return bool(value)
    raise InvalidArgumentError(f"{what} is True or False, not {value!r}")


def count_of(value: Any, what: str) -> int:
    """A whole number of bytes, copies or names, which is no larger than objects can be."""
    try:
        number = int(value.__index__())
    except (AttributeError, TypeError):
        kind = type(value).__name__
        raise InvalidArgumentError(f"{what} is a whole number, not {kind}") from None
    if abs(number) > SIZE_MAX:
        raise InvalidArgumentError(f"{what} is {number}: beyond every object")
    return number
