"""`mooncake simulate`, and hardware files."""

import csv
import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from eviction import read_trace, synthetic_trace
from mooncake_store.cli.main import main
from mooncake_store.errors import ConfigError
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import known_hardware, read_hardware
from serving.simulator.measured import write_hardware
from serving.traces.writing import rows_of, write_rows


@pytest.fixture
def trace_file(tmp_path):
    trace = synthetic_trace(50, seed=1)
    path = tmp_path / "trace.jsonl"
    write_rows(path, rows_of(trace))
    return path


def test_a_run_tells_what_users_would_have_seen(trace_file, capsys):
    arguments = ["simulate", "run", str(trace_file), "--prefill", "2", "--decode", "1", "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == told["answered"] == told["trace"]["requests"] == 50
    assert 0 < told["hit_ratio"] < 1
    assert 0 < told["ttft_p50_s"] <= told["ttft_p99_s"]
    assert main([*arguments[:-1], "--speed", "100"]) == 0
    assert "ttft p99 s" in capsys.readouterr().out


def test_an_ablation_has_every_combination_beside_the_first_of_its_cache(trace_file, capsys):
    words = ["simulate", "ablation", str(trace_file), "--prefill", "2", "--json"]
    lists = ["--cache", "20000,400000", "--eviction", "lru,fifo", "--placement"]
    assert main([*words, *lists, "cache-centric,random"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    named = [(row["cache_tokens"], row["eviction"], row["placement"]) for row in rows]
    assert named == [
        (cache, eviction, placement)
        for cache in (20_000, 400_000)
        for eviction in ("lru", "fifo")
        for placement in ("cache-centric", "random")
    ]
    assert rows[0]["ttft_gain"] == rows[0]["hit_gain"] == rows[4]["ttft_gain"] == 0.0
    for first, row in ((rows[0], rows[3]), (rows[4], rows[7])):
        assert row["ttft_mean_s"] == pytest.approx(first["ttft_mean_s"] * (1 - row["ttft_gain"]))
        assert row["hit_ratio"] == pytest.approx(first["hit_ratio"] * (1 + row["hit_gain"]))
    assert rows[7]["ttft_gain"] < 0, "any node is worse than the best one"
    assert rows[4]["hit_ratio"] > rows[0]["hit_ratio"]


def test_an_ablation_varies_disks_and_names_the_quickest_of_each_memory(
    trace_file, tmp_path, capsys
):
    quick, runs = tmp_path / "quick.toml", tmp_path / "runs.csv"
    write_hardware(quick, replace(read_hardware("a800-llama3-70b"), disk_bytes_per_s=64e9))
    words = ["simulate", "ablation", str(trace_file), "--prefill", "2", "--hardware", str(quick)]
    words += ["--cache", "20000", "--disk", "0,200000", "--placement", "random,cache-centric"]
    assert main([*words, "--csv", str(runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows, best = told["rows"], told["best"]
    assert [(row["disk_tokens"], row["placement"]) for row in rows] == [
        (disk, placement) for disk in (0, 200_000) for placement in ("random", "cache-centric")
    ]
    assert rows[2]["hit_ratio"] > rows[0]["hit_ratio"], "what left memory is found on the disk"
    assert rows[2]["hit_gain"] > 0, "beside the same memory without one"
    assert best == [rows[1], rows[3]]
    lines = list(csv.DictReader(runs.read_text().splitlines()))
    assert [float(line["ttft_mean_s"]) for line in lines] == [row["ttft_mean_s"] for row in rows]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "20,000 tokens in memory: lru, cache-centric, 1.5. First tokens come" in shown
    assert "20,000 tokens in memory and 200,000 on disk: lru, cache-centric" in shown
    assert "sooner than by lru, random, 1.5." in shown


def test_of_an_ablation_the_earlier_of_equally_quick_ones_is_the_best(trace_file, capsys):
    words = ["simulate", "ablation", str(trace_file), "--prefill", "1", "--json"]
    assert main([*words, "--placement", "least-loaded,local-cache"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"][0]["ttft_mean_s"] == told["rows"][1]["ttft_mean_s"]
    assert [row["placement"] for row in told["best"]] == ["least-loaded"]


def test_one_run_of_an_ablation_is_that_run(trace_file, capsys):
    words = [str(trace_file), "--prefill", "2", "--decode", "0", "--balancing", "1", "--json"]
    assert main(["simulate", "ablation", *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert main(["simulate", "run", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (row["hit_ratio"], row["ttft_mean_s"]) == (told["hit_ratio"], told["ttft_mean_s"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cache", "1,x"], "--cache '1,x' is no list of numbers"),
        (["--eviction", "lru,mru"], "unknown eviction policy 'mru'"),
        (["--placement", "best"], "unknown placement policy 'best'"),
        (["--disk", "0,5120"], "how quick disks are, on which 5120 tokens should lie, is not said"),
    ],
)
def test_an_ablation_refuses_what_it_cannot_run_before_it_runs(trace_file, capsys, words, said):
    assert main(["simulate", "ablation", str(trace_file), *words]) == 2
    assert said in capsys.readouterr().err


def test_nodes_that_fail_are_named_and_what_they_failed_is_told(trace_file, capsys):
    arguments = ["simulate", "run", str(trace_file), "--prefill", "2", "--decode", "2", "--json"]
    assert main([*arguments, "--fail", "decode-0:2s:30s", "--fail", "prefill-1:3s:1s"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["answered"] == 50
    assert told["retried"] > 0
    assert main([*arguments, "--fail", "decode-7:2s:30s"]) != 0
    assert "decode-7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [("{}", "line 2: not a trace request"), ('{"timestamp": 1', "line 2: not a trace request")],
)
def test_a_line_that_is_no_request_is_named(trace_file, capsys, line, said):
    first = trace_file.read_text().splitlines()[0]
    trace_file.write_text(f"{first}\n{line}\n")
    assert main(["simulate", "run", str(trace_file)]) != 0
    assert said in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["simulate", "run", str(tmp_path / "none.jsonl")]) != 0
    assert "none.jsonl" in capsys.readouterr().err


def test_every_kind_of_machine_that_is_shipped_can_be_read():
    assert "a800-llama3-70b" in known_hardware()
    for name in known_hardware():
        assert read_hardware(name).step_s(1, 0) > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("about = 'x'", "missing required field"),
        ("about = ", "describes no hardware"),
        (None, "there is no hardware"),
    ],
)
def test_files_that_describe_no_machine_are_refused(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_hardware(path)


def test_a_machine_of_ones_own_is_read_from_its_file(tmp_path):
    shipped = read_hardware("a800-llama3-70b")
    path = tmp_path / "mine.toml"
    numbers = [
        f"{name} = {list(value) if isinstance(value, tuple) else value}"
        for name in shipped.__struct_fields__
        if not isinstance(value := getattr(shipped, name), str)
    ]
    path.write_text("\n".join(["about = 'mine'", *numbers]))
    mine = read_hardware(path)
    assert mine.prefill_s(1000, 500) == shipped.prefill_s(1000, 500)
    path.write_text(path.read_text().replace("kv_bytes = 327680", "kv_bytes = 0"))
    with pytest.raises(ConfigError, match="above 0"):
        read_hardware(path)


def test_the_published_trace_takes_as_long_as_it_did_in_the_paper():
    here = Path(__file__).resolve().parents[3]
    folder = Path(os.environ.get("MOONCAKE_TRACES", here.parent / "shared" / "traces"))
    path = folder / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the conversation trace is not at {path}; set MOONCAKE_TRACES to its folder")
    trace = read_trace(path)
    outcomes = Cluster(Plan(prefill=10, decode=0), read_hardware("a800-llama3-70b")).run(trace)
    assert outcomes.finished.all()
    assert outcomes.computing_s.mean() == pytest.approx(1.051, rel=0.08)
    found = outcomes.cached_tokens.sum() / trace.input_tokens.sum()
    assert found == pytest.approx(0.375, abs=0.03)
