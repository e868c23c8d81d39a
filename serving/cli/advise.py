"""`mooncake advise`: what memory and disk are worth to a pool, by what was asked of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, progress, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from serving.traces.advice import Advice, Comparison


@command(
    ("mooncake advise trace.jsonl", "what each size of a pool would find and save"),
    (
        "mooncake advise trace.jsonl --memory 256GiB --disk 2TiB --hardware ./mine.toml",
        "what today's pool makes of it, on machines of one's own",
    ),
    (
        "mooncake advise trace.jsonl --compare 512GiB,1TiB --json",
        "eviction policies at two sizes, for a script",
    ),
)
def advise(
    trace: Annotated[
        Path, typer.Argument(help="A trace: JSON lines of timestamp, lengths and block ids.")
    ],
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory that the pool has today.")
    ] = "0",
    disk: Annotated[
        str, typer.Option(metavar="SIZE", help="Disk that it has below memory today.")
    ] = "0",
    hardware: Annotated[
        str, typer.Option(help="What computes prompts: a kind of machine by its name, or a file.")
    ] = "a800-llama3-70b",
    block_bytes: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Of 512 tokens of KV.", show_default="by the hardware"),
    ] = "",
    compare: Annotated[
        str,
        typer.Option(
            metavar="SIZES",
            help="At which sizes eviction policies are compared.",
            show_default="today's, or the knee",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Tell from a trace what a pool of each size would find, and what that saves.

    One pool with lru, in which all requests look one after the other; other policies are replayed.
    """
    from mooncake_store.bench.harness import listed
    from mooncake_store.units import parse_size
    from serving.simulator.hardware import read_hardware
    from serving.traces.advice import advise as advice_on
    from serving.traces.reading import read_whole

    machine = read_hardware(hardware)
    with progress(f"reading {trace}"):
        advice = advice_on(
            read_whole(trace),
            machine,
            memory_bytes=parse_size(memory),
            disk_bytes=parse_size(disk),
            block_bytes=parse_size(block_bytes) if block_bytes else 0,
            compared=[parse_size(each) for each in listed(compare)] if compare else [],
        )
    emit(advice.plain(), as_json=as_json, human=lambda: _drawn(advice))


def _drawn(advice: "Advice") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from mooncake_store.units import format_size

    right = dict.fromkeys(
        ("blocks found", "tokens found", "saves an hour", "further GiB saves an hour"), "right"
    )
    rows = [
        (
            format_size(size.size_bytes),
            ", ".join(_names(advice, size.size_bytes)),
            f"{size.found.blocks:.1%}",
            f"{size.found.tokens:.1%}",
            _seconds(advice.an_hour(size.found.saved_s)),
            _seconds(more),
        )
        for size, more in zip(advice.sizes, advice.more_per_gib(), strict=True)
    ]
    compared = [_compared(advice, each) for each in advice.compared]
    told = [
        f"A block of 512 tokens takes {format_size(advice.block_bytes)}. "
        "Seconds are those that computing prompts takes less, loading what is found taken off.",
        _of_knee(advice),
        *_of_today(advice),
        *(_of_policies(advice, each) for each in advice.compared),
    ]
    lines = "\n".join(told)
    return Group(table({"pool": "left", "which is": "left"} | right, rows), *compared, Text(lines))


def _names(advice: "Advice", size_bytes: int) -> list[str]:
    """What a size is besides a number."""
    today, knee = advice.today, advice.knee
    named = [
        ("today's memory", today and today.memory.size_bytes),
        ("with disk", today and today.whole.size_bytes != today.memory.size_bytes
         and today.whole.size_bytes),
        ("knee", knee and knee.size_bytes),
        ("finds all", advice.everything.size_bytes),
    ]  # fmt: skip
    return [name for name, of in named if of == size_bytes]


def _compared(advice: "Advice", compared: "Comparison") -> "RenderableType":
    from mooncake_store.units import format_size
    from serving.traces.worth import LIMIT

    title = f"policy at {format_size(compared.size_bytes)}"
    right = dict.fromkeys(("blocks found", "tokens found", "saves an hour"), "right")
    rows = [
        (
            f"{name} (knows the future)" if name == LIMIT else name,
            f"{found.blocks:.1%}",
            f"{found.tokens:.1%}",
            _seconds(advice.an_hour(found.saved_s)),
        )
        for name, found in compared.found.items()
    ]
    return table({title: "left"} | right, rows)


def _of_knee(advice: "Advice") -> str:
    from mooncake_store.units import format_size

    if advice.knee is None:
        if advice.everything.found.blocks:
            return (
                "No memory saves anything: to load what is found takes longer than to compute it."
            )
        return "No pool finds anything: no prompt begins as an earlier one does."
    return (
        f"The knee is at {format_size(advice.knee.size_bytes)}: what is beyond saves less a GiB "
        f"than the {format_size(advice.everything.size_bytes)} that find all do on average."
    )


def _of_today(advice: "Advice") -> list[str]:
    from mooncake_store.units import format_size

    today = advice.today
    if today is None:
        return []
    whole, memory = today.whole, today.memory
    on_disk = whole.found.tokens - memory.found.tokens
    where = f" ({on_disk:.1%} on disk)" if whole.size_bytes > memory.size_bytes else ""
    return [
        f"Today's {format_size(whole.size_bytes)} find {whole.found.tokens:.1%} of the tokens"
        f"{where}, {advice.reached:.0%} of what a pool without bounds would."
    ]


def _of_policies(advice: "Advice", compared: "Comparison") -> str:
    from mooncake_store.units import format_size

    size = format_size(compared.size_bytes)
    if compared.best == "lru":
        return f"At {size} no policy saves more than lru."
    lru = compared.found["lru"].saved_s
    share = f" ({compared.gain_s / lru:+.1%})" if lru > 0 else ""
    gain = _seconds(advice.an_hour(compared.gain_s))
    best = f"At {size} the best policy is {compared.best}"
    return f"{best}: it saves {gain} an hour more than lru{share}."


def _seconds(value: float | None) -> str:
    """Of an hour; a trace that takes no time has none."""
    return "-" if value is None else f"{value:,.3g} s" if value < 100 else f"{value:,.0f} s"
