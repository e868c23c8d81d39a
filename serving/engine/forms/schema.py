"""A JSON schema as a grammar: every text of it is JSON that satisfies the schema.

    network, part = compile_schema('{"type": "object", "properties": {...}}')

Supported: `type`, `properties`, `required`, `additionalProperties`, `items`, `minItems`,
`maxItems`, `minLength`, `maxLength`, `enum`, `const`, `anyOf`, and `$ref` to `#` and its `$defs`.
Any other keyword that would say something is refused by its name; so is a keyword that would have
to hold beside `anyOf`, `$ref`, `enum` or `const`, but for a type beside the latter two.

Members come in the order of `properties`. Where `additionalProperties` says nothing there are none
beside those, unless no `properties` are given. No I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from serving.engine.forms.json_text import JsonParts
from serving.engine.forms.network import Network
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from serving.engine.forms.network import Part

__all__ = ["SCHEMA_BYTES_MAX", "compile_schema"]

SCHEMA_BYTES_MAX = 1 << 15
COUNT_MAX = 1 << 12
PROPERTIES_MAX = 256
STATES_MAX = 1 << 16
_NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions",
})  # fmt: skip
_OF_TYPES = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "number": (),
    "integer": (),
    "boolean": (),
    "null": (),
}
_OF_ANY_TYPE = frozenset(name for names in _OF_TYPES.values() for name in names)


def compile_schema(text: str) -> tuple[Network, Part]:
    """The grammar of a schema, given as JSON; an InvalidArgumentError names what is refused."""
    if len(text.encode()) > SCHEMA_BYTES_MAX:
        raise InvalidArgumentError(f"the schema has more than {SCHEMA_BYTES_MAX} bytes")
    try:
        schema = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the schema is no JSON: {error}") from error
    compiler = _Compiler(schema)
    try:
        part = compiler.part(schema)
    except RecursionError as error:
        raise InvalidArgumentError("the schema is nested too deeply") from error
    for name, referred in compiler.referred.items():
        if compiler.network.loops(referred):
            raise InvalidArgumentError(f"$ref {name!r} leads to itself and to nothing else")
    if not compiler.network.spot([(part.start, None)]):
        raise InvalidArgumentError("the schema has too many alternatives at once")
    return compiler.network, part


class _Compiler:
    def __init__(self, root: Any) -> None:
        self._root = root
        self.network = Network()
        self._json = JsonParts(self.network)
        self.referred: dict[str, Part] = {}

    def part(self, schema: Any) -> Part:
        """A part for a schema."""
        part = self.network.part()
        self._into(part, schema)
        return part

    def _into(self, part: Part, schema: Any) -> None:
        net = self.network
        if len(net.edges) > STATES_MAX:
            raise InvalidArgumentError("the schema asks for too much at once: its counts multiply")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidArgumentError(f"a schema must be an object, not {schema!r}")
        said = schema.keys() - _NOTES
        if "$ref" in said:
            _alone(said, "$ref")
            net.call(part.start, self._referred(schema["$ref"]), part.end)
        elif "anyOf" in said:
            _alone(said, "anyOf")
            for each in _list(schema, "anyOf"):
                net.call(part.start, self.part(each), part.end)
        elif said & {"enum", "const"}:
            self._constants(part, schema, said)
        elif not said:
            net.call(part.start, self._json.anything, part.end)
        else:
            _known(said - {"type"} - _OF_ANY_TYPE)
            for kind in _types(schema, said):
                self._typed(part, kind, schema)

    def _constants(self, part: Part, schema: dict[str, Any], said: set[str]) -> None:
        name = "enum" if "enum" in said else "const"
        _alone(said - {"type"}, name)
        values = _list(schema, "enum") if name == "enum" else [schema["const"]]
        types = _types(schema, said) if "type" in said else list(_OF_TYPES)
        values = [value for value in values if any(_is(value, kind) for kind in types)]
        if not values:
            raise InvalidArgumentError(f"{name} has no value of its type")
        self._json.constants(part.start, values, part.end)

    def _typed(self, part: Part, kind: str, schema: dict[str, Any]) -> None:
        net, json = self.network, self._json
        if kind == "object":
            net.call(part.start, self._object(schema), part.end)
        elif kind == "array":
            item = self.part(schema.get("items", True))
            net.call(part.start, json.array(item, *_counts(schema, "Items")), part.end)
        elif kind == "string":
            net.call(part.start, json.string(*_counts(schema, "Length")), part.end)
        elif kind == "boolean":
            net.literals(part.start, [b"true", b"false"], part.end)
        elif kind == "null":
            net.literals(part.start, [b"null"], part.end)
        else:
            net.call(part.start, json.integer if kind == "integer" else json.number, part.end)

    def _object(self, schema: dict[str, Any]) -> Part:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise InvalidArgumentError("properties must be an object")
        if len(properties) > PROPERTIES_MAX:
            raise InvalidArgumentError(f"properties has more than {PROPERTIES_MAX} members")
        required = _list(schema, "required") if schema.get("required") else []
        if not all(isinstance(name, str) for name in required):
            raise InvalidArgumentError("required must be a list of names")
        others = schema.get("additionalProperties", not properties)
        undeclared = dict.fromkeys(name for name in required if name not in properties)
        if undeclared and others is False:
            names = ", ".join(undeclared)
            raise InvalidArgumentError(f"required has {names}, which additionalProperties forbids")
        other = None if others is False else self.part(others)
        members = [(name, self.part(each), name in required) for name, each in properties.items()]
        members += [(name, other or self.part(True), True) for name in undeclared]
        return self._json.object(members, other)

    def _referred(self, name: Any) -> Part:
        """The part of a schema that others refer to."""
        if not isinstance(name, str) or not name.startswith("#"):
            raise InvalidArgumentError(f"$ref {name!r} is not supported: only #, #/$defs/NAME")
        if name not in self.referred:
            schema = self._root
            for step in name[1:].split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                if not isinstance(schema, dict) or step not in schema:
                    raise InvalidArgumentError(f"$ref {name!r} leads to nothing")
                schema = schema[step]
            self.referred[name] = self.network.part()
            self._into(self.referred[name], schema)
        return self.referred[name]


def _alone(said: set[str], name: str) -> None:
    _known(said - _OF_ANY_TYPE - {"type", "enum", "const", "anyOf", "$ref"})
    if beside := sorted(said - {name}):
        raise InvalidArgumentError(f"{beside[0]} beside {name} is not supported")


def _known(unknown: set[str]) -> None:
    if unknown:
        raise InvalidArgumentError(f"the keyword {min(unknown)} of a schema is not supported")


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    values = schema[name]
    if not isinstance(values, list) or not values:
        raise InvalidArgumentError(f"{name} must be a list that is not empty")
    return values


def _types(schema: dict[str, Any], said: set[str]) -> list[str]:
    """The types that a value may have: without any, those that the keywords are about."""
    if "type" not in said:
        return [kind for kind, names in _OF_TYPES.items() if said & set(names)]
    given = schema["type"]
    types = [given] if isinstance(given, str) else _list(schema, "type")
    for each in types:
        if each not in _OF_TYPES:
            raise InvalidArgumentError(f"type {each!r} is none of {', '.join(_OF_TYPES)}")
    return types


def _counts(schema: dict[str, Any], what: str) -> tuple[int, int | None]:
    """How many there may be: at least, at most."""
    found: list[int | None] = []
    for name, without in ((f"min{what}", 0), (f"max{what}", None)):
        value = schema.get(name, without)
        if value is not None and (type(value) is not int or not 0 <= value <= COUNT_MAX):
            raise InvalidArgumentError(f"{name} must be a number from 0 to {COUNT_MAX}")
        found.append(value)
    least, most = found[0] or 0, found[1]
    if most is not None and least > most:
        raise InvalidArgumentError(f"min{what} is above max{what}")
    return least, most


def _is(value: Any, kind: str) -> bool:
    """Whether a value of JSON has a type."""
    if kind in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or value == int(value))
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[kind])
