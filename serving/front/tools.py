"""Functions that a model may ask to be called: what a request says of them, what an answer says.

`tool_choice` "none" leaves them out, "auto" lets the model choose, "required" and a function by
name make the answer one call, in the form that the parameters of the functions say. What an answer
wants called is read when it has ended; text before it is told as it comes. No I/O.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from serving.engine.tool_styles import Call, may_begin, read_calls
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NO_TOOLS", "CallsInText", "Tool", "ToolChoice", "Tools", "call_entry", "tools_of"]

TOOLS_MAX = 128
FORCED = "json"
"""The style of an answer that can be nothing but one call."""


class Function(msgspec.Struct, frozen=True):
    """A function, and the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function, in the wrapping that OpenAI gives it."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True):
    """Which function."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class Tools(NamedTuple):
    """The tools of a request as its prompt and its answer need them."""

    given: tuple[dict[str, Any], ...] = ()
    """As chat templates want them."""
    names: tuple[str, ...] = ()
    style: str = ""
    """How calls are told from text; empty where there are none."""
    form: str = ""
    """The schema of an answer that has to be a call."""
    reason: str = "tool_calls"
    """Why an answer that is a call has ended."""
    calls_max: int | None = None
    """Further calls of an answer are left out."""


NO_TOOLS = Tools()


def tools_of(
    tools: Sequence[Tool], choice: ToolChoice | None, style: str, *, calls_max: int | None = None
) -> Tools:
    """Read them. Raises InvalidArgumentError for what this model cannot be made to do."""
    if isinstance(choice, NamedChoice):
        tools_named = [each for each in tools if each.function.name == choice.function.name]
        if not tools_named:
            raise InvalidArgumentError(f"there is no tool {choice.function.name!r}")
    elif choice == "required" and not tools:
        raise InvalidArgumentError("there are no tools to choose from")
    if not tools or choice == "none":
        return NO_TOOLS
    if len(tools) > TOOLS_MAX:
        raise InvalidArgumentError(f"there may be {TOOLS_MAX} tools at most")
    if not style:
        raise InvalidArgumentError("this model's chat template knows no tools")
    given = tuple(msgspec.to_builtins(each) for each in tools)
    for each in given:
        function = each["function"]
        each["function"] = {key: told for key, told in function.items() if told is not None}
    names = tuple(each.function.name for each in tools)
    if isinstance(choice, NamedChoice):
        return Tools(given, names, FORCED, _form(tools_named), "stop")
    if choice == "required":
        return Tools(given, names, FORCED, _form(tools))
    if any(each.function.strict for each in tools):
        raise InvalidArgumentError(
            "strict is kept to where tool_choice is required or a function: the model may do as "
            "it likes otherwise"
        )
    return Tools(given, names, style, calls_max=calls_max)


def _form(tools: Sequence[Tool]) -> str:
    """The schema of one call."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": each.function.name},
                "arguments": each.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
        }
        for each in tools
    ]
    shared: dict[str, Any] = {}
    for each in tools:  # what parameters refer to is at the root of a schema
        parameters = each.function.parameters or {}
        for where in ("$defs", "definitions"):
            own = parameters.get(where, {})
            if not isinstance(own, dict):
                raise InvalidArgumentError(f"{where} must be an object")
            for name, told in own.items():
                if shared.setdefault(where, {}).setdefault(name, told) != told:
                    raise InvalidArgumentError(f"two functions have unlike {where} {name!r}")
        if '"$ref": "#"' in json.dumps(parameters):
            raise InvalidArgumentError("$ref '#' in the parameters of a function is not supported")
    return json.dumps({"anyOf": calls} | shared)


class CallsInText:
    """Parts text from calls as an answer comes."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._plain = False  # of a style that begins with a call or has none

    def add(self, text: str) -> str:
        """What of this is certainly no call."""
        style = self._tools.style
        if not style or self._plain:
            return text
        self._held += text
        if style == FORCED:
            return ""
        sure = may_begin(style, self._held)
        told, self._held = self._held[:sure], self._held[sure:]
        self._plain = bool(told) and style != "hermes"
        return told

    def finish(self) -> tuple[str, list[Call]]:
        """The text that is left, and the calls."""
        held, self._held = self._held, ""
        if not held:
            return "", []
        style = "llama" if self._tools.style == FORCED else self._tools.style
        before, calls = read_calls(style, held, self._tools.names) or (held, [])
        return before, calls[: self._tools.calls_max]


def call_entry(call: Call) -> dict[str, Any]:
    """A call as OpenAI's answers have it. Templates of Mistral take ids of nine letters only."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}
