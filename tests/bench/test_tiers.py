"""The bench `tiers`: rows of all ways and sizes, each beside a bare program."""

from mooncake_store.bench import tiers
from mooncake_store.bench.harness import Report
from mooncake_store.units import KIB
from tests.bench.rounds import one_round


def test_every_row_is_measured_beside_a_bare_program(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(tiers, "SIZES", (4 * KIB, 64 * KIB))
    report = Report("tiers", quick=True)
    with one_round():
        tiers.run(report, quick=True, vs=("raw",))
    rows = {row.name: row for row in report.rows}
    assert list(rows) == [
        "demote/4KiB/b128",
        "read_back/4KiB/b128",
        "demote/64KiB/b128",
        "read_back/64KiB/b128",
        "read_through/4KiB/b128",
        "read_through/64KiB/b128",
    ]
    for name, row in rows.items():
        assert row.value > 0, name
        assert row.vs["raw"].ratio > 0, name
    assert list(tmp_path.iterdir()) == []
