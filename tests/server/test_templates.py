"""Conversations into prompts: by the model's template, by one of the server's, by any at all."""

import dataclasses
import json
from datetime import date
from typing import Any

import pytest

from graphseed.engine import BadParameter
from graphseed.server.conversation.chat_template import ChatTemplate, check_template
from graphseed.server.conversation.messages import Message, messages_of
from graphseed.server.conversation.named_templates import CHATML, NAMED
from graphseed.server.conversation.prompt import _without_bos
from graphseed.server.conversation.tools import CallStyle, Choice, Tools
from graphseed.server.errors import InvalidRequest
from graphseed.server.settings import ServerSettings
from tests.server.conftest import model_of
from tests.server.small import DEFAULTS, small_server

TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "", "parameters": {"type": "object", "properties": {}},
    },
}  # fmt: skip
NOTHING = Tools()
OFFERED = Tools((TOOL,), Choice.AUTO)
CALLED = messages_of(
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hot?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "weather", "arguments": '{"city": "Łódź"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "40"},
    ]
)  # fmt: skip

# As Qwen's: tools, calls and results are shown.
HERMES = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}</{{ m.role }}>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"""
# As Llama's: a call is plain JSON.
LLAMA = """
{%- for m in messages %}[{{ m.role }}]{% if m.tool_calls %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}
{%- endfor %}"""
# As Mistral's, with arguments as text.
MISTRAL = """
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]
{{- m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}
{%- else %}[{{ m.role }}]{{ m.content + '' }}{% endif %}{% endfor %}"""
# As Gemma's: no system, user and model in turns.
STRICT = """
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}
{%- endfor %}"""
# As those of models that also see: contents are parts.
PARTS = """
{%- for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}|
{%- endfor %}{% endfor %}"""
# Goes over the tools without asking whether there are any.
CARELESS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"


def rendered(source: str, messages: list[Message], tools: Tools = NOTHING) -> str:
    return ChatTemplate(source, {}).render(messages, tools, {})


def user(*texts: str) -> list[Message]:
    return [Message("user", texts)]


def test_the_default_is_chatml() -> None:
    with small_server() as server:
        prompt = server.post("/apply-template", messages=[{"role": "user", "content": "Hi"}])
    assert prompt == {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}


def test_the_models_own_template_is_used_and_the_servers_goes_before_it() -> None:
    model = model_of("tiny-llama")
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    own, servers = "own: {{ messages[0].content }}", "server's: {{ messages[0].content }}"
    try:
        model.tokenizer.chat_template = own
        with small_server() as server:
            assert server.post("/apply-template", **ask) == {"prompt": "own: Hi"}
        model.tokenizer.chat_template = {"default": own, "tool_use": "no"}
        with small_server() as server:
            assert server.post("/apply-template", **ask) == {"prompt": "own: Hi"}
        with small_server(ServerSettings(chat_template=servers)) as server:
            assert server.post("/apply-template", **ask) == {"prompt": "server's: Hi"}
    finally:
        model.tokenizer.chat_template = None


def test_a_template_may_be_named() -> None:
    messages = [
        {"role": "system", "content": "You are a test."}, {"role": "user", "content": "Hi there"},
    ]  # fmt: skip
    with small_server(ServerSettings(chat_template="command-r")) as server:
        assert server.post("/apply-template", messages=messages)["prompt"] == (
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are a test.<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi there<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        )
    settings = ServerSettings(chat_template="llama3", num_predict=2, defaults=DEFAULTS)
    with small_server(settings, context_len=512) as server:
        answer = server.post("/chat/completions", messages=messages, verbose=True)
        assert answer["__verbose"]["prompt"] == (
            "<|start_header_id|>system<|end_header_id|>\n\nYou are a test.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_named_template_shows_who_said_what(name: str) -> None:
    said = [
        Message("system", ("Ada",)), Message("user", ("Bob",)), Message("assistant", ("Cid",)),
        Message("user", ("Dan",)),
    ]  # fmt: skip
    prompt = rendered(NAMED[name], said)
    places = [prompt.index(word) for word in ("Ada", "Bob", "Cid", "Dan")]
    assert places == sorted(places)
    again = ChatTemplate(NAMED[name], {}).render(said, Tools(), {}, opens_answer=False)
    assert prompt.startswith(again)
    check_template(name)


def test_a_template_may_be_any_text(caplog: pytest.LogCaptureFixture) -> None:
    text = "This is not a chat template, it is"
    check_template(text)
    assert "nothing to fill in" in caplog.text and "chatml" in caplog.text
    assert rendered(text, user("Hi")) == text


def test_what_is_no_jinja_is_refused_at_the_start() -> None:
    with pytest.raises(BadParameter, match="--chat-template is .*expected Jinja .line 1"):
        check_template("{% for m in messages %}")


def test_a_template_is_asked_only_for_what_it_takes() -> None:
    abilities = ChatTemplate(HERMES, {}).abilities
    assert abilities.takes_system and abilities.takes_tools and abilities.takes_calls
    assert abilities.takes_results and not abilities.wants_argument_texts
    assert abilities.call_style is CallStyle.TAGGED
    prompt = rendered(HERMES, CALLED, OFFERED)
    assert prompt == (
        f"<tools>{json.dumps(TOOL)}</tools><system>Be kind.</system><user>Hot?</user><assistant>"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call></assistant>'
        "<tool>40</tool><assistant><think>"
    )


def test_what_a_template_does_not_show_is_said_in_words() -> None:
    abilities = ChatTemplate(CHATML, {}).abilities
    assert not abilities.takes_tools and not abilities.takes_calls and abilities.takes_results
    prompt = rendered(CHATML, CALLED, OFFERED)
    system = prompt.partition("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe kind.\nYou can call these tools")
    assert json.dumps(TOOL) in system
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>tool\n40<|im_end|>\n"
    ) in prompt
    assert "You can call" not in rendered(CHATML, CALLED)
    assert "You can call" not in rendered(CHATML, CALLED, Tools((TOOL,), Choice.NONE))


def test_a_call_is_written_as_the_template_writes_it() -> None:
    abilities = ChatTemplate(LLAMA, {}).abilities
    assert abilities.call_style is CallStyle.PLAIN and not abilities.wants_argument_texts
    assert '{"name": "weather", "parameters": {"city": "Łódź"}}' in rendered(LLAMA, CALLED)
    abilities = ChatTemplate(MISTRAL, {}).abilities
    assert abilities.call_style is CallStyle.LIST and abilities.wants_argument_texts
    assert '[TOOL_CALLS]weather{"city": "Łódź"}' in rendered(MISTRAL, CALLED)


def test_what_the_system_says_is_said_to_the_user_where_there_is_no_system() -> None:
    abilities = ChatTemplate(STRICT, {}).abilities
    assert not abilities.takes_system
    said = [Message("system", ("Be kind.",)), *user("Hi")]
    assert rendered(STRICT, said) == "<user>Be kind.\n\nHi"
    assert rendered(STRICT, said[:1]) == "<user>Be kind."
    with pytest.raises(InvalidRequest, match="refused the conversation: roles must alternate"):
        rendered(STRICT, [*user("Hi"), *user("Hi")])


def test_contents_are_parts_where_the_template_wants_them() -> None:
    abilities = ChatTemplate(PARTS, {}).abilities
    assert abilities.wants_parts and abilities.takes_system
    assert rendered(PARTS, user("a", "b")) == "[user]a|b|"
    assert rendered(CHATML, user("a", "b")).startswith("<|im_start|>user\na\nb<|im_end|>")


def test_a_template_that_needs_a_list_of_tools_gets_one() -> None:
    assert ChatTemplate(CARELESS, {}).abilities.wants_tool_list
    assert rendered(CARELESS, user("Hi")) == "Hi"
    assert rendered(CARELESS, user("Hi"), OFFERED) == "weatherHi"


def test_a_template_knows_the_special_tokens_and_the_date() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ strftime_now('%Y') }} {{ date_string }}"
    prompt = ChatTemplate(source, {"bos_token": "<s>"}).render(user("Hi"), Tools(), {})
    today = date.today()
    assert prompt == f"<s>Hi{today.year} {today.strftime('%d %b %Y')}"


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    for source in (
        "{{ messages.__class__.__mro__[-1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    ):
        with pytest.raises(InvalidRequest, match="refused the conversation"):
            rendered(source, user("Hi"))


@pytest.mark.parametrize(
    ("asked", "ends_with"),
    [
        ({}, "<assistant><think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<assistant>"),
        ({"reasoning_effort": "none"}, "<assistant>"),
        ({"reasoning_effort": "high"}, "<assistant><think>"),
        ({"add_generation_prompt": False}, "<user>Hi</user>"),
    ],
)
def test_a_request_shapes_its_prompt(asked: dict[str, Any], ends_with: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with small_server(ServerSettings(chat_template=HERMES)) as server:
        prompt = server.post("/apply-template", messages=messages, **asked)["prompt"]
    assert prompt.endswith(ends_with)


@pytest.mark.parametrize(
    ("last", "ends_with"),
    [
        ({"content": "Wh"}, "<assistant><think>\n</think>\n\nWh"),
        ({"content": "Wh", "reasoning_content": "hm"}, "<assistant><think>hm\n</think>\n\nWh"),
        ({"content": "", "reasoning_content": "hm"}, "<assistant><think>hm"),
    ],
)
def test_an_answer_that_is_begun_has_done_with_thinking(
    last: dict[str, Any], ends_with: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", **last}]
    with small_server(ServerSettings(chat_template=HERMES)) as server:
        prompt = server.post("/apply-template", messages=messages)["prompt"]
    assert prompt.endswith(ends_with)


def test_an_open_thought_is_read_as_one() -> None:
    settings = ServerSettings(chat_template=HERMES, num_predict=40, defaults=DEFAULTS)
    with small_server(settings, context_len=512) as server:
        answer = server.post(
            "/chat/completions", messages=[{"role": "user", "content": "Hi"}],
            grammar='root ::= "hm </think> yes"',
        )  # fmt: skip
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "hm" and message["content"] == "yes"


def test_a_prompt_has_one_beginning_of_sequence() -> None:
    class PutsBos:
        bos_token, bos_token_id = "<|bos|>", 256

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Encoding", (), {"input_ids": [256, 97]})

    model = model_of("tiny-llama")
    assert _without_bos(model, "<|bos|>Hi") == "<|bos|>Hi", "nothing else puts one here"
    puts = dataclasses.replace(model, tokenizer=PutsBos())
    assert _without_bos(puts, "<|bos|>Hi") == "Hi"
    assert _without_bos(puts, "Hi") == "Hi"
