"""`mooncake config`: which settings a program would run with, and a file to begin with."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, emit, examples, make_app, note, table
from mooncake_store.cli.shared.client import ProfileOption
from mooncake_store.cli.shared.program_options import ConfigOption
from mooncake_store.errors import ConfigError

app = make_app("Inspect the configuration, or begin one.")


class Program(StrEnum):
    """The programs that have a configuration."""

    MASTER = "master"
    MEMBER = "member"
    WORKER = "worker"
    CLIENT = "client"


@app.command(
    epilog=examples(
        ("mooncake config show", "the settings of a master started here and now"),
        ("mooncake config show --program client --origin", "and where each value comes from"),
        ("mooncake config show --config mooncake.toml --json", "check a file before deploying it"),
        ("mooncake config show --program client --profile test", "of the store of a profile"),
    )
)
def show(
    program: Annotated[
        Program, typer.Option("--program", help="Whose settings to show.")
    ] = Program.MASTER,
    file: ConfigOption = None,
    profile: ProfileOption = None,
    origin: Annotated[
        bool,
        typer.Option(
            "--origin", help="Also show where each value comes from and the variable that sets it."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the settings that result from defaults, file and environment.

    Variables that look like settings and are none are named after them.
    """
    from mooncake_store import config
    from mooncake_store.config.loading import load_settings

    kind = next(kind for kind in config.PROGRAMS if kind.table == program)
    if profile and not kind.profiled:
        raise ConfigError(
            f"profiles are for clients, not for the {program.value}", advice="add --program client"
        )
    loaded = load_settings(kind, config.PROGRAMS, file=file, profile=profile)
    settings = config.rows(loaded)
    titles = ("setting", "value", "from", "variable")[: 4 if origin else 2]
    emit(
        {
            "program": program.value,
            "settings": {
                row.name: {"value": row.value, "origin": row.origin, "variable": row.variable}
                for row in settings
            },
            "unknown": dict(loaded.unknown),
            "links": list(loaded.links),
        },
        as_json=as_json,
        human=lambda: table(
            dict.fromkeys(titles, "left"), [row[: len(titles)] for row in settings]
        ),
    )
    if not as_json:
        _tell_variables(loaded)


def _tell_variables(loaded: Any) -> None:
    """Name, after the table, what stands in the environment and means nothing."""
    for name, near in loaded.unknown.items():
        note(f"unknown variable, ignored: {name} (did you mean {near}?)")
    if loaded.links:
        note(f"passed over, because they describe a service: {', '.join(loaded.links)}")


@app.command(
    epilog=examples(
        ("mooncake config init", "write mooncake.toml here"),
        ("mooncake config init /etc/mooncake.toml", "write another file"),
    )
)
def init(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write; it must not exist.")
    ] = Path("mooncake.toml"),
    as_json: JsonOption = False,
) -> None:
    """Write a configuration file with every setting, explained and at its default.

    The lines are comments: what you do not change follows the defaults of later versions.
    Programs read it when `--config` or `MOONCAKE_CONFIG` names it.
    """
    from mooncake_store import config
    from mooncake_store.config.file import template

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template(config.PROGRAMS))
    except FileExistsError:
        raise ConfigError(
            f"{path} exists and is left as it is", advice="name another file, or remove this one"
        ) from None
    emit(
        {"path": str(path)},
        as_json=as_json,
        human=lambda: f"{path} written; programs read it with --config {path}",
    )
