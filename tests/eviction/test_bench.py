"""The eviction bench: its rows, their names, and what it refuses."""

import pytest

from mooncake_store.bench import eviction as bench
from mooncake_store.bench.harness import Report


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "SYNTHETIC_REQUESTS", 200)
    monkeypatch.setattr(bench, "LIVE_IDS", 2_000)
    monkeypatch.setattr(bench, "TOUCHES", 1_280)


def rows(**options):
    report = Report("eviction")
    bench.run(report, **{"quick": True, "vs": (), **options})
    return {row.name: row for row in report.rows}


def test_every_policy_and_capacity_has_its_rows(small):
    found = rows(capacity="100, 1000,inf,100", policy="lru,opt", vs=("python",))
    assert list(found) == [
        "synthetic_requests",
        *(
            f"{kind}{policy}/{capacity}"
            for policy in ("lru", "opt")
            for capacity in ("100", "1000", "inf")
            for kind in ("", "ratio/")
        ),
        "seconds",
        "touch/lru/b128",
        "touch/lfu/b128",
    ]
    assert found["lru/100"].value <= found["opt/100"].value <= found["opt/inf"].value
    assert found["lru/inf"].unit == "hits"
    assert 0 < found["ratio/lru/inf"].value < 1
    assert found["touch/lru/b128"].vs["python"].value > 0


def test_a_trace_file_is_read_and_said_so(small, tmp_path):
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}\n'
    path = tmp_path / "two.jsonl"
    path.write_text(line * 2)
    found = rows(trace=str(path), capacity="1,inf", policy="fifo")
    assert found["trace_requests"].value == 2
    assert (found["fifo/1"].value, found["fifo/inf"].value) == (1, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capacity": "10,-3"}, "positive number of blocks or inf, not '-3'"),
        ({"capacity": "0"}, "not '0'"),
        ({"policy": "lru,mru"}, "unknown eviction policy 'mru'"),
    ],
)
def test_what_is_misspelt_is_refused_before_measuring(small, options, reason):
    report = Report("eviction")
    with pytest.raises(ValueError, match=reason):
        bench.run(report, quick=True, vs=(), **options)
    assert report.rows == []
