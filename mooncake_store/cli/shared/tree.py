"""The tree of `mooncake` commands: find the one that is meant, run it, say how it ended.

`COMMANDS` names the subcommands in the order of the help; each is a module of the same name in
this package, or in the one that `ELSEWHERE` names (nothing imports serving, so its commands are
found by name), imported only when it is run or listed. Those modules import numpy, numba and the
store inside their functions, so that help, completion and `mooncake version` stay quick.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kernel_cache.interpreter import ADVICE, refusal
from mooncake_store.cli.shared.app import EXIT_MEANINGS, guarded
from mooncake_store.cli.shared.compiling import compilation_shown
from mooncake_store.errors import ConfigError
from mooncake_store.program.logs import escape_unconfigured

__all__ = ["COMMANDS", "root", "run"]

COMMANDS = (
    "version", "config", "master", "worker", "standby", "promote", "standbys", "member", "shard",
    "status", "top", "jobs", "events", "drain", "copy", "move", "tenant",
    "put", "get", "sync", "ls", "stat", "exists", "hint", "rm", "mount", "umount",
    "serve", "chat", "simulate", "trace", "advise",
    "doctor", "topology", "journal", "state", "secret", "warmup", "bench", "completion",
)  # fmt: skip
ELSEWHERE = dict.fromkeys(("serve", "chat", "simulate", "trace", "advise"), "serving.cli")


def _declared(name: str) -> typer.Typer:
    """A command as its module declares it: a group is its `app`, others have its name."""
    module = importlib.import_module(f"{ELSEWHERE.get(name, 'mooncake_store.cli')}.{name}")
    found: typer.Typer = getattr(module, "app", None) or getattr(module, name)
    return found


def _purpose(declared: typer.Typer) -> str:
    """Its first sentence."""
    own = declared.info.help or declared.registered_commands[0].callback.__doc__
    return str(own).partition("\n")[0].partition(". ")[0].removesuffix(".") + "."


class _LazyGroup(TyperGroup):
    """A group whose commands are modules, imported one by one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command and what it is for; their options would be built for nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _purpose(_declared(name))) for name in COMMANDS])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            if cmd_name not in self.commands:
                command = typer.main.get_command(_declared(cmd_name))
                command.name = cmd_name
                self.commands[cmd_name] = command
            return self.commands[cmd_name]
        if not ctx.resilient_parsing:
            import difflib

            nearest = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            ctx.fail(f"there is no command {cmd_name!r}{hint}")
        return None


_app = typer.Typer(
    cls=_LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # Subcommands inherit it.
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A pooled store of immutable KV-cache blocks for LLM inference clusters.",
    epilog="\b\nExit codes:\n"
    + "\n".join(f"  {int(code):>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items()),
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from mooncake_store import __version__

        sys.stdout.write(f"mooncake-store {__version__}\n")
        raise typer.Exit


@_app.callback()
def _root_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_tell_version,
            is_eager=True,
            help="Show the version and end; `mooncake version` says more.",
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; accepted anywhere.")
    ] = False,
) -> None:
    """Declare the options of `mooncake` itself; `run` has already read them."""


def root() -> Any:
    """The whole command tree, for running and for the reference that is generated from it."""
    command = typer.main.get_command(_app)
    command.name = "mooncake"
    return command


def run(argv: Sequence[str]) -> int:
    """Run one command line, without the program's name, and return its exit code."""
    arguments = list(argv) or ["--help"]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    if debug:
        # A person adds --debug at the end of the line that failed; the parser wants it first.
        arguments.remove("--debug")
        arguments.insert(0, "--debug")

    def call() -> object:
        if why := refusal():
            raise ConfigError(why, advice=ADVICE)
        return root().main(args=arguments, prog_name="mooncake", standalone_mode=False)

    as_json = "--json" in own
    escape_unconfigured()
    with compilation_shown(silent=as_json):
        return guarded(call, as_json=as_json, debug=debug)
