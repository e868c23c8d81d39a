"""The OpenAI API as values: what a body asks for (`answers` has what it is answered with).

    asked = read_completion(raw, limits, tokenizer)      # an Asked, or BadRequestError

A field that would change the answer and is not supported is refused by its name: an answer that
ignored it would be wrong without a sign. Fields that change nothing here (`user`, `metadata`) are
accepted. Beside OpenAI's: `top_k`, `stop_token_ids`, `include_stop_str_in_output`, `min_tokens`,
`ignore_eos`, `priority` (a higher one goes first) and `timeout` (seconds for the whole request).
No I/O.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from serving.engine.sampling import Sampling
from serving.front.formats import ResponseFormat, checked, form_of
from serving.front.text import Stopping
from serving.front.tools import NO_TOOLS, Tool, ToolChoice, Tools, tools_of
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from serving.engine.tokenizer import Tokenizer

__all__ = [
    "Asked",
    "BadRequestError",
    "Limits",
    "check_model",
    "check_tokens",
    "decode_body",
    "read_chat",
    "read_completion",
    "read_tools",
    "tokens_of_chat",
    "tokens_of_prompt",
]

STOPS_MAX = 16
STOP_TOKENS_MAX = 64
CHOICES_MAX = 16
PRIORITY_MAX = 1 << 16
_SEED_MASK = (1 << 63) - 1

T = TypeVar("T")
Count = Annotated[int, Meta(ge=1)]
Id = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]


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


# -- bodies


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content; parts that are no text are refused for the lack of one."""

    text: str


class CalledFunction(msgspec.Struct, frozen=True):
    """What a model wanted called."""

    name: str
    arguments: str = "{}"


class MadeCall(msgspec.Struct, frozen=True):
    """A call of an earlier answer."""

    function: CalledFunction
    id: str = ""

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates want it: with the arguments read, if they can be."""
        arguments: Any = self.function.arguments
        with suppress(ValueError, RecursionError):
            arguments = msgspec.json.decode(arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation; one with calls needs no content."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates want it."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        plain: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain for call in self.tool_calls]
        others = {"tool_call_id": self.tool_call_id, "name": self.name}
        return plain | {key: told for key, told in others.items() if told is not None}


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream is to tell beside the text."""

    include_usage: Any = False


class Neutral(msgspec.Struct, frozen=True):
    """Fields that are served as they stand here, or null: other values would change the answer."""

    best_of: Any = 1
    echo: Any = False
    suffix: Any = ""
    prompt_logprobs: Any = None
    presence_penalty: Any = 0
    frequency_penalty: Any = 0
    repetition_penalty: Any = 1
    logit_bias: Any = {}
    functions: Any = []
    function_call: Any = None
    modalities: Any = msgspec.field(default_factory=lambda: ["text"])
    audio: Any = None
    min_p: Any = 0
    bad_words: Any = []
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


_NEUTRAL = Neutral()


class Body(Neutral, frozen=True):
    """What both kinds of requests have; null says what leaving a field out says."""

    model: str | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=STOPS_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | Annotated[list[Any], Meta(max_length=0)] | None = None
    """An empty list is what some languages make of an empty object."""
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=STOP_TOKENS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: Any = False
    priority: Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CompletionBody(Body, frozen=True):
    """A body of /v1/completions."""

    prompt: str | list[int | str | list[int]] | None = None
    tools: Any = None
    logprobs: bool | Annotated[int, Meta(ge=0, le=5)] | None = None
    """False says nothing, as null does; a number how many of the likeliest are told."""

    @property
    def likeliest(self) -> int:
        """How many of the likeliest tokens are asked for; -1 for no probabilities at all."""
        if self.top_logprobs:
            raise BadRequestError(
                "top_logprobs is of chats: a completion has a number of logprobs",
                param="top_logprobs",
            )
        if self.logprobs is True:
            raise BadRequestError("logprobs must be a number, not true", param="logprobs")
        return -1 if self.logprobs is None or self.logprobs is False else self.logprobs


class ChatBody(Body, frozen=True):
    """A body of /v1/chat/completions."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None

    @property
    def likeliest(self) -> int:
        """How many of the likeliest tokens are asked for; -1 for no probabilities at all."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else -1


# In what msgspec says: the field that is missing, or the path to the one that is wrong. Of a
# conversation, param tells which message.
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WRONG = re.compile(r"(.*) - at `\$\.((messages\[\d+\]|\w+).*)`")


def decode_body(raw: bytes, kind: type[T]) -> T:
    """A JSON body as a struct. Raises BadRequestError, which names a field that is wrong."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if wrong := _WRONG.fullmatch(str(error)):
            reason, path, param = wrong.groups()
            raise BadRequestError(f"{path}: {reason}", param=param) from error
        if missing := _MISSING.fullmatch(str(error)):
            raise BadRequestError(f"{missing[1]} is missing", param=missing[1]) from error
        raise BadRequestError(f"the body must be a JSON object: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error


# -- requests


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the front allow."""

    model: str
    context_max: int
    vocabulary: int
    deadline_s: float = 120.0
    eos: tuple[int, ...] = ()
    """Tokens that end an answer, unless that is not wanted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood."""

    chat: bool
    model: str
    tokens: tuple[int, ...]
    sampling: Sampling
    """Of the first choice."""
    choices: int
    max_new_tokens: int
    stopping: Stopping
    stop_tokens: tuple[int, ...]
    """Those that end the answer, the model's own among them."""
    named_stop_tokens: tuple[int, ...]
    """Those of them that the request names."""
    tools: Tools
    stream: bool
    include_usage: bool
    priority: int
    deadline_s: float

    def sampling_of(self, choice: int) -> Sampling:
        """How the tokens of a choice are chosen: each is a draw of its own."""
        sampling = self.sampling
        return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & _SEED_MASK)


def read_completion(raw: bytes, limits: Limits, tokenizer: Tokenizer) -> Asked:
    """Read a body of /v1/completions."""
    body = _checked(decode_body(raw, CompletionBody), limits)
    if body.tools:
        raise BadRequestError("tools are of chats", param="tools")
    tokens = tokens_of_prompt(body.prompt, tokenizer)
    return _asked(body, limits, tokens, _form(body, NO_TOOLS, tokenizer), NO_TOOLS)


def read_chat(raw: bytes, limits: Limits, tokenizer: Tokenizer) -> Asked:
    """Read a body of /v1/chat/completions."""
    body = _checked(decode_body(raw, ChatBody), limits)
    calls_max = 1 if body.parallel_tool_calls is False else None
    tools = read_tools(body.tools, body.tool_choice, tokenizer, calls_max)
    tokens = tokens_of_chat(body.messages, tokenizer, tools)
    return _asked(body, limits, tokens, _form(body, tools, tokenizer), tools)


def tokens_of_prompt(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt as /v1/completions takes it: one text, or one list of tokens."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if prompt and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise BadRequestError("prompt must be one text or one list of tokens", param="prompt")


def read_tools(
    tools: list[Tool] | None,
    choice: ToolChoice | None,
    tokenizer: Tokenizer,
    calls_max: int | None = None,
) -> Tools:
    """The tools of a chat."""
    try:
        return tools_of(tools or (), choice, tokenizer.tool_style, calls_max=calls_max)
    except InvalidArgumentError as error:
        raise BadRequestError(f"tools: {error.what}", param="tools") from error


def tokens_of_chat(
    messages: list[Message] | None, tokenizer: Tokenizer, tools: Tools = NO_TOOLS
) -> list[int]:
    """The tokens of a conversation, by the model's own template."""
    if not messages:
        raise BadRequestError("messages must be a list that is not empty", param="messages")
    try:
        return tokenizer.chat([message.plain for message in messages], tools.given)
    except InvalidArgumentError as error:
        raise BadRequestError(error.what, param="messages") from error


AnyBody = TypeVar("AnyBody", bound=Body)


def _checked(body: AnyBody, limits: Limits) -> AnyBody:
    if body.model is not None:
        check_model(body.model, limits)
    for name in Neutral.__struct_fields__:
        value = getattr(body, name)
        if value not in (None, getattr(_NEUTRAL, name)):
            raise BadRequestError(f"{name}={value!r} is not supported here", param=name)
    return body


def check_model(model: str, limits: Limits) -> None:
    """Raise BadRequestError for a model that is not the one served."""
    if model != limits.model:
        raise BadRequestError(
            f"the model {model!r} does not exist; this server has {limits.model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _form(body: Body, tools: Tools, tokenizer: Tokenizer) -> str:
    """The schema of the answer, which is of its format or of a call that it has to be."""
    param = "response_format"
    try:
        form = form_of(body.response_format, tokenizer)
        if form and tools.style:
            raise InvalidArgumentError("tools are not supported beside it")
        param = "tools"
        return form or checked(tools.form, tokenizer)
    except InvalidArgumentError as error:
        raise BadRequestError(f"{param}: {error.what}", param=param) from error


def _asked(
    body: CompletionBody | ChatBody,
    limits: Limits,
    tokens: list[int],
    form: str,
    tools: Tools,
) -> Asked:
    """The request; the answer of a chat may be as long as the context allows."""
    by_default = None if isinstance(body, ChatBody) else 16
    max_new = body.max_completion_tokens or body.max_tokens or by_default
    check_tokens(tokens, limits, max_new)
    deadline_s = body.timeout or limits.deadline_s
    if deadline_s > limits.deadline_s:
        raise BadRequestError(
            f"timeout must be at most {limits.deadline_s:g} seconds, not {deadline_s:g}",
            param="timeout",
        )
    options = body.stream_options
    max_new = limits.context_max - len(tokens) if max_new is None else max_new
    own = () if body.ignore_eos else limits.eos
    named = tuple(token for token in body.stop_token_ids or () if token not in own)
    stopping = _stopping(body, max_new, named, limits)
    sampling = _sampling(body)
    if form:
        sampling = msgspec.structs.replace(sampling, form=form, form_from=len(tokens))
    if stopping.min_tokens:
        until = len(tokens) + stopping.min_tokens
        sampling = msgspec.structs.replace(sampling, banned=own + named, banned_before=until)
    return Asked(
        chat=isinstance(body, ChatBody),
        model=limits.model,
        tokens=tuple(tokens),
        sampling=sampling,
        choices=body.n or 1,
        max_new_tokens=max_new,
        stopping=stopping,
        stop_tokens=own + named,
        named_stop_tokens=named,
        tools=tools,
        stream=bool(body.stream),
        include_usage=isinstance(options, StreamOptions) and bool(options.include_usage),
        priority=body.priority or 0,
        deadline_s=deadline_s,
    )


def _stopping(body: Body, max_new: int, named: tuple[int, ...], limits: Limits) -> Stopping:
    """What ends the answer beside the model."""
    if max(named, default=0) >= limits.vocabulary:
        raise BadRequestError(
            f"stop_token_ids must be below {limits.vocabulary}", param="stop_token_ids"
        )
    min_tokens, stop = body.min_tokens or 0, body.stop or []
    if min_tokens > max_new:
        raise BadRequestError(
            f"min_tokens is {min_tokens}, above the {max_new} tokens that the answer may have",
            param="min_tokens",
        )
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    return Stopping(strings, bool(body.include_stop_str_in_output), min_tokens)


def check_tokens(tokens: list[int], limits: Limits, max_new: int | None) -> None:
    """Raise BadRequestError for a prompt, and an answer, that the model cannot have."""
    if not tokens:
        raise BadRequestError("the prompt has no tokens", param="prompt")
    if min(tokens) < 0 or max(tokens) >= limits.vocabulary:
        raise BadRequestError(
            f"tokens of a prompt must be between 0 and {limits.vocabulary - 1}", param="prompt"
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


def _sampling(body: CompletionBody | ChatBody) -> Sampling:
    temperature = 1.0 if body.temperature is None else body.temperature
    seed = body.seed
    if seed is None:
        # Without one every request is a draw of its own; with one it can be repeated.
        seed = secrets.randbits(62) if temperature else 0
    top_p = 1.0 if body.top_p is None else body.top_p
    return Sampling(temperature, top_p, max(0, body.top_k or 0), seed & _SEED_MASK, body.likeliest)
