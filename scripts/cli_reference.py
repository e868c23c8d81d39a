"""Writes docs/reference/cli.md from the commands themselves: `python scripts/cli_reference.py`.

A test compares the file with what this makes, so the page cannot fall behind. It reads the
command tree (names, options, help) instead of the rendered help, whose layout changes with typer.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from mooncake_store.cli.shared.app import EXIT_MEANINGS
from mooncake_store.cli.shared.tree import root

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"

HEAD = """# The `mooncake` command

Written by `python scripts/cli_reference.py`; edit the commands in `mooncake_store/cli/`.

`--json` makes a command print exactly one JSON object on standard output; an error is then one
object on standard error; what tells of several things one after the other, as `events`, prints one
a line. `--debug`, anywhere on the line, adds the traceback of an error. Colour
and progress appear only on a terminal, and never with `NO_COLOR` set.
`mooncake completion` prints what a shell completes command lines with, and `man mooncake` and
`man mooncake-drain` show these pages where the package is installed.

## Exit codes

| code | meaning |
|---:|---|
"""


def page() -> str:
    """The text of the page."""
    codes = "".join(f"| {int(code)} | {meaning} |\n" for code, meaning in EXIT_MEANINGS.items())
    return HEAD + codes + "".join(_section(path, command) for path, command in commands(root()))


def commands(group: Any, path: tuple[str, ...] = ("mooncake",)) -> Iterator[tuple[str, Any]]:
    """Every command below a group, each with its whole name."""
    context = typer.Context(group, info_name=path[-1])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def _section(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join([path, *(argument(p) for p in arguments), "[OPTIONS]"])
    rows = "".join(
        f"| {_names(p)} | {_default(p)} | {_cell(p.help or '')} |\n"
        for p in [*arguments, *options]
        if not getattr(p, "hidden", False) and p.name != "help"
    )
    shown = [line.strip() for line in (command.epilog or "").splitlines()[2:]]
    examples = "".join(f"{_example(line)}\n" for line in shown)
    about = re.sub(r"(?<!\n)\n(?!\n)", " ", (command.help or "").strip())
    table = f"| option | default | |\n|---|---|---|\n{rows}"
    return f"\n## `{usage}`\n\n{about}\n\n{table}\n```console\n{examples}```\n"


def argument(parameter: Any) -> str:
    """An argument as it is shown: in brackets where it may be left out."""
    name = (parameter.metavar or parameter.name).upper()
    shown = name if parameter.required else f"[{name}]"
    return f"{shown}..." if parameter.nargs == -1 else shown


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{argument(parameter)}`"
    flags = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    return flags + (f" `{_cell(parameter.metavar)}`" if parameter.metavar else "")


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else parameter.default
    return "" if default in (None, "", False, ()) or callable(default) else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _example(line: str) -> str:
    command, why = re.split(r"\s{2,}", line, maxsplit=1)
    return f"$ {command}  # {why}"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
