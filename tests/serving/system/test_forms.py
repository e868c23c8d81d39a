"""OpenAI's client and a served checkpoint: answers in a form, and what is told of their tokens."""

import json
import math

import pytest

from tests.serving.system.checkpoints import checkpoint
from tests.serving.system.conftest import started

openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["small", "large"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "flags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Write <tool_call>{...}</tool_call>.{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
MESSAGES = [{"role": "user", "content": "Describe the quick brown fox."}]


@pytest.fixture(scope="module")
def client(start_programs_of_module, tmp_path_factory):
    model = checkpoint(tmp_path_factory.mktemp("model"), TEMPLATE)
    folder = tmp_path_factory.mktemp("serve")
    _, facts = started(start_programs_of_module, folder, "--model", str(model))
    with openai.OpenAI(
        base_url=facts["url"] + "/v1", api_key="none", timeout=100, max_retries=0
    ) as made:
        made.model = made.models.list().data[0].id
        yield made


def chat(client, **fields):
    asked = {"model": client.model, "messages": MESSAGES, "max_tokens": 400, "seed": 3}
    return client.chat.completions.create(**(asked | fields))


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_satisfies_its_schema_whole_and_streamed(client, temperature):
    fields = {"response_format": FORM, "temperature": temperature}
    choice = chat(client, **fields).choices[0]
    assert choice.finish_reason == "stop"
    value = json.loads(choice.message.content)
    assert set(value) == {"name", "kind", "flags"}
    assert len(value["name"]) <= 10
    assert value["kind"] in ("small", "large")
    assert all(isinstance(flag, bool) for flag in value["flags"])
    pieces = chat(client, **fields, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == choice.message.content


def test_openais_client_parses_it_into_a_class(client):
    pydantic = pytest.importorskip("pydantic")

    class Fox(pydantic.BaseModel):
        quick: bool
        colour: str = pydantic.Field(max_length=8)
        friends: list["Fox"] = pydantic.Field(max_length=1)

    parsed = client.chat.completions.parse(
        model=client.model, messages=MESSAGES, max_tokens=1000, seed=1, response_format=Fox
    )
    assert isinstance(parsed.choices[0].message.parsed, Fox)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_an_answer_that_has_to_be_a_call_is_one(client, choice):
    values = {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 1, "maxItems": 2}
    add = {"type": "object", "properties": {"values": values}, "required": ["values"]}
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": add, "strict": True}},
        {"type": "function", "function": {"name": "stop", "parameters": {
            "type": "object", "additionalProperties": False}}},
    ]  # fmt: skip
    for seed in range(3):
        told = chat(client, tools=tools, tool_choice=choice, seed=seed, temperature=1).choices[0]
        (call,) = told.message.tool_calls
        assert told.message.content is None
        assert call.function.name in (("add", "stop") if choice == "required" else ("add",))
        arguments = json.loads(call.function.arguments)
        if call.function.name == "add":
            assert set(arguments["values"]) <= {1, 2, 30}
        else:
            assert arguments == {}


def test_an_answer_of_any_object_is_one_unless_it_is_cut_off(client):
    for seed in range(4):
        choice = chat(client, response_format={"type": "json_object"}, seed=seed).choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_what_is_told_of_tokens_joins_to_the_text(client):
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 24, "temperature": 1}
    choice = chat(client, **fields, extra_body={"ignore_eos": True}).choices[0]
    content = choice.logprobs.content
    assert len(content) == 24
    joined = b"".join(bytes(each.bytes) for each in content)
    assert joined.decode("utf-8", "replace") == choice.message.content
    for entry in content:
        top = [each.logprob for each in entry.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert sum(map(math.exp, top)) <= 1
        assert entry.logprob <= top[0] < 0
    again = chat(client, **fields, extra_body={"ignore_eos": True}).choices[0]
    for one, other in zip(content, again.logprobs.content, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)  # now from the pool


def test_a_completion_has_an_offset_for_each_token(client):
    answer = client.completions.create(
        model=client.model, prompt="The quick", max_tokens=400, logprobs=2, seed=5,
        extra_body={"response_format": FORM},
    ).choices[0]  # fmt: skip
    told = answer.logprobs
    assert len(told.tokens) > 10
    for name, at, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
        if not name.startswith("bytes:"):
            assert answer.text[at:].startswith(name)
        assert name in top


def test_a_schema_that_cannot_be_kept_to_is_an_error_that_names_why(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "a+"}}}
    with pytest.raises(openai.BadRequestError, match="pattern"):
        chat(client, response_format=form)
