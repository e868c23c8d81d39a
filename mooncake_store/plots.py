"""Charts as SVG, written by hand, without a library and without a script in them.

    line_chart([Line("lru", [(1, 0.2), (10, 0.4)])], Axis("blocks", log=True), Axis("hit ratio"))
    bar_chart([("lru", 0.4)], "hit ratio")

Lines differ by colour, dash and mark, so that they are told apart on paper and by who sees no
colours. Text and lines follow the preference of who looks, dark or light; viewers that know no
styles show the light one. A chart is made for a column of a page: its width is a narrow screen's,
and it grows with the room it has. O(points).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Axis", "Line", "bar_chart", "line_chart", "short"]

LIGHT = ("#2f6db5", "#c2334d", "#1e7b34", "#8f6400", "#7a3fa0", "#00798c", "#5f5f5f")
DARK = ("#74b0f4", "#ff8a9a", "#6fce84", "#e0b04a", "#c99bec", "#4cc9dc", "#b5b5b5")
LIGHT_GROUND, LIGHT_TEXT, DARK_GROUND, DARK_TEXT = "#ffffff", "#1d2126", "#15181d", "#e6e8eb"
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4")
# Around the point at which the pen is.
MARKS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "m-3.5-3.5h7v7h-7z",
    "m0-5l4.5 8h-9z",
    "m0-5l5 5l-5 5l-5-5z",
    "m0 5l4.5-8h-9z",
    "m-4-4l8 8m0-8l-8 8",
)
MARKS_OF_A_LINE = 7

WIDTH, LEFT, RIGHT, TOP, HIGH = 440, 52, 18, 34, 220
ROW, LETTER = 21, 7.9
_WIDE = WIDTH - LEFT - RIGHT


def _style() -> str:
    def colours(of: Sequence[str]) -> str:
        return "".join(
            f".plot .s{number}{{stroke:{colour}}}.plot .f{number}{{fill:{colour}}}"
            for number, colour in enumerate(of)
        )

    return (
        f".plot text{{fill:{LIGHT_TEXT}}}{colours(LIGHT)}"
        "@media(prefers-color-scheme:dark){"
        f".plot text{{fill:{DARK_TEXT}}}.plot .ground{{fill:{DARK_GROUND}}}"
        f".plot .grid{{stroke:{DARK_TEXT}}}{colours(DARK)}}}"
    )


STYLE = _style()


class Line(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """What goes along one side of a chart."""

    title: str
    """With its unit."""
    log: bool = False
    """Only what is above 0 is shown then."""
    labels: Sequence[str] = ()
    """Of the points 0, 1, 2..., at equal steps."""
    ticks: Sequence[float] = ()
    """The values that are named; without, round ones are."""
    most: float | None = None
    """Where it ends; without, at the last point of `x`, and a little above that of `y`."""


def short(value: float) -> str:
    """A number as an axis has it: three figures, and k, M or G where it would be long."""
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:.3g}{letter}"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


class _Scale:
    """From values to places on the picture."""

    def __init__(
        self, axis: Axis, values: Iterable[float], ends: tuple[float, float], *, upright: bool
    ) -> None:
        found = [value for value in values if value > 0 or not axis.log]
        self._log = axis.log and bool(found)
        self.least = 0.0 if upright and not self._log else min(found, default=0.0)
        most = max(found, default=1.0) * (1.04 if upright else 1.0)
        self.most = most if axis.most is None else axis.most
        if self.most <= self.least:
            self.most = self.least * 2 if self._log else self.least + 1
        self._begin, self._end = ends

    def shows(self, value: float) -> bool:
        """Whether it has a place."""
        return value > 0 or not self._log

    def at(self, value: float) -> float:
        """The place of a value."""
        low, high = self.least, self.most
        if self._log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self._begin + (self._end - self._begin) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values between the ends."""
        found = self._decades() if self._log else []
        return found if len(found) > 1 else _round_steps(self.least, self.most)

    def _decades(self) -> list[float]:
        first, last = math.floor(math.log10(self.least)), math.ceil(math.log10(self.most))
        decades = last - first
        parts = (1, 2, 5) if decades < 3 else (1,)
        found = [
            part * 10.0**power
            for power in range(first, last + 1, max(1, decades // 5))
            for part in parts
        ]
        return [tick for tick in found if self.least / 1.0001 <= tick <= self.most * 1.0001]


def _round_steps(least: float, most: float) -> list[float]:
    rough = (most - least) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * part for part in (1, 2, 2.5, 5, 10) if size * part >= rough * 0.999)
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, *, name: str = "") -> str:
    """Lines over an axis, with a legend below. `y` begins at 0; what is not finite is left out."""
    shown = [
        Line(line.name, [point for point in line.points if all(map(math.isfinite, point))])
        for line in lines
    ]
    xs = [at for line in shown for at, _ in line.points]
    ys = [value for line in shown for _, value in line.points]
    across = _Scale(x, xs, (LEFT, LEFT + _WIDE), upright=False)
    up = _Scale(y, ys, (TOP + HIGH, TOP), upright=True)
    parts = [*_grid(across, up, x, y)]
    for number, line in enumerate(shown):
        places = [
            (across.at(at), up.at(value))
            for at, value in line.points
            if across.shows(at) and up.shows(value)
        ]
        parts += _drawn(places, number)
    legend, height = _legend([line.name for line in lines], TOP + HIGH + 62)
    return _picture([*parts, *legend], height, name or f"{y.title} over {x.title}")


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> Iterable[str]:
    yield _text(6, 18, y.title)
    for tick in up.ticks():
        at = up.at(tick)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}h{_WIDE}" {_GRID}/>'
        yield _text(LEFT - 6, at + 5, short(tick), "end")
    taken = -math.inf
    for at, label in _labels(across, x):
        half = LETTER * len(label) / 2
        if at - half < taken + 6:
            continue  # labels that would run into each other are no labels
        taken = at + half
        yield f'<path class="grid" d="M{at:.1f} {TOP}v{HIGH}" {_GRID}/>'
        # The last one stays within the picture.
        yield _text(min(at, WIDTH - half - 2), TOP + HIGH + 19, label, "middle")
    yield _text(LEFT + _WIDE / 2, TOP + HIGH + 41, x.title, "middle")


def _labels(across: _Scale, x: Axis) -> list[tuple[float, str]]:
    if x.labels:
        return [(across.at(number), label) for number, label in enumerate(x.labels)]
    return [(across.at(tick), short(tick)) for tick in x.ticks or across.ticks()]


def _drawn(places: Sequence[tuple[float, float]], number: int) -> list[str]:
    if not places:
        return []
    points = " ".join(f"{at:.1f},{high:.1f}" for at, high in places)
    every = max(1, math.ceil(len(places) / MARKS_OF_A_LINE))
    # Lines that lie on one another have their marks at different places.
    begin = number * every // 3 % every
    return [
        f'<polyline points="{points}" {_stroke(number)}/>',
        _marks(places[begin::every], number),
    ]


def _stroke(number: int) -> str:
    dash, colour = DASHES[number % len(DASHES)], number % len(LIGHT)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="s{colour}" fill="none" stroke="{LIGHT[colour]}" stroke-width="2"{dashed}'


def _marks(places: Sequence[tuple[float, float]], number: int) -> str:
    mark, colour = MARKS[number % len(MARKS)], number % len(LIGHT)
    ways = "".join(f"M{at:.1f} {high:.1f}{mark}" for at, high in places)
    return (
        f'<path class="s{colour} f{colour}" d="{ways}" fill="{LIGHT[colour]}" '
        f'stroke="{LIGHT[colour]}" stroke-width="1.5"/>'
    )


def _legend(names: Sequence[str], top: float) -> tuple[list[str], float]:
    """The names beside a piece of their lines, and where the picture ends."""
    parts: list[str] = []
    at, high = 8.0, top
    for number, name in enumerate(names):
        fits = int((WIDTH - 60) / LETTER)
        told = name if len(name) <= fits else f"{name[: fits - 1]}…"
        wide = 46 + LETTER * len(told)
        if at > 8 and at + wide > WIDTH:
            at, high = 8.0, high + ROW
        parts += [
            f'<path d="M{at:.1f} {high:.1f}h28" {_stroke(number)}/>',
            _marks([(at + 14, high)], number),
            _text(at + 36, high + 5, told),
        ]
        at += wide + 8
    return parts, high + 16


def bar_chart(bars: Sequence[tuple[str, float]], title: str) -> str:
    """A bar for each name, with its value at the end."""
    most = max((value for _, value in bars if math.isfinite(value)), default=0.0) or 1.0
    room = WIDTH - 90
    parts, high = [_text(6, 18, title)], TOP + 6.0
    for name, value in bars:
        wide = room * value / most if math.isfinite(value) else 0.0
        parts += [
            _text(8, high + 14, name),
            f'<path class="f0" d="M8 {high + 20:.1f}h{wide:.1f}v14h{-wide:.1f}z" '
            f'fill="{LIGHT[0]}"/>',
            _text(14 + wide, high + 32, short(value)),
        ]
        high += 42
    return _picture(parts, high + 6, title)


_GRID = f'stroke="{LIGHT_TEXT}" stroke-opacity="0.16" fill="none"'


def _picture(parts: Sequence[str], height: float, name: str) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} '
            f'{height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img" '
            'font-family="sans-serif" font-size="14">',
            f"<title>{escape(name)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height:.0f}" fill="{LIGHT_GROUND}"/>',
            *parts,
            "</svg>",
            "",
        )
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{LIGHT_TEXT}">'
        f"{escape(text)}</text>"
    )
