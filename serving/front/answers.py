"""What OpenAI's clients are answered with, as values: whole answers, pieces of them, errors.

    Shape(asked, "cmpl-1", created, tokenizer).answer(choices, usage)   # the JSON of an answer

Beside OpenAI's fields a choice has `stop_reason`, as vLLM's have: the stop string or the number of
the token that a request named and that ended it, else null. No I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.program import openapi
from serving.front.logprobs import chat_logprobs, completion_logprobs
from serving.front.tools import call_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.tokenizer import Tokenizer
    from serving.engine.tool_styles import Call
    from serving.front.openai import Asked
    from serving.front.text import Listed
    from serving.scheduling.requests import Finish

__all__ = ["Choice", "Ended", "OpenAIError", "Shape", "error_body", "usage_of"]


class Reason(openapi.Shape, frozen=True):
    """Why something was not done, and which field of a body is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(openapi.Shape, frozen=True):
    """An error in OpenAI's shape."""

    error: Reason


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kinds = {401: "authentication_error", 429: "rate_limit_error", 499: "cancelled"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Ended(NamedTuple):
    """Why a choice ended: OpenAI's reason, and the stop string or the number of the token."""

    reason: str | None = None
    stop: str | int | None = None


_GOES_ON = Ended()


class Choice(NamedTuple):
    """All of one answer."""

    text: str
    listed: Sequence[Listed]
    calls: Sequence[Call]
    ended: Ended


class Shape:
    """The JSON of one answer, whole or in pieces."""

    def __init__(self, asked: Asked, request_id: str, created: int, tokenizer: Tokenizer) -> None:
        self._chat = asked.chat
        self._tokenizer = tokenizer
        self._listing = asked.sampling.likeliest >= 0
        self._include_usage = asked.stream and asked.include_usage
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": request_id,
            "object": f"{kind}.chunk" if asked.stream and asked.chat else kind,
            "created": created,
            "model": asked.model,
        }

    def answer(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole of it: each choice with all that is to be told of it."""
        whole = []
        for number, (text, listed, calls, ended) in enumerate(choices):
            choice = self._choice(number, listed if self._listing else None, ended)
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
                if calls:
                    message["content"] = text or None
                    message["tool_calls"] = [call_entry(call) for call in calls]
                choice["message"] = message
            else:
                choice["text"] = text
            whole.append(choice)
        return {**self._head, "choices": whole, "usage": usage}

    def opening(self, number: int) -> dict[str, Any] | None:
        """The piece before any text of a choice: chats name the role."""
        if not self._chat:
            return None
        return self._chunk(number, {"role": "assistant", "content": ""}, "", (), _GOES_ON)

    def piece(
        self, number: int, text: str, listed: Sequence[Listed] = (), ended: Ended = _GOES_ON
    ) -> dict[str, Any]:
        """Some text of a choice with its tokens, or the reason for its end."""
        delta = {"content": text} if text or listed else {}
        return self._chunk(number, delta, text, listed, ended)

    def calls(self, number: int, calls: Sequence[Call]) -> dict[str, Any]:
        """The calls of a choice."""
        entries = [{"index": at} | call_entry(call) for at, call in enumerate(calls)]
        return self._chunk(number, {"tool_calls": entries}, "", (), _GOES_ON)

    def _chunk(
        self, number: int, delta: dict[str, Any], text: str, listed: Sequence[Listed], ended: Ended
    ) -> dict[str, Any]:
        choice = self._choice(number, listed or None, ended)
        choice |= {"delta": delta} if self._chat else {"text": text}
        return self._with_usage([choice], None)

    def _choice(self, number: int, listed: Sequence[Listed] | None, ended: Ended) -> dict[str, Any]:
        """What choices of all kinds have."""
        logprobs = None
        if listed is not None:
            shaped = chat_logprobs if self._chat else completion_logprobs
            logprobs = shaped(listed, self._tokenizer)
        return {
            "index": number,
            "finish_reason": ended.reason,
            "stop_reason": ended.stop,
            "logprobs": logprobs,
        }

    def closing(self, usage: dict[str, Any]) -> dict[str, Any] | None:
        """The last piece, with the usage, where it was asked for."""
        return self._with_usage([], usage) if self._include_usage else None

    def _with_usage(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return chunk | {"usage": usage} if self._include_usage else chunk


def usage_of(finishes: Sequence[Finish], generated: int) -> dict[str, Any]:
    """OpenAI's usage: the tokens of the prompt, which counts once, and of all choices.

    Cached tokens are those that the first choice found; the others find what it computed.
    """
    first = finishes[0]
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": first.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }
