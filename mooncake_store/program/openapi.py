"""What an HTTP application can be asked, as a table, and its description by OpenAPI 3.1. No I/O.

    API = Api("REST", "What it is.", Error, (
        Operation("exist", "GET", "/api/exist/{key:.+}", "Say whether there is an object",
                  (Answer(200, "whether there is one", Exists),)),
    ))
    openapi(API)["paths"]["/api/exist/{key}"]["get"]

Applications take their routes from the table (`program.shell`, `compat.control`), so neither has a
path that the other lacks, and serve the description at `PATH`. Bodies are the types that requests
are read into; those of answers are strict, so that one which has more than is described shows.
Answers that any request may get are told in words alone: no connection, or no HTTP. O(operations).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from mooncake_store import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "JSON", "PATH", "TEXT", "Answer", "Api", "Failed", "Operation", "Parameter", "Shape", "Why",
    "openapi",
]  # fmt: skip

PATH = "/openapi.json"
JSON, TEXT = "application/json", "text/plain"

Access: TypeAlias = Literal["token", "public", "admin"]

_VARIABLE = re.compile(r"\{(\w+):([^{}]+)\}")
_ANY = (".+", r"[\s\S]+")
_COMPONENTS = "#/components/schemas/{name}"
_SECURED = {"token": "token", "admin": "administrators"}


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body of an answer: it has these fields and no others."""


class Why(Shape, frozen=True):
    """The number of an error (docs/reference/errors.md), what is wrong, and the next step."""

    code: int
    message: str
    advice: str


class Failed(Shape, frozen=True):
    """Why something was not told, or not done."""

    error: Why


class Document(msgspec.Struct, frozen=True):
    """A description of this kind."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One that an operation may get; a status may have several, of different kinds."""

    status: int | Literal["default"]
    what: str
    body: Any = None
    """What its JSON is; of other kinds nothing is said but that a text is one."""
    kind: str = JSON


@dataclass(frozen=True, slots=True)
class Parameter:
    """A text in the query."""

    name: str
    what: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that can be asked."""

    name: str
    method: str
    path: str
    """As routes are written: `/api/get/{key:.+}`."""
    what: str
    answers: tuple[Answer, ...]
    body: Any = None
    """What its JSON is read into."""
    parameters: tuple[Parameter, ...] = ()
    access: Access = "token"
    handler: str = ""
    """What answers it, by a name of the application's; the operation's own by default."""
    examples: tuple[dict[str, Any], ...] = ()
    """Bodies."""

    @property
    def plain_path(self) -> str:
        """The path as OpenAPI writes it."""
        return _VARIABLE.sub(r"{\1}", self.path)


@dataclass(frozen=True, slots=True)
class Api:
    """All that an application can be asked."""

    title: str
    what: str
    error: Any
    """What is answered where it is not done."""
    operations: tuple[Operation, ...]
    path: str = PATH
    """Where it is described..."""
    described_to: Access = "token"
    """...and to whom."""

    @property
    def whole(self) -> tuple[Operation, ...]:
        """Its operations, and the description itself."""
        told = Answer(200, "the description", Document)
        own = Operation(
            "openapi", "GET", self.path, "Describe this API", (told,), access=self.described_to
        )
        return (*self.operations, own)


def openapi(
    api: Api,
    *,
    secured: bool = True,
    further: Callable[[Operation], Iterable[Answer]] = lambda _: (),
) -> dict[str, Any]:
    """Describe an API. `secured` where a token is asked for; `further` answers of operations."""
    answers = {each.name: (*each.answers, *further(each)) for each in api.whole}
    kinds = [each.body for each in api.whole if each.body is not None]
    kinds += [
        each.body for found in answers.values() for each in found if each.body not in (None, *kinds)
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_COMPONENTS)
    schema_of = list(zip(kinds, schemas, strict=True))

    def schema(kind: Any) -> dict[str, Any]:
        return next(found for each, found in schema_of if each is kind or each == kind)

    paths: dict[str, dict[str, Any]] = {}
    used: set[str] = set()
    for each in api.whole:
        told: dict[str, Any] = {"operationId": each.name, "summary": each.what}
        if parameters := [*_in_path(each), *map(_in_query, each.parameters)]:
            told["parameters"] = parameters
        if each.body is not None:
            told["requestBody"] = {"required": True, "content": {JSON: _body(each, schema)}}
        told["responses"] = _responses(answers[each.name], schema)
        if (name := _SECURED.get(each.access)) and (secured or each.access == "admin"):
            told["security"] = [{name: []}]
            used.add(name)
        paths.setdefault(each.plain_path, {})[each.method.lower()] = told
    parts: dict[str, Any] = {"schemas": {name: components[name] for name in sorted(components)}}
    if used:
        parts["securitySchemes"] = {
            name: {"type": "http", "scheme": "bearer"} for name in sorted(used)
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": api.title, "description": api.what, "version": __version__},
        "paths": paths,
        "components": parts,
    }


def _body(operation: Operation, schema: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {"schema": schema(operation.body)}
    if operation.examples:
        told["examples"] = {
            str(number): {"value": each} for number, each in enumerate(operation.examples, 1)
        }
    return told


def _in_path(operation: Operation) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1}
            | ({} if pattern in _ANY else {"pattern": f"^{pattern}$"}),
        }
        for name, pattern in _VARIABLE.findall(operation.path)
    ]


def _in_query(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": "query",
        "description": parameter.what,
        "required": parameter.required,
        "schema": {"type": "string"},
    }


def _responses(
    answers: Iterable[Answer], schema: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Answers by status; where one status means several things, all of them are said."""
    found: dict[str, dict[str, Any]] = {}
    for each in sorted(answers, key=lambda each: str(each.status)):
        told = found.setdefault(str(each.status), {"description": each.what, "content": {}})
        if each.what not in told["description"]:
            told["description"] += f"; {each.what}"
        shape = {"type": "string"} if each.kind == TEXT else {}
        if each.body is not None:
            shape = schema(each.body)
        known = told["content"].setdefault(each.kind, {"schema": shape})["schema"]
        if known != shape:
            told["content"][each.kind]["schema"] = {"anyOf": [known, shape]}
    return found
