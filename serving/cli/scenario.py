"""`mooncake simulate scenario`: many runs from one file, as figures, tables and pictures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, emit, examples, progress, table
from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from serving.simulator.scenario_runs import Results

EPILOG = examples(
    ("mooncake simulate scenario capacity.toml", "medians of each variant"),
    (
        "mooncake simulate scenario capacity.toml --trace trace.jsonl --html report.html",
        "on another trace, as a page with pictures",
    ),
    (
        "mooncake simulate scenario capacity.toml --json --csv runs.csv --svg pictures",
        "for a script, a spreadsheet and a document",
    ),
)

SHOWN = {
    "hits": "hit_ratio", "first p50": "ttft_p50_s", "first p90": "ttft_p90_s",
    "next p90": "tbt_p90_s", "goodput/s": "goodput_per_s",
}  # fmt: skip
"""What fits beside a name in 80 columns, by its title there; JSON and CSV have all."""


def scenario(
    file: Annotated[Path, typer.Argument(help="What to run, as TOML.")],
    trace: Annotated[
        Path | None, typer.Option(help="A trace, instead of the one that the file names.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Processes that run at a time; 0 has one for each core.")
    ] = 0,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line for each run, and medians.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures and tables.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each picture to a file there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run all variants of a scenario with all its seeds, and compare them."""
    import os

    from serving.simulator.report import pictures, report
    from serving.simulator.scenario import read_scenario
    from serving.simulator.scenario_runs import run_scenario

    if jobs < 0:
        raise InvalidArgumentError(f"--jobs is {jobs}", advice="1 or more, or 0 for each core")
    known = read_scenario(file, trace=str(trace) if trace is not None else "")
    runs = len(known.variants) * len(known.seeds)
    with progress(f"{known.about}: run 1 of {runs}") as say:
        results = run_scenario(
            known,
            jobs=jobs or len(os.sched_getaffinity(0)),
            done=lambda count: say(f"{known.about}: run {min(count + 1, runs)} of {runs}"),
        )
    # First what took long: a file that cannot be written loses nothing then.
    emit(results.plain(), as_json=as_json, human=lambda: _drawn(results))
    if csv is not None:
        csv.write_text(results.csv(), encoding="utf-8")
    if html is not None:
        html.write_text(report(results), encoding="utf-8")
    if svg is not None:
        svg.mkdir(parents=True, exist_ok=True)
        for picture in pictures(results):
            (svg / f"{picture.name}.svg").write_text(picture.svg, encoding="utf-8")


def _drawn(results: "Results") -> "RenderableType":
    columns = {"variant": "left"} | dict.fromkeys(SHOWN, "right")
    rows = []
    for variant in results.scenario.variants:
        medians = results.medians(variant)
        told = (f"{medians[name]:,.4g}" if name in medians else "" for name in SHOWN.values())
        rows.append((variant.name, *told))
    seeds = len(results.scenario.seeds)
    medians_of = f"; medians over {seeds} seeds" if seeds > 1 else ""
    caption = f"first, next: seconds to the first token, to a further one{medians_of}"
    return table(columns, rows, caption=caption)
