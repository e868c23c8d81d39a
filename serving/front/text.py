"""The text of an answer as tokens come: whole characters, and nothing of a stop string.

    text = AnswerText(tokenizer, Stopping(("\\n\\n",)))
    text.add(tokens)       # the text that may be told now
    text.stop              # the stop string that came: the rest is of no interest
    text.finish()          # what was held back
    text.listed()          # the tokens of what was told, if their likelihoods were given

A stop string may be spread over several tokens, so as much of the end as could begin one is held
back, and the likelihoods of its tokens with it: those of which nothing is shown are not listed.
No I/O. O(text of the last tokens) a call.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from serving.engine.tokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.sampling import Likelihood
    from serving.engine.tokenizer import Tokenizer

__all__ = ["AnswerText", "Listed", "Stopping"]


class Stopping(NamedTuple):
    """Which texts end an answer, whether they are shown, and before which token they do not."""

    strings: tuple[str, ...] = ()
    shown: bool = False
    min_tokens: int = 0


_NONE = Stopping()


class Listed(NamedTuple):
    """A token of an answer, and where in the text it begins."""

    token: int
    likelihood: Likelihood
    at: int


class AnswerText:
    """Turns the tokens of one answer into the text that may be told."""

    def __init__(self, tokenizer: Tokenizer, stopping: Stopping = _NONE) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stopping = stopping
        self._held = ""
        self._told = 0
        self._waiting: deque[Listed] = deque()
        self._over = False
        self.tokens = 0
        """How many were taken; none behind a stop string."""
        self.stop: str | None = None

    def add(self, tokens: Sequence[int], likelihoods: Sequence[Likelihood] = ()) -> str:
        """The text that these tokens let be told."""
        if not (self._stopping.strings or likelihoods):
            self.tokens += len(tokens)
            return self._release(self._detokenizer.add(tokens))
        told = ""
        for number, token in enumerate(tokens):
            if self.stop is not None:
                break
            self.tokens += 1
            if likelihoods:
                at = self._told + len(self._held)
                self._waiting.append(Listed(token, likelihoods[number], at))
            told += self._release(self._detokenizer.add((token,)))
        return told

    def finish(self) -> str:
        """The rest, when no further token comes."""
        self._over = True
        return self._release(self._detokenizer.finish())

    def listed(self) -> list[Listed]:
        """The tokens of what was told since the last call."""
        listed = []
        rest = self._over and self.stop is None
        while self._waiting and (rest or self._waiting[0].at < self._told):
            listed.append(self._waiting.popleft())
        return listed

    def _release(self, new: str) -> str:
        told = "" if self.stop is not None else self._tellable(self._held + new)
        self._told += len(told)
        return told

    def _tellable(self, text: str) -> str:
        """How much of this may be told; the rest is held back, or is behind the end."""
        self._held = ""
        if self.tokens <= self._stopping.min_tokens:
            return text
        found = [(text.find(stop), len(stop), stop) for stop in self._stopping.strings]
        found = [each for each in found if each[0] >= 0]
        if found:
            at, length, self.stop = min(found)
            return text[: at + length] if self._stopping.shown else text[:at]
        keep = 0 if self._over else self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        longest = 0
        for stop in self._stopping.strings:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
