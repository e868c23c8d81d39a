"""`mooncake simulate`: what a cluster would make of a trace, by the product's own decisions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from mooncake_store.cli.shared.app import JsonOption, emit, examples, make_app, note, table
from mooncake_store.errors import InvalidArgumentError
from serving.cli.scenario import EPILOG, scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from eviction import Trace
    from serving.simulator.ablation import AblationRow
    from serving.simulator.cluster import Plan
    from serving.simulator.outcomes import Outcomes

T = TypeVar("T", int, float)

app = make_app("Simulate a serving cluster on a trace.")
app.command(epilog=EPILOG)(scenario)

TraceArgument = Annotated[
    Path, typer.Argument(help="A trace: JSON lines of timestamp, lengths and block ids.")
]
PrefillOption = Annotated[int, typer.Option(help="Nodes that compute prompts.")]
DecodeOption = Annotated[int, typer.Option(help="Nodes that compute answers; 0 leaves these out.")]
SpeedOption = Annotated[float, typer.Option(help="How much faster requests come.")]
SpreadOption = Annotated[
    bool, typer.Option("--spread", help="Spread requests of one timestamp until the next.")
]
HardwareOption = Annotated[str, typer.Option(help="A kind of machine by its name, or a file.")]
SeedOption = Annotated[int, typer.Option(help="For what is drawn at random.")]
PlacementOption = Annotated[
    str,
    typer.Option(
        help="cache-centric, thrifty, considerate, local-cache, least-loaded, random, round-robin, "
        "or module:Class."
    ),
]
AdmissionOption = Annotated[
    str,
    typer.Option(help="Whom to refuse: at-decode, load, forecast or module:Class; nobody without."),
]


@app.command(
    epilog=examples(
        ("mooncake simulate run trace.jsonl", "8 prefill and 8 decode nodes"),
        (
            "mooncake simulate run trace.jsonl --placement local-cache --speed 2 --json",
            "no transfers between nodes, at twice the rate, for a script",
        ),
        (
            "mooncake simulate run trace.jsonl --admission load --hardware ./mine.toml",
            "refusals, on a machine of one's own",
        ),
        (
            "mooncake simulate run trace.jsonl --placement my_policies:Patient",
            "a policy of one's own",
        ),
        (
            "mooncake simulate run trace.jsonl --fail decode-0:10m:30s",
            "a decode node is gone for half a minute",
        ),
    )
)
def run(
    trace: TraceArgument,
    prefill: PrefillOption = 8,
    decode: DecodeOption = 8,
    cache: Annotated[
        int, typer.Option(help="Tokens whose KV each prefill node keeps.")
    ] = 3_000_000,
    disk: Annotated[
        int, typer.Option(help="And on a disk below that; the hardware has to say how quick it is.")
    ] = 0,
    eviction: Annotated[
        str, typer.Option(help="Which blocks leave first: lru, ..., or module:Class.")
    ] = "lru",
    placement: PlacementOption = "cache-centric",
    balancing: Annotated[
        float, typer.Option(help="Pull a prefix that is so many times longer than a node's own.")
    ] = 1.5,
    admission: AdmissionOption = "",
    ttft: Annotated[str, typer.Option(help="How long a first token may take.")] = "30s",
    tbt: Annotated[str, typer.Option(help="How long a further token may take.")] = "100ms",
    speed: SpeedOption = 1.0,
    spread: SpreadOption = False,
    network: Annotated[str, typer.Option(help="How links are shared: fair or fifo.")] = "fair",
    hardware: HardwareOption = "a800-llama3-70b",
    fail: Annotated[
        list[str] | None, typer.Option(help="A node that fails, when and for how long; repeatable.")
    ] = None,
    roles: Annotated[
        bool, typer.Option("--roles", help="Let nodes change sides, as loads ask for it.")
    ] = False,
    copies: Annotated[
        int, typer.Option(help="Bring hot prefixes to so many nodes ahead of requests; 0 does not.")
    ] = 0,
    seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Serve every request of a trace in simulated time, and tell what users would have seen."""
    from mooncake_store.units import parse_duration
    from serving.simulator.cluster import Cluster, Plan
    from serving.simulator.hardware import read_hardware
    from serving.simulator.outages import read_outage
    from serving.traces.shape import spread as spread_out

    plan = Plan(
        prefill=prefill,
        decode=decode,
        cache_tokens=cache,
        disk_tokens=disk,
        eviction=eviction,
        placement=placement,
        balancing=balancing,
        admission=admission,
        ttft_s=parse_duration(ttft),
        tbt_s=parse_duration(tbt),
        network=network,
        speed=speed,
        seed=seed,
        roles=roles,
        copies=copies,
        outages=tuple(map(read_outage, fail or ())),
    )
    requests = _read(trace)
    outcomes = Cluster(plan, read_hardware(hardware)).run(
        spread_out(requests) if spread else requests
    )
    _tell(requests, outcomes, plan, as_json)


def _tell(trace: "Trace", outcomes: "Outcomes", plan: "Plan", as_json: bool) -> None:
    """Print what one wants to know of a run."""
    from serving.simulator.outcomes import summary
    from serving.traces.shape import describe

    figures = summary(outcomes, trace.input_tokens, plan.ttft_s, plan.tbt_s)
    emit(
        {"trace": describe(trace).plain(), **figures},
        as_json=as_json,
        human=lambda: table(
            {"figure": "left", "value": "right"},
            [(name.replace("_", " "), _shown(value)) for name, value in figures.items()],
        ),
    )


@app.command(
    epilog=examples(
        (
            "mooncake simulate ablation trace.jsonl --eviction lru,sieve --cache 1000000,3000000",
            "four runs, two a cache",
        ),
        (
            "mooncake simulate ablation trace.jsonl --placement cache-centric,my_policies:Patient",
            "a policy of one's own beside Algorithm 1",
        ),
        (
            "mooncake simulate ablation trace.jsonl --disk 0,20000000 --hardware ./mine.toml"
            " --csv runs.csv",
            "with and without disks, for a spreadsheet",
        ),
    )
)
def ablation(
    trace: TraceArgument,
    eviction: Annotated[str, typer.Option(help="Which blocks leave first, a list.")] = "lru",
    placement: Annotated[
        str, typer.Option(help="Where prompts are computed, a list.")
    ] = "cache-centric",
    balancing: Annotated[
        str, typer.Option(help="From how much longer a prefix on it is pulled, a list.")
    ] = "1.5",
    cache: Annotated[
        str, typer.Option(help="Tokens whose KV each prefill node keeps, a list.")
    ] = "3000000",
    disk: Annotated[
        str, typer.Option(help="And on a disk below that, as quick as the hardware says, a list.")
    ] = "0",
    prefill: PrefillOption = 8,
    decode: DecodeOption = 0,
    speed: SpeedOption = 1.0,
    spread: SpreadOption = False,
    hardware: HardwareOption = "a800-llama3-70b",
    seed: SeedOption = 1,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line for each run.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of some policies, and tell what each gains over the first.

    Lists are separated by commas. Gains are over the first of each list, with the same cache. The
    quickest combination of each cache and disk is named.
    """
    from mooncake_store.bench.harness import listed
    from serving.simulator.ablation import as_csv, best, compare
    from serving.simulator.cluster import Plan
    from serving.simulator.hardware import read_hardware
    from serving.traces import shape

    varied = {
        "cache_tokens": _numbers("--cache", cache, int),
        "disk_tokens": _numbers("--disk", disk, int),
        "eviction": listed(eviction),
        "placement": listed(placement),
        "balancing": _numbers("--balancing", balancing, float),
    }
    requests = _read(trace)
    rows = list(
        compare(
            shape.spread(requests) if spread else requests,
            read_hardware(hardware),
            Plan(prefill=prefill, decode=decode, speed=speed, seed=seed),
            varied,
        )
    )
    quickest = best(rows)
    emit(
        {
            "rows": [row._asdict() for row in rows],
            "best": [row._asdict() for row in quickest],
        },
        as_json=as_json,
        human=lambda: _compared(rows, quickest),
    )
    if csv is not None:
        csv.write_text(as_csv(rows), encoding="utf-8")


def _compared(rows: "Sequence[AblationRow]", quickest: "Sequence[AblationRow]") -> "RenderableType":
    """Runs as a table, and in words which are the best."""
    from rich.console import Group
    from rich.text import Text

    first = rows[0]
    base = f"{first.eviction}, {first.placement}, {first.balancing:g}"
    named = []
    for row in quickest:
        disk = f" and {row.disk_tokens:,} on disk" if row.disk_tokens else ""
        when = "sooner" if row.ttft_gain >= 0 else "later"
        named.append(
            f"Quickest with {row.cache_tokens:,} tokens in memory{disk}: {row.eviction}, "
            f"{row.placement}, {row.balancing:g}. "
            f"First tokens come {abs(row.ttft_gain):.1%} {when} than by {base}."
        )
    titles = (name.replace("_", " ") for name in first._fields)
    runs = table(dict.fromkeys(titles, "right"), [tuple(map(_shown, row)) for row in rows])
    return Group(runs, *map(Text, named))


def _numbers(option: str, text: str, kind: type[T]) -> list[T]:
    """Read a list of numbers."""
    from mooncake_store.bench.harness import listed

    try:
        return [kind(each) for each in listed(text)]
    except ValueError:
        raise InvalidArgumentError(f"{option} {text!r} is no list of numbers") from None


@app.command(
    epilog=examples(
        ("mooncake simulate paper conversation_trace.jsonl", "half a minute"),
        (
            "mooncake simulate paper conversation_trace.jsonl --toolagent toolagent_trace.jsonl"
            " --synthetic synthetic_trace.jsonl --json",
            "every row that needs no machines, for a script",
        ),
    )
)
def paper(
    trace: Annotated[
        Path | None,
        typer.Argument(help="The published conversation trace."),
    ] = None,
    toolagent: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The published tool and agent trace.")
    ] = None,
    synthetic: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The published synthetic trace.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare with the figures of the paper, row by row.

    Each row says which trace it was judged on; what needs one that is not given is not run.
    """
    from serving.simulator import paper_figures
    from serving.simulator.paper import compare

    given = {"conversation": trace, "toolagent": toolagent, "synthetic": synthetic}
    traces = {name: _read(file) for name, file in given.items() if file is not None}
    for name, read in traces.items():
        published: paper_figures.Published = getattr(paper_figures, name.upper())
        if not published.is_it(read):
            note(
                f"{given[name]} is not the published {name} trace, which has {published.requests:,}"
                f" requests of {published.input_tokens:,} tokens; its rows tell of this file"
            )
    rows = list(compare(**traces))
    emit(
        {"rows": [row._asdict() for row in rows]},
        as_json=as_json,
        human=lambda: table(dict.fromkeys(rows[0]._fields, "left"), rows),
    )


@app.command(
    epilog=examples(
        ("mooncake simulate fit stats.json mine.toml", "what /stats of a front tells"),
        (
            "mooncake simulate fit samples.jsonl mine.toml --kv-bytes 131072 --network 25GB"
            " --load 64GB --kv-tokens 400000 --layers 32 --json",
            "of measured prompts and steps",
        ),
    )
)
def fit(
    measurements: Annotated[
        Path, typer.Argument(help="The JSON of a front's /stats, or lines of measured times.")
    ],
    out: Annotated[Path, typer.Argument(help="The hardware file to write; one there goes.")],
    kv_bytes: Annotated[
        int | None, typer.Option(help="KV of one token.", show_default="measured")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What a node sends in a second.", show_default="measured"
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What comes in a second from a node's memory to where it computes.",
            show_default="measured",
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of KV a node decodes with.", show_default="measured"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the model.", show_default="measured")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a hardware file of what a live system measured.

    What is given counts more than what was measured.
    """
    import msgspec

    from mooncake_store.units import parse_size
    from serving.simulator.measured import fit_hardware, write_hardware

    given = {
        "kv_bytes": kv_bytes,
        "network_bytes_per_s": None if network is None else parse_size(network),
        "load_bytes_per_s": None if load is None else parse_size(load),
        "kv_tokens": kv_tokens,
        "layers": layers,
    }
    found = fit_hardware(measurements, **{name: of for name, of in given.items() if of is not None})
    write_hardware(out, found)
    emit(
        {"file": str(out)} | msgspec.structs.asdict(found),
        as_json=as_json,
        human=lambda: f"{out}: {found.about}",
    )


def _read(path: Path) -> "Trace":
    """Read a trace, which `eviction` does for everybody."""
    from eviction import read_trace

    try:
        return read_trace(path)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the trace {path}: {error.strerror}") from None


def _shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
