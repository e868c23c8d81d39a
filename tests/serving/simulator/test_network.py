"""Flows that share links: when they end. Time is played."""

import pytest

from serving.simulator.network import FairShare, Fifo
from serving.simulator.timeline import Timeline

SPEED = 100.0


def ends(kind, flows):
    """When flows of (moment, source, target, bytes) end."""
    timeline, found = Timeline(), {}
    network = kind(timeline, SPEED)
    for number, (moment, *flow) in enumerate(flows):

        def done(number=number):
            found[number] = timeline.now

        timeline.at(moment, network.send, *flow, done)
    timeline.run()
    return [found[number] for number in range(len(flows))]


@pytest.mark.parametrize("kind", [FairShare, Fifo])
def test_a_flow_alone_has_the_link(kind):
    assert ends(kind, [(1.0, 0, 1, 300)]) == [4.0]


@pytest.mark.parametrize("kind", [FairShare, Fifo])
def test_flows_of_other_nodes_do_not_disturb(kind):
    assert ends(kind, [(0.0, 0, 1, 300), (0.0, 2, 3, 100)]) == [3.0, 1.0]


def test_flows_of_one_sender_share_its_link():
    # Both at 50 until the second has its 100; then the first alone.
    assert ends(FairShare, [(0.0, 0, 1, 300), (0.0, 0, 2, 100)]) == [4.0, 2.0]


def test_one_that_comes_later_slows_down_those_under_way():
    # 100 are sent alone, 200 are left of both from 1.0 on.
    assert ends(FairShare, [(0.0, 0, 1, 300), (1.0, 2, 1, 200)]) == [5.0, 5.0]


def test_a_flow_is_as_quick_as_the_fuller_of_its_links():
    # The first two share what 1 receives; the third has half of what 0 sends.
    found = ends(FairShare, [(0.0, 0, 1, 100), (0.0, 2, 1, 100), (0.0, 0, 3, 100)])
    assert found == [2.0, 2.0, 2.0]


def test_flows_that_end_at_once_end_in_the_order_in_which_they_began():
    """Else two runs of one plan could differ."""
    timeline, over = Timeline(), []
    network = FairShare(timeline, SPEED)
    for number in range(40):
        network.send(0, number + 1, 100, lambda number=number: over.append(number))
    timeline.run()
    assert over == list(range(40))


def test_fifo_sends_one_after_the_other():
    assert ends(Fifo, [(0.0, 0, 1, 300), (0.0, 0, 2, 100)]) == [3.0, 4.0]


def test_nothing_to_send_is_there_at_once():
    assert ends(FairShare, [(2.0, 0, 1, 0)]) == [2.0]


def test_flows_of_a_node_that_fails_end_nowhere_and_make_room():
    timeline, over = Timeline(), {}
    network = FairShare(timeline, SPEED)

    def done(name):
        over[name] = timeline.now

    network.send(0, 1, 300, done, "to it")
    network.send(1, 3, 300, done, "from it")
    network.send(0, 2, 300, done, "beside it")
    timeline.at(2.0, network.cut, 1)
    timeline.run()
    assert over == {"beside it": 4.0}  # 100 at half the speed, then alone


def test_fifo_does_not_wait_for_what_a_failed_node_was_to_get():
    timeline, over = Timeline(), []
    network = Fifo(timeline, SPEED)
    network.send(0, 1, 300, over.append, "lost")
    timeline.at(1.0, network.cut, 1)
    timeline.at(1.0, network.send, 2, 1, 100, lambda: over.append(timeline.now))
    timeline.run()
    assert over[0] == 2.0
