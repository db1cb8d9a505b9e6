"""Anthropic's Messages API, told from the same answers as chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from graphseed.server.dialects.anthropic_input import chat_body
from tests.server.small import Small, small_server

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather",
    "input_schema": {
        "type": "object",
        "properties": {"hot": {"type": "boolean"}},
        "required": ["hot"],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server(context_len=2048, num_parallel=4) as small:
        yield small


def events_of(server: Small, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; their names must be their types."""
    reply = server.client.post(PATH, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    events = []
    for frame in reply.text.split("\n\n")[:-1]:
        name, _, data = frame.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_message_is_the_chats_answer(server: Small) -> None:
    answer = server.post(PATH, messages=HELLO, max_tokens=8, system="Be brief.", model="any")
    chat = server.post(
        CHAT, messages=[{"role": "system", "content": "Be brief."}, *HELLO], max_tokens=8
    )
    assert answer["type"] == "message" and answer["role"] == "assistant"
    assert answer["id"].startswith("msg_") and answer["model"] == "tiny.gguf"
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert answer["stop_reason"] == "max_tokens" and answer["stop_sequence"] is None
    usage = answer["usage"]
    assert usage["output_tokens"] == 8
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    )
    assert "timings" not in answer


def test_a_stream_is_the_message_in_pieces(server: Small) -> None:
    events = events_of(server, messages=HELLO, max_tokens=8)
    types = [event["type"] for event in events]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[2:-3]) == {"content_block_delta"}
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] > 0
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert {event["index"] for event in events[1:-2]} == {0}
    text = "".join(event["delta"]["text"] for event in events[2:-3])
    whole = server.post(PATH, messages=HELLO, max_tokens=8)
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8
    assert events[-1] == {"type": "message_stop"}


def test_a_stop_sequence_ends_the_message(server: Small) -> None:
    asked: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 50, "stop_sequences": ["\n", "END"],
        "grammar": 'root ::= "It is over. END of it."',
    }  # fmt: skip
    answer = server.post(PATH, **asked)
    assert answer["content"][0]["text"] == "It is over. "
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


def test_the_end_of_a_turn_is_told(server: Small) -> None:
    answer = server.post(PATH, messages=HELLO, max_tokens=50, grammar='root ::= "Yes."')
    assert answer["stop_reason"] == "end_turn" and answer["content"][0]["text"] == "Yes."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_required_tool_is_used(server: Small, choice: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 200, "tools": [WEATHER], "tool_choice": choice,
    }  # fmt: skip
    answer = server.post(PATH, **asked)
    (block,) = answer["content"]
    assert block["type"] == "tool_use" and block["name"] == "get_weather"
    assert block["id"].startswith("toolu_") and isinstance(block["input"]["hot"], bool)
    assert answer["stop_reason"] == "tool_use"
    events = events_of(server, **asked)
    start = next(event for event in events if event["type"] == "content_block_start")
    assert start["content_block"]["input"] == {} and start["index"] == 0
    delta = next(event["delta"] for event in events if event["type"] == "content_block_delta")
    assert delta["type"] == "input_json_delta"
    assert json.loads(delta["partial_json"]) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_thoughts_and_texts_are_blocks_in_order(server: Small) -> None:
    asked: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 60, "grammar": 'root ::= "<think>hm</think>\\n\\nyes"',
    }  # fmt: skip
    assert server.post(PATH, **asked)["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    events = events_of(server, **asked)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["thinking", "text"]
    assert [event["index"] for event in starts] == [0, 1]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1]
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[0] == "thinking_delta" and kinds[-1] == "text_delta"
    assert "signature_delta" in kinds


def test_tools_that_are_offered_need_not_be_used(server: Small) -> None:
    answer = server.post(PATH, messages=HELLO, max_tokens=8, tools=[WEATHER])
    assert answer["content"][0]["type"] == "text"


def test_blocks_become_the_messages_of_a_chat() -> None:
    body = chat_body(
        {
            "system": [{"type": "text", "text": "Be kind."}],
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "y"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1",
                         "content": [{"type": "text", "text": "a b"}]},
                        {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                        {"type": "text", "text": "And?"},
                    ],
                },
            ],
            "tools": [WEATHER],
            "tool_choice": {"type": "tool", "name": "get_weather"},
            "stop_sequences": ["END"],
            "thinking": {"type": "enabled", "budget_tokens": 50},
            "top_k": 3,
        }
    )  # fmt: skip
    call = {
        "id": "t1", "type": "function", "function": {"name": "ls", "arguments": {"path": "."}},
    }  # fmt: skip
    assert body["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "a b"}]},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    assert body["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert body["stop"] == ["END"] and body["top_k"] == 3 and body["max_tokens"] == 4096
    assert body["chat_template_kwargs"] == {"enable_thinking": True}


def test_results_of_tools_are_answered(server: Small) -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Here:"},
                {"type": "tool_result", "tool_use_id": "a", "content": "Sunny, 25°C"},
            ],
        },
    ]
    answer = server.post(PATH, messages=messages, max_tokens=4)
    assert answer["content"][0]["type"] == "text"


def test_images_are_refused_as_llama_server_does(server: Small) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    for block in (image, result):
        error = server.refused(PATH, 500, messages=[{"role": "user", "content": [block]}])
        assert "image input is not supported" in error["message"]


@pytest.mark.parametrize(
    ("status", "message", "body"),
    [
        (400, "messages is missing", {}),
        (400, "messages", {"messages": "Hello"}),
        (400, "messages[0].content[0].type", {"messages": [{"role": "user", "content": [{}]}]}),
        (400, "tools[0].name", {"messages": HELLO, "tools": [{}]}),
        (400, "tool_choice.type", {"messages": HELLO, "tool_choice": {"type": "some"}}),
        (400, "max_tokens", {"messages": HELLO, "max_tokens": "many"}),
        (400, "system", {"messages": HELLO, "system": 3}),
        (501, "tools[0].type", {"messages": HELLO, "tools": [{"type": "bash_20250124"}]}),
        (501, "document", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    ],
)
def test_errors_have_their_form(
    server: Small, status: int, message: str, body: dict[str, Any]
) -> None:
    reply = server.client.post(PATH, json=body)
    assert reply.status_code == status
    answer = reply.json()
    assert answer["type"] == "error" and answer["error"]["code"] == status
    assert message in answer["error"]["message"]


def test_a_conversation_that_is_too_long_is_an_invalid_request(server: Small) -> None:
    messages = [{"role": "user", "content": "x" * 3000}]
    for is_streaming in (False, True):
        error = server.refused(PATH, 400, messages=messages, stream=is_streaming)
        assert error["type"] == "invalid_request_error" and error["n_ctx"] == 2048


def test_no_messages_are_a_conversation_too(server: Small) -> None:
    assert server.post(PATH, messages=[], max_tokens=2)["type"] == "message"


def test_tokens_are_counted_as_they_are_used(server: Small) -> None:
    counted = server.post(COUNT, messages=HELLO, system="Be brief.", tools=[WEATHER])
    used = server.post(
        PATH, messages=HELLO, system="Be brief.", tools=[WEATHER], max_tokens=1
    )["usage"]  # fmt: skip
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


def test_metadata_means_nothing_here(server: Small) -> None:
    server.post(PATH, messages=HELLO, max_tokens=2, metadata={"user_id": "u"}, temperature=0.5)
