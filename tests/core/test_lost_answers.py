"""Puts whose answer was lost, asked for once more."""

from __future__ import annotations

from typing import Any

import numpy as np

from mooncake_store.core.options import DEFAULTS, StartOptions
from mooncake_store.core.records import Status
from tests.core.lab import Lab, digests_of


def begin(lab: Lab, keys: list[int], request: int, sizes: Any = 1000, **options: Any) -> Any:
    """put_start or upsert_start as this request; (rows, replicas)."""
    upsert = options.pop("upsert", False)
    call = lab.shard.upsert_start if upsert else lab.shard.put_start
    wish = StartOptions(**options) if options else DEFAULTS
    sizes = np.broadcast_to(np.array(sizes, np.int64), len(keys)).copy()
    reply = call(lab.now, lab.client, 0, digests_of(keys), sizes, None, wish, request)
    lab.check()
    return reply


def begun(
    lab: Lab, keys: list[int], request: int, sizes: Any = 1000, *, upsert: bool = False
) -> tuple[Any, Any]:
    """put_begun of this request; (rows, replicas)."""
    sizes = np.broadcast_to(np.array(sizes, np.int64), len(keys)).copy()
    asked = lab.client, digests_of(keys), sizes, request, upsert
    reply = lab.shard.put_begun(lab.now, *asked)
    lab.check()
    return reply


def statuses(reply: Any) -> list[int]:
    return [int(status) for status in reply[0]["status"]]


def assert_equal(one: Any, other: Any) -> None:
    """Compare two answers to a put."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine.tolist() == theirs.tolist()


def test_what_a_request_began_is_told_again_and_can_be_ended() -> None:
    lab = Lab(segments=3)
    for request, replicas in ((7, 1), (8, 2)):
        keys = [10 * request + at for at in range(5)]
        first = begin(lab, keys, request, replicas=replicas)
        assert_equal(begun(lab, keys, request), first)
        assert_equal(begun(lab, keys, request), first)
        assert lab.end(keys, first[0]["generation"]) == [0] * 5
        assert statuses(begun(lab, keys, request)) == [Status.NO_SPACE] * 5


def test_nothing_that_others_began_is_told() -> None:
    lab = Lab()
    begin(lab, [1, 2], 7)
    nothing = [Status.NO_SPACE] * 3
    assert statuses(begun(lab, [1, 2, 3], 8)) == nothing
    assert statuses(begun(lab, [1, 2, 3], 0)) == nothing
    assert statuses(begun(lab, [1, 2, 3], 7, 2000)) == [
        Status.ALREADY_EXISTS, Status.ALREADY_EXISTS, Status.NO_SPACE,
    ]  # fmt: skip
    lab.client = lab.open(2)
    assert statuses(begun(lab, [1, 2, 3], 7)) == nothing
    begin(lab, [4], 0)
    assert statuses(begun(lab, [4], 0)) == nothing[:1]


def test_of_equal_keys_the_one_is_told_that_was_begun() -> None:
    lab = Lab()
    keys, sizes = [1, 2, 1, 2], [100, 200, 100, 300]
    for request, upsert in ((7, False), (8, True)):
        first = begin(lab, keys, request, sizes, upsert=upsert)
        assert_equal(begun(lab, keys, request, sizes, upsert=upsert), first)
        assert len(first[1]) == 2
        lab.revoke(keys, first[0]["generation"])


def test_a_second_generation_is_found_beside_the_object_it_is_to_replace() -> None:
    lab = Lab()
    rows, _ = begin(lab, [1], 7)
    lab.end([1], rows["generation"])
    first = begin(lab, [1, 2], 8, upsert=True)
    assert_equal(begun(lab, [1, 2], 8, upsert=True), first)
    assert lab.end([1, 2], first[0]["generation"]) == [0, 0]
