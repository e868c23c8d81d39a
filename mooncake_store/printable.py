"""Text that others wrote, as it may reach a terminal or a line of a log.

Names of objects, workers and segments, and the sentences of a peer, are what somebody else chose.
A control character among them could steer the terminal of who lists them, forge a line, or turn
the order of letters round, and one without a shape of its own could make two names look alike. Here
they become escapes as Python writes them: `\\x1b`, `\\u202e`. What a program reads is not changed:
an object's bytes, and names in `--json`, whose text is ASCII anyway. O(length of the text).
"""

from __future__ import annotations

import re

__all__ = ["TEXT", "printable"]

TEXT = "\n\t\xa0\u2002\u2003\u2009\u200c\u200d\u202f\u3000"
"""What belongs to a text of several lines, to `keep` of it: its spaces, and what joins letters."""
# Most text has none of these, and is not looked at by letters.
_UNUSUAL = re.compile(r"[^\x20-\x7e]+")


def printable(text: str, keep: str = "") -> str:
    """The text with every character that cannot be printed, but for those of `keep`, as an escape.

    That is all of C0, DEL and C1, what changes the direction or breaks lines, spaces that are none
    of ASCII's, what has no shape or no meaning yet, and halves of surrogate pairs.
    """

    def escape(found: re.Match[str]) -> str:
        unusual = found[0]
        if unusual.isprintable():
            return unusual
        return "".join(
            each if each in keep or each.isprintable() else each.encode("unicode_escape").decode()
            for each in unusual
        )

    return _UNUSUAL.sub(escape, text)
