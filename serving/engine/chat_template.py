"""A conversation as a model was taught it: the Jinja template that comes with its checkpoint.

    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    template.render([{"role": "user", "content": "Hello"}])

Templates use what the library they are written for gives them: `raise_exception` to refuse a
conversation, `strftime_now`, a `tojson` that escapes nothing for HTML, `break` and `continue`, and
a tag around what the model is to answer (`generation`), which is left out here.

They come from whoever made the checkpoint, so they run in a sandbox that lets them change nothing.
"""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any, NoReturn

from serving.engine.tool_styles import style_of
from transfer_engine.errors import ConfigError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """One template, compiled. Raises ConfigError for one that is none."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        import jinja2

        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of the model cannot be used: {error}",
                advice="correct chat_template in its directory, or take it away",
            ) from error
        self._special = dict(special)
        self.tool_style = style_of(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The text up to where the assistant's answer begins.

        Raises InvalidArgumentError for a conversation that the template refuses or fails on.
        """
        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except _RefusedError as error:
            raise InvalidArgumentError(f"the model takes no such conversation: {error}") from None
        except Exception as error:  # Whatever a template does wrong, or the sandbox forbids.
            raise InvalidArgumentError(
                f"the model's chat template fails on it: {type(error).__name__}: {error}"
            ) from error
        return text


class _RefusedError(Exception):
    """Raised by a template."""


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> Any:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads the tag around an answer, and keeps what is within."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment
