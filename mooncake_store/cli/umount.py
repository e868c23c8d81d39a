"""`mooncake umount`: end a mount."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit


@command(
    ("mooncake umount /mnt/pool", "once nothing is open there"),
    ("mooncake umount --lazy /mnt/pool", "now; it ends when the last file is closed"),
)
def umount(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The mounted directory.")],
    lazy: Annotated[bool, typer.Option("--lazy", help="Even if it is in use.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Unmount a directory."""
    from mooncake_store.fs.mount.program import unmount

    unmount(directory, lazy=lazy)
    emit(
        {"directory": directory, "lazy": lazy},
        as_json=as_json,
        human=lambda: f"{directory} is unmounted",
    )
