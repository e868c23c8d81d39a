"""Scenario files: what they come to, what is wrong with them, and what is told of their runs."""

import csv
import io
import json
import statistics
from html.parser import HTMLParser

import pytest

from eviction import synthetic_trace
from mooncake_store.cli.main import main
from mooncake_store.errors import ConfigError
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.curves import curves_of
from serving.simulator.hardware import read_hardware
from serving.simulator.outages import Outage
from serving.simulator.outcomes import Outcomes, summary
from serving.simulator.report import pictures, report
from serving.simulator.scenario import read_scenario
from serving.simulator.scenario_runs import run_scenario
from serving.traces.writing import rows_of, write_rows

TRACE = '[trace]\nkind = "conversation"\nrequests = 40\n'
SMALL = (
    'about = "Small"\nseeds = [3, 1, 2]\n' + TRACE + "[plan]\nprefill = 2\ndecode = 2\n"
    '[vary]\nplacement = ["cache-centric", "random"]\ncache_tokens = [0, 100_000]\n'
)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "small.toml"
    path.write_text(SMALL)
    return run_scenario(read_scenario(path))


def test_variants_are_names_and_every_combination_in_the_order_of_the_file(written):
    known = read_scenario(
        written(
            TRACE + "[plan]\nprefill = 3\n[variants.z]\ndecode = 1\n[variants.a]\n"
            'outages = ["prefill-0:1m:2s"]\n[vary]\nspeed = [2, 1.5]\nroles = [false, true]\n'
        )
    )
    assert [variant.name for variant in known.variants] == [
        f"{name}, speed {speed}, roles {roles}"
        for name in "za" for speed in ("2", "1.5") for roles in (False, True)
    ]  # fmt: skip
    assert known.varied == ["variant", "speed", "roles"]
    down = (Outage(at_s=60.0, node="prefill-0", lasts_s=2.0),)
    assert known.variants[1].plan == Plan(prefill=3, decode=1, speed=2.0, roles=True)
    assert known.variants[6].plan == Plan(prefill=3, speed=1.5, outages=down)
    assert [variant.plan for variant in read_scenario(written(TRACE)).variants] == [Plan()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 1\n" + TRACE, ["no field nodes", "seeds", "vary"]),
        (TRACE + "[plan]\nnodes = 1\n", ["no field plan.nodes", "cache_tokens", "placement"]),
        (TRACE + "[vary]\nnodes = [1]\n", ["no field vary.nodes", "cache_tokens"]),
        (TRACE + "[variants.a]\nnodes = 1\n", ["no field variants.a.nodes", "prefill"]),
        (TRACE + "size = 1\n", ["no field trace.size", "requests"]),
        (TRACE + "[slo]\nttft = 1\n", ["no field slo.ttft", "ttft_s"]),
        (TRACE + "[plan]\nseed = 1\n", ["plan.seed", "seeds = [1, 2, 3]"]),
        (TRACE + '[plan]\nprefill = "two"\n', ["plan.prefill: ", "`int`", "`str`"]),
        (TRACE + "[vary]\nprefill = [1, 1.5]\n", ["vary.prefill[1]: ", "`int`", "`float`"]),
        ("seeds = [1, true]\n" + TRACE, ["seeds[1]: ", "`int`", "`bool`"]),
        ("seeds = []\n" + TRACE, ["seeds is empty", "seeds = [1]"]),
        (TRACE + "[vary]\nprefill = []\n", ["vary.prefill is empty"]),
        (TRACE + '[plan]\neviction = "fifth"\n', ["plan: ", "eviction", "'fifth'", "lru"]),
        (TRACE + "[vary]\nprefill = [1, 0]\n", ["prefill 0: ", "one node computes"]),
        (TRACE + '[plan]\noutages = ["decode-0"]\n', ["plan.outages", "decode-0"]),
        (TRACE + '[plan]\noutages = ["decode-9:1s:1s"]\n', ["plan", "decode-9"]),
        (TRACE + "[plan]\ndisk_tokens = 5120\n", ["plan: how quick disks are"]),
        ("", ["trace says no file", "conversation, agents", "--trace"]),
        ('[trace]\nkind = "chat"\n', ["trace.kind is 'chat'", "conversation, agents"]),
        ('[trace]\nfile = "a"\nkind = "agents"\n', ["both a file and a kind"]),
        ('[trace]\nfile = "none.jsonl"\n', ["trace.file", "none.jsonl"]),
        ('[trace]\nkind = "agents"\nrequests = -1\n', ["trace.requests is -1"]),
        ('hardware = "toaster"\n' + TRACE, ["hardware: ", "toaster", "a800-llama3-70b"]),
        ("plan = 1\n" + TRACE, ["plan: ", "`object`", "`int`"]),
        ("plan = \n", ["is no TOML", "line 1"]),
    ],
)
def test_what_is_wrong_is_told_with_the_file_the_field_and_what_is_allowed(written, text, said):
    path = written(text)
    with pytest.raises(ConfigError) as wrong:
        read_scenario(path)
    for part in (str(path), *said):
        assert part in str(wrong.value)
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_scenario(path.with_name("none.toml"))


def test_traces_and_hardware_lie_beside_the_file(written, tmp_path, monkeypatch):
    write_rows(tmp_path / "trace.jsonl", rows_of(synthetic_trace(30, seed=1)))
    mine = "kv_bytes = 1\nnetwork_bytes_per_s = 1.0\nload_bytes_per_s = 1.0\nkv_tokens = 9\n"
    (tmp_path / "mine.toml").write_text(
        f'about = "mine"\n{mine}prefill = [0, 1, 0]\nstep = [1, 1, 1]\n'
    )
    path = written('hardware = "mine.toml"\n[trace]\nfile = "trace.jsonl"\nrequests = 20\n')
    monkeypatch.chdir("/")
    known = read_scenario(path)
    assert known.hardware.about == "mine"
    assert len(known.source.read(1)) == 20


def test_a_run_is_what_the_cluster_makes_of_its_plan_and_seed(results):
    assert [(run.variant, run.seed) for run in results.runs] == [
        (variant, seed) for variant in results.scenario.variants for seed in (3, 1, 2)
    ]
    trace = results.scenario.source.read(seed=2)
    plan = Plan(prefill=2, decode=2, placement="random", cache_tokens=100_000, seed=2)
    outcomes = Cluster(plan, read_hardware("a800-llama3-70b")).run(trace)
    figures = summary(outcomes, trace.input_tokens, plan.ttft_s, plan.tbt_s)
    assert results.runs[-1].figures == figures
    assert results.runs[-2].figures["hit_ratio"] != figures["hit_ratio"]
    told = results.medians(results.scenario.variants[-1])
    assert told["ttft_p50_s"] == statistics.median(
        run.figures["ttft_p50_s"] for run in results.runs[-3:]
    )


def test_objectives_are_those_of_the_file_or_else_of_the_plan(written):
    text = SMALL + "[slo]\nttft_s = 1e-9\n"
    held = run_scenario(read_scenario(written(text)))
    assert {run.figures["within_slo"] for run in held.runs} == {0.0}
    text = TRACE + "[vary]\nttft_s = [1e-9, 1e9]\n"
    loose = run_scenario(read_scenario(written(text)))
    assert loose.runs[0].figures["within_slo"] == 0 < loose.runs[1].figures["within_slo"]


def test_results_are_the_same_whatever_the_number_of_processes(results):
    counts = []
    again = run_scenario(results.scenario, jobs=2, done=counts.append)
    assert counts == list(range(1, 13))
    assert [run.figures for run in again.runs] == [run.figures for run in results.runs]
    assert [run.curves for run in again.runs] == [run.curves for run in results.runs]
    assert again.csv() == results.csv()


def test_a_trace_that_is_none_and_policies_of_others_reach_other_processes(
    written, tmp_path, monkeypatch, capsys
):
    (tmp_path / "others.py").write_text(
        "from serving.scheduling.placement import RoundRobin\n\n\nclass Mine(RoundRobin): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    both = 'placement = ["round-robin", "others:Mine"]'
    path = written(TRACE + f"[plan]\nprefill = 2\n[vary]\n{both}\n")
    found = run_scenario(read_scenario(path), jobs=2)
    assert found.runs[0].figures == found.runs[1].figures
    (tmp_path / "bad.jsonl").write_text("{}\n")
    bad = ["--trace", str(tmp_path / "bad.jsonl"), "--jobs", "2"]
    assert main(["simulate", "scenario", str(path), *bad]) != 0
    assert "line 1" in capsys.readouterr().err


def test_csv_and_json_have_every_run_with_every_figure_and_medians(results):
    lines = list(csv.DictReader(io.StringIO(results.csv())))
    assert [line["seed"] for line in lines] == ["3", "1", "2"] * 4 + ["median"] * 4
    assert (lines[3]["placement"], lines[3]["cache_tokens"]) == ("cache-centric", "100000")
    plain = json.loads(json.dumps(results.plain(), allow_nan=False))
    for line, told in zip(lines, plain["runs"] + plain["medians"], strict=True):
        for name in results.runs[0].figures:
            assert float(line[name]) == told[name]


def test_the_command_runs_a_file_on_another_trace_and_writes_what_is_asked(
    written, tmp_path, capsys, monkeypatch
):
    write_rows(tmp_path / "other.jsonl", rows_of(synthetic_trace(30, seed=1)))
    out = {name: tmp_path / name for name in ("runs.csv", "page.html", "drawn")}
    arguments = ["simulate", "scenario", str(written(SMALL)), "--jobs", "1"]
    arguments += ["--trace", str(tmp_path / "other.jsonl"), "--csv", str(out["runs.csv"])]
    arguments += ["--html", str(out["page.html"]), "--svg", str(out["drawn"])]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["runs"]) == 12
    assert {run["requests"] for run in told["runs"]} == {30}
    assert len(out["runs.csv"].read_text().splitlines()) == 1 + 12 + 4
    assert "<h1>Small</h1>" in out["page.html"].read_text()
    assert sorted(path.name for path in out["drawn"].iterdir()) == [
        "answering.svg", "goodput.svg", "hits.svg", "tbt.svg", "ttft.svg", "waiting.svg",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "200")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "placement random, cache_tokens 100,000" in shown
    assert "medians over 3 seeds" in shown
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown  # on a usual terminal a name goes on in the next line
    assert max(map(len, shown.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    # Runs are told even where a file cannot be written.
    assert main([*arguments, "--csv", str(tmp_path / "none" / "runs.csv")]) != 0
    told, wrong = capsys.readouterr()
    assert "placement random, cache_tokens 100,000" in told
    assert "No such file" in wrong
    assert main([*arguments, "--jobs", "-1"]) != 0
    assert "--jobs is -1" in capsys.readouterr().err


def test_curves_count_who_waits_and_who_is_answered():
    outcomes = Outcomes(3)
    outcomes.arrived_s[:] = 0.0, 10.0, 20.0
    outcomes.first_s[:2] = 30.0, 60.0
    outcomes.ended_s[:] = 90.0, 120.0, 40.0  # the third is refused, without a token
    outcomes.lasted_s = 120.0
    curves = curves_of(outcomes)
    assert curves.at_s == pytest.approx(list(range(121)))
    moments = (0, 15, 25, 35, 50, 70, 100, 120)
    assert [curves.waiting[moment] for moment in moments] == [1, 2, 3, 2, 1, 0, 0, 0]
    assert [curves.answering[moment] for moment in moments] == [0, 0, 0, 1, 1, 2, 1, 0]
    assert (curves.ttft_s[0], curves.ttft_s[50], curves.ttft_s[100]) == (30.0, 40.0, 50.0)
    assert curves.tbt_s == []


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.found, self.text = [], []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.found.append((name, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_has_all_pictures_with_tables_and_nothing_from_elsewhere(results):
    page = Page(report(results))
    names = [name for name, _ in page.found]
    assert names.count("svg") == len(pictures(results)) == 6
    assert names.count("table") == names.count("svg") + 2
    assert not {"script", "link", "img", "iframe"} & set(names)
    assert not [of for _, of in page.found if {"src", "href"} & of.keys()]
    assert "url(" not in report(results)
    assert {"p99, s", "within SLOs", "Hit ratio", "conversation"} <= {
        word for text in page.text for word in (text, text.rpartition(" ")[2])
    }


def test_names_of_a_file_are_text_on_the_page(written):
    text = TRACE + '[plan]\ndecode = 0\n[variants."<script>1</script>"]\n'
    found = run_scenario(read_scenario(written('about = "<b>&"\n' + text)))
    page = Page(report(found))
    assert not {"script", "b"} & {name for name, _ in page.found}
    assert {"<b>&", "<script>1</script>"} <= set(page.text)
    # Without decode nodes nobody has times between tokens, and no picture of them.
    assert "tbt" not in [picture.name for picture in pictures(found)]


def test_pictures_go_along_the_number_that_varies_with_a_line_for_the_rest(written):
    text = TRACE + '[vary]\ncache_tokens = [0, 5120]\nplacement = ["random", "round-robin"]\n'
    drawn = {each.name: each for each in pictures(
        run_scenario(read_scenario(written(text + "speed = [1, 2, 4]\n")))
    )}  # fmt: skip
    assert drawn["goodput"].svg.count("<polyline") == 4
    assert "speed, times that of the trace" in drawn["goodput"].svg
    assert drawn["hits"].svg.count("<polyline") == 6
    assert "tokens that each prefill node keeps" in drawn["hits"].svg
    assert drawn["ttft"].svg.count("<polyline") == 12
