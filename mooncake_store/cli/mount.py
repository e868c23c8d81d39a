"""`mooncake mount`: a namespace of the store as a directory."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, note
from mooncake_store.cli.shared.client import EtcdFileOption, SecretOption


@command(
    ("mooncake mount mooncake://127.0.0.1:50051/default /mnt/pool", "serve in the background"),
    ("mooncake mount mooncake://10.0.0.5:50051/ns /mnt/pool --foreground", "until Ctrl-C"),
)
def mount(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="mooncake://host:port/namespace, or mooncake+etcd://host:port/pool/namespace",
        ),
    ],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="An existing directory.")],
    foreground: Annotated[bool, typer.Option("--foreground", "-f", help="Serve here.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse every change.")] = False,
    allow_other: Annotated[bool, typer.Option("--allow-other", help="Let other users in.")] = False,
    pin: Annotated[
        str, typer.Option(help="How files are kept under pressure: soft, hard or none.")
    ] = "soft",
    staging: Annotated[
        str | None,
        typer.Option(help="Where files lie while they are written.", show_default="$TMPDIR"),
    ] = None,
    part_size: Annotated[str, typer.Option(help="Files above it are stored in parts.")] = "8MiB",
    secret_file: SecretOption = None,
    etcd_file: EtcdFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mount a namespace. Files are stored, whole, when they are closed."""
    from mooncake_store.fs.mount.program import mount as start

    named = {"secret_file": secret_file, "etcd_file": etcd_file}
    if foreground:
        note(f"{url} is being served at {directory}; Ctrl-C or `mooncake umount` ends it")
    start(
        directory,
        foreground=foreground,
        staging=staging,
        allow_other=allow_other,
        read_only=read_only,
        url=url,
        pin=None if pin == "none" else pin,
        part_size=part_size,
        **{name: file for name, file in named.items() if file},
    )
    if not foreground:
        emit(
            {"url": url, "directory": directory},
            as_json=as_json,
            human=lambda: f"{url} is mounted at {directory}; mooncake umount {directory} ends it",
        )
