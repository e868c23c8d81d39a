"""The pictures of a scenario's runs, and one page of HTML with all of them.

    for picture in pictures(results): picture.svg
    page = report(results)

Each picture has a table of its main figures beside it. The page has no scripts and loads nothing;
it follows the preference of who looks, dark or light, and goes from a phone's width to a screen's.
O(runs) for some hundred points each.
"""

from __future__ import annotations

import math
import statistics
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.plots import Axis, Line, bar_chart, line_chart, short
from serving.simulator.curves import SHARES
from serving.simulator.scenario import PLAN_FIELDS, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.simulator.scenario import Variant
    from serving.simulator.scenario_runs import Results

__all__ = ["Picture", "pictures", "report"]

AXES = {
    "prefill": "prefill nodes",
    "decode": "decode nodes",
    "cache_tokens": "tokens that each prefill node keeps",
    "disk_tokens": "tokens on the disk of each prefill node",
    "balancing": "balancing",
    "ttft_s": "seconds that a first token may take",
    "tbt_s": "seconds that a further token may take",
    "decode_s": "seconds that a decode is taken to last",
    "speed": "speed, times that of the trace",
}
CAPACITIES = ("cache_tokens", "disk_tokens")
LOG_FROM = 8
"""How many times the least the most is, from which on an axis is logarithmic."""


class Picture(NamedTuple):
    """One picture, and its figures."""

    name: str
    """Of its file, without an ending."""
    title: str
    about: str
    svg: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def pictures(results: Results) -> list[Picture]:
    """Draw all that the runs have something for."""
    return [
        *_distributions(results),
        _over(
            results, "goodput", "goodput_per_s", "Goodput", "requests a second",
            "Requests a second that met both objectives.",
            ("within SLOs", "within_slo"),
        ),
        _over(
            results, "hits", "hit_ratio", "Hit ratio", "share of prompt tokens",
            "Tokens of prompts that were found in a cache, by all tokens of prompts.",
            ("prefill, mean s", "prefill_mean_s"),
        ),
        *_loads(results),
    ]  # fmt: skip


def _distributions(results: Results) -> list[Picture]:
    found = []
    for name, title, about, unit in (
        ("ttft", "Time to the first token", "Of the requests that got one.",
         "seconds to the first token, logarithmic"),
        ("tbt", "Time between tokens", "The mean of the slowest tenth of each answer.",
         "seconds between tokens, logarithmic"),
    ):  # fmt: skip
        lines = []
        for variant in results.scenario.variants:
            times = [getattr(run.curves, f"{name}_s") for run in results.of(variant)]
            columns = zip(*filter(None, times), strict=True)
            points = list(zip(map(statistics.median, columns), SHARES, strict=False))
            lines.append(Line(variant.name, points))
        if any(line.points for line in lines):
            svg = line_chart(lines, Axis(unit, log=True), Axis("share of requests", most=1.0))
            told = [f"{name}_p{share}_s" for share in (50, 90, 99)]
            columns_ = ("p50, s", "p90, s", "p99, s")
            found.append(Picture(name, title, about, svg, columns_, _rows(results, told)))
    return found


def _rows(results: Results, figures: Sequence[str]) -> list[tuple[str, ...]]:
    """A row a variant: its name and some medians."""
    rows = []
    for variant in results.scenario.variants:
        medians = results.medians(variant)
        told = (short(medians[name]) if name in medians else "" for name in figures)
        rows.append((variant.name, *told))
    return rows


def _over(
    results: Results, name: str, figure: str, title: str, unit: str, about: str,
    further: tuple[str, str],
) -> Picture:  # fmt: skip
    """A figure over the number that varies, or a bar a variant where none does."""
    along = _along(results.scenario.variants, CAPACITIES if name == "hits" else ())
    medians = [results.medians(variant)[figure] for variant in results.scenario.variants]
    if along:
        lines: dict[str, list[tuple[float, float]]] = {}
        for variant, value in zip(results.scenario.variants, medians, strict=True):
            others = {field: of for field, of in variant.differs.items() if field != along}
            at = variant.differs[along]
            lines.setdefault(name_of(others), []).append((at, value))
        values = [at for points in lines.values() for at, _ in points]
        wide = min(values) > 0 and max(values) >= LOG_FROM * min(values)
        svg = line_chart(
            [Line(of, sorted(points)) for of, points in lines.items()],
            Axis(AXES[along], log=wide, ticks=sorted(set(values))), Axis(f"{title}, {unit}"),
        )  # fmt: skip
    else:
        bars = [
            (variant.name, value)
            for variant, value in zip(results.scenario.variants, medians, strict=True)
        ]
        svg = bar_chart(bars, f"{title}, {unit}")
    rows = _rows(results, (figure, further[1]))
    return Picture(name, title, about, svg, (unit, further[0]), rows)


def _along(variants: Sequence[Variant], rather: Sequence[str]) -> str:
    """The number that varies: one of `rather`, or else the last one; empty where none does."""
    numbers = [
        field
        for field in variants[0].differs
        if field in AXES and len({variant.differs[field] for variant in variants}) > 1
    ]
    return next((field for field in numbers if field in rather), numbers[-1] if numbers else "")


def _loads(results: Results) -> list[Picture]:
    found = []
    seed = results.scenario.seeds[0]
    for name, title, about, unit in (
        ("waiting", "Waiting for a first token", "Requests that are there without one",
         "requests that wait for their first token"),
        ("answering", "Being answered", "Requests between their first token and the last",
         "requests that are being answered"),
    ):  # fmt: skip
        lines, rows = [], []
        for variant in results.scenario.variants:
            curves = results.of(variant)[0].curves
            counts = getattr(curves, name)
            lines.append(Line(variant.name, list(zip(curves.at_s, counts, strict=True))))
            rows.append((variant.name, short(statistics.fmean(counts)), short(max(counts))))
        if not any(count for line in lines for _, count in line.points):
            continue  # as where nobody decodes
        svg = line_chart(lines, Axis("seconds since the trace began"), Axis(unit))
        found.append(Picture(name, title, f"{about}; seed {seed}.", svg, ("mean", "most"), rows))
    return found


# -- the page

STYLE = """
:root{color-scheme:light dark;
--back:#f3f4f6;--card:#ffffff;--text:#1d2126;--weak:#50565e;--edge:#d5d9de}
@media(prefers-color-scheme:dark){
:root{--back:#0e1013;--card:#15181d;--text:#e6e8eb;--weak:#a9b0b8;--edge:#33383f}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.45 system-ui,sans-serif}
main{max-width:1180px;margin:auto;padding:8px}
h1{font-size:1.5rem;margin:.4em 0}h2{font-size:1.15rem;margin:0 0 .2em}
p{margin:.2em 0 .8em;color:var(--weak)}
section{background:var(--card);border:1px solid var(--edge);border-radius:8px;
padding:10px;margin:12px 0}
.beside{display:grid;gap:14px;grid-template-columns:minmax(0,1fr)}
@media(min-width:860px){main{padding:16px}section{padding:16px}
.beside{grid-template-columns:minmax(0,540px) minmax(0,1fr)}}
.plot{display:block;width:100%;max-width:540px;height:auto}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px 4px 0;text-align:right;border-bottom:1px solid var(--edge);
vertical-align:top}
th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere}
.facts td{text-align:left}.facts td:first-child{white-space:nowrap}
"""


def report(results: Results) -> str:
    """The page."""
    scenario = results.scenario
    source = scenario.source
    trace = source.file or f"made up, of the kind {source.kind}"
    seeds = ", ".join(map(str, scenario.seeds))
    held = ", ".join(
        f"{name} {value:g} s" if value is not None else f"{name} as in the plan"
        for name, value in (("first token", scenario.slo.ttft_s), ("others", scenario.slo.tbt_s))
    )
    facts = [
        ("trace", trace), ("requests", short(results.runs[0].figures["requests"])),
        ("machines", scenario.hardware.about), ("seeds", f"{seeds}; figures are medians of them"),
        ("objectives", held),
    ]  # fmt: skip
    plan = [
        (field, _plain(getattr(scenario.plan, field)))
        for field in PLAN_FIELDS
        if field not in scenario.varied
    ]
    sections = [
        _section(picture.title, picture.about, f'<div class="beside">{picture.svg}{table}</div>')
        for picture in pictures(results)
        for table in [_table(("", *picture.columns), picture.rows)]
    ]
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(scenario.about)}</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(scenario.about)}</h1>",
            _section("What was run", "", _table(("", ""), facts)),
            *sections,
            _section("The plan", "What all variants start from.", _table(("", ""), plan)),
            "</main></body></html>",
            "",
        )
    )


def _section(title: str, about: str, inner: str) -> str:
    told = f"<p>{escape(about)}</p>" if about else ""
    return f"<section><h2>{escape(title)}</h2>{told}{inner}</section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    shown = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    kind = "" if shown else ' class="facts"'
    return f'<div class="scroll"><table{kind}>{shown}<tbody>{body}</tbody></table></div>'


def _plain(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value:,}" if type(value) in (int, float) else str(value) or "none"
