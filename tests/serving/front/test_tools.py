"""Tools: what a model is told of them, and what it wants called, in the ways of its family."""

import json

import pytest

from serving.engine.chat_template import ChatTemplate
from serving.engine.tokenizer import ByteTokenizer
from serving.engine.tool_styles import Call, read_calls, style_of
from serving.front.openai import Message
from serving.front.tools import CallsInText, Tools
from tests.serving.front.conftest import serving
from tests.serving.front.test_openai_api import events, post

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "description": "Tells the time."}}
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }} Write <tool_call>{...}</tool_call>.{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}"
    "{% endif %}{{ m.content }}{% endfor %}",
    "llama": "{% if tools is not none %}{{ tools | tojson }} Answer with "
    '{"name": function, "parameters": values}.{% endif %}{{ messages[-1].content }}',
}
ONE = '{"name": "weather", "arguments": {"city": "Rome"}}'
ROME = Call("weather", '{"city": "Rome"}')
NAMES = ("weather", "time")


class Templated(ByteTokenizer):
    """Bytes, with a chat template."""

    def __init__(self, style):
        self.template = ChatTemplate(TEMPLATES[style], {})

    @property
    def tool_style(self):
        return self.template.tool_style

    def chat(self, messages, tools=()):
        return self.encode(self.template.render(messages, tools))


@pytest.fixture
def says(monkeypatch):
    """Make every worker answer with a text."""

    def say(text):
        script = [*text.encode(), 257]

        def following(tokens):
            bare = bytes(token for token in tokens if token < 256)
            known = max(n for n in range(len(script)) if bare.endswith(bytes(script[:n])))
            return script[known]

        monkeypatch.setattr("tests.serving.fakes.following", following)

    return say


def test_the_way_of_a_template_is_known_by_its_words():
    assert {style: style_of(source) for style, source in TEMPLATES.items()} == dict(
        zip(TEMPLATES, TEMPLATES, strict=True)
    )
    assert style_of("{{ messages }} <tool_call>") == ""
    assert style_of("{{ tools }}") == ""
    assert style_of("{{ tools }} <tool_call><function=NAME>") == ""


@pytest.mark.parametrize(
    ("style", "text", "before", "calls"),
    [
        ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [ROME]),
        ("hermes", f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>\n"
         '{"name": "time", "arguments": {}}</tool_call>',
         "Let me see.", [ROME, Call("time", "{}")]),
        ("mistral", f"[TOOL_CALLS] [{ONE}]", "", [ROME]),
        ("mistral", f"[{ONE}]", "", [ROME]),
        ("llama", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        ("llama", f"<|python_tag|>{ONE}", "", [ROME]),
    ],
)  # fmt: skip
def test_calls_are_read_whole_and_piece_by_piece(style, text, before, calls):
    assert read_calls(style, text, NAMES) == (before, calls)
    for size in (1, 3, 1000):
        parted, told = CallsInText(Tools((), NAMES, style)), ""
        for at in range(0, len(text), size):
            told += parted.add(text[at : at + size])
        rest, found = parted.finish()
        assert (told.rstrip(), rest, found) == (before, "", calls)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "No call at all, <b>really</b>."),
        ("hermes", "<tool_call>no json</tool_call>"),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("hermes", f"<tool_call>{ONE}"),
        ("hermes", f"<tool_call>{ONE}</tool_call> and more"),
        ("mistral", "[1, 2]"),
        ("mistral", f"[{ONE}, 3]"),
        ("mistral", "Rome is [sunny]."),
        ("llama", '{"name": "other", "parameters": {}}'),
        ("llama", '{"city": "Rome"}'),
        ("llama", f"{ONE} {ONE}"),
        ("llama", "It is sunny."),
        ("llama", ""),
    ],
)  # fmt: skip
def test_what_only_resembles_a_call_stays_text(style, text):
    assert read_calls(style, text, NAMES) is None
    parted = CallsInText(Tools((), NAMES, style))
    told = "".join(map(parted.add, text))
    rest, calls = parted.finish()
    assert (told + rest, calls) == (text, [])


def test_text_that_is_no_call_is_told_as_it_comes():
    parted = CallsInText(Tools((), NAMES, "hermes"))
    assert parted.add("a < b <tool") == "a < b"
    assert parted.add("s are") == " <tools are"
    parted = CallsInText(Tools((), NAMES, "llama"))
    assert parted.add(" So") == " So"
    assert parted.add('{"x": 1}') == '{"x": 1}'


@pytest.mark.parametrize(
    ("style", "text", "content"),
    [
        ("hermes", f"I look.<tool_call>\n{ONE}\n</tool_call>", "I look."),
        ("mistral", f"[TOOL_CALLS] [{ONE}]", None),
        ("llama", '{"name": "weather", "parameters": {"city": "Rome"}}', None),
    ],
)
@pytest.mark.asyncio
async def test_openais_client_gets_calls_whole_and_streamed(fleet, says, style, text, content):
    says(text)
    async with (
        serving(fleet, tokenizer=Templated(style)) as (url, _),
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client,
    ):
        asked = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER, TIME]}
        choice = (await client.chat.completions.create(**asked)).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == content
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        assert call.id
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert (streamed.message.content or None) == content
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        # Who wants none gets the text, and the model is told of none.
        plain = await client.chat.completions.create(**asked, tool_choice="none")
        assert plain.choices[0].message.content == text
        assert plain.choices[0].message.tool_calls is None
        seen = [bytes(m.tokens) for w in fleet.prefill for m in w.seen]
    assert len(set(map(len, seen))) == 2


@pytest.mark.asyncio
async def test_a_conversation_with_calls_and_results_reaches_the_template(http, fleet):
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": "sunny"},
    ]
    tokenizer = Templated("hermes")
    async with serving(fleet, tokenizer=tokenizer) as (url, _):
        _, body, _ = await post(
            http, url, "/v1/chat/completions", messages=messages, tools=[WEATHER], max_tokens=2
        )
    text = tokenizer.template.render(
        [
            *MESSAGES,
            {"role": "assistant", "content": "",
             "tool_calls": [call | {"function": {"name": "weather", "arguments": {}}}]},
            {"role": "tool", "tool_call_id": "abc", "content": "sunny"},
        ],
        [WEATHER],
    )  # fmt: skip
    assert '<tool_call>{"name": "weather", "arguments": {}}</tool_call>' in text
    assert body["usage"]["prompt_tokens"] == len(tokenizer.encode(text))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason", "called"),
    [
        ("required", "tool_calls", {"weather", "time"}),
        ({"type": "function", "function": {"name": "weather"}}, "stop", {"weather"}),
    ],
)
@pytest.mark.asyncio
async def test_an_answer_that_has_to_be_a_call_has_its_form(
    http, fleet, says, stream, choice, reason, called
):
    says(ONE)
    body = {"messages": MESSAGES, "tools": [WEATHER, TIME], "tool_choice": choice}
    async with (
        serving(fleet, tokenizer=Templated("hermes")) as (url, _),
        http.post(url + "/v1/chat/completions", json=body | {"stream": stream}) as response,
    ):
        if stream:
            pieces = [event["choices"][0] for event in (await events(response))[:-1]]
            (calls,) = [p["delta"]["tool_calls"] for p in pieces if "tool_calls" in p["delta"]]
            assert not any(piece["delta"].get("content") for piece in pieces)
            assert pieces[-1]["finish_reason"] == reason
        else:
            (whole,) = (await response.json())["choices"]
            assert whole["finish_reason"] == reason
            calls = whole["message"]["tool_calls"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("weather", '{"city": "Rome"}')
    ]
    (form,) = {m.sampling.form for worker in fleet.workers.values() for m in worker.seen}
    names = {each["properties"]["name"]["const"] for each in json.loads(form)["anyOf"]}
    assert names == called


@pytest.mark.parametrize(
    ("style", "fields", "named"),
    [
        (None, {"tools": [WEATHER]}, "knows no tools"),
        ("hermes", {"tools": [{"type": "retrieval"}]}, "tools"),
        ("hermes", {"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ("hermes", {"tool_choice": "required"}, "no tools"),
        ("hermes", {"tools": [TIME], "tool_choice":
                    {"type": "function", "function": {"name": "weather"}}}, "weather"),
        ("hermes", {"tools": [{"type": "function", "function": {
            "name": "x", "parameters": {"pattern": "a"}}}], "tool_choice": "required"}, "pattern"),
        ("hermes", {"tools": [{"type": "function", "function": {"name": "x", "strict": True}}]},
         "strict"),
        ("hermes", {"tools": [WEATHER], "response_format": {"type": "json_object"}}, "beside"),
        ("hermes", {"tools": [TIME] * 129}, "128"),
        ("hermes", {"tools": [{"type": "function", "function": {
            "name": "x", "parameters": {"$defs": []}}}], "tool_choice": "required"}, "$defs"),
    ],
)  # fmt: skip
@pytest.mark.asyncio
async def test_what_cannot_be_done_is_refused(http, fleet, style, fields, named):
    tokenizer = Templated(style) if style else ByteTokenizer()
    async with serving(fleet, tokenizer=tokenizer) as (url, conductor):
        path = "/v1/chat/completions"
        status, body, _ = await post(http, url, path, messages=MESSAGES, **fields)
        assert status == 400, body
        assert named in body["error"]["message"]
        assert not conductor.under_way


@pytest.mark.asyncio
async def test_of_several_calls_only_the_first_is_told_where_one_is_wanted(http, fleet, says):
    says(f"<tool_call>{ONE}</tool_call><tool_call>{ONE}</tool_call>")
    asked = {"messages": MESSAGES, "tools": [WEATHER]}
    async with serving(fleet, tokenizer=Templated("hermes")) as (url, _):
        for parallel, count in ((True, 2), (False, 1)):
            _, body, _ = await post(
                http, url, "/v1/chat/completions", **asked, parallel_tool_calls=parallel
            )
            assert len(body["choices"][0]["message"]["tool_calls"]) == count


@pytest.mark.asyncio
async def test_completions_have_no_tools(http, served):
    status, body, _ = await post(http, served[0], tools=[WEATHER])
    assert (status, body["error"]["param"]) == (400, "tools")


def test_arguments_that_are_no_json_are_passed_on_as_they_are():
    call = {"function": {"name": "weather", "arguments": "Rome"}}
    import msgspec

    message = msgspec.convert({"role": "assistant", "tool_calls": [call]}, Message)
    assert message.plain["tool_calls"][0]["function"]["arguments"] == "Rome"
