"""`mooncake bench serving`: every row is measured, with small prompts."""

import inspect

import pytest

from mooncake_store.bench.harness import Report
from mooncake_store.cli import bench
from serving import bench as serving_bench
from serving.bench import _rows


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_row_has_a_value(monkeypatch):
    monkeypatch.setattr(_rows, "SHARED_TOKENS", 256)
    monkeypatch.setattr(_rows, "LONG_TOKENS", 600)
    monkeypatch.setattr(_rows, "STREAM_MODEL", "nano")
    monkeypatch.setattr(_rows, "STREAM_TOKENS", 128)
    report = Report("serving", quick=True)
    serving_bench.run(report, quick=True, vs=())
    assert [row.name.split("/")[0] for row in report.rows] == [
        "first token", "first token", "first token", "KV stored", "KV stored",
    ]  # fmt: skip
    assert all(row.value is not None for row in report.rows)
    assert report.rows[2].vs["one worker"].value > 0


def test_the_command_finds_it_by_name():
    assert bench._module("serving") is serving_bench
    assert set(inspect.signature(serving_bench.run).parameters) == {"report", "quick", "vs"}
