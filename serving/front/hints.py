"""Hints over HTTP: what a body of /v1/hints asks for, and what is answered.

    {"messages": [...], "action": "retain", "ttl": "5m", "priority": 2}
    {"object": "hint", "blocks": 31, "accepted": 30, "missing": 1, ..., "outcomes": [...]}

The prompt is given as to the two endpoints that answer one, and cut into blocks as theirs are, so a
router hints with what it sent last. No I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from serving.conductor.hints import OUTCOMES
from serving.front.openai import (
    BadRequestError,
    Message,
    check_model,
    check_tokens,
    decode_body,
    read_tools,
    tokens_of_chat,
    tokens_of_prompt,
)
from serving.front.tools import Tool  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from serving.conductor.hints import Hinted
    from serving.engine.tokenizer import Tokenizer
    from serving.front.openai import Limits

__all__ = ["AskedHint", "hint_answer", "read_hint"]


class HintBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body of /v1/hints; one of `prompt` and `messages`. `ttl`: seconds, or text as "5m"."""

    action: str
    model: str | None = None
    prompt: str | list[int | str | list[int]] | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    ttl: float | str | None = None
    priority: int | None = None


class AskedHint(NamedTuple):
    """A hint that was read; whether there is such an action is for the pool's client to say."""

    tokens: list[int]
    action: str
    ttl: float | str | None
    priority: int | None


def read_hint(raw: bytes, limits: Limits, tokenizer: Tokenizer) -> AskedHint:
    """Read a body of /v1/hints."""
    body = decode_body(raw, HintBody)
    if body.model is not None:
        check_model(body.model, limits)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("a hint is about either a prompt or messages", param="prompt")
    if body.messages is not None:
        tools = read_tools(body.tools, None, tokenizer)
        tokens = tokens_of_chat(body.messages, tokenizer, tools)
    else:
        tokens = tokens_of_prompt(body.prompt, tokenizer)
    check_tokens(tokens, limits, 0)
    return AskedHint(tokens, body.action, body.ttl, body.priority)


def hint_answer(asked: AskedHint, hinted: Hinted, limits: Limits) -> dict[str, Any]:
    """What became of a hint, counted and block by block."""
    outcomes = hinted.outcomes
    return {
        "object": "hint",
        "model": limits.model,
        "action": asked.action,
        "blocks": len(outcomes),
        **{outcome: outcomes.count(outcome) for outcome in OUTCOMES},
        "reason": hinted.reason or None,
        "outcomes": outcomes,
    }
