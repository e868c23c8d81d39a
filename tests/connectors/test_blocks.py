"""Lookups of connectors that weigh loads against computing, over a store in a dictionary."""

import pytest

from serving.connectors.blocks import Blocks
from serving.connectors.counts import Counts
from serving.connectors.options import StoreOptions, WeighedOptions
from tests.vllm.fakes import Link, Store

NAMES = [f"page-{at}" for at in range(6)]


@pytest.fixture
def store():
    return Store(dict.fromkeys(NAMES[:4], b""))


@pytest.fixture
def blocks(store):
    return Blocks(Link(store), StoreOptions(), Counts())


def test_no_more_is_found_than_loads_in_the_time_of_computing(store, blocks):
    store.object_s = 0.9
    assert blocks.leading(NAMES, each_s=1.0) == 4
    assert blocks.counts.take().get("lookup_too_slow", 0) == 0
    store.object_s = 1.1
    assert blocks.leading(NAMES, each_s=1.0) == 0
    assert blocks.counts.take()["lookup_too_slow"] == 4
    assert blocks.leading(NAMES) == 4
    assert store.calls == ["read_cost", "read_cost", "find_prefix"]


def test_what_may_be_quick_again_is_tried_with_as_few_as_are_of_use(store, blocks):
    store.object_s, store.hoped_s = 10.0, 0.5
    assert blocks.leading(NAMES, each_s=1.0) == 1
    assert blocks.leading(NAMES, each_s=1.0, step=2) == 2
    assert blocks.leading(NAMES[:3], each_s=1.0, step=4) == 0
    store.object_s = 0.5
    assert blocks.leading(NAMES[:3], each_s=1.0, step=2) == 2


def test_a_store_that_is_away_has_nothing_worth_loading(store):
    link = Link(store)
    link.up = False
    blocks = Blocks(link, StoreOptions(), Counts())
    assert blocks.leading(NAMES, each_s=1.0) == 0
    assert blocks.counts.take()["lookup_failures"] == 1


def test_what_is_worth_it_is_leased_if_that_is_asked_for(store, blocks):
    leased = []
    store.lease_many = lambda names, **options: leased.extend(names) or store.read_cost(names)
    store.object_s = 0.9
    assert blocks.leading(NAMES, 5.0, each_s=1.0) == 4
    assert leased == NAMES[:4]
    store.object_s = 1.1
    assert blocks.leading(NAMES, 5.0, each_s=1.0) == 0
    assert leased == NAMES[:4]


def test_what_tokens_are_worth_is_known_with_the_engines_rate():
    # Nine tenths of the time in which they are computed.
    assert WeighedOptions(prefill_tokens_per_s=2000).worth_s(64) == pytest.approx(0.0288)
    assert WeighedOptions().worth_s(64) == 0
