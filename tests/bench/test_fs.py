"""The bench `fs`: rows, what it refuses to count, and what it says about sides that are missing."""

import pytest

from mooncake_store.bench import fs
from mooncake_store.bench.harness import Report
from mooncake_store.bench.parts import environment, s3
from mooncake_store.bench.sides.files import Files
from mooncake_store.units import MIB
from tests.bench.rounds import one_round

TINY = fs.Plan(
    files=60,
    s3_files=20,
    names=1000,
    s3_names=1000,
    large_bytes=16 * MIB,
    repeats=1,
    total_s=0.0,
)
ROWS = {
    "small_write",
    "small_list_s",
    "small_read",
    "small_delete",
    "list_1k_s",
    "seq_write",
    "seq_read",
}


def test_every_row_is_measured_beside_local_files():
    report = Report("fs", quick=True)
    with one_round():
        fs.measure_all(report, TINY, ("local",))
    rows = {row.name: row for row in report.rows}
    assert set(rows) == ROWS
    for row in rows.values():
        assert row.value, row
        assert row.vs["local"].ratio, row


@pytest.mark.skipif(
    not (environment.folder_of(s3.NAME) / environment.READY).exists(),
    reason="s3fs is not installed: run `mooncake bench fs --vs s3fs` once",
)
def test_s3fs_runs_the_same_workload():
    report = Report("fs", quick=True)
    with one_round():
        fs.measure_all(report, TINY, ("s3fs",))
    assert {row.name for row in report.rows} == ROWS
    assert all(row.vs["s3fs"].ratio for row in report.rows)


def test_without_s3fs_the_report_says_why(monkeypatch):
    def missing(stack, names):
        raise environment.Missing("s3fs could not be installed")

    monkeypatch.setattr(s3, "side", missing)
    report = Report("fs", quick=True)
    with one_round():
        fs.measure_all(report, TINY, ("s3fs",))
    rows = {row.name: row for row in report.rows}
    assert rows["s3fs"].why.startswith("s3fs could not be installed")
    assert set(rows) == ROWS | {"s3fs"}
    assert all(rows[name].vs["s3fs"].value is None for name in ROWS)


@pytest.fixture
def files(tmp_path):
    side = Files()
    side.open("file", str(tmp_path), {"auto_mkdir": True})
    return side


def test_wrong_bytes_are_no_measurement(files, tmp_path):
    files.write(4, 4096)
    (tmp_path / "small" / "000002").write_bytes(bytes(4096))
    with pytest.raises(RuntimeError, match="file 2 differs"):
        files.read(4, 4096)


def test_missing_names_are_no_measurement(files, tmp_path):
    files.names(5)
    (tmp_path / "names" / "000003").unlink()
    with pytest.raises(RuntimeError, match="4 of 5 names"):
        files.list("names", 5)


def test_a_short_read_is_no_measurement(files, tmp_path):
    files.write_large(1 << 20)
    (tmp_path / "large").write_bytes((tmp_path / "large").read_bytes()[:-1])
    with pytest.raises(RuntimeError, match="1048575 of 1048576 bytes"):
        files.read_large(1 << 20)
