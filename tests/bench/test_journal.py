"""The bench `journal`: its rows, each beside the other levels."""

from mooncake_store.bench import journal
from mooncake_store.bench.harness import Report
from tests.bench.rounds import one_round


def test_every_row_has_all_levels(monkeypatch):
    monkeypatch.setattr(journal, "SAMPLE_QUICK_S", 0.001)
    monkeypatch.setattr(journal, "CALLS_QUICK", 2)
    report = Report("journal", quick=True)
    with one_round():
        journal.run(report, quick=True, vs=())
    assert [row.name for row in report.rows] == [
        "put_remove/128",
        "put_remove/1024",
        "get/128",
        "get/1024",
        "slowest_put/128",
        "slowest_put/128/disk_busy",
        "bytes_per_put",
    ]
    for row in report.rows[:-1]:
        assert row.value > 0
        assert set(row.vs) == {"none", "synced"}
    assert 100 < report.rows[-1].value < 1000
