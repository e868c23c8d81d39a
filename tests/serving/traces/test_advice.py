"""`mooncake advise`: what it says of sizes is what a replay finds and what prompts take less."""

import json
from dataclasses import replace

import numpy as np
import pytest

from eviction import count_hits, synthetic_trace
from eviction.simulate import hits_by_request
from eviction.trace import Row, columns_of
from mooncake_store.cli.main import main
from mooncake_store.errors import InvalidArgumentError
from serving.simulator.hardware import Hardware, read_hardware
from serving.traces.advice import advise
from serving.traces.worth import Worth
from serving.traces.writing import rows_of, write_rows

GIB = 1 << 30
HARDWARE = read_hardware("a800-llama3-70b")
BLOCK_BYTES = HARDWARE.kv_bytes * 512


def machine(**changes):
    values = {name: getattr(HARDWARE, name) for name in HARDWARE.__struct_fields__}
    return Hardware(**(values | changes))


def trace_of(requests, *, apart_ms=1000, cut=0):
    """Prompts of whole blocks but for `cut` tokens, one a second."""
    return columns_of(
        [
            Row(apart_ms * number, 512 * len(blocks) - cut, 10, blocks)
            for number, blocks in enumerate(requests)
        ]
    )


def partial(seed):
    """A trace whose last blocks are not whole."""
    trace = synthetic_trace(400, seed=seed)
    cut = np.random.default_rng(seed).integers(0, 512, len(trace))
    return replace(trace, input_tokens=trace.input_tokens - cut)


def saved_by(trace, hits, hardware):
    """Seconds by the formula for whole prompts, request by request."""
    return sum(
        hardware.prefill_s(tokens, 0) - hardware.prefill_s(tokens, min(512 * found, tokens))
        for tokens, found in zip(trace.input_tokens.tolist(), hits.tolist(), strict=True)
    )


def told(capsys, *words):
    assert main(["advise", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def trace():
    return partial(3)


@pytest.fixture
def file(tmp_path, trace):
    path = tmp_path / "trace.jsonl"
    write_rows(path, rows_of(trace))
    return path


def test_every_size_tells_what_a_replay_finds_and_what_prompts_take_less(trace, file, capsys):
    about = told(capsys, file, "--memory", "3GiB", "--disk", "10GiB")
    assert about["block_bytes"] == BLOCK_BYTES
    sizes = about["sizes"]
    assert len(sizes) > 6
    assert {GIB, 2 * GIB, 3 * GIB, 13 * GIB} <= {size["size_bytes"] for size in sizes}
    for size in sizes:
        assert size["blocks"] == size["size_bytes"] // BLOCK_BYTES
        count = count_hits(trace.ids, trace.offsets, "lru", size["blocks"])
        assert size["hit_ratio"] == count.ratio
        hits = hits_by_request(trace.ids, trace.offsets, "lru", size["blocks"])
        found = np.minimum(512 * hits, trace.input_tokens).sum()
        assert size["token_hit_ratio"] == pytest.approx(found / trace.input_tokens.sum())
        assert size["saved_s"] == pytest.approx(saved_by(trace, hits, HARDWARE))
    unlimited = count_hits(trace.ids, trace.offsets, "lru")
    assert sizes[-1]["hit_ratio"] == unlimited.ratio > sizes[-2]["hit_ratio"]


@pytest.mark.parametrize("cut", [0, 511])
def test_of_a_prompt_that_is_found_whole_the_last_token_is_computed(cut):
    trace = trace_of([[0, 1, 2], [0, 1, 2]], cut=cut)
    advice = advise(trace, HARDWARE)
    saved_s = saved_by(trace, np.array([0, 3]), HARDWARE)
    assert advice.everything.found.saved_s == pytest.approx(saved_s, rel=1e-9)


def test_what_a_further_gib_saves_adds_up(trace, file, capsys):
    about = told(capsys, file)
    hours = about["trace"]["lasts_s"] / 3600
    before, sum_s = 0, 0.0
    for size in about["sizes"]:
        sum_s += size["more_per_gib_s"] * (size["size_bytes"] - before) / GIB
        before = size["size_bytes"]
        assert sum_s == pytest.approx(size["saved_s"] / hours)
        assert sum_s == pytest.approx(size["saved_per_hour_s"])


def test_a_policy_is_told_as_a_replay_of_it_finds(trace, file, capsys):
    about = told(capsys, file, "--compare", "2GiB,4GiB")
    assert [each["size_bytes"] for each in about["policies"]] == [2 * GIB, 4 * GIB]
    for each in about["policies"]:
        blocks = each["size_bytes"] // BLOCK_BYTES
        for policy, found in each["found"].items():
            hits = hits_by_request(trace.ids, trace.offsets, policy, blocks)
            assert found["hit_ratio"] == hits.sum() / len(trace.ids)
            assert found["saved_s"] == pytest.approx(saved_by(trace, hits, HARDWARE))
        saved = {policy: found["saved_s"] for policy, found in each["found"].items()}
        del saved["opt"]
        assert saved[each["best"]] == max(saved.values())


def test_the_knee_is_where_memory_begins_to_save_less_than_on_average():
    # Twenty prompts have one block in common; one comes back after eighteen others.
    requests = [[0], [1], *([0, 10 + number] for number in range(18)), [1]]
    advice = advise(trace_of(requests), HARDWARE)
    assert advice.knee.blocks == 2  # the common one, with one between its uses
    assert advice.everything.blocks == 20
    assert 0 < advice.knee.found.blocks < advice.everything.found.blocks


def test_todays_pool_is_told_with_what_one_without_bounds_would_find(file, trace, capsys):
    about = told(capsys, file, "--memory", "2GiB", "--disk", "2GiB")
    today = about["today"]
    assert today["memory"]["size_bytes"] == 2 * GIB
    assert today["whole"]["size_bytes"] == 4 * GIB
    assert today["memory"]["saved_s"] < today["whole"]["saved_s"]
    everything = about["sizes"][-1]["token_hit_ratio"]
    assert today["of_unlimited"] == pytest.approx(today["whole"]["token_hit_ratio"] / everything)
    assert [each["size_bytes"] for each in about["policies"]] == [4 * GIB]
    assert told(capsys, file)["today"] is None


def test_a_policy_that_is_better_is_named_with_what_it_gains(tmp_path, capsys):
    requests, fresh = [], 100
    for _ in range(30):  # two prompts that come twice, and then what is never asked again
        requests += [[0, 1], [2, 3], [0, 1], [2, 3]]
        requests += [[fresh + 5 * number + block for block in range(5)] for number in range(4)]
        fresh += 20
    file = tmp_path / "scans.jsonl"
    write_rows(file, rows_of(trace_of(requests)))
    words = (file, "--memory", 10 * BLOCK_BYTES)
    each = told(capsys, *words)["policies"][0]
    assert each["best"] in ("lfu", "sieve", "length_aware")
    better, lru = each["found"][each["best"]], each["found"]["lru"]
    gain = better["saved_per_hour_s"] - lru["saved_per_hour_s"]
    assert each["gain_per_hour_s"] == pytest.approx(gain)
    assert gain > 0
    assert main(["advise", *map(str, words)]) == 0
    assert f"best policy is {each['best']}" in capsys.readouterr().out


def test_what_people_read_fits_100_columns(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["advise", str(file), "--memory", "3GiB", "--disk", "10GiB"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    for name, size in (("today's memory", "3GiB"), ("with disk", "13GiB")):
        assert [line.split()[0] for line in lines if name in line] == [size]
    assert "The knee is at" in shown
    assert "of what a pool without bounds would" in shown


def test_blocks_of_another_size_take_that_much_room_and_that_long_to_load(file, trace, capsys):
    half = told(capsys, file, "--block-bytes", BLOCK_BYTES // 2)
    assert half["block_bytes"] == BLOCK_BYTES // 2
    size = next(each for each in half["sizes"] if each["size_bytes"] == GIB)
    hits = hits_by_request(trace.ids, trace.offsets, "lru", size["blocks"])
    hardware = machine(kv_bytes=HARDWARE.kv_bytes // 2)
    assert size["saved_s"] == pytest.approx(saved_by(trace, hits, hardware))


def test_a_pool_smaller_than_a_gib_is_told_in_smaller_steps(file, capsys):
    sizes = [each["size_bytes"] for each in told(capsys, file, "--block-bytes", 4096)["sizes"]]
    assert len(sizes) > 5
    assert sizes[-1] < GIB


def test_where_loading_takes_longer_than_computing_no_memory_saves(file, tmp_path, capsys):
    slow = advise(partial(3), machine(load_bytes_per_s=1e8))
    assert slow.knee is None
    assert not slow.compared
    assert slow.everything.found.saved_s < 0


def test_prompts_that_have_nothing_in_common_are_told(tmp_path, capsys):
    file = tmp_path / "apart.jsonl"
    write_rows(file, rows_of(trace_of([[0, 1], [2, 3]])))
    assert main(["advise", str(file), "--memory", "1GiB"]) == 0
    assert "no prompt begins as an earlier one does" in capsys.readouterr().out
    assert told(capsys, file)["policies"] == []


def test_a_trace_that_takes_no_time_has_no_hours(tmp_path, capsys):
    file = tmp_path / "at-once.jsonl"
    write_rows(file, rows_of(trace_of([[0, 1], [0, 1]], apart_ms=0)))
    about = told(capsys, file)
    assert about["sizes"][-1]["saved_s"] > 0
    assert about["sizes"][-1]["saved_per_hour_s"] is None
    assert main(["advise", str(file)]) == 0
    assert " - " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "1MiB"), "no room for a block"),
        (("--compare", "1MiB"), "no room for a block"),
        (("--block-bytes", "100"), "too small for the KV"),
        (("--memory", "much"), "not a size"),
        (("--hardware", "abacus"), "there is no hardware"),
    ],
)
def test_what_makes_no_sense_is_refused(file, capsys, words, said):
    assert main(["advise", str(file), *words]) != 0
    assert said in capsys.readouterr().err


def test_a_size_counts_what_it_has_room_for():
    worth = Worth(trace_of([[0, 1, 2], [0, 1, 2]]), HARDWARE, 100)
    assert worth.most_blocks == 3
    assert worth.size(299).found.blocks == pytest.approx(2 / 6)
    assert worth.size(300).found.blocks == worth.size(10**9).found.blocks == pytest.approx(3 / 6)
    with pytest.raises(ValueError, match="at least 1 block"):
        worth.compare(99, ["fifo"])


def test_nothing_is_told_of_a_pool_with_room_for_no_block():
    with pytest.raises(InvalidArgumentError, match="no room"):
        advise(trace_of([[0]]), HARDWARE, memory_bytes=5)
