"""Sizes, durations and rates: what is read, what is refused, what is written."""

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import (
    SECOND_NS,
    VALUE_MAX,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_duration_ns,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("0", 0),
        ("12B", 12),
        ("1kB", 1000),
        ("16GB", 16 * 10**9),
        ("2TB", 2 * 10**12),
        ("1KiB", 1024),
        ("64MiB", 64 << 20),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1k", 1024),
        ("2m", 2 << 20),
        ("1.5g", 3 << 29),
        (".5g", 1 << 29),
        ("3T", 3 << 40),
        ("1P", 1 << 50),
        ("1.0001kB", 1000),  # what is finer than a byte is cut off
        (VALUE_MAX, VALUE_MAX),
    ],
)
def test_a_size_is_read_with_its_unit(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "lots", "GiB", "-1", "-4GiB", "4 G B", "4gig", "1e9", "nan", "inf", "0.5"),
        *("1_000", "4GiB4", "0x10", "٤", "4GiB\n4", "4s"),
        *("9" * 400, -1, True, None, 1.5, b"4GiB"),
    ],
)
def test_what_is_no_size_is_refused_in_one_sentence_with_examples(text):
    with pytest.raises(InvalidArgumentError) as refused:
        parse_size(text)
    assert str(refused.value) == (
        f"{text!r} is not a size; write a number of bytes or one with a unit, "
        "such as '4GiB', '16GB', '1.5g' or '4096'"
    )


@pytest.mark.parametrize("text", ["4097PiB", "99999999999999999999", VALUE_MAX + 1])
def test_a_size_beyond_any_machine_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="larger than the largest size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("7ns", 7),
        ("30us", 30_000),
        ("30µs", 30_000),
        ("30\N{GREEK SMALL LETTER MU}s", 30_000),
        ("10ms", 10_000_000),
        ("5s", 5 * SECOND_NS),
        ("0.1s", 100_000_000),
        (" 2 m ", 120 * SECOND_NS),
        ("2min", 120 * SECOND_NS),
        ("1h", 3600 * SECOND_NS),
        ("1.5h", 5400 * SECOND_NS),
        ("1d", 86_400 * SECOND_NS),
        ("0", 0),
        (3, 3 * SECOND_NS),
        (0.25, SECOND_NS // 4),
    ],
)
def test_a_duration_is_read_with_its_unit(text, duration_ns):
    assert parse_duration_ns(text) == duration_ns
    assert parse_duration(text) == pytest.approx(duration_ns / SECOND_NS, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "5000", "soon", "-5s", "1h30m", "5sec", "1e3s", "nan", "5KiB"),
        *(-1, -0.5, True, float("nan"), float("inf")),
    ],
)
def test_what_is_no_duration_is_refused_in_one_sentence_with_examples(text):
    with pytest.raises(InvalidArgumentError) as refused:
        parse_duration(text)
    assert str(refused.value) == (
        f"{text!r} is not a duration; write a number and its unit, "
        "such as '30us', '10ms', '5s', '2m' or '1h'"
    )


@pytest.mark.parametrize("text", ["60000d", 1e300])
def test_a_duration_beyond_any_life_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="longer than the longest duration"):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (64 << 20, "64MiB"),
        (3 << 29, "1.5GiB"),
        (1000**3, "954MiB"),
        (VALUE_MAX, "4096PiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_fits(size_bytes, text):
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0s"),
        (5e-9, "5ns"),
        (12.34e-6, "12.3us"),
        (0.0105, "10.5ms"),
        (1.2345, "1.23s"),
        (90, "90s"),
        (300, "5m"),
        (3600, "1h"),
        (86_400, "1d"),
        (5400.5, "1.5h"),
    ],
)
def test_a_duration_is_written_readably(duration_s, text):
    assert format_duration(duration_s) == text


def test_a_rate_is_written_in_decimal_units():
    assert format_rate(3.214e9) == "3.21GB/s"
    assert format_rate(999) == "999B/s"
    assert format_rate(0) == "0B/s"


@given(st.integers(0, VALUE_MAX))
@example(1111)  # 1.08KiB, of which a part of a byte is dropped
def test_a_written_size_reads_back_within_half_a_percent_and_a_byte(size_bytes):
    off_by = abs(parse_size(format_size(size_bytes)) - size_bytes)
    assert off_by <= 0.0051 * size_bytes + 1


@given(st.floats(1e-9, 1e9))
def test_a_written_duration_reads_back_within_half_a_percent(duration_s):
    assert parse_duration(format_duration(duration_s)) == pytest.approx(duration_s, rel=0.0051)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_and_nothing_else(text):
    for parse in (parse_size, parse_duration_ns):
        with contextlib.suppress(InvalidArgumentError):
            assert 0 <= parse(text) <= VALUE_MAX
