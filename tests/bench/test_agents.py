"""The bench `agents`: a trace that is what it says, and hits that hints are worth."""

import pytest

from mooncake_store.bench import agents
from mooncake_store.bench.harness import Report
from tests.bench.rounds import one_round


def test_a_turn_begins_where_the_one_before_it_ended_and_nothing_follows_the_last():
    blocks, ended = {}, set()
    for request, live in agents.requests_of(3, 2000):
        assert request.session not in ended
        assert request.old == blocks.get(request.session, 0)
        assert request.new > 0
        blocks[request.session] = request.old + request.new
        if request.last:
            ended.add(request.session)
        going_on = sum(size for session, size in blocks.items() if session not in ended)
        assert going_on <= live <= going_on + request.last * blocks[request.session]
    assert len(ended) > 500


def test_the_same_seed_is_the_same_trace():
    one, same, other = (list(agents.requests_of(seed, 300)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.slow
def test_hints_are_worth_hits(monkeypatch):
    monkeypatch.setattr(agents, "REQUESTS_QUICK", 600)
    report = Report("agents", quick=True)
    with one_round():
        agents.run(report, quick=True, vs=("lru",))
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["hit_ratio", "gain/lru", "working_set"]
    assert 0.5 < rows["hit_ratio"].value < 1
    assert rows["gain/lru"].value == pytest.approx(
        100 * (rows["hit_ratio"].value - rows["hit_ratio"].vs["lru"].value),
        abs=1e-3,  # of six digits each
    )
    assert rows["gain/lru"].value > 10
    assert rows["working_set"].value > 1
