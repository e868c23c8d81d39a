"""Threads that call for others let go of what they were given before anybody hears of the end."""

import threading
import weakref
from concurrent.futures import Future

from tests.waiting import PATIENCE_S, until
from transfer_engine.segments.hands import Hands


class Device:
    """Something that may be given up when a call has ended."""

    def use(self, begin):
        return begin.wait(PATIENCE_S)


def test_who_hears_of_the_end_may_give_up_what_was_used():
    hands, device, begin, held = Hands(1, "test-hands"), Device(), threading.Event(), []
    alive = weakref.ref(device)
    future = hands.submit(device.use, begin)
    # Called by the thread, before who waits for the future is woken.
    future.add_done_callback(lambda _: held.append(alive()))
    del device
    begin.set()
    assert future.result(PATIENCE_S)
    assert held == [None]


def test_what_was_withdrawn_is_kept_by_no_thread_that_waits():
    hands, device = Hands(2, "test-hands"), Device()
    alive, both = weakref.ref(device), threading.Barrier(2, timeout=PATIENCE_S)
    for turn in [hands.submit(both.wait) for _ in range(2)]:
        turn.result(PATIENCE_S)
    until(lambda: hands._idle == 2)
    with hands._news:  # neither begins it
        hands.withdraw([hands.submit(device.use, threading.Event())])
    del device
    assert alive() is None


def test_what_is_withdrawn_when_a_thread_had_just_taken_it_is_let_go_of_first(monkeypatch):
    hands, device, taken = Hands(1, "test-hands"), Device(), threading.Event()
    alive, really = weakref.ref(device), Future.set_running_or_notify_cancel

    def begin(future):
        taken.set()
        until(future.cancelled)
        threading.Event().wait(0.05)  # so that who is not waited for has not ended
        return really(future)

    monkeypatch.setattr(Future, "set_running_or_notify_cancel", begin)
    future = hands.submit(device.use, threading.Event())
    del device
    assert taken.wait(PATIENCE_S)
    hands.withdraw([future])
    assert alive() is None


def test_what_is_withdrawn_is_not_called_and_the_next_one_is():
    hands, gate, called = Hands(1, "test-hands"), threading.Event(), []
    first = hands.submit(gate.wait, PATIENCE_S)
    second, third = (hands.submit(called.append, number) for number in (2, 3))
    hands.withdraw([second])
    gate.set()
    assert first.result(PATIENCE_S)
    assert third.result(PATIENCE_S) is None
    assert called == [3]
    assert second.cancelled()
