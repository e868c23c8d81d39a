"""What an engine's answer says of its prompt, from the bytes that pass through: OpenAI's `usage`.

    tail = UsageTail()
    tail.take(piece)          # every piece, as it passes
    tail.read()               # a Usage, None where the answer says nothing

Only the last bytes are kept: `usage` comes in the last event of a stream, or at the end of a short
answer. An answer that is longer than that, or compressed, says nothing here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from serving.scheduling.routing import Usage

__all__ = ["UsageTail"]

TAIL_BYTES = 1 << 14

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: _Count
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class UsageTail:
    """The end of an answer."""

    def __init__(self) -> None:
        self._tail = b""

    def take(self, piece: bytes) -> None:
        """Some bytes of it pass."""
        self._tail = (self._tail + piece)[-TAIL_BYTES:]

    def read(self) -> Usage | None:
        """What it said."""
        events = [
            line.removeprefix(b"data:")
            for line in reversed(self._tail.splitlines())
            if line.startswith(b"data:") and b'"usage"' in line
        ]
        for raw in events or [self._tail]:
            try:
                usage = msgspec.json.decode(raw, type=_Answer).usage
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if usage is not None:
                details = usage.prompt_tokens_details or _Details()
                return Usage(usage.prompt_tokens, details.cached_tokens)
        return None
