"""Policies of others in the serving layer, and the guide that has them written."""

import asyncio
import contextlib
import json
import os
import random
import re
import runpy
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from eviction import synthetic_trace
from eviction.testing import EvictionPolicyContract
from mooncake_store.cli.main import main
from serving.scheduling.policies import (
    ADMISSION_GROUP,
    PLACEMENT_GROUP,
    make_admission,
    make_placement,
)
from serving.scheduling.routing import EngineRouter, Wanted
from serving.scheduling.views import Demand, Placement, PrefillView
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import read_hardware
from tests.eviction.test_plain import scanned
from tests.serving.front.conftest import listening
from tests.serving.front.engines import Engine
from tests.serving.scheduling.test_placement import costs
from tests.test_docs import blocks, commands

GUIDE = Path("docs/guide/policies.md")
PYTHON = [body for _, _, body in blocks(GUIDE, "python")]
WRITTEN = "\n\n".join(body for body in PYTHON if body.startswith("# my_policies.py"))
"""The file that the guide has its reader write."""
SHOWN = [words for _, _, body in blocks(GUIDE, "console") for words in commands(body)]
MINE = """
from eviction import PlainPolicy
from serving.scheduling.placement import placed_on


class Last:
    def place(self, demand, instances, costs):
        chosen = max(instances, key=lambda each: each.name, default=None)
        return None if chosen is None else placed_on(demand, chosen, costs)


class Nobody:
    def refusal(self, outlook):
        from serving.scheduling.views import Rejection

        return Rejection("closed", "come back tomorrow", 1.0)


class Unfinished(PlainPolicy):
    pass


class Broken:
    def __init__(self):
        raise RuntimeError("no luck\\nat all")

    def place(self, demand, instances, costs):
        pass

    refusal = place
"""
NAMES = f"""
[{PLACEMENT_GROUP}]
last = my_policies:Last
random = my_policies:Last

[{ADMISSION_GROUP}]
nobody = my_policies:Nobody
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_policies.py").write_text(WRITTEN + MINE)
    (tmp_path / "broken_policies.py").write_text("raise KeyError('x')\n")
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(NAMES)
    return tmp_path


@pytest.fixture
def importable(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("my_policies", None)


@pytest.fixture
def trace_file(folder, monkeypatch):
    """The trace that the guide makes."""
    monkeypatch.chdir(folder)
    script = folder / "make_trace.py"
    script.write_text(next(body for body in PYTHON if "trace.jsonl" in body))
    runpy.run_path(str(script))
    return folder / "trace.jsonl"


@pytest.fixture
def path(folder):
    """The environment in which programs find the folder."""
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


with tempfile.NamedTemporaryFile("w", suffix=".py") as _file:
    _file.write(WRITTEN)
    _file.flush()
    _made = runpy.run_path(_file.name)


class TestAgeing(EvictionPolicyContract):
    def make(self, capacity_ids):
        return _made["Ageing"](capacity_ids)


def placed(name):
    policy = make_placement(name, 1.5, random.Random(0))
    return policy.place(Demand(1000), [PrefillView("a"), PrefillView("b", 9.0)], costs())


@pytest.mark.parametrize("name", ["my_policies:Last", "last"])
def test_a_placement_is_found_by_its_path_and_by_a_distributions_name(importable, name):
    assert placed(name).prefill == "b"


def test_a_name_of_ours_stays_ours(importable):
    assert type(make_placement("random", 1.5, random.Random(0))).__name__ == "AnyInstance"


@pytest.mark.parametrize("name", ["my_policies:Nobody", "nobody"])
def test_an_admission_is_found_the_same_way(importable, name):
    assert make_admission(name).refusal(None).code == "closed"


NOT_THERE = [
    ("my_policies:Lost", "has no attribute 'Lost'.*PYTHONPATH"),
    ("nowhere:Last", "No module named 'nowhere'.*PYTHONPATH"),
    (":", "cannot import"),
    ("broken_policies:Last", r"KeyError: 'x' \(broken_policies.py, line 1\)"),
    ("os:system", "is no placement policy: .* a class with place"),
    ("my_policies:Nobody", "is no placement policy: .* a class with place"),
    ("lastt", "unknown placement policy 'lastt'; did you mean 'last'"),
    ("my_policies:Broken", r"RuntimeError: no luck \(my_policies.py, line \d+\)$"),
]


@pytest.mark.parametrize(("name", "said"), NOT_THERE)
def test_what_is_no_placement_is_told_in_a_line(importable, trace_file, capsys, name, said):
    with pytest.raises(ValueError, match=said):
        make_placement(name, 1.5, random.Random(0))
    for code, words in (
        (2, ["simulate", "run", str(trace_file)]),
        (3, ["serve", "--port", "0"]),
        (3, ["serve", "--port", "0", "--backend", "a=http://127.0.0.1:1"]),
    ):
        assert main([*words, "--placement", name]) == code
        told = capsys.readouterr().err
        assert re.search(said, told, re.M), told
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--admission", "my_policies:Last", "no admission policy: .* a class with refusal"),
        ("--admission", "my_policies:Broken", "RuntimeError: no luck"),
        ("--eviction", "my_policies:Last", "no eviction policy; subclass"),
        ("--eviction", "my_policies:Unfinished", r"abstract .*touch_one'?$"),
    ],
)
def test_other_kinds_are_told_of_as_well(importable, trace_file, capsys, option, name, said):
    assert main(["simulate", "run", str(trace_file), option, name]) == 2
    assert re.search(said, capsys.readouterr().err, re.M)


def test_a_master_tells_before_it_starts_of_a_policy_that_cannot_be_made(importable, capsys):
    assert main(["master", "--port", "0", "--eviction-policy", "my_policies:Unfinished"]) == 3
    assert "cannot make the eviction policy 'my_policies:Unfinished'" in capsys.readouterr().err


class TwoThatHold:
    """A policy by which everything is pulled from somewhere."""

    def place(self, demand, instances, costs):
        return Placement("a", 900, "b", 800, 2.0, 0.0, 0.0, 0.1, 0.9)


def test_before_engines_nothing_is_pulled_whatever_a_policy_says():
    router = EngineRouter(TwoThatHold(), costs())
    router.join("a")
    assert router.choose(0.0, "r", Wanted(Demand(1000), streamed=True)) == "a"
    router.answering(1.0, "r")
    router.ended(1.0, "r", finished=True)
    # What was predicted is what "a" takes with the 100 tokens that it has.
    assert router.recent[0].predicted_s == pytest.approx(0.9)


def test_a_cluster_is_simulated_with_policies_of_others(importable):
    trace = synthetic_trace(100, seed=1)
    hardware = read_hardware("a800-llama3-70b")
    plan = Plan(prefill=3, decode=1, placement="my_policies:Last", cache_tokens=100_000)
    alone = Plan(prefill=1, decode=1, cache_tokens=100_000)
    one = Cluster(alone, hardware).run(trace)
    assert (Cluster(plan, hardware).run(trace).first_s == one.first_s).all()
    ageing = Cluster(replace(alone, eviction="my_policies:Ageing"), hardware).run(trace)
    assert ageing.cached_tokens.sum() != one.cached_tokens.sum()
    refused = Cluster(replace(alone, admission="my_policies:Nobody"), hardware).run(trace)
    assert not refused.finished.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [words for words in SHOWN if "trace.jsonl" in words],
    ids=lambda words: f"{words[1]} {words[2]}",
)
def test_what_the_guide_measures_is_measured(trace_file, path, words):
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_store", *words[1:]],
        cwd=trace_file.parent, env=os.environ | path, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def shown(program):
    """What the guide starts of a program, first without engines of others."""
    found = [words[1:] for words in SHOWN if words[1] == program]
    return sorted(found, key=lambda words: "--backend" in words)


@pytest.mark.slow
def test_a_master_evicts_by_the_guides_policy(start_program, path):
    (words,) = shown("master")
    program = "-m", "mooncake_store"
    master = start_program(*program, *words, "--port", 0, "--json", **path)
    address = json.loads(master.wait_for_line('"ready": true'))["address"]
    worker = start_program(
        *program, "worker", "--memory", "anonymous", "--master", address, "--segment", "16MiB"
    )
    worker.wait_for_line("lends 16MiB")
    assert scanned(f"mooncake://{address}", uses=9) == [True, False, True]


def serve(start_program, port_file, words, path):
    """The URL of a front."""
    pytest.importorskip("torch")
    program = start_program(
        "-m", "mooncake_store", *words, "--port", "0", "--port-file", port_file, **path
    )
    program.wait_for_line("answers at", 100)
    return json.loads(port_file.read_text())["url"]


@pytest.mark.slow
def test_a_server_with_the_guides_policy_answers(start_program, tmp_path, path):
    words = [*shown("serve")[0], "--segment", "256MB"]
    url = serve(start_program, tmp_path / "port", words, path)
    body = json.dumps({"prompt": "Some words", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] >= 1


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(("policy", "seen"), [("Last", [0, 4]), ("Patient", [2, 2])])
async def test_a_front_before_engines_goes_by_a_policy_of_others(
    start_program, tmp_path, path, policy, seen
):
    engines = {"a": Engine(), "b": Engine()}
    async with contextlib.AsyncExitStack() as stack:
        words = [*shown("serve")[1][:-1], f"my_policies:{policy}"]
        for name, engine in engines.items():
            url = await stack.enter_async_context(listening(engine.application()))
            words = [f"{name}={url}" if word.startswith(f"{name}=") else word for word in words]
        url = await asyncio.to_thread(serve, start_program, tmp_path / "port", words, path)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for _ in range(4):
            async with http.post(url + "/v1/completions", json={"prompt": "p"}) as answer:
                assert answer.status == 200
                await answer.read()
    assert [len(engine.seen) for engine in engines.values()] == seen
