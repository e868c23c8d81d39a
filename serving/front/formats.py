"""`response_format`: the form that an answer has to be in, as the schema that workers keep to.

`json_object` is any object; `json_schema` is what its schema says, as far as it can be kept to
(`serving.engine.forms.schema`). What cannot be is refused here, before a worker is asked. No I/O.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from serving.engine.forms.known import check_vocabulary
from serving.engine.forms.schema import compile_schema
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from serving.engine.tokenizer import Tokenizer

__all__ = ["ResponseFormat", "checked", "form_of"]

_ANY_OBJECT = '{"type":"object"}'


class NamedSchema(msgspec.Struct, frozen=True):
    """A schema; its name and description are for the reader of the request."""

    given: dict[str, Any] = msgspec.field(name="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Nothing else is done than what it asks for."""


class ResponseFormat(msgspec.Struct, frozen=True):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


def form_of(wanted: ResponseFormat | None, tokenizer: Tokenizer) -> str:
    """The schema of an answer; empty where it may be anything.

    Raises InvalidArgumentError for one that this model's answers cannot be made to satisfy.
    """
    if wanted is None or wanted.type == "text":
        return ""
    form = _ANY_OBJECT
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise InvalidArgumentError("json_schema is missing")
        form = msgspec.json.encode(wanted.json_schema.given).decode()
    return checked(form, tokenizer)


def checked(form: str, tokenizer: Tokenizer) -> str:
    """A schema that this model's answers can be made to satisfy, or none; raises likewise."""
    if form:
        check_vocabulary(tokenizer.vocabulary)
        _check(form)
    return form


@lru_cache(64)
def _check(form: str) -> None:
    """Clients send the same schema again and again."""
    compile_schema(form)
