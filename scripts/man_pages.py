"""Writes docs/reference/man/*.1 from the commands themselves: `python scripts/man_pages.py`.

One page for `mooncake` and one for each of its commands, with those below it; what it says is what
`--help` says. Installed from a wheel they are found by `man mooncake-drain`. A test compares the
files with what this makes. O(options).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mooncake_store.cli.shared.app import EXIT_MEANINGS
from mooncake_store.cli.shared.tree import root
from scripts.cli_reference import argument, commands

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FOLDER", "pages"]

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference" / "man"


def pages() -> dict[str, str]:
    """Return the text of each page, by the name of its file."""
    tree = root()
    context = typer.Context(tree, info_name="mooncake")
    tops = {name: tree.get_command(context, name) for name in tree.list_commands(context)}
    made = {"mooncake.1": _whole(tree, tops)}
    for name, command in tops.items():
        title = f"mooncake-{name}"
        below = hasattr(command, "list_commands")
        about = list(
            commands(command, ("mooncake", name)) if below else [(f"mooncake {name}", command)]
        )
        lines = [*_head(title, _purpose(command)), ".SH SYNOPSIS", *_synopsis(about)]
        for path, each in about:
            lines += _command(path, each, alone=not below)
        made[f"{title}.1"] = _joined([*lines, *_see_also()])
    return made


def _whole(tree: Any, tops: dict[str, Any]) -> str:
    lines = [*_head("mooncake", tree.help), ".SH SYNOPSIS", r"\fBmooncake\fR \fICOMMAND\fR ..."]
    lines.append(".SH COMMANDS")
    for name, command in tops.items():
        lines += [".TP", rf"\fBmooncake\-{_text(name)}\fR(1)", _text(_purpose(command))]
    lines += [".SH OPTIONS", *_options(tree.params)]
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_MEANINGS.items():
        lines += [".TP", rf"\fB{int(code)}\fR", _text(meaning)]
    return _joined(lines)


def _head(title: str, purpose: str) -> list[str]:
    return [
        '.\\" Written by scripts/man_pages.py from the help of the command.',
        f'.TH "{title.upper()}" "1" "" "mooncake-store" "User Commands"',
        ".SH NAME",
        rf"{_text(title)} \- {_text(purpose.rstrip('.'))}",
    ]


def _purpose(command: Any) -> str:
    return str(command.help).partition("\n")[0].partition(". ")[0]


def _synopsis(about: list[tuple[str, Any]]) -> Iterator[str]:
    for number, (path, command) in enumerate(about):
        if number:
            yield ".br"
        words = [rf"\fB{_text(path)}\fR", r"[\fIOPTIONS\fR]"]
        words += [
            rf"\fI{_text(argument(each))}\fR"
            for each in command.params
            if each.param_type_name == "argument"
        ]
        yield " ".join(words)


def _command(path: str, command: Any, *, alone: bool) -> Iterator[str]:
    yield ".SH DESCRIPTION" if alone else f'.SH "{_text(path).upper()}"'
    for number, paragraph in enumerate(re.split(r"\n\s*\n", command.help.strip())):
        if number:
            yield ".PP"
        yield _text(" ".join(paragraph.split()))
    yield ".SH OPTIONS" if alone else ".SS Options"
    yield from _options(command.params)
    yield ".SH EXAMPLES" if alone else ".SS Examples"
    for line in (command.epilog or "").splitlines()[2:]:
        said, why = re.split(r"\s{2,}", line.strip(), maxsplit=1)
        yield from (".TP", rf"\fB{_text(said)}\fR", _text(why))


def _options(params: list[Any]) -> Iterator[str]:
    for each in params:
        if getattr(each, "hidden", False):
            continue
        if each.param_type_name == "argument":
            name = rf"\fI{_text(argument(each))}\fR"
        else:
            flags = [rf"\fB{_text(flag)}\fR" for flag in [*each.opts, *each.secondary_opts]]
            name = ", ".join(flags)
            if each.metavar:
                name = rf"{name} \fI{_text(each.metavar)}\fR"
        yield from (".TP", name, _text(" ".join((each.help or "").split())))


def _see_also() -> list[str]:
    return [".SH SEE ALSO", r"\fBmooncake\fR(1), which lists the exit statuses of all commands"]


def _text(text: str) -> str:
    """Text as roff takes it: no character of it means anything else."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages into the docs/reference/man of this source tree, and remove others."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for file in FOLDER.iterdir():
        if file.name not in made:
            file.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
