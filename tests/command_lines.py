"""Whether a command line is one: its command and its options exist. Nothing runs."""

from mooncake_store.cli.shared.tree import root
from mooncake_store.compat.master_flags import translate

__all__ = ["parse"]


def parse(words):
    """Raise what a command line that begins with `mooncake` would be refused with."""
    command, rest, context = root(), words[1:], None
    while True:
        context = command.make_context(words[0], list(rest), parent=context)
        if not hasattr(command, "commands"):
            break
        _name, command, rest = command.resolve_command(context, rest)
    if context.allow_extra_args:
        translate(context.args)
