"""`mooncake trace`: what a trace is like, what is wrong with its lines, and traces made of it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eviction import read_trace, synthetic_trace
from mooncake_store.cli.main import main
from serving.traces.shape import describe, faster, spread
from serving.traces.writing import rows_of, write_rows

LINES = [
    {"timestamp": 1000, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 3]},
    {"timestamp": 5000, "input_length": 100, "output_length": 40, "hash_ids": [4]},
]


def write(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "trace.jsonl", LINES)


def told(capsys, *words):
    """What a command tells a program."""
    assert main(["trace", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_trace_is_described(file, capsys):
    about = told(capsys, "describe", file)
    assert about["requests"] == 4
    assert about["lasts_s"] == 4.0
    assert about["requests_per_s"] == 1.0
    assert about["busiest_s"] == 2
    assert about["timestamps"] == 3
    assert about["input_tokens"] == 931
    assert about["inputs"] == {"median": 1062.0, "p95": pytest.approx(1440), "max": 1500}
    assert about["outputs"]["max"] == 40
    assert (about["blocks"], about["distinct_blocks"]) == (9, 5)
    assert about["reusable"] == pytest.approx(4 / 9)
    assert about["reusable_tokens"] == pytest.approx(4 * 512 / 3724)
    assert about["popularity"] == [
        {"least": 1, "most": 1, "blocks": 3, "uses": 3},
        {"least": 3, "most": 3, "blocks": 2, "uses": 6},
    ]
    assert (about["faulty"], about["faults"]) == (0, [])
    assert main(["trace", "describe", file]) == 0
    assert "44.4%" in capsys.readouterr().out


def test_tokens_of_a_last_block_that_is_not_whole_count_as_they_are(tmp_path, capsys):
    file = write(tmp_path / "same.jsonl", [LINES[0], LINES[0]])
    assert told(capsys, "describe", file)["reusable_tokens"] == 0.5


def test_a_trace_without_requests_is_described(tmp_path, capsys):
    about = told(capsys, "describe", write(tmp_path / "empty.jsonl", []))
    assert (about["requests"], about["reusable"], about["popularity"]) == (0, 0.0, [])
    assert main(["trace", "describe", str(tmp_path / "empty.jsonl")]) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_length": -1}, "input_length is -1, which is below 0"),
        ({"output_length": 1 << 63}, f"output_length is {1 << 63}, which is too large"),
        ({"timestamp": 999}, "timestamp 999 is before 1000 of an earlier line"),
        ({"input_length": 2000}, "3 hash_ids for 2000 tokens, which are 4 blocks of 512"),
        ({"hash_ids": [0, 1, 1]}, "hash_ids names a block twice"),
        ({"hash_ids": [0, 1, -3]}, "hash_ids has -3, which is below 0"),
        ({"hash_ids": [0, 2, 3]}, "block 2 comes after 0, and in an earlier line after 1"),
        ({"hash_ids": [1, 7, 8]}, "block 1 comes first, and in an earlier line after 0"),
        ({"hash_ids": "012"}, "no request: Expected `array`, got `str` - at `$.hash_ids`"),
    ],
)
def test_a_line_that_is_wrong_is_told_by_its_number_and_reason(tmp_path, capsys, change, reason):
    lines = [LINES[0], LINES[2] | change, LINES[3]]
    file = write(tmp_path / "trace.jsonl", lines)
    assert main(["trace", "describe", file, "--json"]) == 1
    about = json.loads(capsys.readouterr().out)
    assert about["faults"] == [{"line": 2, "reason": reason}]
    # What follows a line that is wrong is held to those that are right.
    assert (about["requests"], about["faulty"]) == (2, 1)
    assert main(["trace", "describe", file]) == 1
    assert f"line 2: {reason}" in capsys.readouterr().out


def test_a_file_that_is_no_trace_has_its_first_lines_told(tmp_path, capsys):
    path = tmp_path / "poem.txt"
    path.write_text("a line\n" * 50)
    assert main(["trace", "describe", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "line 20: no request" in shown
    assert "line 21: " not in shown
    assert "and 30 further lines are wrong" in shown


@pytest.mark.parametrize("command", ["speed", "spread", "split"])
def test_a_trace_with_a_wrong_line_is_not_changed(tmp_path, capsys, command):
    file = write(tmp_path / "trace.jsonl", [LINES[2], LINES[0], LINES[1]])
    out, rest = str(tmp_path / "out.jsonl"), str(tmp_path / "rest.jsonl")
    more = {"speed": ["--by", "2"], "spread": [], "split": [rest, "--at", "1"]}[command]
    assert main(["trace", command, file, out, *more]) == 2
    shown = capsys.readouterr().err
    assert "trace.jsonl, line 2: timestamp 1000 is before 3000" in shown
    assert "and 1 further lines are wrong" in shown
    assert "mooncake trace describe" in shown
    assert not Path(out).exists()


def test_a_trace_comes_faster_from_its_first_request_on(file, tmp_path, capsys):
    out = str(tmp_path / "out.jsonl")
    assert told(capsys, "speed", file, out, "--by", "2") == {"file": out, "requests": 4}
    assert [line["timestamp"] for line in lines_of(out)] == [1000, 1000, 2000, 3000]
    assert [line | {"timestamp": 0} for line in lines_of(out)] == [
        line | {"timestamp": 0} for line in LINES
    ]
    assert main(["trace", "speed", file, out, "--by", "0"]) == 2
    assert "--by is 0.0" in capsys.readouterr().err


def test_requests_of_one_timestamp_are_spread_until_the_next(file, tmp_path, capsys):
    assert told(capsys, "spread", file, file)["requests"] == 4
    assert [line["timestamp"] for line in lines_of(file)] == [1000, 2000, 3000, 5000]
    times = np.array([0, 0, 0, 3000, 3000, 6000, 9000])
    trace = replace(synthetic_trace(7), timestamps_ms=times)
    assert spread(trace).timestamps_ms.tolist() == [0, 1000, 2000, 3000, 4500, 6000, 9000]
    assert describe(trace).lasts_s == 9.0


@pytest.mark.parametrize(
    ("at", "count"), [("1", 1), ("3", 3), ("2s", 2), ("2001ms", 3), ("0", 0), ("9", 4), ("1h", 4)]
)
def test_a_trace_is_cut_where_that_is_said(file, tmp_path, capsys, at, count):
    first, rest = str(tmp_path / "first.jsonl"), str(tmp_path / "rest.jsonl")
    counts = told(capsys, "split", file, first, rest, "--at", at)
    assert counts["first"] == {"file": first, "requests": count}
    assert counts["rest"] == {"file": rest, "requests": 4 - count}
    assert lines_of(first) + lines_of(rest) == LINES


def test_a_part_without_requests_is_noticed(file, tmp_path, capsys):
    words = ["trace", "split", file, str(tmp_path / "a"), str(tmp_path / "b"), "--at", "1h"]
    assert main(words) == 0
    assert "one part is empty" in capsys.readouterr().err


def test_what_cannot_be_written_leaves_what_was_there(file, tmp_path, capsys):
    assert main(["trace", "spread", file, str(tmp_path / "none" / "out.jsonl")]) == 2
    assert "No such file or directory" in capsys.readouterr().err

    def broken():
        yield from rows_of(read_trace(file))
        raise RuntimeError("no more")

    before = Path(file).read_text()
    with pytest.raises(RuntimeError, match="no more"):
        write_rows(Path(file), broken())
    assert Path(file).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_trace_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["trace", "describe", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err


def test_what_is_written_is_read_as_it_was(tmp_path):
    trace = synthetic_trace(100, seed=2)
    write_rows(tmp_path / "out.jsonl", rows_of(trace))
    again = read_trace(tmp_path / "out.jsonl")
    for name in ("timestamps_ms", "input_tokens", "output_tokens", "ids", "offsets"):
        assert getattr(again, name).tolist() == getattr(trace, name).tolist()
    assert faster(trace, 1.0).timestamps_ms.tolist() == trace.timestamps_ms.tolist()


def test_the_published_trace_is_as_it_is_described_elsewhere(capsys):
    here = Path(__file__).resolve().parents[3]
    folder = Path(os.environ.get("MOONCAKE_TRACES", here.parent / "shared" / "traces"))
    path = folder / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the conversation trace is not at {path}; set MOONCAKE_TRACES to its folder")
    about = told(capsys, "describe", str(path))
    assert (about["requests"], about["faulty"]) == (12_031, 0)
    assert about["input_tokens"] == pytest.approx(12_035, abs=1)
    assert about["output_tokens"] == pytest.approx(343, abs=1)
    assert (about["blocks"], about["distinct_blocks"]) == (288_500, 182_790)
    assert about["reusable"] == pytest.approx(0.366, abs=0.001)
