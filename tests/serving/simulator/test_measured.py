"""`mooncake simulate fit`: hardware files of what was measured, and what cannot be one."""

import json
import random

import pytest

from mooncake_store.cli.main import main
from serving.scheduling.costs import Costs
from serving.scheduling.index import POOL
from serving.simulator.hardware import Hardware, read_hardware
from serving.simulator.measured import fit_hardware, write_hardware

TRUTH = Hardware(
    about="the truth",
    kv_bytes=131072,
    network_bytes_per_s=2e9,
    load_bytes_per_s=8e9,
    prefill=(0.02, 3e-4, 2e-8),
    step=(0.012, 1e-3, 5e-8),
    kv_tokens=400_000,
    layers=32,
)
GIVEN = {
    "kv_bytes": 131072,
    "network_bytes_per_s": 2e9,
    "load_bytes_per_s": 8e9,
    "kv_tokens": 400_000,
    "layers": 32,
}
OPTIONS = ["--kv-bytes", "131072", "--network", "2GB", "--load", "8GB", "--kv-tokens", "400000",
           "--layers", "32"]  # fmt: skip


def samples(count=60, noise=0.0, seed=1):
    source = random.Random(seed)
    rows = []
    for _ in range(count):
        off = source.uniform(1 - noise, 1 + noise)
        tokens = source.choice((200, 1000, 4000, 16_000))
        cached = source.choice((0, tokens // 2))
        seconds = off * TRUTH.compute_s(tokens, cached)
        rows.append({"tokens": tokens, "cached": cached, "seconds": seconds})
        batch, context = source.choice((1, 4, 16)), source.choice((500, 20_000, 100_000))
        seconds = off * TRUTH.step_s(batch, context)
        rows.append({"batch": batch, "tokens": context, "seconds": seconds})
    return rows


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def front(measured=20):
    """What a front tells that has seen so many of each."""
    costs = Costs(kv_bytes=TRUTH.kv_bytes)
    for number in range(measured):
        tokens, batch = 500 * (1 + number % 7), 1 + number % 5
        size = tokens * TRUTH.kv_bytes
        costs.prefill.observe(tokens, 0, TRUTH.compute_s(tokens, 0))
        costs.load.observe(size, TRUTH.load_s(size))
        costs.transfer.observe("worker", size, size / TRUTH.network_bytes_per_s)
        costs.transfer.observe(POOL, size, 10 * size / TRUTH.network_bytes_per_s)
        context = 3000 * (1 + number % 4)
        costs.decode.observe(batch, context, TRUTH.step_s(batch, context))
    machine = {"layers": TRUTH.layers, "kv_tokens": TRUTH.kv_tokens}
    return {"model": "some", "uptime_s": 5, "costs": costs.learnt(), "machine": machine}


def assert_alike(found, rel):
    for tokens, cached in ((300, 0), (3000, 2000), (3000, 0)):
        assert found.compute_s(tokens, cached) == pytest.approx(
            TRUTH.compute_s(tokens, cached), rel=rel
        )
    for batch, tokens in ((1, 3000), (5, 9000), (3, 12_000)):
        assert found.step_s(batch, tokens) == pytest.approx(TRUTH.step_s(batch, tokens), rel=rel)
    assert found.load_bytes_per_s == pytest.approx(TRUTH.load_bytes_per_s, rel=rel)
    assert found.network_bytes_per_s == pytest.approx(TRUTH.network_bytes_per_s, rel=rel)
    for name in ("kv_bytes", "kv_tokens", "layers"):
        assert getattr(found, name) == getattr(TRUTH, name)


def test_samples_are_fitted_and_the_file_can_be_simulated_with(tmp_path, capsys):
    file = write(tmp_path / "samples.jsonl", samples())
    out = tmp_path / "mine.toml"
    assert main(["simulate", "fit", str(file), str(out), *OPTIONS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = read_hardware(out)
    assert_alike(found, rel=0.01)
    assert told["file"] == str(out)
    assert tuple(told["prefill"]) == found.prefill
    assert told["about"] == found.about
    assert "60 prompts" in found.about
    assert main(["simulate", "fit", str(file), str(out), *OPTIONS]) == 0
    assert "60 prompts" in capsys.readouterr().out


def test_how_far_samples_are_off_is_told(tmp_path):
    file = write(tmp_path / "samples.jsonl", samples(count=200, noise=0.2))
    found = fit_hardware(file, **GIVEN)
    assert_alike(found, rel=0.15)
    off = float(found.about.split("it is ")[1].split("%")[0])
    assert 5 < off < 15  # half of the most that they are off


def test_the_first_samples_count_as_much_as_the_last(tmp_path):
    quick, slow = samples(100), samples(100)
    for row in slow:
        row["seconds"] *= 2
    seconds = [
        fit_hardware(write(tmp_path / "samples.jsonl", rows), **GIVEN).compute_s(1000, 0)
        for rows in (quick + slow, slow + quick)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)


def test_what_a_front_learnt_becomes_a_file(tmp_path, capsys):
    file, out = tmp_path / "stats.json", tmp_path / "mine.toml"
    file.write_text(json.dumps(front()))
    assert main(["simulate", "fit", str(file), str(out)]) == 0
    assert "20 prompts and 20 steps" in capsys.readouterr().out
    assert_alike(read_hardware(out), rel=0.05)


def test_what_is_given_counts_more_than_what_was_measured(tmp_path):
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(front()))
    found = fit_hardware(file, network_bytes_per_s=5e9, layers=2)
    assert found.network_bytes_per_s == 5e9
    assert found.layers == 2
    assert found.kv_bytes == TRUTH.kv_bytes


def test_without_transfers_between_workers_those_from_the_pool_tell_the_rate(tmp_path):
    file, stats = tmp_path / "stats.json", front()
    del stats["costs"]["transfer"]["worker"]
    file.write_text(json.dumps(stats))
    assert fit_hardware(file).network_bytes_per_s == pytest.approx(2e8, rel=0.05)


def lacking(*path):
    stats = front()
    at = stats
    for name in path[:-1]:
        at = at[name]
    del at[path[-1]]
    return json.dumps(stats)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(front(measured=3)), "3 measured prompts, too few"),
        (lacking("costs"), "missing required field `costs`"),
        (lacking("costs", "decode"), "missing required field `decode`"),
        (json.dumps({**front(), "machine": {"layers": 3, "kv_tokens": 0}}), "--kv-tokens"),
        ("[1, 2]", "line 1: no measurement: not an object"),
        ("", "0 different prompts"),
        ("no json\n", "line 1: no measurement"),
        ('{"tokens": 5, "cached": 6, "seconds": 1}', "cached is 6, of 5 tokens"),
        ('\n{"tokens": 5, "seconds": 0}', "line 2: no measurement"),
        ('{"batch": 0, "tokens": 5, "seconds": 1}', "line 1: no measurement"),
        ('{"tokens": 5, "second": 1, "seconds": 2}', "unknown field"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, capsys, text, said):
    file, out = tmp_path / "given", tmp_path / "mine.toml"
    file.write_text(text)
    assert main(["simulate", "fit", str(file), str(out)]) != 0
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_front_that_has_moved_nothing_is_told_what_to_say(tmp_path, capsys):
    file, stats = tmp_path / "stats.json", front()
    stats["costs"]["transfer"] = {}
    stats["costs"]["load"]["measured"] = 0
    file.write_text(json.dumps(stats))
    words = ["simulate", "fit", str(file), str(tmp_path / "mine.toml")]
    for option in ("--network", "--load"):
        assert main(words) != 0
        assert option in capsys.readouterr().err
        words += [option, "1GB"]
    assert main(words) == 0


@pytest.mark.parametrize("name", GIVEN)
def test_what_samples_do_not_tell_has_to_be_given(tmp_path, capsys, name):
    file = write(tmp_path / "samples.jsonl", samples())
    at = 2 * list(GIVEN).index(name)
    out = str(tmp_path / "mine.toml")
    assert main(["simulate", "fit", str(file), out, *OPTIONS[:at], *OPTIONS[at + 2 :]]) != 0
    assert f"say {OPTIONS[at]}" in capsys.readouterr().err
    assert main(["simulate", "fit", str(file), out, *OPTIONS, OPTIONS[at], "0"]) != 0
    assert "above 0" in capsys.readouterr().err


def test_samples_that_do_not_differ_are_refused(tmp_path, capsys):
    alike = [each for each in samples() if each.get("batch") in (None, 1)]
    for row in alike:
        if "batch" in row:
            row["tokens"] = 500
    file = write(tmp_path / "samples.jsonl", alike)
    assert main(["simulate", "fit", str(file), str(tmp_path / "mine.toml"), *OPTIONS]) != 0
    assert "1 different steps of decoding" in capsys.readouterr().err


def test_prompts_that_take_the_same_however_long_are_refused(tmp_path, capsys):
    rows = samples()
    for row in rows:
        if "batch" not in row:
            row["seconds"] = 1.0 / row["tokens"]
    file = write(tmp_path / "samples.jsonl", rows)
    assert main(["simulate", "fit", str(file), str(tmp_path / "mine.toml"), *OPTIONS]) != 0
    assert "what a token of a prompt takes" in capsys.readouterr().err


def test_files_that_are_not_there_or_cannot_be_written_are_named(tmp_path, capsys):
    assert main(["simulate", "fit", str(tmp_path / "none"), str(tmp_path / "out")]) != 0
    assert "cannot read the measurements" in capsys.readouterr().err
    file = write(tmp_path / "samples.jsonl", samples())
    assert main(["simulate", "fit", str(file), str(tmp_path / "no" / "out"), *OPTIONS]) != 0
    assert "cannot write" in capsys.readouterr().err


def test_a_file_that_was_written_is_read_as_it_was(tmp_path):
    for name in ("a800-llama3-70b", None):
        hardware = read_hardware(name) if name else TRUTH
        write_hardware(tmp_path / "mine.toml", hardware)
        assert read_hardware(tmp_path / "mine.toml") == hardware
