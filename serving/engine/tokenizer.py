"""Text to tokens and back: a checkpoint's own tokenizer, or a made-up one for random models.

No torch, so that a front can use it without loading a model. Text of an answer that arrives token
by token is cut where characters end (`Detokenizer`): a token may hold half of one.
"""

from __future__ import annotations

import json
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from serving.engine.chat_template import ChatTemplate
from serving.engine.vocabulary import Vocabulary, vocabulary_of
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ByteTokenizer",
    "Detokenizer",
    "FileTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "load_tokenizer",
]

_BOS, _EOS = 256, 257
_WORDS = resources.files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split()
"""As many as there are bytes."""
_UNFINISHED = "\ufffd"
"""What stands where bytes make no character, yet."""
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
"""What templates may name."""
_PENDING_MAX = 16
"""Tokens held back for a character that may never be completed."""


class Tokenizer(Protocol):
    """What a front needs of a tokenizer."""

    eos: tuple[int, ...]

    @property
    def tool_style(self) -> str:
        """How the model writes calls of tools (`tool_styles`); empty where it knows none."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The bytes of all tokens; None where an answer cannot be read byte by byte."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins."""

    def piece(self, token: int) -> bytes:
        """What a token is shown as alone; a special one, too."""


class ByteTokenizer:
    """Every byte is a token; 256 begins a text and 257 ends one."""

    eos: tuple[int, ...] = (_EOS,)

    @property
    def tool_style(self) -> str:
        """There is no template that would tell of tools."""
        return ""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """A byte for each token."""
        return Vocabulary(tuple(bytes([byte]) for byte in range(256)), (True,) * 256)

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        return [_BOS, *text.encode("utf-8", "replace")]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are no UTF-8 become replacement characters."""
        return bytes(token for token in tokens if token < _BOS).decode("utf-8", "replace")

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens of a conversation: a line with the role before each message."""
        return self.encode(_plain(messages))

    def piece(self, token: int) -> bytes:
        """The byte; nothing for the others."""
        return bytes([token]) if token < _BOS else b""


class WordTokenizer(ByteTokenizer):
    """Bytes in, words out: what a random model answers can be read, though it means nothing.

    Such a model knows no language, so which text a number of its stands for is free. A prompt has a
    token for each byte, an answer a word for each token. An answer that is sent back as a part of
    the next prompt is therefore other tokens than it was.
    """

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Nothing can be written with these words but words."""
        return None

    def decode(self, tokens: Sequence[int]) -> str:
        """The words of an answer, each after a space."""
        return "".join(
            " " + _WORDS[token % len(_WORDS)] for token in tokens if token not in (_BOS, _EOS)
        )

    def piece(self, token: int) -> bytes:
        """The word."""
        return self.decode([token]).encode()


class FileTokenizer:
    """A checkpoint's tokenizer.json, with its chat template where it has one."""

    def __init__(self, directory: Path, eos: tuple[int, ...] = ()) -> None:
        import tokenizers

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json", advice="convert the tokenizer, or copy it"
            )
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        self._settings: dict[str, Any] = {}
        settings = directory / "tokenizer_config.json"
        if settings.is_file():
            self._settings = json.loads(settings.read_text(encoding="utf-8"))
        separate = directory / "chat_template.jinja"
        if separate.is_file():
            self._settings["chat_template"] = separate.read_text(encoding="utf-8")
        self.eos = eos or self._ends()
        self._template = self._chat_template()

    @property
    def tool_style(self) -> str:
        """That of its template."""
        return "" if self._template is None else self._template.tool_style

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The bytes of all tokens; None where they have none of their own. Made when asked."""
        return vocabulary_of(self._tokenizer)

    def piece(self, token: int) -> bytes:
        """What a token is shown as alone; the special ones by their names."""
        if self.vocabulary is None:
            return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()
        return self.vocabulary.pieces[token] if token < len(self.vocabulary.pieces) else b""

    def _ends(self) -> tuple[int, ...]:
        number = self._tokenizer.token_to_id(self._special("eos_token"))
        return () if number is None else (int(number),)

    def _special(self, name: str) -> str:
        value = self._settings.get(name) or ""
        return str(value["content"] if isinstance(value, dict) else value)

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with the special ones the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens of a conversation by the checkpoint's template, or a plain one without."""
        if self._template is None:
            return self.encode(_plain(messages))
        text = self._template.render(messages, tools)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _chat_template(self) -> ChatTemplate | None:
        given = self._settings.get("chat_template")
        if isinstance(given, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in given}
            given = named.get("default")
        if not isinstance(given, str):
            return None
        return ChatTemplate(given, {name: self._special(name) for name in _SPECIAL})


def load_tokenizer(directory: str, eos: tuple[int, ...] = ()) -> Tokenizer:
    """The tokenizer of a checkpoint, or words where there is no directory (a random model)."""
    return FileTokenizer(Path(directory), eos) if directory else WordTokenizer()


class Detokenizer:
    """Text of an answer as its tokens come, only whole characters of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = ""
        self._pending = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens)
        whole = text.rstrip(_UNFINISHED)
        if len(whole) > len(self._told):
            return self._advance(whole, unfinished=len(text) > len(whole))
        self._pending += len(tokens)
        if text.endswith(_UNFINISHED) and self._pending < _PENDING_MAX:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """What was held back for a character that did not come."""
        return self._advance(self._tokenizer.decode(self._tokens))

    def _advance(self, text: str, *, unfinished: bool = False) -> str:
        """Tell what is new in the text of all tokens; the last may begin an `unfinished` one."""
        new = text[len(self._told) :]
        self._told = text
        self._pending = 0
        if len(self._tokens) >= 2 * _PENDING_MAX:
            # What is decoded again stays short. Some tokenizers drop a space before the first
            # token of a text, so a few are kept as its beginning.
            self._tokens = self._tokens[-_PENDING_MAX // 2 :]
            kept = self._tokenizer.decode(self._tokens)
            self._told = kept.rstrip(_UNFINISHED) if unfinished else kept
        return new


def _plain(messages: Sequence[dict[str, Any]]) -> str:
    lines = [f"{each['role']}: {each['content']}\n" for each in messages]
    return "".join(lines) + "assistant: "
