"""The demo: equal prefixes are found, the rest is computed, and it says so quickly."""

import time

import pytest

from mooncake_store import demo
from mooncake_store.errors import AlreadyExistsError, NoSpaceError, NotFoundError
from transfer_engine.segment import Segment


@pytest.fixture
def pool():
    with Segment.create(demo.SEGMENT_BYTES, name="test") as segment:
        yield demo.TinyPool(segment)


def test_a_shared_prefix_is_computed_once(pool):
    shared = "x" * (4 * demo.BLOCK_TOKENS)
    assert demo.serve(pool, shared + "a" * demo.BLOCK_TOKENS) == (0, 5)
    assert demo.serve(pool, shared + "b" * demo.BLOCK_TOKENS) == (4, 1)
    assert demo.serve(pool, shared + "b" * demo.BLOCK_TOKENS) == (5, 0)


def test_a_block_after_a_difference_has_another_key(pool):
    tail = "t" * demo.BLOCK_TOKENS
    demo.serve(pool, "a" * demo.BLOCK_TOKENS + tail)
    assert demo.serve(pool, "b" * demo.BLOCK_TOKENS + tail) == (0, 2)


def test_the_last_block_has_no_key_until_it_is_full():
    assert len(demo.block_keys([1] * (3 * demo.BLOCK_TOKENS - 1))) == 2


def test_objects_are_immutable_bounded_and_read_only(pool):
    pool.put(b"k", b"value")
    with pytest.raises(AlreadyExistsError):
        pool.put(b"k", b"other")
    with pytest.raises(NotFoundError):
        pool.get(b"other")
    with pytest.raises(NoSpaceError):
        pool.put(b"big", bytes(demo.SEGMENT_BYTES))
    assert pool.get(b"k") == b"value"
    assert pool.get(b"k").readonly


def test_the_demo_says_what_it_did(start_program):
    started = time.monotonic()
    program = start_program("-m", "mooncake_store.demo")
    assert program.wait() == 0
    assert time.monotonic() - started < 10
    assert "found" in program.output
    assert "every block read back equal to what was put" in program.output
