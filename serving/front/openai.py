"""The OpenAI API as values: what a body asks for, what an answer and an error look like.

    asked = read_completion(body, limits, tokenizer)     # an Asked, or BadRequestError
    Shape(asked, "cmpl-1", created).answer(text, ...)    # the JSON of an answer

A field that would change the answer and is not supported is refused by its name: an answer that
ignored it would be wrong without a sign. Fields that change nothing here (`user`, `metadata`) are
accepted. Beside OpenAI's: `top_k`, `priority` (a higher one goes first), `ignore_eos` and
`timeout` (seconds for the whole request). No I/O.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.workers.protocol import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.tokenizer import Tokenizer

__all__ = [
    "Asked",
    "BadRequestError",
    "Limits",
    "Shape",
    "error_body",
    "read_chat",
    "read_completion",
    "usage_of",
]

STOPS_MAX = 16
PRIORITY_MAX = 1 << 16

# Fields whose other values would change the answer, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "min_p": (None, 0),
}


class BadRequestError(Exception):
    """A request that cannot be served as it is; becomes an error in OpenAI's shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the front allow."""

    model: str
    context_max: int
    vocabulary: int
    deadline_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood."""

    chat: bool
    model: str
    tokens: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool
    priority: int
    deadline_s: float


def read_completion(body: object, limits: Limits, tokenizer: Tokenizer) -> Asked:
    """Read a body of /v1/completions."""
    fields = _checked(body, limits)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and prompt and all(_is_int(token) for token in prompt):
        tokens = prompt
    else:
        raise BadRequestError("prompt must be one text or one list of tokens", param="prompt")
    return _asked(fields, limits, tokens, chat=False, max_new=_max_tokens(fields, 16))


def read_chat(body: object, limits: Limits, tokenizer: Tokenizer) -> Asked:
    """Read a body of /v1/chat/completions."""
    fields = _checked(body, limits)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list that is not empty", param="messages")
    plain = [_message(each, at) for at, each in enumerate(messages)]
    try:
        tokens = tokenizer.chat(plain)
    except Exception as error:  # A template is a program that came with a checkpoint.
        raise BadRequestError(
            f"the model's chat template refuses these messages: {error}", param="messages"
        ) from error
    return _asked(fields, limits, tokens, chat=True, max_new=_max_tokens(fields, None))


def _checked(body: object, limits: Limits) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    model = body.get("model")
    if model is not None and model != limits.model:
        raise BadRequestError(
            f"the model {model!r} does not exist; this server has {limits.model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in neutral:
            raise BadRequestError(f"{name}={body[name]!r} is not supported here", param=name)
    return body


def _message(message: object, at: int) -> dict[str, str]:
    where = f"messages[{at}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequestError(f"{where} must be an object with a role", param=where)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadRequestError(f"{where}.content has parts that are no text", param=where)
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise BadRequestError(f"{where}.content must be a text", param=where)
    return {"role": message["role"], "content": content}


def _max_tokens(fields: dict[str, Any], default: int | None) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is not None:
            if not _is_int(value) or value < 1:
                raise BadRequestError(f"{name} must be a whole number above 0", param=name)
            return int(value)
    return default


def _asked(
    fields: dict[str, Any], limits: Limits, tokens: list[int], *, chat: bool, max_new: int | None
) -> Asked:
    _check_length(tokens, limits, max_new)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object", param="stream_options")
    return Asked(
        chat=chat,
        model=limits.model,
        tokens=tuple(tokens),
        sampling=_sampling(fields),
        max_new_tokens=limits.context_max - len(tokens) if max_new is None else max_new,
        stops=_stops(fields.get("stop")),
        stream=bool(
            _typed(fields, "stream", False, lambda v: isinstance(v, bool), "true or false")
        ),
        include_usage=bool(options.get("include_usage")),
        ignore_eos=bool(fields.get("ignore_eos")),
        priority=int(
            _typed(
                fields,
                "priority",
                0,
                lambda v: _is_int(v) and abs(v) <= PRIORITY_MAX,
                f"a whole number of at most {PRIORITY_MAX}",
            )
        ),
        deadline_s=float(
            _typed(
                fields,
                "timeout",
                limits.deadline_s,
                lambda v: _is_number(v) and 0 < v <= limits.deadline_s,
                f"seconds above 0, at most {limits.deadline_s:g}",
            )
        ),
    )


def _check_length(tokens: list[int], limits: Limits, max_new: int | None) -> None:
    if not tokens:
        raise BadRequestError("the prompt has no tokens", param="prompt")
    if min(tokens) < 0 or max(tokens) >= limits.vocabulary:
        raise BadRequestError(
            f"tokens must be between 0 and {limits.vocabulary - 1}", param="prompt"
        )
    wanted = len(tokens) + (1 if max_new is None else max_new)
    if wanted > limits.context_max:
        raise BadRequestError(
            f"this model's maximum context length is {limits.context_max} tokens, but "
            f"{len(tokens)} tokens of prompt and {wanted - len(tokens)} of answer were requested; "
            "shorten the prompt or lower max_tokens",
            param="messages" if max_new is None else "max_tokens",
            code="context_length_exceeded",
        )


def _sampling(fields: dict[str, Any]) -> Sampling:
    temperature = float(
        _typed(fields, "temperature", 1.0, lambda v: _is_number(v) and 0 <= v <= 2, "from 0 to 2")
    )
    top_p = float(
        _typed(fields, "top_p", 1.0, lambda v: _is_number(v) and 0 < v <= 1, "above 0, at most 1")
    )
    top_k = int(_typed(fields, "top_k", 0, lambda v: _is_int(v) and v >= -1, "-1 or more"))
    seed = _typed(fields, "seed", None, _is_int, "a whole number")
    if seed is None:
        # Without one every request is a draw of its own; with one it can be repeated.
        seed = secrets.randbits(62) if temperature else 0
    return Sampling(temperature, top_p, max(0, top_k), int(seed) & ((1 << 63) - 1))


def _stops(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(stops, list)
        or len(stops) > STOPS_MAX
        or not all(isinstance(each, str) and each for each in stops)
    ):
        raise BadRequestError(f"stop must be a text or up to {STOPS_MAX} of them", param="stop")
    return tuple(stops)


def _typed(
    fields: dict[str, Any],
    name: str,
    default: Any,
    good: Callable[[Any], bool],
    wanted: str,
) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not good(value):
        raise BadRequestError(f"{name} must be {wanted}, not {value!r}", param=name)
    return value


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kinds = {
        401: "authentication_error",
        404: "invalid_request_error",
        429: "rate_limit_error",
        499: "cancelled",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Shape:
    """The JSON of one answer, whole or in pieces."""

    def __init__(self, asked: Asked, request_id: str, created: int) -> None:
        self._chat = asked.chat
        self._stream = asked.stream
        self._include_usage = asked.stream and asked.include_usage
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": request_id,
            "object": f"{kind}.chunk" if asked.stream and asked.chat else kind,
            "created": created,
            "model": asked.model,
        }

    def answer(self, text: str, reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole of it."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**self._head, "choices": [choice], "usage": usage}

    def opening(self) -> dict[str, Any] | None:
        """The piece before any text: chats name the role."""
        if not self._chat:
            return None
        return self._chunk({"role": "assistant", "content": ""}, "", None)

    def piece(self, text: str, reason: str | None = None) -> dict[str, Any]:
        """Some text, or the reason for the end."""
        delta = {"content": text} if text else {}
        return self._chunk(delta, text, reason)

    def _chunk(self, delta: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"delta": delta} if self._chat else {"text": text}
        return self._with_usage([choice], None)

    def closing(self, usage: dict[str, Any]) -> dict[str, Any] | None:
        """The last piece, with the usage, where it was asked for."""
        return self._with_usage([], usage) if self._include_usage else None

    def _with_usage(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return chunk | {"usage": usage} if self._include_usage else chunk


def usage_of(prompt: int, cached: int, generated: int) -> dict[str, Any]:
    """OpenAI's usage: how many tokens, and how many of the prompt were not computed."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
