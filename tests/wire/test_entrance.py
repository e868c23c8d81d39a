"""Who has to go for whom: strangers, sessions, and descriptors that become scarce."""

import logging
import os
import resource

import pytest

from transfer_engine.lasting import Seldom
from transfer_engine.rpc import entrance
from transfer_engine.rpc.entrance import PER_ADDRESS_MAX, Entrance, spare_descriptors


class Guests:
    """An entrance, and for how long each guest has been idle."""

    def __init__(self, sessions_max=100, strangers_max=1000):
        self.idle = {}
        self.port = Entrance(
            "a port", idle_s=lambda guest: self.idle.get(guest, -1.0), sessions_max=sessions_max,
            strangers_max=strangers_max, log=logging.getLogger("tests.entrance"),
        )  # fmt: skip

    def come(self, guest, address="10.0.0.1"):
        return self.port.arrive(guest, address)

    def enter(self, guest, idle=-1.0):
        self.come(guest)
        self.idle[guest] = idle
        return self.port.admit(guest)


@pytest.fixture(autouse=True)
def looking(monkeypatch):
    """Look for idle sessions as often as anybody comes; returns what bounds that else."""
    share = entrance._LOOKING_SHARE
    monkeypatch.setattr(entrance, "_LOOKING_SHARE", 0)
    return share


@pytest.fixture
def left(monkeypatch):
    """Sets how many descriptors are left to this process, as a share of those that are spared."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    def set_left(share):
        count = limit - round(share * spare_descriptors(limit))
        monkeypatch.setattr(entrance, "open_descriptors", lambda: count)

    return set_left


def test_the_first_of_the_address_that_has_most_goes_for_a_newcomer():
    guests = Guests(strangers_max=4)
    for guest, address in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")):
        assert guests.come(guest, address) is None
    assert guests.come("d1", "d") == "b1"
    assert guests.come("c2", "c") == "c1"
    assert guests.port.guests == 4


def test_one_address_has_only_so_many_however_many_places_there_are():
    guests = Guests()
    for number in range(PER_ADDRESS_MAX):
        assert guests.come(number) is None
    assert guests.come("other", "10.0.0.2") is None
    assert guests.come("more") == 0
    assert guests.come("more still") == 1


def test_sessions_take_no_place_of_strangers_and_strangers_none_of_sessions():
    guests = Guests(sessions_max=2, strangers_max=2)
    assert guests.enter("one") == (True, None)
    assert guests.enter("two") == (True, None)
    assert guests.come("a") is None
    assert guests.come("b") is None
    assert guests.come("c") == "a"
    guests.port.leave("one")
    assert guests.port.admit("c") == (True, None)


def test_the_session_that_was_idle_for_longest_makes_room():
    guests = Guests(sessions_max=3)
    for guest, idle in (("short", 2.0), ("long", 9.0), ("at work", -1.0)):
        guests.enter(guest, idle)
    assert guests.enter("first") == (True, "long")
    assert guests.enter("second") == (True, "short")
    assert guests.enter("third") == (False, None)
    assert guests.port.guests == 4  # "third" is a stranger still
    guests.port.leave("third")
    guests.port.leave("third")
    assert guests.port.guests == 3


def test_who_went_to_work_since_it_was_looked_stays():
    guests = Guests(sessions_max=3)
    for guest in ("a", "b", "c"):
        guests.enter(guest, 5.0)
    _, gone = guests.enter("new")
    first, second = {"a", "b", "c"} - {gone}
    guests.idle[first] = -1.0
    assert guests.enter("newer") == (True, second)


def test_who_had_to_go_is_not_admitted_afterwards():
    guests = Guests(strangers_max=1)
    guests.come("a")
    assert guests.come("b") == "a"
    assert guests.port.admit("a") == (False, None)
    assert guests.port.admit("b") == (True, None)


def test_where_all_are_at_work_it_is_not_looked_for_idle_ones_all_the_time(monkeypatch, looking):
    monkeypatch.setattr(entrance, "_LOOKING_SHARE", looking)
    guests = Guests(sessions_max=50)
    looks = []
    for number in range(50):
        guests.enter(number)
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr(entrance.time, "monotonic", lambda: next(clock))  # each look takes 3 s
    guests.port._idle_s = lambda guest: looks.append(guest) or -1.0
    for number in range(10):
        assert guests.enter(f"new {number}") == (False, None)
    assert len(looks) == 50


def test_near_the_limit_of_descriptors_a_newcomer_takes_a_place_of_others(left):
    guests = Guests()
    guests.enter("idle", 9.0)
    guests.enter("at work")
    left(2)
    assert guests.come("a", "a") is None
    left(1)
    assert guests.come("b", "b") == "idle"  # "a" may have said who it is, and is not heard yet
    assert guests.come("c", "c") == "a"
    left(2)
    guests.enter("idle again", 9.0)
    left(1)
    assert guests.port.admit("b") == (True, "idle again")
    assert guests.port.admit("c") == (True, None)  # there is nobody else to go
    left(0.5)
    assert guests.come("d", "d") is None
    assert guests.port.admit("d") == (False, None)


def test_near_the_limit_of_descriptors_many_strangers_go_rather_than_who_is_idle(left):
    guests = Guests()
    guests.enter("idle", 9.0)
    for number in range(10):
        guests.come(number)
    left(1)
    assert [guests.come(f"new {number}") for number in range(3)] == [0, 1, 2]


def test_descriptors_are_counted_as_the_system_does(monkeypatch):
    assert entrance.open_descriptors() == len(os.listdir("/proc/self/fd")) - 1
    monkeypatch.setattr(entrance.os, "stat", lambda _: os.stat_result([0] * 10))
    assert entrance.open_descriptors() == len(os.listdir("/proc/self/fd"))


def test_where_nobody_can_be_accepted_a_stranger_goes_then_who_is_idle():
    guests = Guests()
    guests.enter("idle", 9.0)
    guests.come("a", "a")
    assert [guests.port.relieve() for _ in range(3)] == ["a", "idle", None]


def test_what_strangers_do_is_told_once_in_a_while_with_how_often(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(entrance, "Seldom", lambda: Seldom(lambda: now[0]))
    port = Guests().port
    for number in range(50):
        port.tell("silent", f"10.0.0.{number}: it said nothing")
    now[0] += 61
    port.tell("silent", "10.0.0.99: it said nothing")
    assert [r.getMessage() for r in caplog.records] == [
        "a port: 10.0.0.0: it said nothing",
        "a port: 10.0.0.99: it said nothing (50 times since this was told last)",
    ]
