"""The bench `conversations`: what a disk adds to a memory that is too small."""

import numpy as np
import pytest

from eviction import synthetic_trace
from mooncake_store.bench import conversations
from mooncake_store.bench.harness import Report
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import MIB
from tests.bench.rounds import one_round


def test_as_many_requests_are_replayed_as_the_working_set_has_blocks():
    trace = synthetic_trace(300)
    for blocks in (1, 100, 2000):
        count = conversations._requests(trace, blocks)
        distinct = len(np.unique(trace.ids[: trace.offsets[count]]))
        more = len(np.unique(trace.ids[: trace.offsets[count + 1]]))
        assert distinct <= blocks < more or count == 1
    assert conversations._requests(trace, 1 << 40) == 300


@pytest.mark.slow
def test_a_disk_finds_what_memory_does_not_hold(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(conversations, "MEMORY_QUICK_BYTES", 16 * MIB)
    monkeypatch.setattr(conversations, "TIMES_MEMORY", 2)
    report = Report("conversations", quick=True)
    with one_round():
        conversations.run(report, quick=True, vs=("memory",))
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["hit_ratio", "foreground_p99", "read/memory", "read/disk"]
    assert 1 > rows["hit_ratio"].value > rows["hit_ratio"].vs["memory"].value > 0
    assert rows["foreground_p99"].value > 0
    assert rows["read/memory"].value > 0
    assert rows["read/disk"].value > 0
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_is_none_is_refused_before_anything_is_measured(tmp_path):
    broken = tmp_path / "trace.jsonl"
    broken.write_text("{")
    with pytest.raises(InvalidArgumentError, match="conversations"):
        conversations.run(Report("conversations"), quick=True, vs=(), trace=str(broken))
