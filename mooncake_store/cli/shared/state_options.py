"""Where a master's state is, for commands that look into it: its directory, or its port."""

from pathlib import Path
from typing import Annotated

import typer

from mooncake_store.errors import ConfigError

__all__ = ["PortOption", "StateOption", "state_path"]

StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="The state directory of the master."),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        help="The port of the master, whose state is where it is by default.",
        show_default="50051",
    ),
]


def state_path(state: Path | None, port: int | None) -> Path:
    """Return the directory that the options name."""
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.state_directory import default_path, expanded

    if state is not None and port is not None:
        raise ConfigError("--state and --port each name a state directory", advice="say one")
    if state is not None:
        return expanded(state)
    try:
        return default_path(MasterConfig().port if port is None else port)
    except RuntimeError as error:
        raise ConfigError(f"no home: {error}", advice="name the directory with --state") from error
