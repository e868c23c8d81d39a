"""The bench `restart`: it kills what it says, and tells when it is back."""

from mooncake_store.bench import restart
from mooncake_store.bench.harness import Report


def test_every_row_is_measured(monkeypatch):
    monkeypatch.setattr(restart, "OBJECTS_QUICK", (5000,))
    monkeypatch.setattr(restart, "CALLS", 5)
    report = Report("restart", quick=True)
    restart.run(report, quick=True, vs=())
    rows = {row.name: row for row in report.rows}
    assert list(rows) == [
        "get/128/p99/snapshot/5000",
        "get/128/slowest/snapshot/5000",
        "master/first_read/5000",
        "master/first_put/5000",
        "master/goes_on/5000",
        "put/128/after/5000",
        "worker/read/5000",
    ]
    for name, row in rows.items():
        assert "snapshot" in name or row.value > 0, name
