"""`mooncake bench`: run a benchmark and show its report.

Every bench is a module of `mooncake_store.bench` with a `run` function; here it gets a subcommand
with the common options and its own, from a line of `COMMANDS`. What a bench measures, and against
what, is written in its module; the format of the report is `mooncake_store.bench.harness`.
"""

import importlib
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
from mooncake_store.cli.shared.client import store_options
from mooncake_store.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from mooncake_store.bench.harness import Report, Row

app = make_app("Measure this installation on this machine.")

QuickOption = Annotated[
    bool,
    typer.Option(
        "--quick", help="Take at most 50 s a bench: smaller sizes, fewer repeats, the same rows."
    ),
]
VsOption = Annotated[
    str,
    typer.Option(
        "--vs",
        metavar="NAME,NAME",
        help="Also measure these alternatives, in the same run, in turn with ours.",
    ),
]


ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="Threads that share a batch.", show_default="1")
]


TraceArgument = Annotated[
    Path | None, typer.Argument(help="A trace; without one conversations are made up.")
]


def _option(name: str, metavar: str, about: str, kind: type = str) -> tuple[object, Any]:
    return None, Annotated[kind | None, typer.Option(name, metavar=metavar, help=about)]


class _Bench(NamedTuple):
    """A subcommand: its help, what follows `mooncake bench NAME` in its examples, its options."""

    about: str
    examples: dict[str, str]
    options: dict[str, tuple[object, Any]] = {}  # noqa: RUF012
    """By the parameter of `run` that takes them; what is not given is left out of the call."""
    module: str = ""
    """Of a bench that `all` leaves out: it is above this package, so known by name only."""
    store: bool = False
    """Whether it can use a store that runs, and finds it with `connected`."""


FULL = {"--json": "the full run, for a program"}
COMMANDS = {
    "agents": _Bench(
        "Count what hints are worth: cache hits of agents' sessions.",
        {
            "--quick": "the hit ratio of a pool that is told which sessions ended",
            "--vs lru": "beside one that is told nothing",
        },
    ),
    "alloc": _Bench(
        "Measure the allocators: space they use, nanoseconds per call.",
        {"--quick": "space used and time per call, in under a minute"} | FULL,
    ),
    "conversations": _Bench(
        "Measure a pool whose disk holds what its memory does not: hits, bytes, waits.",
        {
            "--quick": "conversations of 256 MiB on 64 MiB of memory",
            "--vs memory --trace trace.jsonl": "a trace of yours, beside a pool without the disk",
        },
        {"trace": _option("--trace", "FILE", "Replay this trace.", Path)},
    ),
    "core": _Bench(
        "Measure the shard core alone: operations per second, bytes per object.",
        {
            "--quick": "operations per second of one shard",
            "--vs python": "compared with a plain dict",
        },
    ),
    "data": _Bench(
        "Measure gets and puts through a client: GB/s, latency, a full pool.",
        {
            "--quick": "gets and puts of 4 KiB to 4 MiB over tcp, shm and local",
            "--vs upstream,raw": "beside the original, bare sockets and memcpy",
        },
    ),
    "echo": _Bench(
        "Measure the wire layer against an echo service on this machine.",
        {"--quick": "round trips and throughput of the wire layer"} | FULL,
    ),
    "eviction": _Bench(
        "Count the cache hits of the eviction policies on a trace of requests.",
        {
            "--quick": "cache hits of every policy on a synthetic trace",
            "--trace trace.jsonl --capacity 1000,inf --policy lru,opt": (
                "chosen policies on a trace of your own"
            ),
            "--policy lru,my_policies:Slru --csv hits.csv --plot hits.svg": (
                "a policy of your own beside ours, for a spreadsheet and as a picture"
            ),
        },
        {
            "trace": _option("--trace", "FILE", "Replay this trace.", Path),
            "capacity": _option(
                "--capacity", "N,N", "Cache sizes in blocks; inf is a cache without limit."
            ),
            "policy": _option(
                "--policy",
                "NAME,NAME",
                "Only these policies; module:Class is one of your own, which is imported.",
            ),
            "csv": _option("--csv", "FILE", "Write hits and ratios to this file.", Path),
            "plot": _option("--plot", "FILE", "Draw the ratios to this SVG file.", Path),
        },
    ),
    "fs": _Bench(
        "Measure files: 10,000 small ones, a large one, a listing of 100,000 names.",
        {
            "--quick": "the pool as a filesystem beside one on tmpfs",
            "--vs s3fs,local --json": "beside s3fs on a server of this machine too",
        },
    ),
    "identity": _Bench(
        "Measure what it costs to name keys under a secret.",
        {"--quick": "keys and chains of blocks, keyed beside XXH3"} | FULL,
    ),
    "journal": _Bench(
        "Measure what it costs that a restarted master still knows its objects.",
        {"--quick": "puts and gets of pools that write down nothing, all, and all at once"} | FULL,
    ),
    "metadata": _Bench(
        "Measure a master through a client: keys per second, time and memory of the master.",
        {
            "--quick": "probes, queries, small puts: keys per second",
            "--vs upstream": "beside the original's master",
        },
    ),
    "replay": _Bench(
        "Play a trace of requests against a store, or a server of models.",
        {
            "--quick": "made-up conversations, on a store that it starts",
            "trace.jsonl --master 10.0.0.5:50051 --speed 2": "on a store that runs, twice as fast",
            "trace.jsonl --front http://127.0.0.1:8000 --requests 500": (
                "completions of the trace's lengths, when it has them come"
            ),
        },
        {
            "trace": (None, TraceArgument),
            "front": _option("--front", "URL", "A server with OpenAI's API, in place of a store."),
            "token_file": _option("--token-file", "FILE", "File with its API key.", Path),
            "speed": _option("--speed", "X", "Play the trace's times, so much faster.", float),
            "requests": _option("--requests", "N", "Play only the first ones.", int),
            "block": _option("--block", "SIZE", "Bytes of a block in a store; 64KiB."),
            "clients": _option("--clients", "N", "Requests at once to a store; 1.", int),
            "segment": _option("--segment", "SIZE", "Memory of a store that it starts."),
            "block_tokens": _option(
                "--block-tokens", "N", "Tokens of a block for a server; 512.", int
            ),
        },
        module="serving.bench.replay",
        store=True,
    ),
    "restart": _Bench(
        "Measure how long a pool is away when its processes are killed.",
        {"--quick": "seconds until objects are read again, with 20,000 of them"} | FULL,
    ),
    "serving": _Bench(
        "Measure what serving gains from the pool, with real workers.",
        {"--quick": "first tokens with hits, streaming, a group of two"} | FULL,
        module="serving.bench",
    ),
    "tiers": _Bench(
        "Measure hauls between memory and a file: GB/s there, and back.",
        {
            "--quick": "blocks of 64 KiB and 1 MiB to a temporary file and back",
            "--vs raw": "beside a bare program on the same file system",
        },
    ),
    "transfer": _Bench(
        "Measure the transfer engine alone: GB/s of reads and writes.",
        {
            "--quick": "the transfer engine alone over tcp, shm and local",
            "--vs upstream,raw": "beside the original and bare calls",
            "--transport tcp --size 64KiB --batch 32": "a few rows",
        },
        {
            "sizes": _option("--size", "SIZE,SIZE", "Block sizes."),
            "batches": _option("--batch", "N,N", "Blocks a call."),
            "transports": _option("--transport", "NAME,NAME", "tcp, shm, local."),
            "operations": _option("--operation", "NAME,NAME", "read, write."),
            "threads": (None, ThreadsOption),
        },
    ),
}
BENCHES = tuple(name for name, bench in COMMANDS.items() if not bench.module)
"""What `all` runs."""


def _add(name: str, bench: _Bench) -> None:
    """Make the subcommand of one bench."""

    def run(quick: bool, as_json: bool, vs: str | None = None, **given: Any) -> None:
        from mooncake_store.bench.harness import listed

        own = {
            option: str(value) if isinstance(value, Path) else value
            for option, value in given.items()
            if value not in (None, "")
        }
        sides = listed(vs or "")
        if vs is not None:
            own["vs"] = sides

        def measure(report: "Report") -> None:
            module = _module(name)
            if vs is not None:
                _check_known(name, sides, module.ALTERNATIVES)
            module.run(report, quick=quick, **own)

        _show(name, measure, quick=quick, vs=sides, as_json=as_json)

    common = {"quick": (False, QuickOption), "vs": ("", VsOption), "as_json": (False, JsonOption)}
    if bench.module:
        del common["vs"]
    lines = [(f"mooncake bench {name} {words}", why) for words, why in bench.examples.items()]
    command = taking(bench.options | common)(run)
    app.command(name, help=bench.about, epilog=examples(*lines))(
        store_options(command) if bench.store else command
    )


for _name, _command in COMMANDS.items():
    _add(_name, _command)


@app.command(
    "all",
    epilog=examples(
        ("mooncake bench all --quick", "every bench, one report"),
        ("mooncake bench all --json", "the full run, for a program"),
    ),
)
def every(quick: QuickOption = False, vs: VsOption = "", as_json: JsonOption = False) -> None:
    """Run every bench; a row's name then starts with its bench."""
    from mooncake_store.bench.harness import listed

    failed = []
    sides = listed(vs)

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


def _module(name: str) -> Any:
    module = COMMANDS[name].module or f"mooncake_store.bench.{name}"
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
    from mooncake_store.bench.harness import Report
    from mooncake_store.program import kernels

    kernels.forget_stale_caches()
    with progress(f"bench {name}: starting") as say:
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
        from mooncake_store.bench.parts.policy_matrix import Matrix

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
