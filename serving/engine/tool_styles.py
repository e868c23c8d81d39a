"""How models write that they want a function called, by the family of their chat template.

    style_of(template_source)             # "hermes", "mistral", "llama", or "" without tools
    read_calls(style, text)               # (text before the calls, calls), or None: it is only text

Hermes and Qwen write JSON between `<tool_call>` and `</tool_call>`, Mistral a list behind
`[TOOL_CALLS]`, Llama 3 one object with `parameters`, which may stand behind `<|python_tag|>`. The
marks of the latter two may be special tokens, which are no part of a text: the JSON alone will do.

A text that only resembles a call is a text. No I/O.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Call", "may_begin", "read_calls", "style_of"]

_BETWEEN = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
_MARKS = {"mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}


class Call(NamedTuple):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


def style_of(source: str) -> str:
    """The way of a template; empty where it knows no tools, or writes calls in another way."""
    if "tools" not in source or "<function=" in source:
        return ""
    if "<tool_call>" in source:
        return "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    return "llama" if "<|python_tag|>" in source or '"parameters"' in source else ""


def may_begin(style: str, text: str) -> int:
    """How much of a text is certainly none of a call: the rest may be one, or begin one."""
    if style == "hermes":
        at = text.find("<tool_call>")
        if at < 0:
            at = next((n for n in range(len(text)) if "<tool_call>".startswith(text[n:])), -1)
        return len(text) if at < 0 else len(text[:at].rstrip())
    begun = text.lstrip()
    mark = _MARKS[style]
    opens = begun[:1] in ("[" if style == "mistral" else "{") or not begun
    return 0 if opens or begun.startswith(mark) or mark.startswith(begun) else len(text)


def read_calls(style: str, text: str, names: Collection[str]) -> tuple[str, list[Call]] | None:
    """The text before the calls, and the calls; None where it has none of these functions."""
    if style == "hermes":
        at = text.find("<tool_call>")
        if at < 0 or _BETWEEN.sub("", text[at:]):
            return None
        before, told = text[:at].rstrip(), [_json(each) for each in _BETWEEN.findall(text[at:])]
    else:
        before, given = "", _json(text.strip().removeprefix(_MARKS[style]))
        told = given if isinstance(given, list) else [given]
    calls = [_call(each, names) for each in told]
    found = [call for call in calls if call is not None]
    return (before, found) if found and len(found) == len(calls) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(told: Any, names: Collection[str]) -> Call | None:
    if not isinstance(told, dict) or told.get("name") not in names:
        return None
    arguments = told.get("arguments", told.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return Call(told["name"], json.dumps(arguments, ensure_ascii=False))
