"""`mooncake bench`: run a benchmark and show its report.

Every bench is a module of `mooncake_store.bench` with a `run` function; here it gets a subcommand
with the common options and its own. What a bench measures, and against what, is written in its
module; the format of the report is `mooncake_store.bench.harness`.
"""

import importlib
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli._app import (
    ExitCode,
    JsonOption,
    emit,
    examples,
    make_app,
    note,
    progress,
    table,
)
from mooncake_store.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from mooncake_store.bench.harness import Report, Row

BENCHES = ("alloc", "core", "data", "echo", "eviction", "fs", "metadata", "transfer")

APART = {"serving": "serving.bench"}
"""Benches that `all` leaves out, and their modules: above this package, so known by name only."""

app = make_app("Measure this installation on this machine.")

QuickOption = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Take at most 50 s a bench: smaller sizes, fewer repeats, the same rows.",
        show_default=False,
    ),
]
VsOption = Annotated[
    str,
    typer.Option(
        "--vs",
        metavar="NAME,NAME",
        help="Also measure these alternatives, in the same run, in turn with ours.",
        show_default=False,
    ),
]


@app.command(
    epilog=examples(
        ("mooncake bench alloc --quick", "space used and time per call, in under a minute"),
        ("mooncake bench alloc --json", "the full run, for a program"),
    )
)
def alloc(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Measure the allocators: space they use, nanoseconds per call."""
    _bench("alloc", quick, vs, as_json)


@app.command(
    epilog=examples(
        ("mooncake bench core --quick", "operations per second of one shard"),
        ("mooncake bench core --vs python", "compared with a plain dict"),
    )
)
def core(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Measure the shard core alone: operations per second, bytes per object."""
    _bench("core", quick, vs, as_json)


@app.command(
    epilog=examples(
        ("mooncake bench data --quick", "gets and puts of 4 KiB to 4 MiB over tcp, shm and local"),
        ("mooncake bench data --vs upstream,raw", "beside the original, bare sockets and memcpy"),
    )
)
def data(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Measure gets and puts through a client: GB/s, latency, a full pool."""
    _bench("data", quick, vs, as_json)


@app.command(
    epilog=examples(
        ("mooncake bench echo --quick", "round trips and throughput of the wire layer"),
        ("mooncake bench echo --json", "the full run, for a program"),
    )
)
def echo(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Measure the wire layer against an echo service on this machine."""
    _bench("echo", quick, vs, as_json)


@app.command(
    epilog=examples(
        ("mooncake bench eviction --quick", "cache hits of every policy on a synthetic trace"),
        (
            "mooncake bench eviction --trace trace.jsonl --capacity 1000,inf --policy lru,opt",
            "chosen policies on a trace of your own",
        ),
        (
            "mooncake bench eviction --policy lru,my_policies:Slru --csv hits.csv --plot hits.svg",
            "a policy of your own beside ours, for a spreadsheet and as a picture",
        ),
    )
)
def eviction(
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Replay this trace.", show_default=False),
    ] = None,
    capacity: Annotated[
        str,
        typer.Option(
            "--capacity",
            metavar="N,N",
            help="Cache sizes in blocks; inf is a cache without limit.",
            show_default=False,
        ),
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME,NAME",
            help="Only these policies; module:Class is one of your own, which is imported.",
            show_default=False,
        ),
    ] = "",
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE", help="Write hits and ratios to this file.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw the ratios to this SVG file.", show_default=False
        ),
    ] = None,
    quick: QuickOption = False,
    vs: VsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Count the cache hits of the eviction policies on a trace of requests."""
    files = {"trace": trace, "csv": csv, "plot": plot}
    given = {name: path and str(path) for name, path in files.items()}
    given |= {"capacity": capacity, "policy": policy}
    own = {name: value for name, value in given.items() if value}
    try:
        _bench("eviction", quick, vs, as_json, **own)
    except InvalidArgumentError:
        raise
    except ValueError as error:
        # The bench checks its options and the trace before it measures anything.
        raise InvalidArgumentError(
            str(error), operation="bench eviction", advice="see `mooncake bench eviction --help`"
        ) from error


@app.command(
    epilog=examples(
        ("mooncake bench fs --quick", "the pool as a filesystem beside one on tmpfs"),
        ("mooncake bench fs --vs s3fs,local --json", "beside s3fs on a server of this machine too"),
    )
)
def fs(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Measure files: 10,000 small ones, a large one, a listing of 100,000 names."""
    _bench("fs", quick, vs, as_json)


@app.command(
    epilog=examples(
        ("mooncake bench metadata --quick", "probes, queries, small puts: keys per second"),
        ("mooncake bench metadata --vs upstream", "beside the original's master"),
    )
)
def metadata(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Measure a master through a client: keys per second, time and memory of the master."""
    _bench("metadata", quick, vs, as_json)


@app.command(
    epilog=examples(
        ("mooncake bench serving --quick", "first tokens with hits, streaming, a group of two"),
        ("mooncake bench serving --json", "the full run, for a program"),
    )
)
def serving(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Measure what serving gains from the pool, with real workers."""
    _bench("serving", quick, None, as_json)


@app.command(
    epilog=examples(
        ("mooncake bench transfer --quick", "the transfer engine alone over tcp, shm and local"),
        (
            "mooncake bench transfer --vs upstream,raw",
            "beside the original and bare calls",
        ),
        ("mooncake bench transfer --transport tcp --size 64KiB --batch 32", "a few rows"),
    )
)
def transfer(
    size: Annotated[
        str,
        typer.Option("--size", metavar="SIZE,SIZE", help="Block sizes.", show_default=False),
    ] = "",
    batch: Annotated[
        str, typer.Option("--batch", metavar="N,N", help="Blocks a call.", show_default=False)
    ] = "",
    transport: Annotated[
        str,
        typer.Option(
            "--transport", metavar="NAME,NAME", help="tcp, shm, local.", show_default=False
        ),
    ] = "",
    operation: Annotated[
        str,
        typer.Option("--operation", metavar="NAME,NAME", help="read, write.", show_default=False),
    ] = "",
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads that share a batch.", show_default="1")
    ] = None,
    quick: QuickOption = False,
    vs: VsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Measure the transfer engine alone: GB/s of reads and writes."""
    own = {
        "sizes": size,
        "batches": batch,
        "transports": transport,
        "operations": operation,
        "threads": threads,
    }
    given = {name: value for name, value in own.items() if value not in ("", None)}
    _bench("transfer", quick, vs, as_json, **given)


@app.command(
    "all",
    epilog=examples(
        ("mooncake bench all --quick", "every bench, one report"),
        ("mooncake bench all --json", "the full run, for a program"),
    ),
)
def every(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Run every bench; a row's name then starts with its bench."""
    failed = []
    sides = _names(vs)

    def measure(report: "Report") -> None:
        _check_known("all", sides, [side for name in BENCHES for side in _alternatives(name)])
        for name in BENCHES:
            try:
                with report.within(name):
                    known = tuple(side for side in sides if side in _alternatives(name))
                    _module(name).run(report, quick=quick, vs=known)
            except Exception as error:
                # The other benches are still worth their rows; the exit code says it failed.
                failed.append(name)
                expected = isinstance(error, StoreError)
                why = str(error) if expected else f"{type(error).__name__}: {error}"
                report.row(name, "", [], why=why)

    _show("all", measure, quick=quick, vs=sides, as_json=as_json)
    if failed:
        note(f"these benches failed: {', '.join(failed)}")
        raise typer.Exit(ExitCode.FAILED)


def _bench(name: str, quick: bool, vs: str | None, as_json: bool, **own_options: Any) -> None:
    """Run one bench; `vs` is None for one that compares with nothing else."""
    sides = _names(vs or "")
    if vs is not None:
        own_options["vs"] = sides

    def measure(report: "Report") -> None:
        module = _module(name)
        if vs is not None:
            _check_known(name, sides, module.ALTERNATIVES)
        module.run(report, quick=quick, **own_options)

    _show(name, measure, quick=quick, vs=sides, as_json=as_json)


def _module(name: str) -> Any:
    module = APART.get(name, f"mooncake_store.bench.{name}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise StoreError(
                f"the bench {name!r} is not part of this installation",
                advice="choose one that `mooncake bench --help` lists, or install a newer version",
            ) from None
        raise StoreError(
            f"the bench {name!r} needs the module {error.name!r}",
            advice="install the extra that brings it: pip install 'mooncake-store[bench]'",
        ) from None


def _alternatives(name: str) -> tuple[str, ...]:
    """What a bench can be compared with; nothing if it cannot run here."""
    try:
        known: tuple[str, ...] = _module(name).ALTERNATIVES
    except StoreError:
        return ()
    return known


def _check_known(name: str, sides: tuple[str, ...], known: "Iterable[str]") -> None:
    """Refuse an alternative that no row knows, before minutes are spent on those rows."""
    names = list(dict.fromkeys(known))
    for side in sides:
        if side not in names:
            raise InvalidArgumentError(
                f"bench {name} is not compared with {side!r}",
                advice=f"choose from: {', '.join(names)}" if names else "leave --vs out",
            )


def _show(name: str, measure: Any, *, quick: bool, vs: tuple[str, ...], as_json: bool) -> None:
    from mooncake_store import kernels
    from mooncake_store.bench.harness import Report

    kernels.forget_stale_caches()
    with ExitStack() as stack:
        say = stack.enter_context(progress(f"bench {name}: starting"))
        report = Report(
            name, quick=quick, on_row=lambda row: say(f"bench {name}: {row.name} measured")
        )
        measure(report)
        value = report.to_dict()
    compared = {side for row in report.rows for side in row.vs}
    emit(value, as_json=as_json, human=lambda: _draw(report.rows, value))
    for side in vs:
        if side not in compared:
            note(f"no row of bench {name} is compared with {side!r}")


def _draw(rows: "list[Row]", value: dict[str, Any]) -> "RenderableType":
    """A table for each bench of the report, then the machine: benches differ in their columns."""
    from rich.console import Group
    from rich.text import Text

    def bench_of(row: "Row") -> str:
        return row.name.partition("/")[0] if value["bench"] == "all" else ""

    machine, noise = value["machine"], value["noise"]
    measured_on = (
        f"{machine['cpu']}, {machine['cores']} cores, kernel {machine['kernel']}; "
        f"noise {noise['spread_before']:.0%} before, {noise['spread_after']:.0%} after, "
        f"drift {noise['drift']:+.0%}"
    )
    tables = []
    if value["bench"] == "eviction":
        from mooncake_store.bench._policy_matrix import Matrix

        matrix = Matrix.of(rows)
        rows = [row for row in rows if row.unit not in ("hits", "ratio")]
        columns = {"hit ratio": "left"} | dict.fromkeys(matrix.capacities, "right")
        tables.append(table(columns, matrix.cells()))
    tables += [_table_of(list(group)) for _, group in groupby(rows, bench_of)]
    return Group(*tables, Text(measured_on, style="italic"))


def _table_of(rows: "list[Row]") -> "RenderableType":
    """Every row, and below the table why some have no value."""
    from rich.console import Group
    from rich.text import Text

    sides = list(dict.fromkeys(side for row in rows for side in row.vs))
    columns = {"row": "left", "value": "right", "unit": "left", "low": "right", "high": "right"}
    columns |= {"n": "right"} | {f"vs {side}": "right" for side in sides}
    lines = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        cells = [row.name, _number(row.value), row.unit, _number(row.low), _number(row.high)]
        cells.append(str(row.repeats))
        for side in sides:
            other = row.vs.get(side)
            ratio = "" if other is None or other.ratio is None else f" ({other.ratio:.3g}x)"
            cells.append("" if other is None else _number(other.value) + ratio)
        lines.append(tuple(cells))
        if row.why:
            reasons.setdefault(row.why, []).append(row.name)
    told = [Text(f"not measured, {why}: {', '.join(names)}") for why, names in reasons.items()]
    return Group(table(columns, lines), *told)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.4g}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
