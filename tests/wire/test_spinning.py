"""Polling before sleeping: it learns whether it pays, it ends, and it changes no outcome."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import pytest

from tests.waiting import until
from tests.wire.helpers import on_loop, serving
from transfer_engine.rpc import spinning
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.echo import COLUMNS, ECHO, REGISTRY, SLEEP
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.rpc.spinning import SPIN_NS, LoopSpin, Spin


class Clock:
    """Time that moves when it is told to."""

    def __init__(self):
        self.now = 1_000_000

    def __call__(self):
        return self.now


class Loop:
    """An event loop that runs one round of callbacks at a time."""

    def __init__(self):
        self.due = []

    def call_soon(self, callback):
        self.due.append(callback)

    def turn(self):
        due, self.due = self.due, []
        for callback in due:
            callback()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(spinning, "perf_counter_ns", clock)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return clock


def rests(spin):
    """How many waits are left alone before the next poll."""
    count = 0
    while not spin.worthwhile():
        count += 1
    return count


def test_polls_in_vain_become_rare(clock):
    spin = Spin()
    assert rests(spin) == 0
    seen = []
    for _ in range(10):
        spin.failed()
        seen.append(rests(spin))
    assert seen == [1, 3, 7, 15, 31, 63, 63, 63, 63, 63]
    spin.paid()
    spin.failed()
    assert rests(spin) == 1


def test_one_processor_never_polls(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    spin = Spin()
    assert not any(spin.worthwhile() for _ in range(1000))


def test_a_loop_sleeps_when_nothing_comes(clock):
    loop = Loop()
    spin = LoopSpin(loop)
    spin.expect()
    for _ in range(5):
        loop.turn()
        assert loop.due
    clock.now += SPIN_NS
    loop.turn()
    assert not loop.due
    spin.expect()  # it was in vain, so this request is not waited upon
    assert not loop.due
    spin.expect()
    assert loop.due


def test_a_loop_stays_awake_while_requests_come(clock):
    loop = Loop()
    spin = LoopSpin(loop)
    for _ in range(10):
        spin.expect()
        clock.now += SPIN_NS - 1
        loop.turn()
        assert len(loop.due) == 1
    spin.rest()
    loop.turn()
    assert not loop.due
    spin.expect()  # resting was no failure
    assert loop.due


def test_a_request_that_others_delayed_was_waited_upon_in_vain(clock):
    loop = Loop()
    spin = LoopSpin(loop)
    spin.expect()
    clock.now += SPIN_NS + 1  # the loop did not get to run meanwhile
    spin.expect()
    clock.now += SPIN_NS
    loop.turn()
    assert not loop.due
    # Two failures: three requests are left alone.
    for due in (0, 0, 0, 1):
        spin.expect()
        assert len(loop.due) == due


def test_a_reply_that_others_delayed_was_polled_for_in_vain(monkeypatch):
    seen = []
    monkeypatch.setattr(Spin, "paid", lambda _: seen.append("paid"))
    monkeypatch.setattr(Spin, "failed", lambda _: seen.append("failed"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with (
        serving() as server,
        BlockingConnection.connect(server.address, REGISTRY) as connection,
    ):
        for step_ns, expected in ((1, "paid"), (SPIN_NS + 1, "failed")):
            request = connection.send(ECHO, ECHO.request.pack(payload=b"x"), timeout_s=60)
            until(connection.stale)  # the reply is there: the poll begins with it
            ticks = itertools.count(0, step_ns)
            with monkeypatch.context() as patch:
                patch.setattr(time, "perf_counter_ns", lambda ticks=ticks: next(ticks))
                connection.recv(request, timeout_s=60)
            assert seen == [expected]
            seen.clear()


def test_a_server_stays_awake_after_brief_requests_and_chosen_ones(monkeypatch):
    seen = []
    monkeypatch.setattr(LoopSpin, "expect", lambda _: seen.append("expect"))
    monkeypatch.setattr(LoopSpin, "rest", lambda _: seen.append("rest"))
    limits = ServerLimits(awake_bytes_max=512, awake_opcodes=frozenset({COLUMNS.opcode}))
    long = COLUMNS.request.pack(
        ttl_ms=1, owner=bytes(16), weight=0.0, digests=np.zeros((100, 2), np.uint64),
        sizes=np.zeros(100, np.uint64), names=[b""] * 100, segments=[], deltas=np.empty((0, 3)),
    )  # fmt: skip
    with (
        serving(limits=limits) as server,
        BlockingConnection.connect(server.address, REGISTRY) as connection,
    ):
        for operation, body, expected in (
            (ECHO, ECHO.request.pack(payload=b"brief"), "expect"),
            (ECHO, ECHO.request.pack(payload=bytes(1000)), "rest"),
            (COLUMNS, long, "expect"),
        ):
            connection.call(operation, body, timeout_s=60)
            assert on_loop(server, seen.copy)[-1] == expected


@pytest.mark.parametrize("processors", [{0}, {0, 1}])
def test_answers_soon_and_late_are_the_same(monkeypatch, processors):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors)
    with (
        serving(limits=ServerLimits(awake_bytes_max=512)) as server,
        BlockingConnection.connect(server.address, REGISTRY) as connection,
    ):
        for round_ in range(20):
            payload = b"%d" % round_ * 40
            body = connection.call(ECHO, ECHO.request.pack(payload=payload), timeout_s=60)
            assert ECHO.reply.unpack(body).payload.tobytes() == payload
            if round_ % 5 == 0:
                connection.call(SLEEP, SLEEP.request.pack(ms=3), timeout_s=60)
