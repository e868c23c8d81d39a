"""`mooncake completion`: what a shell reads to complete command lines."""

from enum import StrEnum
from typing import Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit


class Shell(StrEnum):
    """Shells that can be told."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@command(
    ("mooncake completion bash", "as /etc/bash_completion.d/mooncake, for all users"),
    ("mooncake completion zsh", "as _mooncake in a folder of its fpath"),
    ("mooncake completion fish", "as ~/.config/fish/completions/mooncake.fish, for oneself"),
)
def completion(
    shell: Annotated[Shell, typer.Argument(help="Which shell reads it.")],
    as_json: JsonOption = False,
) -> None:
    """Print a script that has a shell complete commands and options of `mooncake`.

    The shell asks `mooncake` itself for what could follow, so the script need not be made anew.
    """
    # What `--show-completion` prints; no door of typer's own leads to it.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="mooncake", complete_var="_MOONCAKE_COMPLETE", shell=shell.value
    )
    emit({"shell": shell.value, "script": script}, as_json=as_json, human=lambda: script)
