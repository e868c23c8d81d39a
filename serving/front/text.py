"""The text of an answer as tokens come: whole characters, and nothing of a stop string.

    text = AnswerText(tokenizer, stops=("\\n\\n",))
    text.add(tokens)       # the text that may be told now
    text.stopped           # a stop string came: the rest is of no interest
    text.finish()          # what was held back

A stop string may be spread over several tokens, so as much of the end as could begin one is held
back. No I/O. O(text of the last tokens) a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.tokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.tokenizer import Tokenizer

__all__ = ["AnswerText"]


class AnswerText:
    """Turns the tokens of one answer into the text that may be told."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens let be told."""
        return self._release(self._detokenizer.add(tokens), last=False)

    def finish(self) -> str:
        """The rest, when no further token comes."""
        return self._release(self._detokenizer.finish(), last=True)

    def _release(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if last else self._possible_start(text)
        told, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return told

    def _possible_start(self, text: str) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
