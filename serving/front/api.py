"""What a front can be asked: its operations, what they read and what they answer. No I/O.

Answers of OpenAI's API have OpenAI's shapes, as `answers` makes them. What a request may ask for
beside its types, `openai` says: a field that is not supported is refused by its name.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from mooncake_store.program.openapi import TEXT, Answer, Api, Operation, Shape
from serving.front.answers import OpenAIError
from serving.front.hints import HintBody
from serving.front.openai import ChatBody, CompletionBody
from serving.front.pages import PAGE_OPERATIONS

__all__ = ["API"]


class Cached(Shape, frozen=True):
    """Tokens of a prompt that were not computed."""

    cached_tokens: int


class Usage(Shape, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


class CompletionLogprobs(Shape, frozen=True):
    """Probabilities of tokens, in columns."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Likely(Shape, frozen=True):
    """A token and its probability."""

    token: str
    logprob: float
    bytes: list[int]


class ToldToken(Likely, frozen=True):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(Shape, frozen=True):
    """Probabilities of tokens, one by one."""

    content: list[ToldToken]
    refusal: None


class Choice(Shape, frozen=True):
    """What all kinds of choices have."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class CompletionChoice(Choice, frozen=True):
    """One answer to a prompt."""

    text: str
    logprobs: CompletionLogprobs | None


class CalledFunction(Shape, frozen=True):
    """A function, and its arguments as text."""

    name: str
    arguments: str


class MadeCall(Shape, frozen=True):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnsweredMessage(Shape, frozen=True):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MadeCall] | UnsetType = UNSET


class ChatChoice(Choice, frozen=True):
    """One answer to a conversation."""

    message: AnsweredMessage
    logprobs: ChatLogprobs | None


class Completed(Shape, frozen=True):
    """What all kinds of answers have."""

    id: str
    created: int
    model: str
    usage: Usage


class Completion(Completed, frozen=True):
    """The answers to a prompt."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Chat(Completed, frozen=True):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Hint(Shape, frozen=True):
    """What became of a hint, counted and block by block."""

    object: Literal["hint"]
    model: str
    action: str
    blocks: int
    accepted: int
    clipped: int
    missing: int
    rejected: int
    reason: str | None
    outcomes: list[Literal["accepted", "clipped", "missing", "rejected"]]


class Model(Shape, frozen=True):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Shape, frozen=True):
    """The models there are."""

    object: Literal["list"]
    data: list[Model]


class Health(Shape, frozen=True):
    """Whether requests can be served, and whether prefixes are reused."""

    serving: bool
    workers: dict[str, int]
    store: str


_OTHER_MODEL = Answer(404, "another model is served", OpenAIError)
_NO_WORKERS = Answer(503, "no worker is there yet", OpenAIError)
_REFUSALS = (
    Answer(400, "it cannot be served as it is", OpenAIError),
    _OTHER_MODEL,
    Answer(429, "there is too much to do; Retry-After says when to ask again", OpenAIError),
    Answer(503, "workers are starting, or failed it again and again", OpenAIError),
    Answer(504, "its timeout has passed", OpenAIError),
)
_STREAM = Answer(200, "its pieces, where `stream` is true", kind="text/event-stream")
_PROMPT = {"prompt": "Once upon a time", "max_tokens": 8}
_MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}

API = Api(
    "A front of a serving system",
    "The OpenAI API, and what the front shows of itself. Where all connections are in use an "
    "answer is 503, without a body; 500 is a defect, of which the log tells.",
    OpenAIError,
    (
        Operation(
            "completions", "POST", "/v1/completions", "Answer a prompt",
            (Answer(200, "the answer", Completion), _STREAM, *_REFUSALS), CompletionBody,
            examples=(_PROMPT, _PROMPT | {"logprobs": 2, "n": 2}, _PROMPT | {"stream": True}),
        ),
        Operation(
            "chats", "POST", "/v1/chat/completions", "Answer a conversation",
            (Answer(200, "the answer", Chat), _STREAM, *_REFUSALS), ChatBody,
            examples=(
                _MESSAGES,
                _MESSAGES | {"logprobs": True, "top_logprobs": 2},
                _MESSAGES | {"stream": True, "stream_options": {"include_usage": True}},
            ),
        ),
        Operation(
            "hints", "POST", "/v1/hints", "Tell the pool what to expect of a prompt",
            (
                Answer(200, "what became of it", Hint),
                Answer(400, "it cannot be done as it is", OpenAIError),
                _OTHER_MODEL,
                Answer(429, "as many hints are under way as may be", OpenAIError),
                Answer(501, "this server has no pool", OpenAIError),
                Answer(503, "no worker is there yet, or the pool is away", OpenAIError),
            ),
            HintBody,
            examples=({"prompt": "Once upon a time", "action": "retain", "ttl": "5m"},),
        ),
        Operation(
            "models", "GET", "/v1/models", "List the one model there is",
            (Answer(200, "the model", Models), _NO_WORKERS),
        ),
        Operation(
            "model", "GET", "/v1/models/{model:.+}", "Describe a model",
            (Answer(200, "the model", Model), _OTHER_MODEL, _NO_WORKERS),
        ),
        Operation(
            "health", "GET", "/health", "Say whether requests can be served",
            (Answer(200, "they can", Health), Answer(503, "they cannot", Health)),
            access="public",
        ),
        Operation(
            "metrics", "GET", "/metrics", "Show counters as Prometheus reads them",
            (Answer(200, "counters", kind=TEXT),),
        ),
        Operation(
            "stats", "GET", "/stats", "Show what the page shows, which changes with it",
            (Answer(200, "figures", dict[str, Any]),),
        ),
        *PAGE_OPERATIONS,
    ),
)  # fmt: skip
