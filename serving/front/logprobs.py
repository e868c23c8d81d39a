"""Probabilities of an answer's tokens in the two shapes that OpenAI has for them.

A completion lists tokens as texts, in columns; a chat lists them one by one, with their bytes. A
token that is no text by itself, as half of a character, is written as its bytes there and here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.tokenizer import Tokenizer
    from serving.front.text import Listed

__all__ = ["chat_logprobs", "completion_logprobs"]


def completion_logprobs(listed: Sequence[Listed], tokenizer: Tokenizer) -> dict[str, Any]:
    """Columns of tokens. Among the likeliest of each is the chosen one, whatever its place."""
    names = [_name(tokenizer.piece(each.token), "bytes:") for each in listed]
    tops = []
    for name, (_, likelihood, _) in zip(names, listed, strict=True):
        top: dict[str, float] = {}
        for token, logprob in zip(likelihood.tokens, likelihood.logprobs, strict=True):
            # Different tokens may look the same: the likeliest of them counts.
            top.setdefault(_name(tokenizer.piece(token), "bytes:"), logprob)
        top.setdefault(name, likelihood.chosen)
        tops.append(top)
    return {
        "tokens": names,
        "token_logprobs": [each.likelihood.chosen for each in listed],
        "top_logprobs": tops,
        "text_offset": [each.at for each in listed],
    }


def chat_logprobs(listed: Sequence[Listed], tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry for each token."""
    content = []
    for token, likelihood, _ in listed:
        pairs = zip(likelihood.tokens, likelihood.logprobs, strict=True)
        top = [_entry(tokenizer.piece(each), logprob) for each, logprob in pairs]
        entry = _entry(tokenizer.piece(token), likelihood.chosen)
        content.append(entry | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _name(piece, ""), "logprob": logprob, "bytes": list(piece)}


def _name(piece: bytes, before: str) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return before + "".join(f"\\x{byte:02x}" for byte in piece)
