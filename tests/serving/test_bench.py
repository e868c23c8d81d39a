"""`mooncake bench serving`: every row is measured, with small prompts."""

import inspect

import pytest
from typer.testing import CliRunner

from mooncake_store.bench.harness import Report
from mooncake_store.cli import bench
from serving import bench as serving_bench
from serving.bench import rows


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_row_has_a_value(monkeypatch):
    monkeypatch.setattr(rows, "SHARED_TOKENS", 256)
    monkeypatch.setattr(rows, "LONG_TOKENS", 600)
    monkeypatch.setattr(rows, "STREAM_MODEL", "nano")
    monkeypatch.setattr(rows, "STREAM_TOKENS", 128)
    monkeypatch.setattr(rows, "CODEC_TOKENS", 128)
    report = Report("serving", quick=True)
    serving_bench.run(report, quick=True)
    names = [row.name for row in report.rows]
    assert names[:6] == [
        "first token/256 tokens shared, in the pool",
        "first token/256 tokens shared, of the time computed",
        "first token/600 tokens, two workers",
        "first token/600 tokens each, two workers",
        "KV stored/over tcp, layer by layer",
        "KV stored/over tcp, time hidden",
    ]
    assert names[6:8] == [
        "KV stored/over a link as slow as compute, layer by layer",
        "KV stored/over a link as slow as compute, time hidden",
    ]
    pushed = [f"KV pushed/8 MiB over {way}" for way in ("shm", "tcp")]
    assert [name for name in names if name.startswith("KV pushed")] == pushed
    smaller = {row.name: row.value for row in report.rows if row.name.startswith("KV smaller")}
    assert smaller["KV smaller/bf16, left"] < smaller["KV smaller/fp16, left"] < 90
    assert len(smaller) == 6
    assert names[-3:] == [f"decision/{count} under way" for count in (10, 100, 1000)]
    for row in report.rows:
        # One processor, or a kernel that makes no such link.
        assert row.value is not None or "two workers" in row.name or "a link" in row.name
        assert (row.value is None) == bool(row.why)
    assert report.rows[4].vs["after"].value > 0


def test_the_command_finds_it_by_name():
    assert bench._module("serving") is serving_bench
    assert set(inspect.signature(serving_bench.run).parameters) == {"report", "quick"}


def test_it_is_compared_with_nothing_else():
    done = CliRunner().invoke(bench.app, ["serving", "--vs", "upstream"])
    assert done.exit_code == 2
    assert "--vs" in done.output
