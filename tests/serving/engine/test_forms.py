"""Answers in a given form: what comes out satisfies the schema, however it is drawn.

Texts are drawn at random from what an automaton allows and judged by `valid`, which knows nothing
of automata: it looks at the value that `json` reads.
"""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.forms.automaton import Automaton, Reader, Words
from serving.engine.forms.known import Forms
from serving.engine.forms.network import DEPTH_MAX, Network
from serving.engine.forms.schema import compile_schema
from serving.engine.tokenizer import ByteTokenizer, WordTokenizer
from serving.engine.vocabulary import Vocabulary
from serving.workers.protocol import Sampling
from tests.serving.engine.support import add, make_engine, run
from transfer_engine.errors import InvalidArgumentError

BYTES = tuple(bytes([byte]) for byte in range(256))
MORE = (
    b'{"', b'": ', b'", "', b'"}', b"}}", b"[[", b"]", b" true", b"false", b"null", b"12", b"-0.5",
    b"the ", b"\n    ", b'\\"', b"\\u00e9", "é".encode(), "€😀".encode(), b'a": {"', b"\xe2\x82",
    b'":[1,2', b"e+1", b"x" * 40,
)  # fmt: skip
SPECIAL = 3
VOCABULARY = Vocabulary(
    (*BYTES, *MORE, *[b"<s>"] * SPECIAL), (True,) * (256 + len(MORE)) + (False,) * SPECIAL
)
SIZE = 300  # a few more than there are pieces, as models have


def automaton_of(schema):
    return Automaton(*compile_schema(json.dumps(schema)), Words(VOCABULARY, SIZE))


def drawn(automaton, generator, limit=400):
    """A text from what is allowed; None if it did not end in time. Ends as soon as it may."""
    reader, text = Reader(automaton), b""
    while not reader.complete:
        tokens = np.flatnonzero(reader.allowed()).tolist()
        assert tokens, text
        # Now and then what ends things, or texts would hardly ever end.
        ending = [t for t in tokens if VOCABULARY.pieces[t] in (b'"', b"}", b"]", b'"}', b"}}")]
        token = generator.choice(ending if ending and generator.random() < 0.5 else tokens)
        text += VOCABULARY.pieces[token]
        reader.take(token)
        if len(text) > limit:
            return None
    return text.decode()


def accepts(automaton, text):
    reader = Reader(automaton)
    for byte in text.encode("utf-8", "surrogatepass"):
        if not reader.allowed()[byte]:
            return False
        reader.take(byte)
    return reader.complete


def of_type(value, kind):
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "integer": int, "number": (int, float),
    }  # fmt: skip
    return isinstance(value, kinds[kind]) and not (
        isinstance(value, bool) and kind in ("integer", "number")
    )


def valid(value, schema, root):
    """Whether a value satisfies a schema."""
    if schema is True:
        return True
    if "$ref" in schema:
        found = root
        for step in schema["$ref"].split("/")[1:]:
            found = found[step]
        return valid(value, found, root)
    if "anyOf" in schema:
        return any(valid(value, each, root) for each in schema["anyOf"])
    kinds = schema.get("type")
    if kinds is not None:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(of_type(value, kind) for kind in kinds):
            return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1e9)
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1e9)
        return fits and all(valid(each, schema.get("items", True), root) for each in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", [])) and all(
            valid(each, known[name], root)
            if name in known
            else other is not False and valid(each, other, root)
            for name, each in value.items()
        )
    return True


KINDS = ["string", "integer", "number", "boolean", "null"]
NAMES = ["a", "ab", "é", 'q"', "\\", "€", "long name", "a\n"]
leaves = st.one_of(
    st.sampled_from([{"type": kind} for kind in KINDS]),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 4), st.integers(0, 4),
    ),
    st.sampled_from([
        {"enum": ["red", "reddish", "é\"\\", 7, None, {"a": [1]}]}, {"const": "x y"},
        {"type": "string", "enum": ["one", 1]}, {"type": ["null", "boolean"]}, True, {},
        {"type": ["string", "array"], "maxItems": 2, "maxLength": 3, "items": {"type": "null"}},
    ]),
)  # fmt: skip


def composed(inner):
    def an_object(properties, required, other):
        schema = {"type": "object", "properties": properties}
        schema["required"] = [name for name in properties if name in required]
        return schema | ({} if other is None else {"additionalProperties": other})

    return st.one_of(
        st.builds(
            an_object, st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
            st.sets(st.sampled_from(NAMES)), st.one_of(st.none(), st.booleans(), inner),
        ),
        st.builds(
            lambda items, low, more: {
                "type": "array", "items": items, "minItems": low, "maxItems": low + more,
            },
            inner, st.integers(0, 2), st.integers(0, 2),
        ),
        st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=3)),
    )  # fmt: skip


schemas = st.recursive(leaves, composed, max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 1 << 32))
def test_what_is_written_satisfies_the_schema(schema, seed):
    automaton, generator = automaton_of(schema), random.Random(seed)
    for _ in range(3):
        text = drawn(automaton, generator)
        if text is not None:
            assert valid(json.loads(text), schema, schema), (text, schema)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.text(max_size=6)
        | st.floats(-1e6, 1e6).filter(lambda each: "e" not in repr(each)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
    st.sampled_from([None, 1, 2]), st.booleans(),
)  # fmt: skip
def test_any_json_can_be_written_as_anything(value, indent, ascii_only):
    """In each of the ways that `json` has."""
    keys_escaped = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert accepts(automaton_of({"anyOf": [True]}), keys_escaped) == writable(value, ascii_only)


def writable(value, ascii_only):
    """Keys that need an escape are not written where any key may stand."""
    if isinstance(value, dict):
        return all(
            json.dumps(key, ensure_ascii=ascii_only) == f'"{key}"' and writable(each, ascii_only)
            for key, each in value.items()
        )
    return not isinstance(value, list) or all(writable(each, ascii_only) for each in value)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, ["0", "-7", "120"], ["01", "1.5", "", "-", "+1", " 1", "1" * 21]),
        ({"type": "number"}, ["-0.5", "1e9", "2.5E-3"], [".5", "1.", "1e", "1e999", "--1"]),
        (
            {"type": "string"},
            ['""', '"\\u00e9"', '"\\ud83d\\ude00"', '"é😀"', '"\\n\\""'],
            ['"\\ud83d"', '"\\ude00"', '"\n"', '"\\x"', '"\ud800"', "''", '"a'],
        ),
        ({"type": "string", "maxLength": 1}, ['"😀"', '"\\ud83d\\ude00"'], ['"ab"', '"\\n1"']),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
         ["[null]", "[ null , null ]"], ["[]", "[null,]", "[null,null,null]", "[1]"]),
        (
            {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]},
            ['{"a":1,"b":2}', '{ "b" : [] }'],
            ['{"a":1}', '{"b":1,"a":2}', '{"b":1,}', '{"b":1,"c":2}', "{}", '{,"b":1}'],
        ),
        (
            {"type": "object", "properties": {"ab": {"type": "null"}}, "required": ["zz"],
             "additionalProperties": {"type": "integer"}},
            ['{"ab":null,"zz":1,"a":2,"abc":3}', '{"zz":1}'],
            ['{"ab":1,"zz":1}', '{"zz":1,"ab":2}', '{"zz":1,"x":null}', '{"ab":null}'],
        ),
        ({"type": "object"}, ['{"x":{"y":[1]}}', "{}"], ["[]", "1", '{"x"}', '{"x":1} ']),
        ({"minItems": 1}, ["[1]"], ["[]", "1"]),
        (
            {"$ref": "#/$defs/tree", "$defs": {"tree": {
                "type": "object", "properties": {"left": {"anyOf": [
                    {"$ref": "#/$defs/tree"}, {"type": "null"}]}}, "required": ["left"]}}},
            ['{"left":{"left":null}}'], ['{"left":{}}', "null"],
        ),
    ],
)  # fmt: skip
def test_what_a_schema_allows_and_what_it_does_not(schema, right, wrong):
    automaton = automaton_of(schema)
    assert {text: accepts(automaton, text) for text in right} == dict.fromkeys(right, True)
    assert {text: accepts(automaton, text) for text in wrong} == dict.fromkeys(wrong, False)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "integer", "minimum": 3}, "minimum"),
        ({"oneOf": [{}]}, "oneOf"),
        ({"allOf": [{}]}, "allOf"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"properties": {"a": {"properties": {"b": {"multipleOf": 2}}}}}, "multipleOf"),
        ({"anyOf": [{}], "type": "string"}, "type beside anyOf"),
        ({"enum": ["a"], "maxLength": 3}, "maxLength beside enum"),
        ({"$ref": "http://example.com/x"}, "ref"),
        ({"$ref": "#/$defs/x"}, "leads to nothing"),
        ({"$ref": "#"}, "leads to itself"),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
          "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "leads to itself"),
        ({"type": "text"}, "type 'text'"),
        ({"type": ["string", 3]}, "type 3"),
        ({"enum": []}, "enum"),
        ({"enum": [1], "type": "string"}, "no value of its type"),
        ({"minItems": 3, "maxItems": 2}, "minItems"),
        ({"maxLength": 1 << 20}, "maxLength"),
        ({"maxLength": True}, "maxLength"),
        ({"properties": []}, "properties"),
        ({"type": "object", "required": "a"}, "required"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
        ({"items": [{}]}, "must be an object"),
        ({"properties": {"a": False}}, "must be an object"),
        ({"description": "x" * 40_000}, "bytes"),
        ({"properties": {f"p{at}": {"type": "string", "maxLength": 4000 - at} for at in range(99)}},
         "too much"),
        ({"properties": {f"p{at}": {} for at in range(300)}}, "more than 256"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_by_name(schema, named):
    with pytest.raises(InvalidArgumentError, match=named.replace("$", r"\$")):
        compile_schema(json.dumps(schema))


def test_nested_as_deep_as_memory_is_no_danger():
    with pytest.raises(InvalidArgumentError, match=r"nested|JSON"):
        compile_schema('{"items":' * 3000 + "{}" + "}" * 3000)
    automaton = automaton_of({"type": "array"})
    reader = Reader(automaton)
    for depth in range(DEPTH_MAX):
        assert reader.allowed()[ord("[")], depth
        reader.take(ord("["))
    assert not reader.allowed()[ord("[")]
    assert reader.allowed()[ord("]")]


def test_a_text_that_may_be_read_in_too_many_ways_ends_without_eating_memory():
    either = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    automaton = automaton_of({"type": "array", "items": either})
    reader = Reader(automaton)
    for _ in range(DEPTH_MAX):
        if not reader.allowed()[ord("[")]:
            break
        reader.take(ord("["))
    else:
        pytest.fail("every one of them was followed")


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0x10FFFF), (0x7F, 0x80), (0x7FF, 0x800), (0xFFFF, 0x10000), (0x20AC, 0x20AC),
     (0x1234, 0xFEDC), (0x10123, 0x98765), (0xD7FF, 0xE000)],
)  # fmt: skip
def test_ranges_of_characters_are_those_of_utf8(low, high):
    network = Network()
    part = network.part()
    network.characters(part.start, [(low, high)], part.end)
    automaton = Automaton(network, part, Words(Vocabulary(BYTES, (True,) * 256), 256))
    points = {0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF}
    points |= {low, high, max(0, low - 1), min(high + 1, 0x10FFFF), (low + high) // 2}
    points |= {random.Random(low).randrange(0x110000) for _ in range(200)}
    for point in points - set(range(0xD800, 0xE000)):
        assert accepts(automaton, chr(point)) == (low <= point <= high), hex(point)
    for surrogate in ("\ud800", "\udfff"):
        assert not accepts(automaton, surrogate)


def test_what_is_known_of_a_form_has_a_bound_and_may_be_forgotten(monkeypatch):
    monkeypatch.setattr("serving.engine.forms.automaton.SPOTS_MAX", 4)
    monkeypatch.setattr("serving.engine.forms.automaton.MASKS_MAX", 2)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3}
    automaton, generator = automaton_of(schema), random.Random(1)
    for _ in range(20):
        text = drawn(automaton, generator)
        assert text is None or valid(json.loads(text), schema, schema)
    assert len(automaton._masks) <= 2


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
}


def forms_of_bytes():
    return Forms(lambda: ByteTokenizer().vocabulary, 260)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_answers_in_the_form(temperature):
    """Whatever a random model would like to say, and beside others that may say anything."""
    engine = make_engine(forms=forms_of_bytes())
    form, prompt = json.dumps(SCHEMA), [256, *b"Describe it. "]
    sampling = Sampling(temperature, seed=4, form=form, form_from=len(prompt), likeliest=2)
    stops = frozenset({257})
    notes = add(engine, prompt, count=300, sampling=sampling, stop_tokens=stops)
    free = add(engine, prompt, count=20, sampling=Sampling(temperature, seed=4))
    run(engine)
    assert notes.reason == "stop"
    assert valid(json.loads(bytes(notes.tokens)), SCHEMA, SCHEMA)
    alone = add(engine, prompt, count=20, sampling=Sampling(temperature, seed=4))
    run(engine)
    assert free.tokens == alone.tokens
    # Probabilities are those of the model, which thinks little of JSON.
    assert min(told.chosen for told in notes.likelihoods) < -6
    # Another engine that is given a part of the answer goes on with the same.
    for cut in (1, 7, len(notes.tokens)):
        other = make_engine(forms=forms_of_bytes())
        resumed = add(
            other,
            prompt + notes.tokens[:cut],
            count=300 - cut,
            sampling=sampling,
            stop_tokens=stops,
        )
        run(other)
        assert resumed.tokens == notes.tokens[cut:]
        assert resumed.reason == "stop"


def test_an_answer_that_may_end_or_go_on_ends_with_the_models_own_token():
    engine, told = make_engine(forms=forms_of_bytes()), set()
    for seed in range(40):
        sampling = Sampling(1.0, seed=seed, form='{"enum":[1,12]}', form_from=3)
        notes = add(engine, [256, 65, 66], sampling=sampling, stop_tokens=frozenset({257}))
        run(engine)
        engine.release(notes.sequence)
        assert notes.reason == "stop"
        told.add(tuple(notes.tokens))
    assert told == {(*b"1", 257), tuple(b"12")}


def test_a_model_whose_tokens_are_words_writes_no_json():
    forms = Forms(lambda: WordTokenizer().vocabulary, 260)
    with pytest.raises(InvalidArgumentError, match="not known"):
        forms.check("{}")
    no_letters = Vocabulary((b"ab", b"{"), (True, True))
    with pytest.raises(InvalidArgumentError, match="single letters"):
        Forms(lambda: no_letters, 2).check("{}")
