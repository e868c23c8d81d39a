"""What a front before engines can be asked: the engines' API, and the indexer's. No I/O."""

from __future__ import annotations

from typing import Any

from mooncake_store.program.openapi import Answer, Api, Operation, Shape
from serving.front.answers import OpenAIError
from serving.front.indexer_http import INDEXER_OPERATIONS

__all__ = ["API"]

FORWARDED = (
    "completions", "chat/completions", "embeddings", "responses", "messages",
    "messages/count_tokens", "rerank", "score",
)  # fmt: skip
"""What may be asked of an engine, below /v1."""
MODEL = "/v1/models/{model:[A-Za-z0-9._:@/-]+}"


class Health(Shape, frozen=True):
    """Whether an engine is thought to answer: those that are there, and those that are not."""

    serving: bool
    engines: list[str]
    resting: list[str]
    passed_over: list[str]


class FirstTokens(Shape, frozen=True):
    """How long first tokens took, and how long they were predicted to take."""

    count: int
    measured_s: float
    predicted_s: float
    off_s: float


class Prefill(Shape, frozen=True):
    """What computing a prompt is thought to cost."""

    fixed_s: float
    token_s: float
    square_s: float


class Stats(Shape, frozen=True):
    """Requests under way by engine, their loads, and how first tokens are predicted."""

    engines: dict[str, int]
    load: dict[str, dict[str, Any]]
    first_tokens: FirstTokens
    prefill: Prefill


_FORWARDED = (
    Answer("default", "what an engine answers, byte by byte", kind="*/*"),
    Answer(503, "no engine can be reached; Retry-After says when to ask again", OpenAIError),
)

API = Api(
    "A front before engines",
    "The API of the engines, each request to the best of them, and the indexer of what they hold. "
    "Where all connections are in use an answer is 503, without a body; 500 is a defect, of which "
    "the log tells.",
    OpenAIError,
    (
        Operation(
            "health", "GET", "/health", "Say whether an engine is thought to answer",
            (Answer(200, "one is", Health), Answer(503, "none is", Health)),
            access="public",
        ),
        Operation("stats", "GET", "/stats", "Show figures", (Answer(200, "figures", Stats),)),
        *INDEXER_OPERATIONS,
        *(
            Operation(
                path.replace("/", "_"), "POST", f"/v1/{path}", "Ask the best engine",
                _FORWARDED, dict[str, Any], handler="forward",
            )
            for path in FORWARDED
        ),
        Operation(
            "models", "GET", "/v1/models", "Ask an engine", _FORWARDED, handler="forward"
        ),
        Operation("model", "GET", MODEL, "Ask an engine", _FORWARDED, handler="forward"),
    ),
)  # fmt: skip
