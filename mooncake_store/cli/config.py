"""`mooncake config`: which settings a program would run with here, and where each comes from."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mooncake_store.cli._app import JsonOption, emit, examples, make_app, table

app = make_app("Inspect the configuration.")


class Program(StrEnum):
    """The programs that have a configuration."""

    MASTER = "master"
    WORKER = "worker"
    CLIENT = "client"


@app.callback()
def _group() -> None:
    """Keep `show` a subcommand: an app with one command would otherwise be that command."""


@app.command(
    epilog=examples(
        ("mooncake config show", "the settings of a master started here and now"),
        ("mooncake config show --program client --origin", "and where each value comes from"),
        ("mooncake config show --config mooncake.toml --json", "check a file before deploying it"),
    )
)
def show(
    program: Annotated[
        Program, typer.Option("--program", help="Whose settings to show.")
    ] = Program.MASTER,
    file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Read this file; without it, the one that MOONCAKE_CONFIG names.",
            show_default=False,
        ),
    ] = None,
    origin: Annotated[
        bool,
        typer.Option(
            "--origin",
            help="Also show where each value comes from and the variable that sets it.",
            show_default=False,
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the settings that result from defaults, file and environment."""
    from mooncake_store import config

    kind = next(kind for kind in config.PROGRAMS if kind.table == program)
    settings = config.rows(config.load(kind, file=file))
    columns = {"setting": "left", "value": "left"}
    lines: list[tuple[str, ...]] = [(row.name, row.value) for row in settings]
    if origin:
        columns |= {"from": "left", "variable": "left"}
        lines = [(row.name, row.value, row.origin, row.variable) for row in settings]
    emit(
        {
            "program": program.value,
            "settings": {
                row.name: {"value": row.value, "origin": row.origin, "variable": row.variable}
                for row in settings
            },
        },
        as_json=as_json,
        human=lambda: table(columns, lines),
    )
