"""The comparison with the paper: which rows are run on what, and what they are judged by."""

import dataclasses
import json

import numpy as np
import pytest

from eviction import Trace, synthetic_trace
from eviction.trace import BLOCK_TOKENS
from mooncake_store.cli.main import main
from mooncake_store.errors import InvalidArgumentError
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import read_hardware
from serving.simulator.paper import compare
from serving.simulator.paper_figures import CONVERSATION, SYNTHETIC, TOOLAGENT
from serving.simulator.paper_rows import TraceRows
from serving.simulator.paper_synthetic import synthetic_rows

HARDWARE = read_hardware("a800-llama3-70b")
BLOCKS = 30
"""Of a prompt in the made-up trace: 5 GB of KV, as the paper's prompts have on average."""


def poisson_trace(requests=300, gap_s=0.3, shared=20, seed=2):
    """Prompts of one length at random times, which begin with one of a dozen documents."""
    rng = np.random.default_rng(seed)
    fresh = iter(range(1000, 1000 + BLOCKS * requests))
    ids = []
    for document in rng.integers(12, size=requests).tolist():
        ids += [BLOCKS * document + at for at in range(shared)]
        ids += [next(fresh) for _ in range(BLOCKS - shared)]
    return Trace(
        timestamps_ms=np.cumsum(rng.exponential(1e3 * gap_s, requests)).astype(np.int64),
        input_tokens=np.full(requests, BLOCKS * BLOCK_TOKENS),
        output_tokens=np.full(requests, 100),
        ids=np.array(ids),
        offsets=np.arange(0, BLOCKS * requests + 1, BLOCKS),
    )


def numbers(text):
    return [float(each) for each in text.removesuffix(" s").split(", ")]


def code(row):
    return row["name"].split()[0].rstrip(":")


def test_rows_that_need_no_trace_are_met_and_others_say_which_they_need(capsys):
    assert main(["simulate", "paper", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["verdict"] for row in rows if code(row) in ("A0", "A1")} == {"ok"}
    others = [row for row in rows if code(row) not in ("A0", "A1")]
    assert {row["verdict"] for row in others} == {"not run"}
    needed = {row["name"].split(" needs ")[1] for row in others if code(row) == "A17"}
    assert needed == {"the conversation trace", "the toolagent trace", "the synthetic trace"}
    assert {row["name"] for row in others if code(row) == "A16"} == {
        "A16: it needs the synthetic trace"
    }


def test_generated_files_take_the_place_of_published_ones_and_are_told_apart(tmp_path, capsys):
    agents, documents = tmp_path / "agents.jsonl", tmp_path / "documents.jsonl"
    making = ["--requests", "60", "--seed", "3", "--json"]
    assert main(["trace", "generate", str(agents), "--kind", "agents", *making]) == 0
    assert main(["trace", "generate", str(documents), *making]) == 0
    capsys.readouterr()
    given = ["--toolagent", str(agents), "--synthetic", str(documents)]
    assert main(["simulate", "paper", *given, "--json"]) == 0
    told = capsys.readouterr()
    rows = json.loads(told.out)["rows"]
    run = [row for row in rows if row["verdict"] != "not run" and row["trace"]]
    by_trace = {
        name: {code(row) for row in run if row["trace"] == f"not the published {name} trace"}
        for name in ("toolagent", "synthetic")
    }
    of_all = {"A3", "A4", "A5", "A6", "A7", "A8"}
    assert by_trace["toolagent"] == of_all | {"A13", "A17", "A18"}
    assert by_trace["synthetic"] == of_all | {"A10", "A11", "A12", "A14", "A16"}
    assert {row["trace"] for row in run} == {
        "not the published toolagent trace", "not the published synthetic trace"
    }  # fmt: skip
    assert f"{agents} is not the published toolagent trace, which has 23,608 requests" in told.err
    assert f"{documents} is not the published synthetic trace" in told.err


@pytest.mark.parametrize("published", [CONVERSATION, TOOLAGENT, SYNTHETIC])
def test_a_published_trace_is_known_by_its_requests_and_their_length(published):
    trace = synthetic_trace(published.requests)
    right = np.full(len(trace), published.input_tokens)
    assert published.is_it(dataclasses.replace(trace, input_tokens=right))
    assert not published.is_it(dataclasses.replace(trace, input_tokens=right + 100))
    fewer = synthetic_trace(published.requests - 1)
    assert not published.is_it(dataclasses.replace(fewer, input_tokens=right[1:]))


def test_a_trace_without_requests_is_refused_by_its_name():
    with pytest.raises(InvalidArgumentError, match="synthetic trace has no requests"):
        compare(synthetic=synthetic_trace(0))


def test_narrow_links_make_kv_and_first_tokens_late_and_wide_ones_do_not():
    theory, over, waits = (
        row
        for row in synthetic_rows(TraceRows(poisson_trace(), SYNTHETIC))
        if row.name.startswith("A16")
    )
    whole = BLOCKS * BLOCK_TOKENS * HARDWARE.kv_bytes
    rates = [gbps * 1e9 / 8 for gbps in (24, 40, 80, 100, 160, 320, 400)]
    assert numbers(theory.ours) == pytest.approx([whole / rate for rate in rates], abs=1e-3)
    assert theory.verdict == "ok"
    times = numbers(over.ours)
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5
    assert times[-1] < 1.1
    seconds = numbers(waits.ours)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 2 * seconds[-1]


def test_kv_takes_what_the_link_takes_and_longer_where_two_share_it():
    blocks = np.arange(2 * BLOCKS)
    trace = Trace(
        timestamps_ms=np.zeros(2, np.int64),
        input_tokens=np.full(2, BLOCKS * BLOCK_TOKENS),
        output_tokens=np.full(2, 10),
        ids=blocks,
        offsets=np.array([0, BLOCKS, 2 * BLOCKS]),
    )
    alone_s = BLOCKS * BLOCK_TOKENS * HARDWARE.kv_bytes / HARDWARE.network_bytes_per_s
    for decode, times in ((2, 1), (1, 2)):
        outcomes = Cluster(Plan(prefill=2, decode=decode), HARDWARE).run(trace)
        assert outcomes.sending_s.tolist() == pytest.approx([times * alone_s] * 2)
        last_s = alone_s / HARDWARE.layers
        assert (outcomes.there_s - outcomes.first_s).tolist() == pytest.approx([last_s] * 2)
