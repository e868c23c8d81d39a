"""The configuration file that `mooncake config init` writes: every setting, as a comment.

Read off the settings themselves, so it names all of them. Each line of a setting is commented out:
a file full of today's defaults would keep them when a later version chooses better ones.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from mooncake_store.config.setting import Setting, Settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["template"]

_HEAD = """\
# Settings of mooncake. Remove the "#" of a line to change what it says. Programs read this file
# when --config or MOONCAKE_CONFIG names it; a variable or an option wins over it.
"""
_PROFILE = """
# Stores that a client can be told to use by name: --profile test, or MOONCAKE_PROFILE=test. What
# stands here replaces [client].
# [profile.test]
# url = "mooncake://10.0.0.5:50051/test"
"""


def template(programs: Iterable[type[Settings]]) -> str:
    """Return the text of a file with all settings of `programs`."""
    programs = list(programs)
    general: dict[str, dict[str, Setting]] = {}
    for program in programs:
        for setting in settings_of(program):
            if setting.general is not None:
                table, name = setting.general
                general.setdefault(table, {})[name] = setting
    text = [_HEAD]
    for table in sorted(general):  # what stands above all tables comes first
        text += _table(table, general[table].items())
    for program in programs:
        own = [(each.name, each) for each in settings_of(program) if each.general is None]
        text += _table(program.table, own)
    return "".join(text) + _PROFILE


def _table(table: str, settings: Iterable[tuple[str, Setting]]) -> Iterator[str]:
    if table:
        yield f"\n[{table}]\n"
    for name, setting in settings:
        yield (
            "\n"
            + textwrap.fill(setting.text, 98, initial_indent="# ", subsequent_indent="# ")
            + f"\n# {name} = {setting.kind.literal(setting.default)}\n"
        )
