"""Charts as SVG: where points lie, what is told apart, and that all can be read."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from mooncake_store import plots
from mooncake_store.plots import Axis, Line, bar_chart, line_chart, short

SVG = "{http://www.w3.org/2000/svg}"


def points(drawn):
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in ElementTree.fromstring(drawn).iter(f"{SVG}polyline")
    ]


def texts(drawn):
    return [each.text for each in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def luminance(colour):
    def linear(part):
        value = int(part, 16) / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = map(linear, re.findall("[0-9a-f]{2}", colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_points_lie_where_their_values_say():
    [[first, middle, last]] = points(
        line_chart([Line("a", [(1, 0.0), (10, 5.0), (100, 10.0)])], Axis("x", log=True), Axis("y"))
    )
    assert middle[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.2)  # a decade on either side
    assert middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.2)
    assert first[1] > last[1]  # up is more
    [[_, middle, last]] = points(
        line_chart([Line("a", [(0, 1.0), (10, 1.0), (100, 2.0)])], Axis("x"), Axis("y"))
    )
    assert (middle[0] - plots.LEFT) * 10 == pytest.approx(last[0] - plots.LEFT, abs=0.5)


def test_what_has_no_place_is_left_out_and_nothing_to_draw_is_no_fault():
    drawn = line_chart(
        [Line("a", [(0, 1.0), (1, 1.0), (2, math.nan), (4, math.inf), (8, 2.0)]), Line("b", [])],
        Axis("x", log=True), Axis("y"),
    )  # fmt: skip
    assert [len(line) for line in points(drawn)] == [2]
    assert "b" in texts(drawn)
    line_chart([], Axis("x", log=True), Axis("y"))
    line_chart([Line("one", [(3, 0.0)])], Axis("x", log=True), Axis("y"))
    bar_chart([("none", 0.0), ("nan", math.nan)], "x")


@pytest.mark.parametrize(
    "x", [Axis("x"), Axis("x", log=True), Axis("x", labels=[f"label {n}" for n in range(40)])]
)
def test_labels_do_not_run_into_each_other_nor_out_of_the_picture(x):
    lines = [Line("a long name of a line " * 5, [(1 + at, at / 7) for at in range(39)])] * 4
    root = ElementTree.fromstring(line_chart(lines, x, Axis("y")))
    wide, high = float(root.get("width")), float(root.get("height"))
    rows = {}
    for each in root.iter(f"{SVG}text"):
        at, length = float(each.get("x")), len(each.text) * 7.0
        begin = at - {"start": 0, "middle": 0.5, "end": 1}[each.get("text-anchor")] * length
        assert begin >= 0
        assert begin + length <= wide
        assert float(each.get("y")) < high
        rows.setdefault(each.get("y"), []).append((begin, begin + length))
    for row in rows.values():
        row.sort()
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(row))


def test_lines_are_told_apart_without_colours():
    drawn = line_chart(
        [Line(str(n), [(0, n), (1, n)]) for n in range(20)], Axis("x"), Axis("y")
    )  # fmt: skip
    root = ElementTree.fromstring(drawn)
    dashes = [line.get("stroke-dasharray") for line in root.iter(f"{SVG}polyline")]
    marks = [
        re.sub(r"M[\d.]+ [\d.]+", "", path.get("d")[: path.get("d").find("M", 1)])
        for path in root.iter(f"{SVG}path")
        if " f" in (path.get("class") or "")
    ][:20]
    assert len(set(zip(dashes, marks, strict=True))) == 20


@pytest.mark.parametrize(
    ("ground", "text", "colours"),
    [
        (plots.LIGHT_GROUND, plots.LIGHT_TEXT, plots.LIGHT),
        (plots.DARK_GROUND, plots.DARK_TEXT, plots.DARK),
    ],
)
def test_text_and_lines_stand_out_from_the_ground(ground, text, colours):
    assert contrast(text, ground) >= 4.5
    assert min(contrast(colour, ground) for colour in colours) >= 3
    assert all(colour in line_chart([], Axis("x"), Axis("y")) for colour in (text, *colours))


def test_names_are_text_and_never_markup():
    hostile = "<script>1</script>&"
    for drawn in (
        line_chart([Line(hostile, [(0, 1)])], Axis(hostile), Axis(hostile)),
        bar_chart([(hostile, 1.0)], hostile),
    ):
        assert hostile in texts(drawn)
        assert "<script" not in drawn


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.125, "0.125"), (999, "999"), (1000, "1,000"), (30_000, "30k"), (3e6, "3M")],
)
def test_numbers_are_short(value, said):
    assert short(value) == said
