"""Chat templates as checkpoints bring them: compared with the library that they are written for."""

import datetime
import json

import pytest

from serving.engine.chat_template import ChatTemplate
from serving.engine.tokenizer import load_tokenizer
from serving.front.openai import BadRequestError, Message, tokens_of_chat
from transfer_engine.errors import ConfigError, InvalidArgumentError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": 'Hé "you"?'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Go on.\n"},
]
# The ways of checkpoints: checks of the order, a date, JSON, loops that end early, the tag around
# what is learnt, blocks whose white space is trimmed.
TEMPLATES = {
    "alternating": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{%- set told = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set told = messages %}{% set system = '' %}{% endif %}
{% for message in told %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if message['role'] == 'user' %}
[INST] {{ system if loop.first else '' }}{{ message['content'] | trim }} [/INST]
    {%- else %}
{{ ' ' ~ message['content'] ~ eos_token }}
    {%- endif %}
{% endfor %}""",
    "dated": "{{ strftime_now('%Y') }}|{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools is none }}",
    "ending early": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "learnt": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "namespaced": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ (unk_token is defined) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_say_what_they_say_elsewhere(name):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs, _ = utils.render_jinja_template(
        [TURNS], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(TURNS) == theirs[0]


def test_tools_are_shown_to_a_template_as_elsewhere():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{% if tools is not none %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    )
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for given in (tools, None):
        theirs, _ = utils.render_jinja_template(
            [TURNS], tools=given, chat_template=source, add_generation_prompt=True, **SPECIAL
        )
        assert ChatTemplate(source, SPECIAL).render(TURNS, given or ()) == theirs[0]


def test_a_conversation_that_a_template_refuses_is_refused_in_its_words():
    template = ChatTemplate(TEMPLATES["alternating"], SPECIAL)
    with pytest.raises(InvalidArgumentError, match="no such conversation: roles must alternate"):
        template.render([TURNS[2]])
    with pytest.raises(InvalidArgumentError, match="fails on it: UndefinedError"):
        ChatTemplate("{{ messages[9].content }}", SPECIAL).render(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for each in range(10 ** 7) %}x{% endfor %}",
    ],
)
def test_a_template_gets_at_nothing_and_changes_nothing(source):
    given = [dict(turn) for turn in TURNS]
    with pytest.raises(InvalidArgumentError, match=r"fails on it: (SecurityError|OverflowError)"):
        ChatTemplate(source, SPECIAL).render(given)
    assert given == TURNS


def test_what_is_no_template_is_refused_when_it_is_read():
    with pytest.raises(ConfigError, match="chat template of the model cannot be used"):
        ChatTemplate("{% for m in messages %}", SPECIAL)


def test_of_several_templates_the_default_is_taken(tmp_path):
    import tokenizers

    words = {"<unk>": 0, "a": 1, "b": 2, "<s>": 3}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    plain.save(str(tmp_path / "tokenizer.json"))
    named = [
        {"name": "tool_use", "template": "b"},
        {"name": "default", "template": "{{ bos_token }} a {{ add_bos_token is defined }}"},
    ]
    settings = {"bos_token": {"content": "<s>"}, "add_bos_token": True, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(tmp_path)).chat(TURNS) == [3, 1, 0]
    settings["chat_template"] = named[:1]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(tmp_path)).chat([{"role": "a", "content": "b"}]) == [0, 2, 0]


def test_a_date_is_that_of_here():
    said = ChatTemplate("{{ strftime_now('%d %b %Y') }}", SPECIAL).render([])
    around = [datetime.datetime.now().astimezone() + datetime.timedelta(minutes=m) for m in (-1, 1)]
    assert said in [each.strftime("%d %b %Y") for each in around]


def test_whoever_asks_is_told_why_a_conversation_is_refused():
    class Tokenizer:
        def chat(self, messages, tools):
            return ChatTemplate(TEMPLATES["alternating"], SPECIAL).render(messages)

    messages = [Message("assistant", "I begin.")]
    with pytest.raises(BadRequestError, match="roles must alternate") as refused:
        tokens_of_chat(messages, Tokenizer())
    assert (refused.value.status, refused.value.param) == (400, "messages")
