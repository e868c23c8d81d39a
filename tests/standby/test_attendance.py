"""Waiting for a standby: until it is there, for a while, or until the shard ends."""

import asyncio

import pytest

from mooncake_store.master import attendance
from mooncake_store.master.attendance import Attendance
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio


async def test_whoever_waits_goes_on_when_it_comes():
    standby = Attendance()
    assert standby.may_come
    waiting = asyncio.ensure_future(standby.wait(PATIENCE_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    standby.come()
    await waiting
    assert not standby.may_come
    await standby.wait(PATIENCE_S)  # it is there
    standby.leave()
    assert standby.may_come


async def test_one_that_stays_away_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(attendance, "RETURN_S", 0.01)
    standby = Attendance()
    await standby.wait(PATIENCE_S)
    assert not standby.there
    assert not standby.may_come
    await standby.wait(PATIENCE_S)  # at once
    standby.leave()
    assert standby.may_come


async def test_a_shard_that_ends_answers_nobody_who_waits():
    """Not even by a refusal: another master may do what was asked for."""
    standby = Attendance()
    waiting = asyncio.ensure_future(standby.wait(PATIENCE_S))
    await asyncio.sleep(0)
    standby.give_up()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    standby.leave()
    assert not standby.may_come
