"""What every `mooncake` subcommand shares: options, output, progress, errors, exit codes.

A subcommand is a module with a function of its name under `@command`, which does its work through
the library and hands one plain value to `emit`. It never prints, never formats an error and never
chooses an exit code: it raises, and `guarded` turns what was raised into one sentence with a next
step on standard error and into one of the codes of `ExitCode`. So all commands fail alike.

Text is for people and may change; `--json` is for programs: exactly one object on standard output,
or one `{"error": ...}` object on standard error. Progress appears only on a terminal. In text,
what cannot be printed of names and messages shows as escapes (`printable`, `screen`), wherever it
goes.

Help is rendered as plain text (no markup mode): it starts in half the time and pipes cleanly.
Only typer is imported with this module; rich is imported when something is drawn.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mooncake_store.errors import (
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.status import Status

__all__ = [
    "EXIT_MEANINGS",
    "ExitCode",
    "JsonOption",
    "agreed",
    "command",
    "console",
    "declared",
    "emit",
    "examples",
    "guarded",
    "make_app",
    "note",
    "progress",
    "table",
    "taking",
]

F = TypeVar("F", bound=Callable[..., Any])

spinner: "Status | None" = None
"""What `progress` shows at the moment; only one thing moves on a terminal."""

# Width of piped output, where there is no terminal to ask: wide enough not to fold a table.
PIPE_COLUMNS = 200


class ExitCode(IntEnum):
    """How `mooncake` ends; scripts may rely on these numbers."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 3
    UNAVAILABLE = 4
    NOT_FOUND = 5
    WARNINGS = 10
    PROBLEMS = 11
    INTERRUPTED = 130


EXIT_MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "the operation failed",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.CONFIG: "the configuration is wrong",
    ExitCode.UNAVAILABLE: "a service cannot be reached, does not answer in time, or is not ready",
    ExitCode.NOT_FOUND: "the key, or the thing named, does not exist",
    ExitCode.WARNINGS: "`mooncake doctor` found something that costs speed or room",
    ExitCode.PROBLEMS: "`mooncake doctor` found something that will fail",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
}

# The first class that matches decides.
_EXIT_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (ConfigError, ExitCode.CONFIG),
    (InvalidArgumentError, ExitCode.USAGE),
    (NotFoundError, ExitCode.NOT_FOUND),
    (UnavailableError, ExitCode.UNAVAILABLE),
    (PeerLostError, ExitCode.UNAVAILABLE),
    (TransferTimeoutError, ExitCode.UNAVAILABLE),
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def make_app(about: str | None = None) -> typer.Typer:
    """An app for a group of subcommands, or for one, as `command` makes it."""
    return typer.Typer(
        help=about,
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )


def command(
    *lines: tuple[str, str], **options: Any
) -> Callable[[Callable[..., object]], typer.Typer]:
    """Make a function the one subcommand of its module; `lines` are its `examples`."""

    def decorate(function: Callable[..., object]) -> typer.Typer:
        app = make_app()
        app.command(epilog=examples(*lines), **options)(function)
        return app

    return decorate


def examples(*lines: tuple[str, str]) -> str:
    """The epilog of a command: pairs of a command line and what it is for."""
    width = max(len(line) for line, _ in lines)
    # The backspace tells the help formatter to keep these line ends.
    return "\b\nExamples:\n" + "\n".join(f"  {line:<{width}}  {why}" for line, why in lines)


def taking(options: Mapping[str, tuple[object, Any]]) -> Callable[[F], F]:
    """Let a command take these on the command line, by name and with what they are by default.

    So a table can say what is else declared behind the names of the function.
    """

    def decorate(command: F) -> F:
        parameters = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, (default, kind) in options.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def declared(command: Callable[..., Any]) -> dict[str, tuple[object, Any]]:
    """What a command takes, as `taking` is told."""
    signature = inspect.signature(command, eval_str=True)
    return {name: (each.default, each.annotation) for name, each in signature.parameters.items()}


def emit(
    value: Mapping[str, Any], *, as_json: bool, human: "Callable[[], str | RenderableType]"
) -> None:
    """Write a command's result: `value` as one JSON line, or the text or drawing of `human`."""
    if as_json:
        sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
        return
    shown = human()
    if isinstance(shown, str):
        sys.stdout.write(printable(shown, keep="\n\t") + "\n")
    else:
        console().print(shown)


def note(text: str) -> None:
    """Write one line for the person at the terminal to standard error."""
    sys.stderr.write(f"note: {printable(text)}\n")


def agreed(question: str, *, instead: str) -> bool:
    """Ask the person at the terminal; without one, raise that the option `instead` says yes."""
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise InvalidArgumentError(
            "there is no terminal to ask for consent at", advice=f"say {instead}"
        )
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def console(*, stderr: bool = False) -> "Console":
    """A console that honours NO_COLOR and takes keys literally (no markup, no emoji)."""
    from mooncake_store.cli.shared.screen import Screen

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Screen(file=stream, width=width, markup=False, highlight=False, emoji=False)


def table(
    columns: Mapping[str, str], rows: Sequence[tuple[str, ...]], *, caption: str | None = None
) -> "RenderableType":
    """A table from column titles, each with its alignment ("left", "right"), and text cells.

    Nothing is cut: text goes on in the next line of its cell, numbers ("right") stay whole.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    for title, alignment in columns.items():
        if alignment == "right":
            drawn.add_column(title, justify="right", no_wrap=True)
        else:
            drawn.add_column(title, overflow="fold")
    for row in rows:
        drawn.add_row(*map(printable, row))
    return drawn


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal while the block runs; the value changes its text."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    global spinner
    with console(stderr=True).status(printable(text)) as shown:
        spinner = shown
        try:
            yield lambda text: shown.update(printable(text))
        finally:
            spinner = None


def guarded(call: Callable[[], object], *, as_json: bool, debug: bool) -> int:
    """Run a command line and return its exit code, after telling the user what went wrong."""
    try:
        outcome = call()
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`mooncake ls | head`): nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error}\n")
            return ExitCode.USAGE
        failure = _describe(error)
        if debug:
            import traceback

            failure["traceback"] = traceback.format_exc()
        _tell(failure, as_json=as_json)
        return int(failure["exit_code"])
    return outcome if isinstance(outcome, int) else ExitCode.OK


def _describe(error: Exception) -> dict[str, Any]:
    """What failed, what to do next, and the code to leave with."""
    exit_code, code, next_step = ExitCode.FAILED, None, ""
    if isinstance(error, StoreError):
        code, next_step = error.code, error.advice
        message = str(error).removesuffix(f"; {next_step}")
        exit_code = next((to for kind, to in _EXIT_CODES if isinstance(error, kind)), exit_code)
    elif hasattr(error, "format_message"):
        # A usage error of the command-line parser, whose classes moved between typer versions.
        exit_code = ExitCode(getattr(error, "exit_code", ExitCode.USAGE))
        message = error.format_message().rstrip(".")
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "mooncake"
        next_step = f"see `{path} --help`"
    elif isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename is not None else ""
        message = f"{error.strerror}{where}"
    else:
        message = f"internal error: {type(error).__name__}: {error}"
        next_step = "run the same command with --debug and report what it prints"
    return {
        "type": type(error).__name__,
        "message": message,
        "next_step": next_step,
        "code": code,
        "exit_code": int(exit_code),
    }


def _tell(failure: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stderr.write(json.dumps({"error": failure}) + "\n")
        return
    sys.stderr.write(printable(failure.get("traceback", ""), keep="\n"))
    step = f"; {failure['next_step']}" if failure["next_step"] else ""
    sys.stderr.write(printable(f"error: {failure['message']}{step}") + "\n")
