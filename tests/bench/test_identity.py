"""The bench `identity`: its rows, each beside XXH3."""

from mooncake_store.bench import identity
from mooncake_store.bench.harness import Report
from tests.bench.rounds import one_round


def test_every_row_has_both_ways_of_naming(monkeypatch):
    monkeypatch.setattr(identity, "SAMPLE_QUICK_S", 0.001)
    report = Report("identity", quick=True)
    with one_round():
        identity.run(report, quick=True, vs=())
    assert [row.name for row in report.rows] == [
        "digest/1",
        "digests/same_length/128",
        "digests/mixed/128",
        "digests/same_length/1024",
        "digests/mixed/1024",
        "hash_blocks/array/16",
        "hash_blocks/list/16",
        "hash_blocks/array/64",
        "hash_blocks/list/64",
        "exists/128",
        "exists/1024",
        "put_remove/128",
    ]
    for row in report.rows:
        assert row.value > 0
        assert set(row.vs) == {"xxh3"}
