"""Traces that are made up: what they are like, and that they are traces."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from eviction.trace import columns_of
from mooncake_store.cli.main import main
from mooncake_store.errors import ConfigError
from serving.traces.generating import AGENTS, CONVERSATION, KINDS, Amount, generate
from serving.traces.reading import Lines, check_trace
from serving.traces.shape import describe
from serving.traces.writing import line_of

SEEDS = range(4)


def sessions_of(rows):
    """The requests of each session: each has the whole blocks of the one before."""
    latest, sessions = {}, []
    for row in rows:
        whole = row.hash_ids[: row.input_length // 512]
        came_from = next((latest[name] for name in reversed(whole) if name in latest), None)
        if came_from is None:
            came_from = len(sessions)
            sessions.append([])
        sessions[came_from].append(row)
        latest.update(dict.fromkeys(whole, came_from))
    return sessions


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_made_up_is_a_trace(kind):
    rows = list(generate(replace(kind, requests=3000), seed=5))
    lines = Lines()
    assert len(list(lines.rows(map(line_of, rows)))) == 3000
    assert lines.faults == []
    names = [name for row in rows for name in row.hash_ids]
    fresh = list(dict.fromkeys(names))
    assert fresh == list(range(len(fresh)))
    assert all(row.output_length > 0 for row in rows)
    assert max(row.input_length for row in rows) <= kind.longest


def test_conversations_are_as_those_that_were_published():
    kind = replace(CONVERSATION, requests=12_031)
    found = [describe(columns_of(list(generate(kind, seed)))) for seed in SEEDS]
    mean = {name: np.mean([getattr(one, name) for one in found]) for name in found[0]._fields[:-1]
            if isinstance(getattr(found[0], name), float)}  # fmt: skip
    assert mean["lasts_s"] == pytest.approx(3537, rel=0.05)
    assert mean["input_tokens"] == pytest.approx(12_035, rel=0.05)
    assert mean["output_tokens"] == pytest.approx(343, rel=0.02)
    assert mean["reusable"] == pytest.approx(0.366, abs=0.02)
    assert np.mean([one.inputs.median for one in found]) == pytest.approx(6909, rel=0.1)
    assert np.mean([one.inputs.p95 for one in found]) == pytest.approx(39_550, rel=0.1)
    assert found[0].popularity[-1].uses == 12_031


def test_agents_read_far_more_than_they_write_and_most_of_it_again():
    found = [describe(columns_of(list(generate(AGENTS, seed)))) for seed in SEEDS]
    read = sum(one.input_tokens for one in found) / sum(one.output_tokens for one in found)
    assert read == pytest.approx(131, rel=0.06)
    again = np.mean([one.reusable_tokens for one in found])
    assert again == pytest.approx(0.94, abs=0.01)


def test_the_middle_one_of_agents_sessions_has_33_turns():
    # One program and prompts that never become too long, so that sessions can be told apart.
    kind = replace(AGENTS, rate=0.001, prompts=1, prompt=Amount(500, 500), longest=1 << 40)
    sessions = sessions_of(generate(replace(kind, requests=20_000), seed=1))
    turns = [len(session) for session in sessions[:-1]]
    assert np.median(turns) == pytest.approx(33, abs=3)
    pauses = [
        (after.timestamp - before.timestamp) / 1e3
        for session in sessions
        for before, after in pairwise(session)
    ]
    assert np.median(pauses) == pytest.approx(AGENTS.pause.median, rel=0.05)
    assert np.mean(pauses) == pytest.approx(AGENTS.pause.mean, rel=0.05)


def test_a_turn_has_all_that_was_said_before_it():
    kind = replace(CONVERSATION, requests=1500, turns=Amount(5, 5), prompt=Amount(100, 100))
    grew = 0
    for session in sessions_of(generate(kind, seed=3)):
        for before, after in pairwise(session):
            whole = before.input_length // 512
            assert after.hash_ids[:whole] == before.hash_ids[:whole]
            assert after.input_length > before.input_length + before.output_length
            grew += 1
    assert grew > 200


def test_a_prompt_that_would_be_too_long_begins_anew():
    kind = replace(AGENTS, requests=200, rate=0.001, turns=Amount(200, 200), longest=20_000)
    lengths = [row.input_length for row in generate(kind, seed=1)]
    assert max(lengths) <= 20_000
    assert sum(after < before for before, after in pairwise(lengths)) > 5


def test_system_prompts_are_as_popular_as_zipf_has_it():
    kind = replace(
        CONVERSATION, requests=20_000, turns=Amount(1, 1), prompts=4, prompt=Amount(512, 512)
    )
    starts = Counter(row.hash_ids[0] for row in generate(kind, seed=2))
    counts = [count for _, count in starts.most_common()]
    assert len(counts) == 4
    for rank, count in enumerate(counts, start=1):
        assert count / counts[0] == pytest.approx(1 / rank, rel=0.1)
    alike = Counter(row.hash_ids[0] for row in generate(replace(kind, zipf=0.0), seed=2))
    assert min(alike.values()) > 0.9 * max(alike.values())


def test_the_same_seed_makes_the_same_bytes(tmp_path, capsys):
    def made(*words):
        path = tmp_path / "trace.jsonl"
        assert main(["trace", "generate", str(path), "--requests", "200", *words]) == 0
        assert "200 requests" in capsys.readouterr().out
        assert check_trace(path).faulty == 0
        return path.read_bytes()

    one = made("--seed", "1")
    assert one == made("--seed", "1")
    assert one != made("--seed", "2")
    assert one != made("--seed", "1", "--kind", "agents")
    assert one != made("--seed", "1", "--added", "10:20")


def test_a_trace_is_made_as_it_is_asked_for():
    rows = generate(replace(CONVERSATION, requests=1 << 60), seed=1)
    assert next(rows).hash_ids[0] == 0
    assert next(rows).hash_ids[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "robots"], "there is no kind 'robots'"),
        (["--turns", "3:2"], "--turns '3:2' is not MEDIAN:MEAN"),
        (["--pause", "soon"], "--pause 'soon' is not MEDIAN:MEAN"),
        (["--output", "1e10"], "--output '1e10' is not MEDIAN:MEAN"),
        (["--added", "1:inf"], "--added '1:inf' is not MEDIAN:MEAN"),
        (["--rate", "0"], "--rate is 0.0"),
        (["--prompts", "0"], "--prompts is 0"),
        (["--longest", "511"], "--longest is 511"),
        (["--zipf", "nan"], "--zipf is nan"),
    ],
)
def test_what_makes_no_trace_is_refused(tmp_path, capsys, words, said):
    path = tmp_path / "trace.jsonl"
    assert main(["trace", "generate", str(path), *words]) == 3
    assert said in capsys.readouterr().err
    assert not path.exists()


def test_an_amount_is_its_median_and_its_mean():
    from random import Random

    assert Amount.parse("100:150", "--x") == (100.0, 150.0)
    assert Amount.parse("7", "--x") == (7.0, 7.0)
    random = Random(1)
    drawn = [Amount(100, 150).draw(random) for _ in range(20_000)]
    assert np.median(drawn) == pytest.approx(100, rel=0.03)
    assert np.mean(drawn) == pytest.approx(150, rel=0.03)
    assert {Amount(7, 7).tokens(random) for _ in range(50)} == {7}
    with pytest.raises(ConfigError):
        Amount.parse("", "--x")
