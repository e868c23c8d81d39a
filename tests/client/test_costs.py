"""What reads are predicted to take, learnt from made-up transfers on a made-up clock."""

import pytest

from mooncake_store.client.costs import Costs, Sample
from mooncake_store.core.records import Tier

MB = 1_000_000


def read(pace, seconds, *, nbytes=MB, objects=1, at=0.0):
    pace.samples.append(Sample(nbytes, objects, seconds, at))


def predicted(pace, *, transport="tcp", tier=Tier.MEMORY, nbytes=MB, objects=1, at=0.0):
    return pace.outlook(transport, tier, at).hoped.seconds(nbytes, objects)


def test_the_order_of_transports_holds_before_anything_was_read():
    seconds = [
        predicted(Costs().pace(), transport=each) for each in ("shm", "rdma", "tcp", "unheard")
    ]
    assert seconds == sorted(seconds)
    assert predicted(Costs().pace(), tier=Tier.DISK) > predicted(Costs().pace())
    file = predicted(Costs().pace(), transport="file", tier=Tier.DISK)
    assert file == predicted(Costs().pace(), transport="file")


@pytest.mark.parametrize("seconds", [1e-5, 1e-4, 0.001, 0.5, 20.0])
def test_the_first_transfer_is_believed(seconds):
    pace = Costs().pace()
    read(pace, seconds)
    assert predicted(pace) == pytest.approx(seconds, rel=0.5)


@pytest.mark.parametrize(
    "truth", [(1e-3, 1e-5, 1e-8), (1e-5, 1e-6, 1e-10), (0.05, 0.0, 1e-9), (1e-4, 0.001, 1e-9)]
)
def test_latency_objects_and_bytes_are_told_apart(truth):
    latency, each, byte = truth
    pace = Costs().pace()
    batches = [(4096, 1), (100 * MB, 1), (4096 * 512, 512), (64 * MB, 64)]
    for turn in range(300):
        nbytes, objects = batches[turn % 4]
        seconds = latency + objects * each + nbytes * byte
        read(pace, seconds, nbytes=nbytes, objects=objects, at=turn * 0.01)
        predicted(pace, at=turn * 0.01)
    for nbytes, objects in [*batches, (10 * MB, 10)]:
        seconds = latency + objects * each + nbytes * byte
        found = predicted(pace, nbytes=nbytes, objects=objects, at=3.0)
        assert found == pytest.approx(seconds, rel=0.3), (nbytes, objects)


def test_one_pause_changes_little_but_a_path_that_became_slow_is_believed():
    pace = Costs().pace()
    for turn in range(20):
        read(pace, 0.01, at=turn)
        predicted(pace, at=turn)
    read(pace, 10.0, at=20)
    assert predicted(pace, at=20) < 0.02
    read(pace, 10.0, at=21)
    assert predicted(pace, at=21) > 3.0  # the second in a row
    for turn in range(22, 60):
        read(pace, 10.0, at=turn)
        predicted(pace, at=turn)
    assert predicted(pace, at=60) == pytest.approx(10.0, rel=0.3)


@pytest.mark.parametrize("times", [2, 10, 18, 100])
def test_two_reads_tell_how_slow_a_path_became(times):
    """Who may compute instead, in nearly the same time, would read in vain until it is known."""
    pace = Costs().pace()
    for turn in range(60):
        read(pace, 0.05, nbytes=16 * MB, objects=64, at=turn)
        pace.outlook("tcp", Tier.DISK, turn)
    found = []
    for turn in range(60, 64):
        read(pace, 0.05 * times, nbytes=16 * MB, objects=64, at=turn)
        measured = pace.outlook("tcp", Tier.DISK, turn).measured
        found.append(measured.seconds(16 * MB, 64))
    if times > 4:
        assert found[1] == pytest.approx(0.05 * times, rel=0.15)
    assert found[3] == pytest.approx(0.05 * times, rel=0.3 if times < 4 else 0.1)


def test_what_was_heard_a_moment_ago_counts_in_full():
    costs, slow = Costs(), (1.0, 0.0, 0.0)
    costs.expect({("tcp", Tier.MEMORY): (slow, (0.002, 0.0, 0.0), (3.0, 0.0))}, 100.0)
    for age_s in (2, 10, 60):
        heard = costs.pace().outlook("tcp", Tier.MEMORY, 100.0 + age_s).measured
        assert heard.seconds(MB, 1) == pytest.approx(1.0)


def test_pauses_that_are_not_in_a_row_are_pauses():
    pace = Costs().pace()
    for turn in range(60):
        read(pace, 10.0 if turn % 8 == 7 else 0.01, at=turn)
        assert predicted(pace, at=turn) < 0.03


def test_what_is_learnt_fades_so_that_a_slow_path_is_tried_again():
    costs = Costs()
    pace, usual = costs.pace(), predicted(Costs().pace())
    for turn in range(30):
        read(pace, 5.0, at=turn)
    later = [predicted(pace, at=30 + minutes * 60) for minutes in (0, 1, 5, 60)]
    assert later == sorted(later, reverse=True)
    assert later[0] > 1000 * usual
    assert later[-1] == pytest.approx(usual, rel=0.01)


def tries(pace, seconds, worth, moments):
    """How often somebody reads to whom a read is worth so much, when each takes so long."""
    count = 0
    for at in moments:
        if predicted(pace, at=at) <= worth:
            count += 1
            read(pace, seconds, at=at)
    return count


@pytest.mark.parametrize("quick", [0, 1, 30])
@pytest.mark.parametrize("busy", [1, 5, 100])
def test_what_was_slow_beside_other_work_is_tried_again_within_seconds(quick, busy):
    """Who leaves it alone for minutes because of some seconds computes what he could read."""
    pace = Costs().pace()
    for turn in range(quick):
        read(pace, 0.002, at=turn * 0.1)
        predicted(pace, at=turn * 0.1)
    for turn in range(busy):
        at = 10 + turn * 0.05
        read(pace, 0.03, at=at)
        predicted(pace, at=at)
    if busy > 1:
        assert predicted(pace, at=at) > 0.01
    assert predicted(pace, at=at + 20) < 0.01
    read(pace, 0.002, at=at + 20)
    assert tries(pace, 0.002, 0.01, [at + 20 + turn for turn in range(1, 20)]) > 10


@pytest.mark.parametrize("gap_s", [0, 1])
@pytest.mark.parametrize(("slow", "most"), [(0.7, 1.15), (1.2, 1.15), (3.0, 1.3)])
def test_who_may_compute_instead_loses_little_to_a_path_that_became_slow(slow, gap_s, most):
    """Time passes as reads and computing take it; of a hundred, those that find out included."""
    pace, quick, worth, at = Costs().pace(), 0.06, 0.5, 0.0
    for _ in range(20):
        at += quick
        read(pace, quick, at=at)
        predicted(pace, at=at)
    taken = 0.0
    for _ in range(100):
        seconds = slow if predicted(pace, at=at) <= worth else worth
        taken, at = taken + seconds, at + seconds
        if seconds == slow:
            read(pace, slow, at=at)
        at += gap_s
    assert taken < most * 100 * worth


@pytest.mark.parametrize("pause_s", [0.1, 1, 10])
@pytest.mark.parametrize("slower", [3, 30, 1000])
def test_what_stays_slow_is_tried_in_vain_a_few_times_only(pause_s, slower):
    pace = Costs().pace()
    for turn in range(30):
        read(pace, 0.002, at=turn)
        predicted(pace, at=turn)
    moments = [30 + turn * pause_s for turn in range(200)]
    assert 1 <= tries(pace, 0.002 * slower, 0.004, moments) <= 20


def test_what_another_client_measured_fades_as_well():
    """A scheduler hears of reads only: who never lets one happen would never hear better."""
    costs, usual = Costs(), predicted(Costs().pace())
    busy, calm = (1.0, 0.0, 0.0), (0.002, 0.0, 0.0)
    costs.expect({("tcp", Tier.MEMORY): (busy, calm, (3.0, 0.0))}, 100.0)
    later = [predicted(costs.pace(), at=100 + seconds) for seconds in (0, 30, 300, 3600)]
    assert later[0] == pytest.approx(1.0)
    assert later[1] < 0.005
    assert later[-1] == pytest.approx(usual, rel=0.3)


def test_what_is_told_to_another_client_is_what_it_takes_now_and_in_calm():
    costs, other = Costs(), Costs()
    pace = costs.pace()
    for turn in range(30):
        read(pace, 0.002, at=turn)
        predicted(pace, at=turn)
    for turn in range(10):
        read(pace, 0.03, at=30 + turn * 0.1)
        predicted(pace, at=30 + turn * 0.1)
    other.expect(costs.known(31.0), 1000.0)  # its clock is another one
    at_once, later = (predicted(other.pace(), at=1000 + seconds) for seconds in (0, 20))
    assert at_once > 0.01
    assert later < 0.006


def test_who_only_hears_looks_no_more_often_than_who_measures():
    """As the part of an engine that looks up, which reads nothing, does by what another reads."""
    reader, listener, at = Costs(), Costs(), 0.0
    pace, tried = reader.pace(), []
    for _ in range(20):
        at += 0.06
        read(pace, 0.06, at=at)
        predicted(pace, at=at)
    for turn in range(60):
        if not tried or tried[-1] == turn - 1:
            listener.expect(reader.known(at), at)
        if predicted(listener.pace(), at=at) <= 0.5:
            tried.append(turn)
            at += 3.0
            read(pace, 3.0, at=at)
            predicted(pace, at=at)
        at += 1.0
    assert 2 <= len(tried) <= 8


def test_neighbours_are_taken_to_be_alike_and_one_that_differs_is_not():
    costs = Costs()
    slow, quick = costs.pace(), costs.pace()
    for turn in range(50):
        read(slow, 0.2, at=turn)
        read(quick, 0.02, at=turn)
        predicted(slow, at=turn)
        predicted(quick, at=turn)
    assert predicted(slow, at=50) == pytest.approx(0.2, rel=0.3)
    assert predicted(quick, at=50) == pytest.approx(0.02, rel=0.3)
    assert 0.02 < predicted(costs.pace(), at=50) < 0.2
    # What lies on disks is another kind, and so is another transport.
    untouched = predicted(Costs().pace(), tier=Tier.DISK)
    assert predicted(costs.pace(), tier=Tier.DISK, at=50) == untouched


def test_a_slow_neighbour_is_no_part_of_a_quick_ones_time():
    costs = Costs()
    slow, quick = costs.pace(), costs.pace()
    for turn in range(20):
        read(slow, 3600.0, at=turn)
        read(quick, 0.001, at=turn)
    assert predicted(slow, at=19) == pytest.approx(3600, rel=0.1)
    assert predicted(quick, at=19) == pytest.approx(0.001, rel=0.1)


def test_what_is_under_way_comes_first():
    pace = Costs().pace()
    read(pace, 0.1, nbytes=100 * MB)
    alone = predicted(pace, nbytes=100 * MB)
    pace.under_way[1] = 300 * MB
    assert predicted(pace, nbytes=100 * MB) == pytest.approx(4 * alone, rel=0.1)
    del pace.under_way[1]
    assert predicted(pace, nbytes=100 * MB) == alone


def test_measurements_that_nobody_asks_about_stay_few():
    pace = Costs().pace()
    for turn in range(10_000):
        read(pace, 0.01, at=turn)
    assert len(pace.samples) < 100
    assert predicted(pace, at=10_000) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("seconds", [1e-12, 1e12])
def test_odd_measurements_leave_predictions_finite(seconds):
    pace = Costs().pace()
    for turn in range(100):
        read(pace, seconds, at=turn)
        predicted(pace, at=turn)
    assert 0 < predicted(pace, at=100) <= 1e12


def test_of_several_that_tell_the_slowest_is_believed_and_each_may_become_quick():
    costs = Costs()
    slow, quick = (1.0, 0.0, 0.0), (0.0, 0.002, 0.0)
    costs.expect({("tcp", Tier.MEMORY): (slow, slow, (3.0, 0.0))}, 100.0, "rank 0")
    costs.expect({("tcp", Tier.MEMORY): (quick, quick, (3.0, 0.0))}, 100.0, "rank 1")
    assert predicted(costs.pace(), at=100) == pytest.approx(1.0), "no sum of both"
    costs.expect({("tcp", Tier.MEMORY): (quick, quick, (3.0, 0.0))}, 101.0, "rank 0")
    assert predicted(costs.pace(), at=101) == pytest.approx(0.002)
