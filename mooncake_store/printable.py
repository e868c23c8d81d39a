"""Text that others wrote, as it may reach a terminal or a line of a log.

Names of objects, workers and segments, and the sentences of a peer, are what somebody else chose.
A control character among them could steer the terminal of who lists them, forge a line, or turn
the order of letters round. Here they become escapes as Python writes them: `\\x1b`, `\\u202e`.
What a program reads (`--json`, an object's bytes) is not changed. O(length of the text).
"""

from __future__ import annotations

import re

__all__ = ["printable"]

# C0, DEL and C1; all that Unicode counts as Bidi_Control; halves of surrogate pairs, which no
# stream can encode.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str, keep: str = "") -> str:
    """The text with every control character but those of `keep` as an escape."""

    def escape(found: re.Match[str]) -> str:
        character = found[0]
        return character if character in keep else character.encode("unicode_escape").decode()

    return _CONTROL.sub(escape, text)
