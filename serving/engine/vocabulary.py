"""What bytes each token adds to a text: what probabilities are shown for, and automata read.

    vocabulary = vocabulary_of(tokenizers_tokenizer)
    vocabulary.pieces[17]      # b" the"
    vocabulary.shown           # False for special tokens, which are no part of a text

A token may hold half of a character, so this is bytes and not text. Two ways are known in which
tokenizers write bytes: a letter for each byte (GPT-2's, Llama 3's, Qwen's), and text with a mark
for spaces and `<0x0A>` for what is no text (SentencePiece's, as Llama 2's and Mistral's). Others
have text only as a whole: they have no vocabulary here.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Vocabulary", "vocabulary_of"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(NamedTuple):
    """The bytes of each token, and whether it is shown in a text."""

    pieces: tuple[bytes, ...]
    shown: tuple[bool, ...]


def vocabulary_of(tokenizer: Any) -> Vocabulary | None:
    """The vocabulary of a `tokenizers.Tokenizer`; None where tokens have no bytes of their own."""
    decoder = tokenizer.decoder
    read = _reader(None if decoder is None else json.loads(decoder.__getstate__()))
    if read is None:
        return None
    known: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    size = 1 + max(known.values(), default=-1)
    pieces, shown = [b""] * size, [False] * size
    for text, number in known.items():
        special = added.get(number)
        pieces[number] = read(text) if special is None else special.content.encode()
        shown[number] = special is None or not special.special
    return Vocabulary(tuple(pieces), tuple(shown))


def _reader(decoder: Any) -> Callable[[str], bytes] | None:
    """What makes bytes of a token, by the decoder of its tokenizer."""
    if not decoder:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return _by_letters
    if "Metaspace" in kinds:
        space = kinds["Metaspace"]["replacement"]
    elif "Replace" in kinds and kinds["Replace"]["content"] == " ":
        space = kinds["Replace"]["pattern"].get("String")
    else:
        return None
    return lambda text: _by_mark(text, space, bytes_too="ByteFallback" in kinds)


def _by_mark(text: str, space: str, *, bytes_too: bool) -> bytes:
    if bytes_too and (found := _BYTE.fullmatch(text)):
        return bytes([int(found[1], 16)])
    return text.replace(space, " ").encode("utf-8", "replace")


def _by_letters(text: str) -> bytes:
    letters = _letters()
    return b"".join(
        bytes([letters[letter]]) if letter in letters else letter.encode() for letter in text
    )


@cache
def _letters() -> dict[str, int]:
    """The letter that stands for each byte: itself if it is printed, else one from U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }
