"""The benchmark harness: what it measures, in which order, and what it prints."""

import json

import pytest

from mooncake_store.bench.harness import Report, alternate, machine, versions


def test_sides_run_in_turn_and_the_first_round_is_not_counted():
    calls = []

    def side(name, value):
        def call():
            calls.append(name)
            return value + len(calls)

        return call

    samples = alternate({"a": side("a", 100), "b": side("b", 200)}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert samples == {"a": [103.0, 105.0], "b": [204.0, 206.0]}


def test_a_spent_deadline_still_gives_every_side_one_counted_sample():
    samples = alternate({"a": lambda: 1, "b": lambda: 2}, repeats=1000, deadline_s=0)
    assert samples == {"a": [1.0], "b": [2.0]}


def test_without_a_deadline_all_rounds_run():
    assert len(alternate({"a": lambda: 1}, repeats=7)["a"]) == 7


@pytest.mark.parametrize(("sides", "repeats"), [({}, 1), ({"a": lambda: 1}, 0)])
def test_a_measurement_of_nothing_is_refused(sides, repeats):
    with pytest.raises(ValueError, match="at least"):
        alternate(sides, repeats)


def test_a_row_is_the_median_with_smallest_and_largest_sample():
    report = Report("demo")
    report.row("get/64KiB", "GB/s", [3.0, 1.0, 8.0])
    assert report.rows[0].to_dict() == {
        "name": "get/64KiB",
        "value": 3,
        "unit": "GB/s",
        "low": 1,
        "high": 8,
        "repeats": 3,
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "higher_is_better", "ratio"),
    [(8.0, 2.0, True, 4), (2.0, 8.0, True, 0.25), (2.0, 8.0, False, 4), (8.0, 2.0, False, 0.25)],
)
def test_the_ratio_is_above_one_when_we_are_better(ours, theirs, higher_is_better, ratio):
    report = Report("demo")
    report.row("r", "u", [ours], vs={"raw": [theirs]}, higher_is_better=higher_is_better)
    assert report.rows[0].to_dict()["vs"] == {"raw": {"value": theirs, "ratio": ratio}}


def test_a_side_that_could_not_run_stays_visible_as_null():
    report = Report("demo")
    report.row("r", "u", [1.0], vs={"upstream": [], "zero": [0.0]})
    assert report.rows[0].to_dict()["vs"] == {
        "upstream": {"value": None, "ratio": None},
        "zero": {"value": 0, "ratio": None},
    }


def test_a_row_that_could_not_be_measured_is_present_with_its_reason():
    report = Report("demo")
    report.row("read/rdma", "GB/s", [], why="no RDMA device", vs={"raw": [2.0]})
    row = report.to_dict()["rows"][0]
    assert row["value"] is None
    assert row["low"] is None
    assert row["repeats"] == 0
    assert row["why"] == "no RDMA device"
    assert row["vs"] == {"raw": {"value": 2, "ratio": None}}


@pytest.mark.parametrize(("samples", "why"), [([], None), ([1.0], "but it was measured")])
def test_a_null_without_reason_and_a_reason_without_null_are_refused(samples, why):
    with pytest.raises(ValueError, match="either samples or the reason"):
        Report("demo").row("r", "u", samples, why=why)


def test_a_sample_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="no number"):
        Report("demo").row("r", "u", [1.0, float("nan")])


def test_a_row_name_is_used_once():
    report = Report("demo")
    report.row("r", "u", [1.0])
    with pytest.raises(ValueError, match="'r' twice"):
        report.row("r", "u", [1.0])


def test_rows_inside_a_bench_of_all_carry_its_name():
    report = Report("all")
    with report.within("core"):
        report.row("get/b128", "M ops/s", [1.0])
    report.row("last", "s", [1.0])
    assert [row.name for row in report.rows] == ["core/get/b128", "last"]


def test_counts_stay_exact_and_timings_are_shortened():
    report = Report("demo")
    report.row("hits", "hits", [123_456_789.0])
    report.row("time", "s", [1 / 3])
    assert [row.value for row in report.rows] == [123_456_789, 0.333333]


def test_progress_sees_each_row_as_it_is_added():
    seen = []
    report = Report("demo", on_row=seen.append)
    report.row("r", "u", [1.0])
    assert seen == report.rows


def test_the_report_is_one_json_object_with_machine_versions_and_noise():
    report = Report("demo", quick=True)
    report.row("r", "u", [1.0, 2.0])
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert list(plain) == ["bench", "quick", "machine", "versions", "noise", "rows"]
    assert plain["machine"]["cores"] >= 1
    assert plain["machine"]["memory_bytes"] > 2**20
    assert plain["versions"]["mooncake_store"]
    assert plain["noise"]["calibration_ms"] > 0
    assert plain["noise"]["spread_before"] >= 0
    assert len(plain["noise"]["load_average"]) == 3


def test_machine_and_versions_name_what_a_reader_compares():
    assert set(machine()) == {"cpu", "cores", "memory_bytes", "kernel", "transparent_hugepages"}
    assert set(versions()) == {"mooncake_store", "commit", "python", "numpy", "numba"}
