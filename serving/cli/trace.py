"""`mooncake trace`: look into traces of requests, make them up, and make others of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import (
    ExitCode,
    JsonOption,
    emit,
    examples,
    make_app,
    note,
    progress,
    table,
    taking,
)
from mooncake_store.errors import ConfigError, InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eviction import Trace
    from serving.traces.reading import Checked
    from serving.traces.shape import Description

app = make_app("Look into traces of requests, make them up, and make others of them.")

FileArgument = Annotated[
    Path, typer.Argument(help="A trace: JSON lines of timestamp, lengths and block ids.")
]
OutArgument = Annotated[Path, typer.Argument(help="The file to write; one that is there goes.")]


@app.command(
    epilog=examples(
        ("mooncake trace describe trace.jsonl", "lengths, arrivals, how much comes again"),
        ("mooncake trace describe trace.jsonl --json", "for a program"),
    )
)
def describe(file: FileArgument, as_json: JsonOption = False) -> None:
    """Tell what a trace is like, and which of its lines are wrong.

    Figures are of the lines that are right; with others among them the command fails.
    """
    from serving.traces import shape
    from serving.traces.reading import check_trace

    found = check_trace(file)
    about = shape.describe(found.trace)
    faults = [fault._asdict() for fault in found.faults]
    emit(
        about.plain() | {"faulty": found.faulty, "faults": faults},
        as_json=as_json,
        human=lambda: _drawn(about, found),
    )
    if found.faulty:
        raise typer.Exit(ExitCode.FAILED)


def _drawn(about: "Description", found: "Checked") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    figures = [
        ("requests", f"{about.requests:,}"),
        ("duration", f"{about.lasts_s:,.1f} s"),
        ("requests a second, mean", f"{about.requests_per_s:.3g}"),
        ("requests of the busiest second", f"{about.busiest_s:,}"),
        ("different timestamps", f"{about.timestamps:,}"),
        ("blocks", f"{about.blocks:,}"),
        ("different blocks", f"{about.distinct_blocks:,}"),
        ("blocks an earlier request has", f"{about.reusable:.1%}"),
        ("tokens an earlier request has", f"{about.reusable_tokens:.1%}"),
    ]
    right = dict.fromkeys(("mean", "median", "95 %", "max"), "right")
    lengths = [
        (name, f"{mean:,.0f}", f"{of.median:,.0f}", f"{of.p95:,.0f}", f"{of.max:,}")
        for name, mean, of in (
            ("input", about.input_tokens, about.inputs),
            ("output", about.output_tokens, about.outputs),
        )
    ]
    used = [
        (_range(step.least, step.most), f"{step.blocks:,}", f"{step.uses / about.blocks:.1%}")
        for step in about.popularity
    ]
    parts: list[RenderableType] = [
        table({"figure": "left", "value": "right"}, figures),
        table({"tokens": "left"} | right, lengths),
        table({"requests that have a block": "left", "blocks": "right", "uses": "right"}, used),
    ]
    if found.faulty:
        parts += [Text(f"line {line}: {reason}") for line, reason in found.faults]
        more = found.faulty - len(found.faults)
        parts += [Text(f"and {more:,} further lines are wrong")] if more else []
    return Group(*parts)


def _range(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _option(name: str, about: str, metavar: str, kind: Any = str) -> tuple[object, Any]:
    """An option of `generate`, which without it is as the kind has it."""
    return None, Annotated[
        kind | None, typer.Option(name, metavar=metavar, help=about, show_default="by the kind")
    ]


AMOUNT = "MEDIAN:MEAN"
GENERATE = {
    "out": (..., OutArgument),
    "kind": (
        "conversation",
        Annotated[str, typer.Option(help="What its sessions are: conversation or agents.")],
    ),
    "seed": (0, Annotated[int, typer.Option(help="The same one makes the same file.")]),
    "requests": _option("--requests", "Requests in all.", "N", int),
    "rate": _option("--rate", "Sessions that begin in a second.", "X", float),
    "turns": _option("--turns", "Requests of a session.", AMOUNT),
    "prompts": _option("--prompts", "Different system prompts.", "N", int),
    "zipf": _option(
        "--zipf", "The n-th of them is as popular as n to the power of minus X.", "X", float
    ),
    "prompt": _option("--prompt", "Tokens of a system prompt.", AMOUNT),
    "opening": _option("--opening", "Tokens that a first turn adds to it.", AMOUNT),
    "added": _option("--added", "Tokens that a further turn adds to what was said.", AMOUNT),
    "output": _option("--output", "Tokens of an answer.", AMOUNT),
    "pause": _option("--pause", "Seconds between two requests of a session.", AMOUNT),
    "longest": _option("--longest", "Tokens of the longest prompt.", "N", int),
    "as_json": (False, JsonOption),
}
AMOUNTS = ("turns", "prompt", "opening", "added", "output", "pause")


@app.command(
    epilog=examples(
        ("mooncake trace generate chat.jsonl", "an hour of conversations"),
        (
            "mooncake trace generate agents.jsonl --kind agents --seed 7 --json",
            "agents that call tools, for a script",
        ),
        (
            "mooncake trace generate mine.jsonl --requests 1000000 --rate 20 --opening 2000:5000",
            "a busy day with shorter prompts",
        ),
    )
)
@taking(GENERATE)
def generate(*, out: Path, kind: str, seed: int, as_json: bool, **given: Any) -> None:
    """Make a trace up: sessions of several turns, each with all that was said before.

    Lengths and pauses are lognormal, given by median and mean; one number is both.
    """
    from dataclasses import replace

    from serving.traces.generating import KINDS, Amount
    from serving.traces.generating import generate as rows_of
    from serving.traces.writing import write_rows

    if kind not in KINDS:
        raise ConfigError(f"there is no kind {kind!r}", advice=f"one of {', '.join(KINDS)}")
    told = {name: value for name, value in given.items() if value is not None}
    told |= {name: Amount.parse(told[name], f"--{name}") for name in AMOUNTS if name in told}
    with progress(f"making {out}"):
        count = write_rows(out, rows_of(replace(KINDS[kind], **told), seed))
    _tell(as_json, out, count)


@app.command(
    epilog=examples(
        ("mooncake trace speed trace.jsonl twice.jsonl --by 2", "the same in half the time"),
        ("mooncake trace speed trace.jsonl slow.jsonl --by 0.5 --json", "in twice the time"),
    )
)
def speed(
    file: FileArgument,
    out: OutArgument,
    by: Annotated[float, typer.Option(help="How much faster requests come.")],
    as_json: JsonOption = False,
) -> None:
    """Have the requests of a trace come faster, or slower."""
    from serving.traces import shape

    if not 0 < by < float("inf"):
        raise InvalidArgumentError(f"--by is {by}", advice="above 0, such as 2")
    _write(as_json, out, shape.faster(_read(file), by))


@app.command(
    epilog=examples(
        (
            "mooncake trace spread trace.jsonl even.jsonl",
            "requests whose times were rounded no longer come at once",
        ),
        ("mooncake trace spread trace.jsonl trace.jsonl --json", "in place"),
    )
)
def spread(file: FileArgument, out: OutArgument, as_json: JsonOption = False) -> None:
    """Have requests of one timestamp come evenly until the next one."""
    from serving.traces import shape

    _write(as_json, out, shape.spread(_read(file)))


@app.command(
    epilog=examples(
        (
            "mooncake trace split trace.jsonl warm.jsonl rest.jsonl --at 10m",
            "what fills the caches, and what is measured",
        ),
        (
            "mooncake trace split trace.jsonl first.jsonl rest.jsonl --at 5000 --json",
            "after 5,000 requests",
        ),
    )
)
def split(
    file: FileArgument,
    first: OutArgument,
    rest: Annotated[Path, typer.Argument(help="The file for all after that.")],
    at: Annotated[
        str, typer.Option(help="Where: so long after the first request, or so many requests.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Cut a trace in two. Times stay, and names: the rest goes on where the first part ends."""
    from mooncake_store.units import parse_duration
    from serving.traces import shape
    from serving.traces.writing import rows_of, write_rows

    trace = _read(file)
    if at.isdecimal():
        count = min(int(at), len(trace))
    else:
        until = int(trace.timestamps_ms[0]) + round(1e3 * parse_duration(at))
        count = int(trace.timestamps_ms.searchsorted(until))
    counts = [
        write_rows(path, rows_of(part))
        for path, part in zip((first, rest), shape.split(trace, count), strict=True)
    ]
    if not all(counts):
        note(f"one part is empty: {file} has {len(trace):,} requests")
    emit(
        {"first": {"file": str(first), "requests": counts[0]},
         "rest": {"file": str(rest), "requests": counts[1]}},
        as_json=as_json,
        human=lambda: f"{first}: {counts[0]:,} requests, {rest}: {counts[1]:,}",
    )  # fmt: skip


def _read(path: Path) -> "Trace":
    from serving.traces.reading import read_whole

    return read_whole(path)


def _write(as_json: bool, path: Path, trace: "Trace") -> None:
    from serving.traces.writing import rows_of, write_rows

    _tell(as_json, path, write_rows(path, rows_of(trace)))


def _tell(as_json: bool, path: Path, count: int) -> None:
    emit(
        {"file": str(path), "requests": count},
        as_json=as_json,
        human=lambda: f"{path}: {count:,} requests",
    )
