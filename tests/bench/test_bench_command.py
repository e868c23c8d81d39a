"""`mooncake bench`: options reach the bench, the report reaches the user, failures are told."""

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mooncake_store.cli import bench
from mooncake_store.cli.main import main

FOLDER = Path(bench.__file__).parents[1] / "bench"
WRITTEN = sorted(path.stem for path in FOLDER.glob("[a-z]*.py") if path.stem != "harness")


OWN_OPTIONS = {
    "conversations": {"trace"},
    "eviction": {"trace", "capacity", "policy", "csv", "plot"},
    "transfer": {"sizes", "batches", "operations", "transports", "threads"},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_bench_module_has_a_subcommand_and_the_common_options(name):
    assert name in bench.BENCHES
    module = importlib.import_module(f"mooncake_store.bench.{name}")
    parameters = inspect.signature(module.run).parameters
    assert next(iter(parameters)) == "report"
    common = {"quick", "vs"}
    own = OWN_OPTIONS.get(name, set())
    assert set(parameters) == {"report"} | common | own
    for option in common | own:
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        # The command leaves out what the user did not give.
        assert (parameters[option].default is inspect.Parameter.empty) == (option in common)
    assert type(module.ALTERNATIVES) is tuple


@pytest.fixture
def benches(monkeypatch):
    """Replace every bench by one that adds a row and notes how it was called."""
    calls = {}

    def stand_in(name):
        def run(report, **options):
            calls[name] = options
            report.row("speed/[b1]", "GB/s", [2.0, 4.0], vs={side: [1.5] for side in options["vs"]})
            report.row("read/rdma", "GB/s", [], why="no RDMA device")

        module = ModuleType(f"mooncake_store.bench.{name}")
        module.run, module.ALTERNATIVES = run, ("raw", "upstream")
        return module

    for name in bench.BENCHES:
        monkeypatch.setitem(sys.modules, f"mooncake_store.bench.{name}", stand_in(name))
    return calls


@pytest.mark.parametrize("name", bench.BENCHES)
def test_json_is_one_object_and_nothing_else(benches, capsys, name):
    assert main(["bench", name, "--quick", "--vs", "raw, upstream", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert benches[name] == {"quick": True, "vs": ("raw", "upstream")}
    assert (value["bench"], value["quick"]) == (name, True)
    assert value["rows"][0] == {
        "name": "speed/[b1]",
        "value": 3,
        "unit": "GB/s",
        "low": 2,
        "high": 4,
        "repeats": 2,
        "vs": {"raw": {"value": 1.5, "ratio": 2}, "upstream": {"value": 1.5, "ratio": 2}},
    }


def test_the_table_shows_values_ratios_and_reasons(benches, capsys):
    assert main(["bench", "core", "--vs", "raw"]) == 0
    shown = capsys.readouterr().out
    assert "speed/[b1]" in shown
    assert "1.5 (2x)" in shown
    assert "no RDMA device" in shown


def test_eviction_options_arrive_as_they_were_given(benches):
    words = ["--trace", "t.jsonl", "--capacity", "1000,inf", "--policy", "lru,opt", "--json"]
    assert main(["bench", "eviction", *words]) == 0
    assert benches["eviction"] == {
        "quick": False,
        "vs": (),
        "trace": "t.jsonl",
        "capacity": "1000,inf",
        "policy": "lru,opt",
    }


@pytest.mark.parametrize(
    ("option", "value"),
    [("--capacity", "x"), ("--capacity", "10,0"), ("--capacity", "1.5"), ("--policy", "lru,mru")],
)
def test_an_eviction_option_that_makes_no_sense_is_a_usage_error(capsys, option, value):
    assert main(["bench", "eviction", option, value]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert repr(value.split(",")[-1]) in shown.err
    assert "mooncake bench eviction --help" in shown.err


def test_a_trace_that_does_not_exist_is_named(capsys):
    assert main(["bench", "eviction", "--trace", "no/such.jsonl"]) == 1
    assert capsys.readouterr().err == "error: No such file or directory: no/such.jsonl\n"


def test_all_puts_every_bench_into_one_report(benches, capsys):
    assert main(["bench", "all", "--quick", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert names == [f"{b}/{row}" for b in bench.BENCHES for row in ("speed/[b1]", "read/rdma")]
    assert set(benches) == set(bench.BENCHES)


def test_all_draws_a_table_for_each_bench_and_cuts_nothing(benches, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "all", "--quick", "--vs", "raw"]) == 0
    shown = capsys.readouterr().out
    assert sum(line.startswith(" row ") for line in shown.splitlines()) == len(bench.BENCHES)
    assert "transfer/speed/[b1]" in shown
    assert "no RDMA device: transfer/read/rdma" in shown
    assert "…" not in shown


def test_all_goes_on_after_a_bench_that_fails_and_says_so(benches, capsys, monkeypatch):
    def fail(report, **options):
        raise ZeroDivisionError("no time passed")

    monkeypatch.setattr(sys.modules["mooncake_store.bench.core"], "run", fail)
    assert main(["bench", "all", "--json"]) == 1
    shown = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(shown.out)["rows"]}
    assert rows["core"]["why"] == "ZeroDivisionError: no time passed"
    assert rows["core"]["value"] is None
    assert "eviction/speed/[b1]" in rows
    assert "core" in shown.err


def test_a_bench_that_is_not_installed_is_one_sentence(benches, capsys, monkeypatch):
    # None in sys.modules makes the import fail as it does for a module that does not exist.
    monkeypatch.setitem(sys.modules, "mooncake_store.bench.core", None)
    assert main(["bench", "core"]) == 1
    assert capsys.readouterr().err.startswith(
        "error: the bench 'core' is not part of this installation; "
    )


@pytest.mark.parametrize("name", [*bench.BENCHES, "all"])
def test_an_alternative_that_does_not_exist_is_refused_before_anything_is_measured(
    benches, capsys, name
):
    assert main(["bench", name, "--vs", "raw,upstreem"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    told = f"bench {name} is not compared with 'upstreem'; choose from: raw, upstream"
    assert shown.err == f"error: {told}\n"
    assert not benches


def test_a_bench_that_is_compared_with_nothing_says_so(capsys):
    assert main(["bench", "echo", "--vs", "raw"]) == 2
    told = "bench echo is not compared with 'raw'; leave --vs out"
    assert capsys.readouterr().err == f"error: {told}\n"


def test_all_gives_each_bench_the_alternatives_it_knows(benches, monkeypatch):
    monkeypatch.setattr(sys.modules["mooncake_store.bench.core"], "ALTERNATIVES", ("python",))
    assert main(["bench", "all", "--vs", "raw,python"]) == 0
    assert benches["core"]["vs"] == ("python",)
    assert benches["data"]["vs"] == ("raw",)


def test_an_alternative_that_was_not_measured_is_told(benches, capsys, monkeypatch):
    def run(report, **options):
        report.row("r", "u", [1.0])

    monkeypatch.setattr(sys.modules["mooncake_store.bench.core"], "run", run)
    assert main(["bench", "core", "--vs", "upstream", "--json"]) == 0
    shown = capsys.readouterr()
    json.loads(shown.out)
    assert shown.err == "note: no row of bench core is compared with 'upstream'\n"
