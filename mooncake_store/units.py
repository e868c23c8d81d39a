"""Sizes, durations and rates as people write them, and back.

A size is a whole number of bytes, optionally with a unit in any case:

    kB MB GB TB PB      powers of 1000, as disks and networks are sold
    KiB MiB GiB TiB PiB powers of 1024
    k  m  g  t  p       powers of 1024, as in docker, qemu, dd and the JVM

A duration always names its unit (ns us ms s m h d), because a bare `5000` means seconds to one
program and milliseconds to the next; only a Python number, by Python's own convention, is seconds.
Text is parsed as an exact fraction, so `0.1s` is 100,000,000 ns and not one less; what is finer
than a byte or a nanosecond is cut off.

Not done here: compound forms such as `1h30m`, and negative values, which no setting needs. Every
function is O(length of its text), and the length is bounded before any arithmetic.
"""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction

from transfer_engine.errors import InvalidArgumentError

__all__ = [
    "GIB",
    "HOUR_NS",
    "KIB",
    "MIB",
    "MILLISECOND_NS",
    "MINUTE_NS",
    "SECOND_NS",
    "VALUE_MAX",
    "format_duration",
    "format_rate",
    "format_size",
    "parse_duration",
    "parse_duration_ns",
    "parse_size",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS

VALUE_MAX = 1 << 62
"""The largest size or nanosecond count accepted: the sum of two still fits an int64."""

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?|\.[0-9]{1,20})\s*([a-zµμ]*)\s*")

_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZE_UNITS[_letter] = _SIZE_UNITS[_letter + "ib"] = 1024**_power
    _SIZE_UNITS[_letter + "b"] = 1000**_power

_DURATION_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # micro sign
    "μs": 1_000,  # Greek small letter mu
    "ms": MILLISECOND_NS,
    "s": SECOND_NS,
    "m": MINUTE_NS,
    "min": MINUTE_NS,
    "h": HOUR_NS,
    "d": 24 * HOUR_NS,
}


def parse_size(size: str | int) -> int:
    """Return the bytes that `size` names, such as `"16GB"`, `"4GiB"`, `"1.5g"`, `"4096"` or 4096.

    A fraction needs a unit and is rounded down to a whole byte.

    Raises:
        InvalidArgumentError: no such size, a negative one, or one above 2**62.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        size_bytes: Fraction | None = Fraction(size)
    else:
        size_bytes = _parse(size, _SIZE_UNITS)
    if size_bytes is None or size_bytes < 0:
        raise InvalidArgumentError(
            f"{size!r} is not a size; write a number of bytes or one with a unit, "
            "such as '4GiB', '16GB', '1.5g' or '4096'"
        )
    if size_bytes > VALUE_MAX:
        raise InvalidArgumentError(f"{size!r} is larger than the largest size, 4096PiB (2**62)")
    return int(size_bytes)


def parse_duration(duration: str | float) -> float:
    """Return the seconds that `duration` names, such as `"10ms"`, `"5s"`, `"2m"` or `"1h"`.

    A Python number is taken as seconds; text must name its unit, except `"0"`.

    Raises:
        InvalidArgumentError: no such duration, a negative one, or one above 2**62 ns.
    """
    return float(_duration_ns(duration) / SECOND_NS)


def parse_duration_ns(duration: str | float) -> int:
    """Return `duration` in whole nanoseconds; otherwise exactly like `parse_duration`."""
    return int(_duration_ns(duration))


def _duration_ns(duration: str | float) -> Fraction:
    duration_ns: Fraction | None = None
    if isinstance(duration, str):
        duration_ns = _parse(duration, _DURATION_UNITS_NS)
        if duration_ns is None and duration.strip() == "0":
            duration_ns = Fraction(0)
    elif not isinstance(duration, bool) and _is_finite(duration):
        duration_ns = Fraction(duration) * SECOND_NS
    if duration_ns is None or duration_ns < 0:
        raise InvalidArgumentError(
            f"{duration!r} is not a duration; write a number and its unit, "
            "such as '30us', '10ms', '5s', '2m' or '1h'"
        )
    if duration_ns > VALUE_MAX:
        raise InvalidArgumentError(f"{duration!r} is longer than the longest duration, 146 years")
    return duration_ns


def _is_finite(number: object) -> bool:
    """Whether it is a number, which an array is not; a whole one may be beyond every float."""
    if isinstance(number, numbers.Rational):
        return True
    return isinstance(number, numbers.Real) and math.isfinite(number)


def _parse(text: object, units: dict[str, int]) -> Fraction | None:
    """Return the exact value of `text` in the smallest of `units`, or None when it has none."""
    if not isinstance(text, str):
        return None
    found = _NUMBER_AND_UNIT.fullmatch(text.lower())
    if found is None or found[2] not in units:
        return None
    value = Fraction(found[1]) * units[found[2]]
    # "0.5" of nothing in particular is more likely a forgotten unit than half a byte.
    return None if not found[2] and value.denominator != 1 else value


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` in the largest binary unit that fits, such as `"64MiB"` or `"1.5GiB"`.

    At most three significant digits are kept below 1000, so the text may be rounded.
    """
    for power, letter in reversed(list(enumerate("KMGTP", start=1))):
        unit = 1024**power
        if abs(size_bytes) >= unit:
            return f"{_rounded(size_bytes / unit)}{letter}iB"
    return f"{size_bytes}B"


def format_duration(duration_s: float) -> str:
    """Return `duration_s` in a readable unit, such as `"12.3us"`, `"90s"` or `"5m"`.

    Whole seconds are kept exactly, in the largest unit that divides them; the rest is rounded to
    about three significant digits.
    """
    if duration_s >= 1 and duration_s == int(duration_s):
        for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
            if duration_s % unit_s == 0:
                return f"{int(duration_s) // unit_s}{unit}"
        return f"{int(duration_s)}s"
    for seconds, unit in ((86_400.0, "d"), (3_600.0, "h"), (60.0, "m"), (1.0, "s"), (1e-3, "ms")):
        if abs(duration_s) >= seconds:
            return f"{_rounded(duration_s / seconds)}{unit}"
    if abs(duration_s) >= 1e-6:
        return f"{_rounded(duration_s * 1e6)}us"
    return f"{_rounded(duration_s * 1e9)}ns" if duration_s else "0s"


def format_rate(bytes_per_second: float) -> str:
    """Return a throughput in decimal units, such as `"3.21GB/s"`, as networks are rated."""
    for power, letter in reversed(list(enumerate("kMGTP", start=1))):
        unit = 1000.0**power
        if abs(bytes_per_second) >= unit:
            return f"{_rounded(bytes_per_second / unit)}{letter}B/s"
    return f"{_rounded(bytes_per_second)}B/s"


def _rounded(value: float) -> str:
    """Return `value` with three significant digits and no exponent, without trailing zeros."""
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
