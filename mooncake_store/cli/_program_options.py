"""Options that the commands which serve (`master`, `worker`) have in common."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ConfigOption", "InsecureOption", "PortFileOption", "SecretOption"]

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read this file; without it, the one that MOONCAKE_CONFIG names.",
        show_default=False,
    ),
]
SecretOption = Annotated[
    str | None, typer.Option(help="File with the shared secret.", show_default=False)
]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Accept other machines without a secret.", show_default=False),
]
PortFileOption = Annotated[
    str | None, typer.Option(help="Write the addresses in use to this file.", show_default=False)
]
