"""`mooncake bench replay`: a trace against a store, and against a front."""

import asyncio
import json

import numpy as np
import pytest

from eviction import read_trace
from mooncake_store import Client, LocalCluster
from mooncake_store.bench.harness import Report
from mooncake_store.cli.main import main
from mooncake_store.errors import ConfigError, StoreError, UnavailableError
from serving.bench.replay_front import play, prompt_of
from serving.workers.protocol import unpack_tokens
from tests.serving.fakes import Fleet
from tests.serving.front.conftest import listening, serving

LINES = [
    {"timestamp": 1000, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 3]},
    {"timestamp": 5000, "input_length": 100, "output_length": 40, "hash_ids": [4]},
]
BLOCK = "4KiB"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    return str(path)


@pytest.fixture
def pool():
    with LocalCluster(segment="4MiB", in_process=True) as cluster:
        yield cluster.url


@pytest.fixture
def played(file, pool, capsys):
    """Run the command on the pool; the rows by name."""

    def play_it(*words):
        assert main(["bench", "replay", file, "--url", pool, *words, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        return {row["name"]: row for row in rows}

    return play_it


def test_what_earlier_requests_put_is_found_and_the_store_is_left_as_it_was(played, pool):
    with Client(pool) as store:
        store.put("replay", b"of somebody else")
        for clients in ("1", "1", "3"):
            rows = played("--clients", clients)
            if clients == "1":
                assert rows["hit_ratio"]["value"] == pytest.approx(4 / 9, rel=1e-4)
            assert rows["not put"]["value"] == 0
            assert rows["put"]["value"] > 0
            assert rows["lookup/p50"]["value"] > 0
            assert rows["late/p99"]["value"] is None
            assert [each.key for each in store.list()] == ["replay"]


def test_requests_are_played_when_the_trace_has_them_come(played):
    # In a fiftieth of its four seconds: the last of four requests begins then.
    rows = played("--speed", "50", "--block", BLOCK)
    assert rows["requests"]["value"] < 4 / (4 / 50)
    assert rows["late/p99"]["value"] > 0
    assert rows["hit_ratio"]["value"] == pytest.approx(4 / 9, rel=1e-4)


def test_only_the_first_requests_are_played_where_that_is_said(played):
    assert played("--requests", "2")["hit_ratio"]["value"] == pytest.approx(2 / 5)


def test_what_does_not_fit_into_the_store_is_counted(played):
    rows = played("--block", "8MiB")
    assert rows["not put"]["value"] == 9
    assert rows["hit_ratio"]["value"] == 0
    assert rows["get/p50"]["why"] == "nothing was found"


def test_a_block_that_is_not_what_was_put_ends_the_replay(file, pool, monkeypatch, capsys):
    get_many = Client.get_many

    def wrong(self, names):
        found = get_many(self, names)
        found.values = [b"x" * len(value) for value in found.values]
        return found

    monkeypatch.setattr(Client, "get_many", wrong)
    assert main(["bench", "replay", file, "--url", pool, "--block", BLOCK]) == 1
    assert "is not what was put" in capsys.readouterr().err


def test_nobody_waits_for_requests_to_come_when_one_has_failed(file, pool, monkeypatch, capsys):
    def broken(self, names):
        raise UnavailableError("the store has gone")

    monkeypatch.setattr(Client, "find_prefix", broken)
    # The third request is due in three weeks.
    words = ["--url", pool, "--clients", "3", "--speed", "0.000001"]
    assert main(["bench", "replay", file, *words]) == 4
    assert "the store has gone" in capsys.readouterr().err


def test_a_store_is_named_as_for_every_command(file, pool, tmp_path, capsys):
    master = pool.removeprefix("mooncake://").partition("/")[0]
    settings = tmp_path / "mine.toml"
    settings.write_text(f'[client]\nurl = "{pool}"\n')
    for words in (["--master", master], ["--config", str(settings)]):
        # A store that it would start has room for these.
        assert main(["bench", "replay", file, *words, "--block", "8MiB", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        assert rows["not put"]["value"] == 9


@pytest.mark.slow
def test_without_a_store_and_a_trace_there_is_one_of_each(capsys):
    words = ["--requests", "20", "--segment", "64MiB", "--json"]
    assert main(["bench", "replay", *words]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert 0 < rows["hit_ratio"]["value"] < 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speed", "0"], "--speed is 0"),
        (["--requests", "-1"], "--requests is -1"),
        (["--clients", "0"], "--clients is 0"),
        (["--block", "4"], "--block is 4 bytes"),
        (["--front", "http://127.0.0.1:1"], "two things"),
    ],
)
def test_what_cannot_be_played_is_refused(file, pool, capsys, words, said):
    assert main(["bench", "replay", file, "--url", pool, *words]) == 2
    assert said in capsys.readouterr().err


# -- a front


def test_prompts_share_tokens_where_they_share_blocks():
    one = prompt_of(np.array([0, 1, 2]), 1500, 512)
    assert len(one) == 1500
    assert prompt_of(np.array([0, 1, 3]), 1100, 512)[:1024] == one[:1024]
    assert prompt_of(np.array([5, 1, 2]), 1500, 512)[:512] != one[:512]
    assert prompt_of(np.array([0, 1, 3]), 1500, 512)[1024:] != one[1024:]
    assert min(one) >= 32
    assert max(one) < 224


async def at_front(file, url, **options):
    report = Report("replay")
    told = {"token_file": "", "speed": 50.0, "block_tokens": None} | options
    await asyncio.to_thread(play, report, read_trace(file), url, **told)
    return {row.name: row for row in report.rows}


@pytest.mark.asyncio
async def test_a_front_is_sent_completions_of_the_lengths_of_a_trace(file):
    fleet = Fleet(1, 1)
    async with serving(fleet) as (url, _):
        rows = await at_front(file, url)
    prompts = [unpack_tokens(message.tokens).tolist() for message in fleet.prefill[0].seen]
    assert sorted(map(len, prompts)) == [100, 1024, 1100, 1500]
    by_length = {len(prompt): prompt for prompt in prompts}
    assert by_length[1024] == by_length[1500][:1024] == by_length[1100][:1024]
    assert rows["answered"].value == 4
    assert rows["refused"].value == rows["failed"].value == rows["too long"].value == 0
    for name in ("first token/p99", "between tokens/p50", "late/p50", "read", "written"):
        assert rows[name].value > 0, name


@pytest.mark.asyncio
async def test_blocks_of_fewer_tokens_make_shorter_requests(file):
    fleet = Fleet(1, 1)
    async with serving(fleet) as (url, _):
        await at_front(file, url, block_tokens=16)
    seen = [len(unpack_tokens(message.tokens)) for message in fleet.prefill[0].seen]
    assert sorted(seen) == [4, 32, 35, 47]


@pytest.mark.asyncio
async def test_what_is_too_long_for_the_model_is_left_out(file):
    fleet = Fleet(1, 1)
    async with serving(fleet) as (url, _):
        rows = await at_front(file, url, block_tokens=2100)
        assert rows["too long"].value == 3
        with pytest.raises(StoreError, match="fits into its context"):
            await at_front(file, url, block_tokens=1 << 20)


@pytest.mark.asyncio
async def test_what_a_front_refuses_is_counted_and_nothing_else_hides_it(file):
    async with serving(Fleet(1, 1)) as (url, conductor):
        conductor.requests_max = 0
        with pytest.raises(StoreError, match="under way already"):
            await at_front(file, url)


@pytest.mark.asyncio
async def test_a_front_that_is_none_is_named(file):
    from aiohttp import web

    async with listening(web.Application()) as url:
        with pytest.raises(StoreError, match="names no model"):
            await at_front(file, url)
    with pytest.raises(ConfigError):
        await at_front(file, url, token_file="/none")
