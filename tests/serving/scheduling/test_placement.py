"""Algorithm 1 by its corner cases, and the rules it is compared with."""

import random

import pytest

from serving.scheduling.costs import Costs
from serving.scheduling.learnt import LearntDecode, LearntLoad, LearntPrefill, LearntTransfer
from serving.scheduling.placement import (
    AnyInstance,
    CacheCentric,
    LeastLoaded,
    LocalCache,
    RoundRobin,
    choose_decode,
)
from serving.scheduling.views import DecodeView, Demand, PrefillView


def costs(bytes_per_s=1e9, kv_bytes=1000, load_bytes_per_s=1e18):
    """1 ms a token, nothing else; transfers and loads as told."""
    return Costs(
        prefill=LearntPrefill((0.0, 1e-3, 0.0)),
        transfer=LearntTransfer(bytes_per_s, latency_s=0.0),
        load=LearntLoad(load_bytes_per_s),
        decode=LearntDecode((0.01, 0.01, 0.0)),
        kv_bytes=kv_bytes,
    )


TWO = [PrefillView("p0"), PrefillView("p1")]


def test_without_any_match_the_shortest_queue_gets_it():
    busy = [PrefillView("p0", 2.0), PrefillView("p1", 0.5), PrefillView("p2", 0.5)]
    found = CacheCentric().place(Demand(1000), busy, costs())
    assert (found.prefill, found.source, found.pulled) == ("p1", "", 0)
    assert found.ttft_s == pytest.approx(1.5)


def test_ties_keep_the_earlier_instance():
    assert CacheCentric().place(Demand(100), TWO, costs()).prefill == "p0"


def test_a_holder_with_a_short_queue_keeps_the_request():
    queues = [PrefillView("p0"), PrefillView("p1", 0.2)]
    found = CacheCentric().place(Demand(1000, {"p1": 900}), queues, costs(bytes_per_s=1e5))
    assert (found.prefill, found.cached, found.source) == ("p1", 900, "")


def test_a_busy_holder_gives_its_prefix_to_another():
    queues = [PrefillView("p0"), PrefillView("p1", 10.0)]
    found = CacheCentric().place(Demand(1000, {"p1": 900}), queues, costs())
    assert (found.prefill, found.source, found.pulled, found.cached) == ("p0", "p1", 900, 900)
    assert found.transfer_s == pytest.approx(900 * 1000 / 1e9)
    assert found.saved_s == pytest.approx(0.9)


def test_what_loading_a_prefix_takes_is_part_of_its_time():
    # 900 tokens of its own take longer to load than to compute, then half as long.
    found = LocalCache().place(Demand(1000, {"p1": 900}), TWO, costs(load_bytes_per_s=0.9e6))
    assert (found.prefill, found.load_s) == ("p0", 0.0)
    found = LocalCache().place(Demand(1000, {"p1": 900}), TWO, costs(load_bytes_per_s=2e6))
    assert (found.prefill, found.load_s) == ("p1", pytest.approx(0.45))
    assert found.ttft_s == pytest.approx(0.55)


def test_a_pull_has_to_save_more_than_it_and_its_load_take():
    queues = [PrefillView("p0"), PrefillView("p1", 10.0)]
    demand = Demand(1000, {"p1": 900})
    found = CacheCentric().place(demand, queues, costs(bytes_per_s=1e7, load_bytes_per_s=2e6))
    assert (found.prefill, found.pulled, found.transfer_s) == ("p0", 900, pytest.approx(0.09))
    assert (found.load_s, found.saved_s) == (pytest.approx(0.45), pytest.approx(0.45))
    found = CacheCentric().place(demand, queues, costs(bytes_per_s=1e7, load_bytes_per_s=1.05e6))
    assert (found.prefill, found.pulled, found.declined) == ("p0", 0, "p1")


@pytest.mark.parametrize(("best", "pulled"), [(150, 0), (151, 51)])
def test_only_a_prefix_above_the_threshold_is_pulled(best, pulled):
    demand = Demand(1000, {"p0": 100, "pool": best})
    found = CacheCentric(balancing=1.5).place(demand, TWO[:1], costs())
    assert found.pulled == pulled
    assert found.cached == 100 + pulled


def test_nothing_of_its_own_counts_as_an_infinite_ratio():
    found = CacheCentric(balancing=1e9).place(Demand(100, {"pool": 1}), TWO[:1], costs())
    assert (found.source, found.pulled) == ("pool", 1)


def test_a_pull_that_is_slower_than_computing_is_not_made():
    demand = Demand(1000, {"pool": 900})
    slow = costs(bytes_per_s=1e5)  # 9 s for what takes 0.9 s to compute
    found = CacheCentric().place(demand, TWO[:1], slow)
    assert (found.source, found.ttft_s) == ("", pytest.approx(1.0))
    # The paper's own rule pulls whenever the ratio says so.
    assert CacheCentric(weigh=False).place(demand, TWO[:1], slow).source == "pool"


def test_the_last_token_is_always_computed():
    found = CacheCentric().place(Demand(512, {"p0": 512}), TWO[:1], costs())
    assert found.prefill_s == pytest.approx(1e-3)


def test_local_cache_never_pulls():
    found = LocalCache().place(Demand(1000, {"pool": 900, "p1": 100}), TWO, costs())
    assert (found.prefill, found.cached, found.source) == ("p1", 100, "")


def test_least_loaded_looks_at_queues_only():
    queues = [PrefillView("p0", 0.2), PrefillView("p1", 0.1)]
    found = LeastLoaded().place(Demand(1000, {"p0": 1000}), queues, costs())
    assert (found.prefill, found.cached) == ("p1", 0)


def test_any_instance_is_reproducible_and_uses_all():
    def names(seed):
        rule = AnyInstance(random.Random(seed))
        return [rule.place(Demand(10), TWO, costs()).prefill for _ in range(50)]

    assert names(1) == names(1)
    assert set(names(1)) == {"p0", "p1"}


def test_round_robin_takes_whose_turn_is_longest_ago_whatever_it_holds():
    rule = RoundRobin()

    def next_of(*views):
        return rule.place(Demand(1000, {"p0": 1000}), views, costs()).prefill

    busy = [PrefillView("p0"), PrefillView("p1", 9.0), PrefillView("p2")]
    assert [next_of(*busy) for _ in range(5)] == ["p0", "p1", "p2", "p0", "p1"]
    assert [next_of(*TWO) for _ in range(2)] == ["p0", "p1"]
    assert next_of(*busy) == "p2"


@pytest.mark.parametrize(
    "rule",
    [CacheCentric(), LocalCache(), LeastLoaded(), AnyInstance(random.Random(0)), RoundRobin()],
)
def test_without_instances_there_is_no_place(rule):
    assert rule.place(Demand(10), [], costs()) is None


def test_decode_goes_where_tokens_come_fastest_and_there_is_room():
    views = [DecodeView("d0", 4), DecodeView("d1", 1), DecodeView("d2", 0, free_tokens=50)]
    assert choose_decode(Demand(100, max_new_tokens=20), views, costs().decode).name == "d1"
    assert choose_decode(Demand(100), views[2:], costs().decode) is None


@pytest.mark.parametrize(("free", "fits"), [(119, False), (120, True), (121, True)])
def test_an_answer_goes_where_exactly_enough_is_free(free, fits):
    view = DecodeView("d0", free_tokens=free)
    chosen = choose_decode(Demand(100, max_new_tokens=20), [view], costs().decode)
    assert (chosen is not None) is fits


def test_a_threshold_below_one_is_refused():
    with pytest.raises(ValueError, match="balancing"):
        CacheCentric(balancing=0.5)


def test_what_an_instance_will_have_counts_there_and_cannot_be_pulled():
    """Behind the prompt that computes it, computing it again elsewhere would take longer."""
    queues = [PrefillView("p0", 0.5), PrefillView("p1")]
    found = CacheCentric().place(Demand(1000, coming={"p0": 900}), queues, costs())
    assert (found.prefill, found.cached, found.source) == ("p0", 900, "")
    longer = [PrefillView("p0", 50.0), PrefillView("p1")]
    found = CacheCentric().place(Demand(1000, coming={"p0": 900}), longer, costs())
    assert (found.prefill, found.cached, found.source) == ("p1", 0, "")
