"""Clients that come and go, many and all the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.core import janitor
from mooncake_store.core.shard import HANDLES_LEAST
from tests.core.lab import Lab

if TYPE_CHECKING:
    import pytest

ROWS = 100
SWEPT = 8


def test_what_a_client_left_is_swept_though_others_come_and_go_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(janitor, "SWEEP_ROWS", SWEPT)
    monkeypatch.setattr(janitor, "SWEEP_ROWS_URGENT", SWEPT)
    lab = Lab()
    lab.put(range(ROWS))
    lab.tick()  # from here on a sweep is under way
    gone = lab.open(2)
    lab.start(range(ROWS, ROWS + 3), client=gone)
    lab.shard.close_client(lab.now, gone)
    for number in range(3 * (ROWS // SWEPT + 2)):
        lab.shard.close_client(lab.now, lab.open(3 + number))
        lab.tick()
    lab.check()
    assert lab.shard.stats().writing == 0
    assert not lab.shard.closed[gone]


def test_a_client_that_ends_while_rows_are_swept_leaves_no_puts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(janitor, "SWEEP_ROWS", SWEPT)
    lab = Lab()
    gone = lab.open(2)
    lab.start([1], client=gone)
    lab.put(range(10, 10 + ROWS))
    lab.tick()  # from here on a sweep is under way, and has seen that put
    lab.shard.close_client(lab.now, gone)
    lab.check()
    assert lab.shard.stats().writing == 0


def test_several_clients_end_at_once() -> None:
    lab = Lab()
    lab.put([1])
    here = lab.open(2)
    gone = [lab.open(number) for number in (3, 4, 5)]
    for number, client in enumerate([here, *gone]):
        lab.start([10 + number], client=client)
    lab.shard.close_clients(lab.now, [*gone[:2], 9999])
    lab.tick()
    lab.check()
    assert {client.handle for client in lab.shard.clients.values()} == {lab.client, here, gone[2]}
    assert lab.shard.stats().writing == 2


def test_numbers_of_clients_stay_small_and_are_not_given_again_at_once() -> None:
    """A sweep looks at each number that there was."""
    lab = Lab()
    handles = []
    for number in range(3 * HANDLES_LEAST):
        handles.append(lab.open(10 + number))
        lab.shard.close_client(lab.now, handles[-1])
        lab.tick()
    assert max(handles) == lab.shard.handles_used == HANDLES_LEAST
    for first in (0, 100, HANDLES_LEAST):
        some = handles[first : first + HANDLES_LEAST - 1]
        assert len(set(some)) == len(some)


def test_more_clients_than_numbers_in_turn_have_each_their_own() -> None:
    lab = Lab()
    handles = {lab.open(10 + number) for number in range(2 * HANDLES_LEAST)}
    assert len(handles) == 2 * HANDLES_LEAST
    assert lab.shard.handles_used < 3 * HANDLES_LEAST
