"""The forms that answers of one model may have to be in: compiled once, kept while they are used.

    forms = Forms(load_vocabulary, size)
    forms.check(schema)                    # raises InvalidArgumentError for one that cannot be kept
    reader = forms.reader(schema, tokens)

The vocabulary is read for the first form: who never asks for one does not pay for it. `check` may
be called from any thread, readers belong to one.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from serving.engine.forms.automaton import Automaton, Reader, Words
from serving.engine.forms.schema import compile_schema
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.engine.vocabulary import Vocabulary

__all__ = ["Forms", "check_vocabulary"]

FORMS_MAX = 8
_PRINTED = range(0x20, 0x7F)


def check_vocabulary(vocabulary: Vocabulary | None) -> Vocabulary:
    """Raise InvalidArgumentError for one in which not every text can be written."""
    if vocabulary is None:
        raise InvalidArgumentError("the bytes of this model's tokens are not known")
    letters = {piece for piece, shown in zip(*vocabulary, strict=True) if shown and len(piece) == 1}
    if not all(bytes([letter]) in letters for letter in _PRINTED):
        raise InvalidArgumentError("this model has no tokens for single letters")
    return vocabulary


class Forms:
    """Automata by their schemas, `FORMS_MAX` of them."""

    def __init__(self, load: Callable[[], Vocabulary | None], size: int) -> None:
        self._load = load
        self._size = size
        self._lock = threading.Lock()
        self._automata: dict[str, Automaton] = {}

    @cached_property
    def _words(self) -> Words:
        return Words(check_vocabulary(self._load()), self._size)

    def check(self, schema: str) -> None:
        """Compile a schema if it is new."""
        self._automaton(schema)

    def reader(self, schema: str, tokens: Sequence[int]) -> Reader:
        """What reads an answer of which these tokens are there already."""
        return Reader(self._automaton(schema), tokens)

    def _automaton(self, schema: str) -> Automaton:
        with self._lock:
            automaton = self._automata.pop(schema, None)
            if automaton is None:
                automaton = Automaton(*compile_schema(schema), self._words)
            self._automata[schema] = automaton  # the last one used is the last one
            if len(self._automata) > FORMS_MAX:
                del self._automata[next(iter(self._automata))]
            return automaton
